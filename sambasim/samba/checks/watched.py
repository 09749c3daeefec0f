"""The functions of torch that are watched for changes and uses of weights on the host (AP05, AP06).

watched       `model.state_dict()`, `load_state_dict`; `torch.save` of the model or of something that holds it; calls
              of the model and of its modules; clipping of gradients
not watched   `model.forward(x)` of a model without modules; reads of a parameter; pickle and deepcopy; state_dict
              of a module in the model; what `torch.jit`, `torch.compile`, `torch.export` and `torch.func` make
"""

import inspect
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from functools import cache, partial, wraps
from typing import Any, Protocol

import torch
from torch import Tensor, nn, serialization
from torch.jit import _recursive
from torch.nn.utils import clip_grad
from torch.utils.weak import WeakIdKeyDictionary

from sambasim.compiler.capture.trial import is_tracing

BOUNDS = {"clip_grad_norm_": "max_norm", "_clip_grads_with_norm_": "max_norm", "clip_grad_value_": "clip_value"}
"""Functions of torch that clip gradients, and the argument of each that is the bound."""


class Watcher(Protocol):
    @property
    def model(self) -> nn.Module: ...
    def note_read(self, use: str) -> None:
        """The weights of the model are used on the host; `use` is a verb."""

    def note_load(self) -> None:
        """The app has loaded weights into the model."""

    def note_clipping(self, function: str, parameters: list[Tensor], arguments: Mapping[str, Any]) -> None:
        """The app calls `function`, one of `BOUNDS`, for these parameters."""


_watchers: "MutableMapping[nn.Module, weakref.ref[Watcher]]" = WeakIdKeyDictionary()
"""By module that the device changes. The module itself gets a hook and nothing else."""


def watch(watcher: Watcher, modules: Iterable[nn.Module]) -> None:
    """Tells `watcher`, as long as it exists, what the app does with `modules` of its model."""
    modules = list(modules)
    # With hooks, torch leaves its fast path for these layers.
    fast = {id(part) for layer in modules if isinstance(layer, nn.TransformerEncoderLayer) for part in layer.modules()}
    for module in modules:
        _watchers[module] = weakref.ref(watcher)
        if id(module) not in fast:
            weakref.finalize(watcher, module.register_forward_pre_hook(_note_forward).remove)
    _replace_functions()


def _of(modules: Iterable[nn.Module]) -> set[Watcher]:
    return {watcher for module in modules if module in _watchers and (watcher := _watchers[module]()) is not None}


@cache
def _replace_functions() -> None:
    for owner, name, watched in (
        # Apps call methods of torch's class.
        (nn.Module, "state_dict", _watched_method),
        (nn.Module, "load_state_dict", _watched_method),
        # `torch.save` and `torch.jit.script` call these by their names in the module, however the app imports them.
        (serialization, "_save", partial(_without_hooks, saves=True)),
        (serialization, "_legacy_save", partial(_without_hooks, saves=True)),
        (_recursive, "create_script_module", partial(_without_hooks, saves=False)),
    ):
        setattr(owner, name, watched(getattr(owner, name)))
    # The app may have imported these before, under any name. Each is a wrapper that holds the real function in a
    # closure cell; replacing the cell reaches all names. In a torch without such wrappers the names are replaced.
    for name in BOUNDS.keys() & vars(clip_grad).keys():
        function: Callable[..., Any] = getattr(clip_grad, name)
        cells = [cell for cell in function.__closure__ or () if getattr(cell.cell_contents, "__name__", None) == name]
        for cell in cells:
            cell.cell_contents = _watched_clipping(name, cell.cell_contents)
        for module in () if cells else (clip_grad, nn.utils):
            setattr(module, name, _watched_clipping(name, function))


def _note_forward(module: nn.Module, _: object) -> None:
    """The hook of each module: a function, so that the model can be copied and pickled."""
    if is_tracing():
        return
    for watcher in _of([module]):
        # In training mode with gradients, a training step on the host may begin.
        if not (watcher.model.training and torch.is_grad_enabled()):
            watcher.note_read("computes with")


def _watched_method(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def method(module: nn.Module, *args: Any, **keywords: Any) -> Any:
        result = original(module, *args, **keywords)
        for watcher in _of([module]):
            if watcher.model is module and original.__name__ == "load_state_dict":
                watcher.note_load()
            # Tracers read with a prefix, or keep the variables.
            elif watcher.model is module and not (args or keywords.get("prefix") or keywords.get("keep_vars")):
                watcher.note_read("reads")
        return result

    return method


def _watched_clipping(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    @wraps(original)
    def clip(*args: Any, **keywords: Any) -> Any:
        try:
            call = signature.bind(*args, **keywords)
        except TypeError:
            return original(*args, **keywords)  # which raises
        parameters = call.arguments["parameters"]
        listed = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        call.arguments["parameters"] = listed or parameters  # torch warns of an empty generator
        for watcher in _of(list(_watchers)):
            watcher.note_clipping(name, listed, call.arguments)
        return original(*call.args, **call.kwargs)

    return clip


def _without_hooks(original: Callable[..., Any], *, saves: bool) -> Callable[..., Any]:
    """`original`, for modules without our hooks: TorchScript would compile them, and a file would need sambasim."""

    @wraps(original)
    def call(owner: object, *args: Any, **keywords: Any) -> Any:
        # A module, or a checkpoint that holds modules beside other things.
        parts = owner.values() if isinstance(owner, Mapping) else owner if isinstance(owner, list | tuple) else [owner]
        modules = [module for part in parts if isinstance(part, nn.Module) for module in part.modules()]
        for watcher in _of(modules if saves else []):
            watcher.note_read("saves")
        with _hidden_hooks(modules):
            return original(owner, *args, **keywords)

    return call


@contextmanager
def _hidden_hooks(modules: Iterable[nn.Module]) -> Iterator[None]:
    hooks = [
        (module._forward_pre_hooks, number)
        for module in {id(module): module for module in modules}.values()
        for number, hook in module._forward_pre_hooks.items()
        if hook is _note_forward
    ]
    for of_module, number in hooks:
        of_module.pop(number, None)  # a shallow copy shares the hooks
    try:
        yield
    finally:
        for of_module, number in hooks:
            of_module[number] = _note_forward
