"""AP05 of gradients that the app clips on the host, where the model has none: those of the device stay as they are.

The device clips in one way alone: by `max_grad_norm`, the 2-norm of all gradients together. Of an app that clips
otherwise it is told that this is something else.
"""

import inspect
import math
import weakref
from collections.abc import Callable, Iterable, Mapping
from functools import cache, wraps
from types import GeneratorType
from typing import Any

from torch import Tensor
from torch.nn.utils import clip_grad

from sambasim.ir.graph import SectionKind
from sambasim.samba import context
from sambasim.samba.checks.findings import Finding
from sambasim.samba.checks.place import app_line
from sambasim.samba.checks.telling import telling
from sambasim.samba.machine import Machine

_BOUNDS: Mapping[str, str] = {
    "clip_grad_norm_": "max_norm",
    "_clip_grads_with_norm_": "max_norm",  # `torch.nn.utils.clip_grads_with_norm_`
    "clip_grad_value_": "clip_value",
}
"""Functions of torch that clip, by the name that they are made under, and the argument of each that is the bound."""

_loaded: "weakref.WeakSet[Unclipped]" = weakref.WeakSet()


class Unclipped:
    """Whether gradients are clipped where there are none, for one loaded PEF."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._told = False
        _loaded.add(self)
        _watch()

    def note_clipping(self, function: str, parameters: list[Tensor], arguments: Mapping[str, Any]) -> None:
        """The app calls `function`, one of `_BOUNDS`, with these `arguments`, to have gradients of `parameters`
        clipped."""
        bound = float(arguments[_BOUNDS[function]])
        reads_the_norm_alone = not math.isfinite(bound)
        if self._told or reads_the_norm_alone or not context.current().trains:
            return
        if any(one.grad is not None for one in parameters):
            return
        training = self._machine.program.training
        if training is None or any(section.kind is SectionKind.GRADNORM for section in training.sections):
            return
        given = {id(one) for one in parameters}
        trained = {id(one) for one in self._machine.model.parameters() if one.requires_grad}
        if given.isdisjoint(trained):
            return
        self._told = True  # an app clips in every step
        remedy = self._remedy(function, bound, arguments, of_all=trained <= given)
        telling.tell(
            Finding("AP05", "the app clips gradients on the host, and the device does not", app_line(), remedy)
        )

    def _remedy(self, function: str, bound: float, arguments: Mapping[str, Any], *, of_all: bool) -> str:
        """What clips on the device as the app does on the host, or what is next to it."""
        norm_type = float(arguments.get("norm_type", 2.0))
        if function == "clip_grad_value_":
            other = "no single values"
        elif norm_type != 2:
            other = f"no {norm_type:g}-norm"
        else:
            other = "" if of_all else "not that of some"
        kind, clipped = type(self._machine.optimizers[0]).__name__, "the 2-norm of all gradients together"
        if other:
            remedy = (
                f"samba.optim.{kind}(…, max_grad_norm=…), a bound to choose anew: on the device it is of {clipped}, "
            )
            return f"{remedy}and {other}; then compile the app again"
        condition = ", if total_norm is that" if "total_norm" in arguments else ""
        remedy = f"samba.optim.{kind}(…, max_grad_norm={bound!r}), a bound of {clipped}{condition}"
        return f"{remedy}; then compile the app again"


@cache
def _watch() -> None:
    """Be told of clipping from now on, once in a process.

    An app may have imported a function, by any name, long before. But each is one of torch's wrappers, which switch
    gradients off and call the function that they have in a cell: there it is replaced, and every name still holds. A
    function of a torch that is made otherwise is not seen.
    """
    for name in _BOUNDS:
        wrapper = getattr(clip_grad, name, None)
        for cell in getattr(wrapper, "__closure__", None) or ():
            if inspect.isfunction(cell.cell_contents) and cell.cell_contents.__name__ == name:
                cell.cell_contents = _watched(name, cell.cell_contents)


def _watched(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    @wraps(original)
    def clip(*given: Any, **keywords: Any) -> Any:
        try:
            called = signature.bind(*given, **keywords)
        except TypeError:  # torch says so itself
            return original(*given, **keywords)
        parameters = called.arguments["parameters"]
        listed = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        called.arguments["parameters"] = _as_given(parameters, listed)
        for unclipped in list(_loaded):
            unclipped.note_clipping(name, listed, called.arguments)
        return original(*called.args, **called.kwargs)

    return clip


def _as_given(parameters: Iterable[Tensor], listed: list[Tensor]) -> Iterable[Tensor]:
    """A generator is used up by now, and torch warns of one that is empty, and of no list."""
    return (one for one in listed) if isinstance(parameters, GeneratorType) else listed
