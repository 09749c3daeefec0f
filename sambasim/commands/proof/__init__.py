"""The proof that a PEF computes what its model does: `prove` compares them bit for bit in `steps`, on other `batches`.

`played` runs the PEF, `beside` runs `eager` PyTorch in a copy of the process; `differences` tells rounding from errors.
"""
