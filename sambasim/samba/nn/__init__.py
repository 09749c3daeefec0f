"""torch.nn under SambaFlow's name: the modules are torch's own, and `parameter` has SambaParameter as well."""

import torch.nn
from torch.nn import *  # noqa: F403  # every name of torch.nn, whatever the release

from sambasim.samba.absent import no_such_name
from sambasim.samba.nn.parameter import SambaParameter as SambaParameter


def __getattr__(name: str) -> object:
    raise no_such_name("sambasim.samba.nn", name, ("SambaParameter", *vars(torch.nn)))
