"""torch.nn.parameter, and SambaParameter."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn.parameter import Buffer as Buffer
from torch.nn.parameter import Parameter as Parameter
from torch.nn.parameter import UninitializedParameter as UninitializedParameter

from sambasim.errors import DataError
from sambasim.samba.checks.keywords import checks_keywords_beside
from sambasim.samba.checks.place import app_line
from sambasim.samba.tensor import SambaTensor, to_torch

MATERIALIZER = "sn_materializer"
"""The attribute of a lazy parameter that holds the function which makes its values."""


class _EveryParameter(type):
    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, nn.Parameter)


class SambaParameter(metaclass=_EveryParameter):
    """Makes an `nn.Parameter` that has a name, in the memory of `data`; and every `nn.Parameter` is an instance of it.

    There is no class of its own: a model's parameters stay what torch's tracing and optimizers take.
    """

    @checks_keywords_beside("SambaParameter", ())
    def __new__(  # type: ignore[misc]  # it gives no SambaParameter, as the docstring above says
        cls,
        data: Tensor | None = None,
        requires_grad: bool = True,
        name: str | None = None,
        shape: Sequence[int] | None = None,
        dtype: torch.dtype | None = None,
        materializer: Callable[[], Tensor] | None = None,
    ) -> nn.Parameter:
        """From `data`; from a `materializer`, which is called without arguments and returns a tensor; or from a shape
        alone, with zeros.

        In `lazy_param` a parameter with a `shape` and a `materializer` gets its values from `materialize`.
        Raises DataError if what is given is no tensor, or is not of `shape`.
        """
        is_lazy = torch.get_default_device().type == "meta"
        if data is None and materializer is not None and shape is not None and is_lazy:
            values = torch.empty(tuple(shape), dtype=dtype)
        else:
            values = _values(data, shape, dtype, materializer)
        parameter = nn.Parameter(values, requires_grad)
        if is_lazy and materializer is not None:
            setattr(parameter, MATERIALIZER, materializer)
        if name is not None:
            parameter.sn_name = name  # type: ignore[attr-defined]  # SambaFlow's name, which torch does not know
        return parameter


def _values(
    data: Tensor | None,
    shape: Sequence[int] | None,
    dtype: torch.dtype | None,
    materializer: Callable[[], Tensor] | None,
) -> Tensor:
    if data is not None and not isinstance(data, Tensor):
        raise DataError(
            f"the data of a parameter must be a tensor, and it is of type {type(data).__name__}",
            where=app_line(),
            remedy="torch.as_tensor(…) makes one of numbers, lists and arrays",
        )
    return to_torch(SambaTensor(data, shape, dtype, materializer=materializer)).detach()
