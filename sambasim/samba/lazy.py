"""`lazy_param`: models whose parameters have no memory yet. `materialize` gives them memory and values.

    with samba.lazy_param():
        model = LargeModel()                # at once, whatever its size
    samba.materialize(model)                # now it has memory, and the values of its layers' `reset_parameters`

What a constructor does after that, with `nn.init` or `apply`, is not repeated: do it again on the materialized model.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor, nn

from sambasim.errors import ModelError
from sambasim.samba.checks.keywords import checks_keywords
from sambasim.samba.checks.place import app_line
from sambasim.samba.nn import MATERIALIZER
from sambasim.samba.notices import say_once
from sambasim.samba.tensor import SambaTensor, to_torch

__all__ = ["lazy_param", "materialize"]

Part = TypeVar("Part", nn.Module, SambaTensor)


@checks_keywords
@contextmanager
def lazy_param(quantized: bool = False) -> Iterator[None]:
    """Within it, tensors that a model makes are lazy: they have a shape and a dtype on torch's device `meta`, and no
    random number is drawn. `quantized` has no effect."""
    if quantized:
        say_once("lazy_param(quantized=True)", "parameters keep the dtype that the model gives them", app_line())
    with torch.device("meta"):
        yield


def materialize(lazy: Part) -> Part:
    """Gives lazy parameters and buffers memory on the host and their initial values, in place; returns `lazy`.

    lazy: a model, also in `with materialize(model) as model:`; or a SambaTensor, which is never lazy

    Calls `reset_parameters` of each layer with lazy tensors, inner layers first, as constructors do; of a layer without
    tensors of its own only if all below it is lazy. Layers without lazy tensors, as after
    `load_state_dict(…, assign=True)`, keep their values. The `materializer` of a SambaParameter is called last.
    Raises ModelError for a layer with lazy tensors that has no `reset_parameters`, or whose own leaves some unset.
    """
    if isinstance(lazy, SambaTensor):
        return lazy
    if not hasattr(type(lazy), "__enter__"):
        # `with` finds these methods in the class only, and materialize must return the model itself.
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
                f"{path} is a lazy {type(module).__name__}, which has no reset_parameters",
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
    """Each module once, after its parts: MultiheadAttention changes the initial values of its Linear."""
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
    """`reset_parameters` of this layer, or torch's other name for it."""
    for name in ("reset_parameters", "_reset_parameters"):
        reset = getattr(module, name, None)
        if callable(reset):
            return reset  # type: ignore[no-any-return]  # torch declares attributes of modules as tensors and modules
    return None


def _give_memory(module: nn.Module, made: dict[int, Tensor]) -> dict[str, Tensor]:
    """Replaces the lazy tensors of the layer by unset ones with memory; returns these by name."""
    given: dict[str, Tensor] = {}
    for name, tensor in _own_tensors(module).items():
        if tensor.is_meta:
            real = made.get(id(tensor))
            if real is None:
                real = made[id(tensor)] = _unset(tensor)
            # By setattr, because an LSTM also keeps a list of its weights.
            setattr(module, name, real)
            given[name] = real
    return given


def _unset(lazy: Tensor) -> Tensor:
    """Memory filled with NaN, if the type has it, so that unset values are detected."""
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
    """Raises ModelError for a tensor of `given` that no reset wrote to: by NaN, or for integers by torch's count of
    writes."""
    for name, memory in given.items():
        now = _own_tensors(module).get(name)
        if now is None:
            continue
        if bool(now.isnan().any()) if _holds_nan(now) else now is memory and now._version == 0:
            raise ModelError(
                f"{path} is a {type(module).__name__}, whose reset_parameters does not set {name}",
                remedy=f"set {name} in it, or make the layer outside lazy_param",
            )
