"""`materialize`: memory and values for the parameters of a model that was made in `lazy_param`."""

from collections.abc import Callable, Iterator, Mapping
from typing import TypeVar

import torch
from torch import Tensor, nn

from sambasim.errors import ModelError
from sambasim.samba.nn.parameter import MATERIALIZER
from sambasim.samba.tensor import SambaTensor, to_torch

__all__ = ["materialize"]

Part = TypeVar("Part", nn.Module, SambaTensor)


def materialize(lazy: Part) -> Part:
    """Gives lazy parameters and buffers memory on the host and the values that their layers begin with; returns `lazy`.

    lazy: a model, in place; or a SambaTensor, which has its data from the beginning

    A model can also be used as `with materialize(model) as model:`.

    Values are drawn now, by the `reset_parameters` of each layer, parts before the whole, as constructors do it. What
    else a constructor does to them, such as `nn.init` and `apply`, is not repeated. What is not lazy any more, for a
    checkpoint was loaded with `assign=True`, stays as it is; but a layer of which a part is lazy begins anew as a
    whole, and a layer that has none of its own only where all below it is lazy.
    A SambaParameter that was given a `materializer` gets its values from that, last.
    Raises ModelError for a layer with lazy tensors that has no `reset_parameters`, or whose own leaves some unset.
    """
    if isinstance(lazy, SambaTensor):
        return lazy
    if not hasattr(type(lazy), "__enter__"):
        # `with` looks these up in the class, and materialize must give back the very model.
        type(lazy).__enter__ = _itself  # type: ignore[attr-defined]  # a new method of the app's class
        type(lazy).__exit__ = _leave  # type: ignore[attr-defined]  # likewise
    found = [
        (path or type(lazy).__name__, module, _reset_of(module))
        for path, module in _parts_first(lazy, "", set())
        if any(tensor.is_meta for tensor in _own_tensors(module).values()) or _is_lazy_below(module)
    ]
    for path, module, reset in found:
        if reset is None and any(
            tensor.is_meta and MATERIALIZER not in vars(tensor) for tensor in _own_tensors(module).values()
        ):
            raise ModelError(
                f"{path} is a lazy {type(module).__name__}, which does not say how it begins",
                remedy="give the class a method reset_parameters that fills its parameters and buffers, or make it "
                "outside lazy_param, or load_state_dict(…, assign=True) first",
            )
    made: dict[int, Tensor] = {}  # parameters that two layers share stay shared
    given = [(path, module, _give_memory(module, made)) for path, module, _ in found]
    for _, _, reset in found:
        if reset is not None:
            reset()
    for path, module, memory in given:
        for name, tensor in memory.items():
            _fill(path, name, tensor)
        _check_set(path, module, memory)
    return lazy


def _itself(module: nn.Module) -> nn.Module:
    return module


def _leave(module: nn.Module, *error: object) -> None:
    return None


def _fill(path: str, name: str, tensor: Tensor) -> None:
    """Calls the `materializer` of a parameter that has one."""
    materializer = vars(tensor).pop(MATERIALIZER, None)
    if materializer is None:
        return
    values = to_torch(materializer())
    if values.shape != tensor.shape:
        raise ModelError(
            f"the materializer of {path}.{name} gives the shape {tuple(values.shape)}, and the parameter has "
            f"{tuple(tensor.shape)}",
            remedy="give SambaParameter the shape that its materializer returns",
        )
    with torch.no_grad():
        tensor.copy_(values)


def _parts_first(module: nn.Module, path: str, seen: set[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """Each module once, after those that it is made of: MultiheadAttention changes what its Linear began with."""
    if module in seen:
        return
    seen.add(module)
    for name, part in module.named_children():
        yield from _parts_first(part, f"{path}.{name}" if path else name, seen)
    yield path, module


def _own_tensors(module: nn.Module) -> dict[str, Tensor]:
    own = {**module._parameters, **module._buffers}
    return {name: tensor for name, tensor in own.items() if tensor is not None}


def _is_lazy_below(module: nn.Module) -> bool:
    """Whether there are tensors in it, and all are lazy."""
    tensors = [*module.parameters(), *module.buffers()]
    return bool(tensors) and all(tensor.is_meta for tensor in tensors)


def _reset_of(module: nn.Module) -> Callable[[], object] | None:
    """What fills the tensors of this layer; some of torch's have it under another name."""
    for name in ("reset_parameters", "_reset_parameters"):
        reset = getattr(module, name, None)
        if callable(reset):
            return reset  # type: ignore[no-any-return]  # torch declares attributes of modules as tensors and modules
    return None


def _give_memory(module: nn.Module, made: dict[int, Tensor]) -> dict[str, Tensor]:
    """The tensors of the layer that were lazy, by name, with memory, and nothing sensible in it yet."""
    given: dict[str, Tensor] = {}
    for name, tensor in _own_tensors(module).items():
        if tensor.is_meta:
            real = made.get(id(tensor))
            if real is None:
                real = made[id(tensor)] = _unset(tensor)
            # Not into the dictionaries of the module: an LSTM has a list of its weights beside them.
            setattr(module, name, real)
            given[name] = real
    return given


def _unset(lazy: Tensor) -> Tensor:
    """Memory for it: NaN in what can hold it, so that what nobody sets is seen."""
    memory = torch.empty_like(lazy, device="cpu")
    if _holds_nan(memory):
        memory = torch.full_like(memory, torch.nan)
    if not isinstance(lazy, nn.Parameter):
        return memory
    parameter = nn.Parameter(memory, lazy.requires_grad)
    vars(parameter).update(vars(lazy))  # sn_name
    return parameter


def _holds_nan(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _check_set(path: str, module: nn.Module, given: Mapping[str, Tensor]) -> None:
    """Raises ModelError for a tensor of `given` that no reset wrote to. An integer shows it by torch's count of writes
    alone, which begins with 0."""
    for name, memory in given.items():
        now = _own_tensors(module).get(name)
        if now is None:
            continue
        if bool(now.isnan().any()) if _holds_nan(now) else now is memory and now._version == 0:
            raise ModelError(
                f"{path} is a {type(module).__name__}, whose reset_parameters does not set {name}",
                remedy=f"set {name} in it, or make the layer outside lazy_param",
            )
