"""`lazy_param`: models whose parameters have no memory and no values yet. `materialize` gives them both.

    with samba.lazy_param():
        model = LargeModel()                # at once, whatever its size
    samba.materialize(model)                # now its parameters are there, with the values that its layers begin with

These values are those of the layers' `reset_parameters`. What a model's `__init__` does to them after that, with
`nn.init` or `apply`, finds no memory to write to, and is not repeated: do it again on the materialized model.

A process that loads a checkpoint, or that only asks for shapes, saves the time and the random draws of the beginning.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["lazy_param"]


@contextmanager
def lazy_param() -> Iterator[None]:
    """Within it, tensors that a model makes (its parameters and buffers) are lazy: a shape and a dtype on torch's
    device `meta`. No random number is drawn. A lazy model must be materialized before it is compiled."""
    with torch.device("meta"):
        yield
