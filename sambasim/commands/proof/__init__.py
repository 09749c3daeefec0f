"""The proof that a PEF computes what its model does: `prove` compares them bit for bit on several batches, in `steps`.

`eager` computes a step of the model in eager PyTorch, `played` runs the PEF; `products` both need are computed once.
"""
