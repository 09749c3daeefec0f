"""From a model, an example batch and options to a PEF. `front` finds the model and the data that options name, and
takes one batch; `compile` goes from model and batch to a PEF.

capture    captures a model's graphs in eager PyTorch, or says why it cannot; `translate` and `build` make a program,
           with the symbols' names of `names`
passes     all passes in their order: `sharding` cuts tensors over chips, `stages` finds where a pipeline is cut and
           `pipeline` cuts it, `update` adds optimizers and data parallelism
"""
