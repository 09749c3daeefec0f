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

from sambasim.samba.checks.keywords import checks_keywords
from sambasim.samba.checks.place import app_line
from sambasim.samba.notices import say_once

__all__ = ["lazy_param"]


@checks_keywords
@contextmanager
def lazy_param(quantized: bool = False) -> Iterator[None]:
    """Within it, tensors that a model makes (its parameters and buffers) are lazy: a shape and a dtype on torch's
    device `meta`. No random number is drawn. A lazy model must be materialized before it is compiled.

    quantized: no effect: parameters keep the dtype that the model gives them
    """
    if quantized:
        say_once("lazy_param(quantized=True)", "parameters keep the dtype that the model gives them", app_line())
    with torch.device("meta"):
        yield
