"""`materialize`: memory and values for the parameters of a model that was made in `lazy_param`."""

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor, nn

from sambasim.errors import ModelError
from sambasim.samba.tensor import SambaTensor

__all__ = ["materialize"]

Part = TypeVar("Part", nn.Module, SambaTensor)


def materialize(lazy: Part) -> Part:
    """Gives lazy parameters and buffers memory on the host and the values that their layers begin with; returns `lazy`.

    lazy: a model, in place; or a SambaTensor, which has its data from the beginning

    Values are drawn now, layer by layer in the order of `named_modules`, by each layer's `reset_parameters`. What is
    not lazy any more, for a checkpoint was loaded with `assign=True`, stays as it is; but a layer of which a part
    is lazy begins anew as a whole. Raises ModelError for a layer with lazy tensors that has no `reset_parameters`.
    """
    if isinstance(lazy, SambaTensor):
        return lazy
    found = [(path, module, _reset_of(module)) for path, module in lazy.named_modules() if _is_lazy(module)]
    for path, module, reset in found:
        if reset is None:
            raise ModelError(
                f"{path or type(lazy).__name__} is a lazy {type(module).__name__}, which does not say how it begins",
                remedy="give the class a method reset_parameters that fills its parameters and buffers, or make it "
                "outside lazy_param, or load_state_dict(…, assign=True) first",
            )
    made: dict[int, Tensor] = {}  # parameters that two layers share stay shared
    for _, module, _ in found:
        _give_memory(module, made)
    for _, _, reset in found:
        if reset is not None:
            reset()
    return lazy


def _own_tensors(module: nn.Module) -> list[Tensor]:
    return [tensor for kept in (module._parameters, module._buffers) for tensor in kept.values() if tensor is not None]


def _is_lazy(module: nn.Module) -> bool:
    return any(tensor.is_meta for tensor in _own_tensors(module))


def _reset_of(module: nn.Module) -> Callable[[], object] | None:
    """What fills the tensors of this layer; some of torch's have it under another name."""
    for name in ("reset_parameters", "_reset_parameters"):
        reset = getattr(module, name, None)
        if callable(reset):
            return reset  # type: ignore[no-any-return]  # torch declares attributes of modules as tensors and modules
    return None


def _give_memory(module: nn.Module, made: dict[int, Tensor]) -> None:
    for name, parameter in module._parameters.items():
        if parameter is not None and parameter.is_meta:
            if id(parameter) not in made:
                real = nn.Parameter(torch.empty_like(parameter, device="cpu"), parameter.requires_grad)
                vars(real).update(vars(parameter))  # sn_name
                made[id(parameter)] = real
            module._parameters[name] = made[id(parameter)]  # type: ignore[assignment]  # all are parameters
    for name, buffer in module._buffers.items():
        if buffer is not None and buffer.is_meta:
            module._buffers[name] = torch.empty_like(buffer, device="cpu")
