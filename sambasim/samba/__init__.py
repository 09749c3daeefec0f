"""SambaFlow's shape: what `from sambaflow import samba` gives, on the compiler and the runtime.

    tensors        SambaTensor, from_torch_tensor, to_torch, randn, randint
    models         from_torch_model_, lazy_param, materialize
    data           SambaLoader
    session        session, which compiles and runs
    optimizers     optim.SGD, optim.Adam, optim.AdamW
    the rest       utils, nn, env, directives, schema, test
    operators      cat, addmm, sigmoid …: torch's, under the same names

What each of them does, and what it leaves out, is in README.md. Importing it imports torch, and no MPI.
"""

from collections.abc import Callable
from typing import Any

from sambasim.samba import directives, env, nn, optim, schema, test, utils
from sambasim.samba.functional import operator, operators, randint, randn
from sambasim.samba.lazy_param import lazy_param
from sambasim.samba.loader import SambaLoader
from sambasim.samba.materialize import materialize
from sambasim.samba.modules import from_torch_model_
from sambasim.samba.session import session
from sambasim.samba.tensor import SambaTensor, from_torch_tensor, to_torch

# The older names.
from_torch = from_torch_tensor
from_torch_ = from_torch_model = from_torch_model_

__all__ = [
    "SambaLoader",
    "SambaTensor",
    "directives",
    "env",
    "from_torch",
    "from_torch_",
    "from_torch_model",
    "from_torch_model_",
    "from_torch_tensor",
    "lazy_param",
    "materialize",
    "nn",
    "optim",
    "randint",
    "randn",
    "schema",
    "session",
    "test",
    "to_torch",
    "utils",
]


def __getattr__(name: str) -> Callable[..., Any]:
    """The operators of torch."""
    return operator(name)


def __dir__() -> list[str]:
    return sorted({*__all__, *operators()})
