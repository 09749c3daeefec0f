"""The SambaFlow API, `from sambaflow import samba`, on sambasim's compiler and runtime. README.md has a row for each
name. Names of `samba` itself are imported here from the file of their subject; `shim/` finds those of its modules.

    tensors and data      tensor, inputs, functional, nn
    models                models, optim
    compile and run       session, request, trace, fingerprint, loaded, device
    command line          flags, utils/ (argparser, measuring, checkpoints)
    this process          process, ending, notices
    checks of the app     checks/, test, profiler
    import sambaflow      shim/

Importing it imports torch, and no MPI.
"""

from sambasim.samba import nn, optim, test, utils
from sambasim.samba.functional import addmm, operator, operators, triu_fill
from sambasim.samba.inputs import SambaLoader, install_sampler_of_one_replica
from sambasim.samba.models import from_torch_model_, install_attributes, lazy_param, materialize
from sambasim.samba.notices import is_internal, patched_torch
from sambasim.samba.session import session
from sambasim.samba.tensor import SambaTensor, from_named_dict, from_torch_tensor, to_torch
from sambasim.samba.utils.common import seed_from_environment

# The older names.
from_torch = from_torch_tensor
from_torch_ = from_torch_model = from_torch_model_

__all__ = [
    "SambaLoader", "SambaTensor", "addmm", "from_named_dict", "from_torch", "from_torch_", "from_torch_model",
    "from_torch_model_", "from_torch_tensor", "is_internal", "lazy_param", "materialize", "nn", "optim",
    "patched_torch", "randint", "randn", "session", "test", "to_torch", "triu_fill", "utils",
]  # fmt: skip

tensor, trace = operator("tensor"), operator("trace")  # torch's, in place of our modules of these names

install_attributes()
install_sampler_of_one_replica()
seed_from_environment()

__getattr__ = operator  # those of torch


def __dir__() -> list[str]:
    return sorted({*__all__, *operators()})
