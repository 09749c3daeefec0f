"""torch.nn.parameter, and SambaParameter."""

from torch import Tensor, nn
from torch.nn.parameter import Buffer as Buffer
from torch.nn.parameter import Parameter as Parameter
from torch.nn.parameter import UninitializedParameter as UninitializedParameter

from sambasim.samba.tensor import to_torch


class _EveryParameter(type):
    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, nn.Parameter)


class SambaParameter(metaclass=_EveryParameter):
    """Makes an `nn.Parameter` that has a name, in the memory of `data`; and every `nn.Parameter` is an instance of it.

    There is no class of its own: a model's parameters stay what torch's tracing and optimizers take.
    """

    def __new__(  # type: ignore[misc]  # it gives no SambaParameter, as the docstring above says
        cls, data: Tensor, requires_grad: bool = True, name: str | None = None
    ) -> nn.Parameter:
        """Raises DataError if `data` is no tensor."""
        parameter = nn.Parameter(to_torch(data).detach(), requires_grad)
        if name is not None:
            parameter.sn_name = name  # type: ignore[attr-defined]  # SambaFlow's name, which torch does not know
        return parameter
