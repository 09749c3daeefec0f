"""From a model, an example batch and options to a PEF: `front` and `compile` lead through all of it.

capture    the graphs of a model in eager PyTorch, and why one has none; `translate` and `build` make a program
passes     all passes in their order: `sharding` cuts tensors over chips, `pipeline` the layers into the stages that
           `stages` finds, `update` adds optimizers and data parallelism
"""
