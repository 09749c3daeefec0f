"""AP05 of gradients that the app clips on the host, where the model has none: those of the device stay as they are."""

import math
import weakref
from collections.abc import Callable
from functools import cache, wraps
from typing import Any

from torch import Tensor
from torch.nn.utils import clip_grad

from sambasim.ir.graph import SectionKind
from sambasim.samba import context
from sambasim.samba.checks.findings import Finding
from sambasim.samba.checks.place import app_line
from sambasim.samba.checks.telling import telling
from sambasim.samba.machine import Machine

_CLIPS = "_clip_grads_with_norm_"
"""What `clip_grad_norm_` calls by the name that its module has for it, however the app has imported it."""

_loaded: "weakref.WeakSet[Unclipped]" = weakref.WeakSet()


class Unclipped:
    """Whether gradients are clipped where there are none, for one loaded PEF."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._told = False
        _loaded.add(self)
        _watch()

    def note_clipping(self, parameters: list[Tensor], bound: float) -> None:
        """The app has gradients of `parameters` clipped at the norm `bound`."""
        reads_the_norm_alone = not math.isfinite(bound)
        if self._told or reads_the_norm_alone or not context.current().trains:
            return
        if any(one.grad is not None for one in parameters):
            return
        training = self._machine.program.training
        if training is None or any(section.kind is SectionKind.GRADNORM for section in training.sections):
            return
        own = {id(parameter) for parameter in self._machine.model.parameters()}
        where = app_line()
        if where is None or not any(id(one) in own for one in parameters):
            return
        self._told = True
        kind = type(self._machine.optimizers[0]).__name__
        remedy = (
            f"samba.optim.{kind}(…, max_grad_norm={bound!r}), a bound of the 2-norm of all gradients together; then "
        )
        remedy += "compile the app again"
        telling.tell(Finding("AP05", "the app clips gradients on the host, and the device does not", where, remedy))


@cache
def _watch() -> None:
    """Be told of clipping from now on, once in a process."""
    original = getattr(clip_grad, _CLIPS, None)
    if original is not None:
        setattr(clip_grad, _CLIPS, _watched(original))


def _watched(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def clip(parameters: Any, max_norm: float, *args: Any, **keywords: Any) -> Any:
        listed = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        for unclipped in list(_loaded):
            unclipped.note_clipping(listed, float(max_norm))
        return original(listed, max_norm, *args, **keywords)

    return clip
