"""`samba.nn`: all of `torch.nn`, and SambaParameter, which apps import from `samba.nn.parameter`."""

from collections.abc import Callable, Sequence

import torch.nn
from torch import Tensor
from torch.nn import *  # noqa: F403  # every name of torch.nn, whatever the release

from sambasim.errors import DataError
from sambasim.samba.notices import checks_keywords, no_such_name
from sambasim.samba.process import type_error
from sambasim.samba.tensor import MATERIALIZER, SambaTensor, to_torch


class _EveryParameter(type):
    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, torch.nn.Parameter)


class SambaParameter(metaclass=_EveryParameter):
    """Makes an `nn.Parameter` with a name, in the memory of `data`. Every `nn.Parameter` is an instance of it. It is no
    class of its own, because torch's tracing and optimizers take parameters of torch."""

    @checks_keywords("SambaParameter")
    def __new__(  # type: ignore[misc]  # it returns no SambaParameter
        cls,
        data: Tensor | None = None,
        requires_grad: bool = True,
        name: str | None = None,
        shape: Sequence[int] | None = None,
        dtype: torch.dtype | None = None,
        materializer: Callable[[], Tensor] | None = None,
    ) -> torch.nn.Parameter:
        """From `data`, from a `materializer` that returns a tensor, or from a shape, with zeros. In `lazy_param`,
        `materialize` calls the materializer. Raises DataError for what is no tensor, or has another shape."""
        is_lazy = torch.get_default_device().type == "meta"
        if data is not None and not isinstance(data, Tensor):
            remedy = "torch.as_tensor(…) makes one of numbers, lists and arrays"
            raise type_error(DataError, "the data of a parameter must be a tensor", data, remedy)
        if data is None and materializer is not None and shape is not None and is_lazy:
            values = torch.empty(tuple(shape), dtype=dtype)
        else:
            values = to_torch(SambaTensor(data, shape, dtype, materializer=materializer)).detach()
        parameter = torch.nn.Parameter(values, requires_grad)
        if is_lazy and materializer is not None:
            setattr(parameter, MATERIALIZER, materializer)
        if name is not None:
            parameter.sn_name = name  # type: ignore[attr-defined]  # SambaFlow's attribute
        return parameter


def __getattr__(name: str) -> object:
    raise no_such_name("sambasim.samba.nn", name, ("SambaParameter", *vars(torch.nn)))
