"""The proof that a PEF computes what its model does: `prove` compares them bit for bit on several batches, in `steps`.

`played` runs the PEF, `eager` the model in eager PyTorch, in a copy of the process.
"""
