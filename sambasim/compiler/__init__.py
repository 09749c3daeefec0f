"""From a model, an example batch and options to a PEF: `front` and `compile` lead through all of it.

capture    the graphs of a model in eager PyTorch, and why one has none; `translate` and `build` make a program
sharding   the tensors of a program cut over chips
pipeline   its layers cut into stages
passes     all passes over a program in their order, optimizers and recomputation among them
"""
