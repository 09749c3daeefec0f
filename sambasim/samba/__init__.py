"""The SambaFlow API, `from sambaflow import samba`, on sambasim's compiler and runtime.

    tensors        SambaTensor, from_torch_tensor, from_named_dict, to_torch, randn, randint
    models         from_torch_model_, lazy_param, materialize
    data           SambaLoader
    session        session, which compiles and runs
    optimizers     optim.SGD, optim.Adam, optim.AdamW
    others         utils, nn, test; env, directives and schema by the table in shim/
    operators      cat, addmm, sigmoid …: torch's, under the same names

README.md compares each name with SambaFlow. Importing it imports torch, and no MPI.
"""

from collections.abc import Callable
from typing import Any

from sambasim.samba import nn, optim, test, utils
from sambasim.samba.functional import addmm, operator, operators, randint, randn, triu_fill
from sambasim.samba.inputs import SambaLoader, install_sampler_of_one_replica
from sambasim.samba.models import from_torch_model_, lazy_param, materialize
from sambasim.samba.notices import is_internal, patched_torch
from sambasim.samba.session import session
from sambasim.samba.tensor import SambaTensor, from_named_dict, from_torch_tensor, install_attributes, to_torch
from sambasim.samba.utils.common import seed_from_environment

# The older names.
from_torch = from_torch_tensor
from_torch_ = from_torch_model = from_torch_model_

__all__ = [
    "SambaLoader", "SambaTensor", "addmm", "from_named_dict", "from_torch", "from_torch_", "from_torch_model",
    "from_torch_model_", "from_torch_tensor", "is_internal", "lazy_param", "materialize", "nn", "optim",
    "patched_torch", "randint", "randn", "session", "test", "to_torch", "triu_fill", "utils",
]  # fmt: skip

install_attributes()
install_sampler_of_one_replica()
seed_from_environment()


def __getattr__(name: str) -> Callable[..., Any]:
    """The operators of torch."""
    return operator(name)


def __dir__() -> list[str]:
    return sorted({*__all__, *operators()})
