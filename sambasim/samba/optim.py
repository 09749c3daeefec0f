"""SGD, Adam and AdamW: torch's optimizers with `max_grad_norm`, whose options a session compiles into a PEF.

`max_grad_norm` bounds the norm of all gradients together on the device; of an optimizer's own on the host.
"""

import inspect
from collections.abc import Iterable
from typing import Any, ClassVar, Literal, TypeAlias

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from sambasim.commands.torch_optimizers import NOT_IN_A_PEF, options_of_group, plain_number, refuse_changed_step
from sambasim.errors import OptionError
from sambasim.options.training import OptimizerOptions
from sambasim.samba.notices import checks_keywords

__all__ = ["SGD", "Adam", "AdamW"]

Parameters: TypeAlias = Iterable[Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, Tensor]]


class _OnDevice(torch.optim.Optimizer):
    """The base of the three classes below; each has one of torch's optimizers as its next base."""

    kind: ClassVar[Literal["sgd", "adam", "adamw"]]
    _clips: bool = False
    _opt_called: bool = False
    """Torch's schedulers warn unless it is set; a session sets it after a step."""

    # Without torch's wrappers, which import its tracer for seconds. Nothing traces these methods here.
    add_param_group = inspect.unwrap(torch.optim.Optimizer.add_param_group)
    zero_grad = inspect.unwrap(torch.optim.Optimizer.zero_grad)
    state_dict = inspect.unwrap(torch.optim.Optimizer.state_dict)
    load_state_dict = inspect.unwrap(torch.optim.Optimizer.load_state_dict)

    def __init__(self, params: Parameters, *arguments: Any, max_grad_norm: float | None = None, **others: Any) -> None:
        """Raises OptionError as `options` does; torch raises ValueError or TypeError, but not for no parameters."""
        groups: Any = params if isinstance(params, Tensor) else list(params) or [{"params": []}]
        super().__init__(groups, *arguments, **others)
        for group in self.param_groups:  # torch's own defaults of SGD are integers
            group.update({name: float(group[name]) for name in ("dampening", "weight_decay") if name in group})
        self._bound_gradients(max_grad_norm)
        self.options()

    def options(self) -> tuple[OptimizerOptions, ...]:
        """The options of each of `param_groups` for a PEF. Raises OptionError for what a PEF cannot have."""
        name = f"samba.optim.{type(self).__name__}"
        refuse_changed_step(self, name)
        bounds = dict.fromkeys(group["max_grad_norm"] for group in self.param_groups)
        if len(bounds) > 1:
            what = f"the parameter groups of {type(self).__name__} differ in max_grad_norm, "
            what += f"{' and '.join(map(str, bounds))}, which bounds the norm of all gradients together"
            raise OptionError(what, remedy="give max_grad_norm to the optimizer and to no group")
        bound = plain_number(next(iter(bounds), None))
        groups = enumerate(self.param_groups)
        return tuple(options_of_group(self.kind, group, f"{name}, parameter group {i}", bound) for i, group in groups)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._bound_gradients(self.defaults["max_grad_norm"])

    def _bound_gradients(self, max_grad_norm: float | None) -> None:
        """Sets `max_grad_norm` of groups that have none, as those of a checkpoint of torch's optimizer, and clips
        gradients before each step on the host."""
        self.defaults["max_grad_norm"] = max_grad_norm
        for group in self.param_groups:
            group.setdefault("max_grad_norm", max_grad_norm)
        if not self._clips:
            self.register_step_pre_hook(_clip_first)
            self._clips = True


class SGD(_OnDevice, torch.optim.SGD):
    kind = "sgd"


class Adam(_OnDevice, torch.optim.Adam):
    kind = "adam"


class AdamW(_OnDevice, torch.optim.AdamW):
    kind = "adamw"


def _clip_first(
    optimizer: torch.optim.Optimizer, arguments: tuple[Any, ...], keywords: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Clips the gradients before a step on the host; with a closure, after the closure has computed them."""
    bound = optimizer.param_groups[0]["max_grad_norm"]
    if bound is None:
        return None
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    itself, closure, *_ = (*arguments, keywords.get("closure"))
    if closure is None:
        if any(parameter.grad is not None for parameter in parameters):
            clip_grad_norm_(parameters, bound)
        return None

    def compute_and_clip() -> Any:
        loss = closure()
        clip_grad_norm_(parameters, bound)
        return loss

    return (itself,), {"closure": compute_and_clip}


for _one, _of_torch in ((SGD, torch.optim.SGD), (Adam, torch.optim.Adam), (AdamW, torch.optim.AdamW)):
    # Each has its own check of keywords, because torch's optimizers take different ones.
    _taken = tuple(inspect.signature(_of_torch).parameters)
    _checks = checks_keywords(f"samba.optim.{_one.__name__}", _taken, refused_later=NOT_IN_A_PEF)
    _one.__init__ = _checks(_OnDevice.__init__)  # type: ignore[method-assign]  # the same, checked
