"""What a user hands over beside the model: optimizers with hooks, of their own kinds, and with schedulers."""

# Calling a module gives Any, and some functions of torch have no types.
# mypy: no-warn-return-any, allow-untyped-calls

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import lr_scheduler
from torch.optim.optimizer import Optimizer

from tests.state.case import BATCH, EQUAL, RATE, REFUSED, TOLD, Setup, built, net_of


def plain() -> Setup:
    return net_of(lambda net, h: h.tanh(), steps=6)


def _with_optimizer(make: Callable[[Any], Optimizer], attach: Callable[[Optimizer], object] | None = None) -> Setup:
    setup = plain()
    setup.optimizer = make(setup.model.parameters())
    if attach is not None:
        attached = attach(setup.optimizer)
        setup.scheduler = attached if isinstance(attached, lr_scheduler.LRScheduler) else None
    return setup


def _sgd(parameters: Any) -> Optimizer:
    return torch.optim.SGD(parameters, lr=RATE)


def _halves_gradients(optimizer: Optimizer, *others: object) -> None:
    for group in optimizer.param_groups:
        for one in group["params"]:
            one.grad = one.grad * 0.5


def _shrinks(optimizer: Optimizer, *others: object) -> None:
    with torch.no_grad():
        for group in optimizer.param_groups:
            for one in group["params"]:
                one.mul_(0.9)


@built(REFUSED, where=None, says=("hook", "_halves_gradients"))
def hook_before_a_step() -> Setup:
    return _with_optimizer(_sgd, lambda optimizer: optimizer.register_step_pre_hook(_halves_gradients))


@built(REFUSED, where=None, says=("hook", "_shrinks"), whole=True)
def hook_after_a_step() -> Setup:
    return _with_optimizer(_sgd, lambda optimizer: optimizer.register_step_post_hook(_shrinks))


@built(REFUSED, where=None, whole=True)
def step_of_the_instance() -> Setup:
    def attach(optimizer: Any) -> None:
        step = optimizer.step

        def halved(closure: Any = None) -> Any:
            _halves_gradients(optimizer)
            return step(closure)

        optimizer.step = halved

    return _with_optimizer(_sgd, attach)


class AdamW(torch.optim.AdamW):
    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for one in group["params"]:
                one.sub_(one.grad.sign(), alpha=0.01)


class SGD(torch.optim.SGD):
    """Another step by its own method."""

    def step(self, closure: Any = None) -> Any:
        _halves_gradients(self)
        return super().step(closure)


class Named(torch.optim.SGD): ...


@built(REFUSED, where=None, says=("AdamW.step",))
def subclass_called_adamw() -> Setup:
    return _with_optimizer(lambda parameters: AdamW(parameters, lr=1e-3))


@built(REFUSED, where=None, says=("SGD.step",), whole=True)
def subclass_called_sgd() -> Setup:
    return _with_optimizer(lambda parameters: SGD(parameters, lr=RATE))


@built(EQUAL, whole=True)
def subclass_without_a_step() -> Setup:
    return _with_optimizer(lambda parameters: Named(parameters, lr=RATE))


@built(EQUAL | TOLD | REFUSED, where=None, notice="states", whole=True)
def momentum_of_earlier_steps() -> Setup:
    setup = _with_optimizer(lambda parameters: torch.optim.SGD(parameters, lr=RATE, momentum=0.9))
    setup.model(*(tensor[:BATCH] for tensor in setup.data)).backward()
    setup.optimizer.step()
    return setup


def _scheduled(make: Callable[[Optimizer], object], **schedule: Any) -> tuple[Callable[[], Setup], Callable[[], Setup]]:
    """A scheduler of torch, and the same as a table."""

    def told() -> Setup:
        setup = plain()
        setup.options = {"set": {f"training.schedule.{name}": value for name, value in schedule.items()}}
        return setup

    return lambda: _with_optimizer(_sgd, make), told


_LINEAR = _scheduled(lambda o: lr_scheduler.LinearLR(o, 0.25, 1.0, 3), name="constant", warmup_steps=4)
_STEP = _scheduled(lambda o: lr_scheduler.StepLR(o, 2, 0.5), name="step", step_size=2, gamma=0.5)
_COSINE = _scheduled(lambda o: lr_scheduler.CosineAnnealingLR(o, 6), name="cosine", total_steps=6)
_LAMBDA = _scheduled(lambda o: lr_scheduler.LambdaLR(o, lambda s: 1 - s / 8), name="linear", total_steps=8)
_CYCLE = _scheduled(lambda o: lr_scheduler.OneCycleLR(o, 0.5, 6))

for _name, _ways in {"linear": _LINEAR, "step": _STEP, "cosine": _COSINE, "lambda": _LAMBDA, "cycle": _CYCLE}.items():
    _has_rewrite = _name != "cycle"  # of which the schedules of a PEF have none
    _case = built(
        REFUSED,
        where=None,
        says=("training.schedule",) if _has_rewrite else ("OneCycleLR",),
        steps=6,
        rewritten=_ways[1] if _has_rewrite else None,
        tolerance=1e-6,  # chainable schedulers of torch multiply rates by ratios
        whole=_name != "linear",
    )
    _ways[0].__name__ = f"scheduler_{_name}"
    _case(_ways[0])


# Losses.
