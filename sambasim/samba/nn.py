"""`samba.nn`: all of `torch.nn`, and SambaParameter, which apps import from `samba.nn.parameter`."""

from collections.abc import Sequence
from typing import Any

import torch.nn
from torch import Tensor
from torch.nn import *  # noqa: F403  # every name of torch.nn, whatever the release

from sambasim.errors import DataError
from sambasim.samba.notices import checks_keywords
from sambasim.samba.process import type_error
from sambasim.samba.tensor import MATERIALIZER, Materializer, SambaTensor, to_torch


class _Converted(type):
    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, torch.nn.Parameter) and "sn_name" in vars(instance)


class SambaParameter(metaclass=_Converted):
    """Makes an `nn.Parameter` with a name, in the memory of `data`. Its instances are what it made, and the parameters
    of models that `from_torch_model_` has converted. It is no class of its own, because torch's tracing and optimizers
    take parameters of torch."""

    @checks_keywords("SambaParameter")
    def __new__(  # type: ignore[misc]  # it returns no SambaParameter
        cls,
        data: Tensor | None = None,
        requires_grad: bool = True,
        name: str | None = None,
        shape: Sequence[int] | None = None,
        dtype: torch.dtype | None = None,
        materializer: Materializer | None = None,
    ) -> torch.nn.Parameter:
        """From `data`, by a `materializer`, or from a shape, with zeros, as a SambaTensor is made. Raises DataError for
        what is no tensor, or has another shape."""
        if data is not None and not isinstance(data, Tensor):
            remedy = "torch.as_tensor(…) makes one of numbers, lists and arrays"
            raise type_error(DataError, "the data of a parameter must be a tensor", data, remedy)
        values = SambaTensor(data, shape, dtype, name, materializer=materializer)
        parameter = torch.nn.Parameter(to_torch(values).detach(), requires_grad)
        parameter.sn_name = name  # type: ignore[attr-defined]  # SambaFlow's attribute
        if materializer is not None and parameter.is_meta:
            setattr(parameter, MATERIALIZER, materializer)
        return parameter


_deepcopy: Any = torch.nn.Parameter.__deepcopy__


def _copied(parameter: torch.nn.Parameter, memo: dict[int, Any]) -> torch.nn.Parameter:
    """As torch's copy, and with SambaFlow's attributes."""
    copied: torch.nn.Parameter = _deepcopy(parameter, memo)
    vars(copied).update({name: vars(parameter)[name] for name in ("sn_name", MATERIALIZER) if name in vars(parameter)})
    return copied


torch.nn.Parameter.__deepcopy__ = _copied  # type: ignore[assignment, method-assign]  # copies keep attributes


def __dir__() -> list[str]:
    return [*vars(torch.nn), "SambaParameter"]
