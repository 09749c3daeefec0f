"""Models whose own `train()` or `eval()` changes weights, as those that merge or swap them do. A PEF has one set of
weights, for training and for evaluation."""

import inspect
from collections.abc import Callable, Iterator
from types import FunctionType

from torch import Tensor, nn

from sambasim.compiler.names import is_library_file
from sambasim.compiler.recording import Recording, line_of
from sambasim.errors import CaptureError

_REMEDY = (
    "leave the method out, and keep merged or averaged weights apart from those to train: compute them in forward(), "
    "w = self.a.weight + self.delta() if self.training else self.averaged, or merge them after training"
)


def check_modes(model: nn.Module, *, training: bool) -> None:
    """Raises CaptureError if a method of the user's that switches to evaluation, or back to training, changes a
    parameter, a buffer or another tensor of `model`, whose tensors are afterwards as they were."""
    if not any(map(_methods, model.modules())):
        return
    modes = [(module, module.training) for module in model.modules()]
    named = _tensors(model)
    recording = Recording(named)
    try:
        for name in ("eval", "train") if training else ("eval",):
            with recording:
                getattr(model, name)()
            now = _tensors(model)
            slots = [label for op in recording.ops for label in op.writes]
            slots += [path for path in {**named, **now} if named.get(path) is not now.get(path)]
            if slots:
                raise _refused(model, name, slots[0] if slots[0].startswith("model") else "a tensor", training)
    finally:
        recording.undo()
        for module, was_training in modes:
            module.training = was_training


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    return {
        ".".join(filter(None, ("model", path, name))): one
        for path, module in model.named_modules()
        for name, one in {**module._parameters, **module._buffers, **vars(module)}.items()
        if isinstance(one, Tensor)
    }


def _methods(module: nn.Module) -> list[tuple[str, FunctionType]]:
    """The `train` and `eval` of a module that are not torch's, by their names."""
    found: Iterator[tuple[str, Callable[..., object]]]
    found = ((name, inspect.unwrap(getattr(module, name))) for name in ("train", "eval"))
    plain = ((name, getattr(one, "__func__", one)) for name, one in found)
    return [
        (name, one)
        for name, one in plain
        if isinstance(one, FunctionType) and not is_library_file(one.__code__.co_filename)
    ]


def _refused(model: nn.Module, called: str, slot: str, training: bool) -> CaptureError:
    """The error for `model.train()` or `model.eval()` that changes `slot`, at the method of the innermost module that
    has the slot."""
    own = [(f"model.{path}" if path else "model", module) for path, module in model.named_modules() if _methods(module)]
    around = [pair for pair in own if f"{slot}.".startswith(f"{pair[0]}.")] or own
    module = around[-1][1]
    methods = dict(_methods(module))
    name, method = (called, methods[called]) if called in methods else next(iter(methods.items()))
    what = f"{name}() of {type(module).__name__} changes {slot}, and a PEF has one set of weights for both modes"
    return CaptureError(
        f"the {'training step' if training else 'evaluation graph'} cannot be captured: {what}",
        where=line_of(method.__code__.co_filename, method.__code__.co_firstlineno),
        remedy=_REMEDY if training else "call model.eval() before you compile",
    )
