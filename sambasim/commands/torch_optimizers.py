"""What a PEF takes of an optimizer of torch: the options of its groups, and the schedule that has the rates of its
schedulers, by a comparison of the rates of many steps. One whose step is the user's own is refused."""

import copy
import gc
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain, combinations, repeat
from math import isclose
from typing import Any, NamedTuple

import torch
import torch.optim.optimizer as torch_optimizer
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from sambasim.compiler.capture.recording import first_line
from sambasim.errors import OptionError
from sambasim.optimizers import FORM_OF_OWN, OPTIMIZERS
from sambasim.options.base import build
from sambasim.options.schedules import ScheduleOptions
from sambasim.options.training import OptimizerOptions

NOT_IN_A_PEF: Mapping[str, str] = {"differentiable": "leave it out", "initial_accumulator_value": "leave it out"}
"""Options of torch's optimizers that a PEF does not have, with remedies."""

_LIBRARIES = ("torch.", "sambasim.", "typing_extensions")


def refuse_changed_step(optimizer: Optimizer, name: str) -> None:
    """Raises OptionError if a step of `optimizer`, which users call `name`, does more or other than that of the class
    in torch: for a hook, and for a method that was replaced in the object, in a class of the user's, or in torch's."""
    hooks = {**vars(torch_optimizer), **vars(optimizer)}
    for kind in (name for name in hooks if name.endswith("_hooks")):
        for hook in hooks[kind].values():
            if not is_of_a_library(hook):
                words = kind.replace("_global_optimizer", "_step").removeprefix("_optimizer").removesuffix("s")
                what = f"{name} has a{words.replace('_', ' ')}, {_called(hook)}, which a run does not call"
                remedy = "remove it: handle.remove(); to clip gradients give max_grad_norm=1.0"
                raise OptionError(what, where=str(first_line(hook) or ""), remedy=remedy)
    library = next(kind for kind in type(optimizer).__mro__ if kind.__module__.startswith(_LIBRARIES))
    for method, function in _methods(optimizer):
        if hasattr(library, method) and not is_of_a_library(function):
            what = f"{method} of {name} is not torch's, but {_called(function)}, which a run does not call"
            remedy = f"{name}(model.parameters(), …) as it is, or write its update: {FORM_OF_OWN}"
            raise OptionError(what, where=str(first_line(function) or ""), remedy=remedy)


def _methods(optimizer: Optimizer) -> Iterator[tuple[str, Any]]:
    """Name and function of each method, without those of Python's protocols."""
    for attributes in (vars(optimizer), *map(vars, type(optimizer).__mro__)):
        for name, value in attributes.items():
            if callable(value) and not name.startswith("__") and not hasattr(value, "__origin__"):  # no alias of a type
                yield name, value


def is_of_a_library(function: Any) -> bool:
    """Whether torch or sambasim has written `function`, and what it wraps."""
    function = getattr(function, "__func__", function)  # of a method
    wrapped, names = getattr(function, "__wrapped__", None), getattr(function, "__globals__", {})
    return str(names.get("__name__")).startswith(_LIBRARIES) and (wrapped is None or is_of_a_library(wrapped))


def _called(function: Any) -> str:
    return getattr(function, "__qualname__", f"a {type(function).__name__}")


def options_of_group(
    kind: str, group: Mapping[str, Any], where: str, max_grad_norm: float | None = None
) -> OptimizerOptions:
    """Raises OptionError for an option that a PEF's optimizer does not have, and for values out of range."""
    for option, remedy in NOT_IN_A_PEF.items():
        if group.get(option):
            raise OptionError(f"the optimizer of a PEF does not have {option}", where=where, remedy=remedy)
    if kind == "adam" and group.get("decoupled_weight_decay"):
        remedy = f"{where.partition(',')[0].rpartition('.')[0]}.AdamW"
        raise OptionError("Adam with decoupled_weight_decay is AdamW", where=where, remedy=remedy)
    values = {field: plain_number(group[field]) for field in OPTIMIZERS[kind].defaults}
    numbers = {field: float(value) if type(value) is int else value for field, value in values.items()}
    return build(OptimizerOptions, {"name": kind, **numbers, "max_grad_norm": max_grad_norm}, where=where)


def plain_number(value: Any) -> Any:
    """A value of a group: of a tensor of one element the number, of a list a tuple."""
    if isinstance(value, tuple | list):
        return tuple(map(plain_number, value))
    return value.item() if isinstance(value, Tensor) else value


_COSINE, _STEP = 'lr_schedule="cosine"', 'lr_schedule="step", set={"training.schedule.step_size": …}'
_NEAR = {
    "OneCycleLR": f"{_COSINE}, warmup_steps=…",
    "MultiStepLR": _STEP,
    "ReduceLROnPlateau": f"{_COSINE}, and stop_after=N ends a run that gets no better",
}
_MOST_STEPS = 300_000  # they take some 20 s
_IN_PARTS = 'run in parts: lr=…, checkpoint_dir=…, resume="newest"'


class Taken(NamedTuple):
    """A schedule that has the rates of `schedulers` in so many `steps`, and of each group the rate at factor 1."""

    schedule: ScheduleOptions
    rates: tuple[float, ...]
    schedulers: str
    steps: int

    def notice(self, optimizer: OptimizerOptions) -> str:
        rates = " and ".join(dict.fromkeys(f"lr {update.lr:.6g}" for update in optimizer.updates()))
        fields = self.schedule.model_dump(exclude_unset=True).items()
        settings = ", ".join(f"{name} {value}" for name, value in fields)
        what = f"the learning rate follows {self.schedulers} of the optimizer: {rates}, schedule.{settings}"
        return f"{what} (equal in {self.steps:,} steps); each optimizer step is one of the scheduler, not each epoch"


def taken_over(optimizers: Sequence[Optimizer], known_steps: int = 0) -> Taken | None:
    """What the schedulers of `optimizers` do; None without. Raises OptionError if no schedule does that in a run."""
    of_each = [_schedulers_of(optimizer) for optimizer in optimizers]
    schedulers = [*chain.from_iterable(of_each)]
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    if not schedulers and all("initial_lr" not in group for group in groups):
        return None
    called = " and ".join(dict.fromkeys(type(scheduler).__name__ for scheduler in schedulers))
    near = " or ".join(dict.fromkeys(_NEAR.get(type(scheduler).__name__, _COSINE) for scheduler in schedulers))
    remedy = f"no schedule of a PEF has its rates: make it without, and give one that is near: {near or _COSINE}; "
    remedy += f"or for its rates, {_IN_PARTS}"
    if schedulers:
        integers = {number for scheduler in schedulers for number in _integers(vars(scheduler))}
        numbers = sorted(number for number in integers if 0 < number < 10**9)
        count = min(max(sum(numbers[-2:]) + 1000, known_steps), _MOST_STEPS)
        of_optimizers = map(_rates, of_each, optimizers, repeat(count))
        together = [[*chain.from_iterable(rates)] for rates in zip(*of_optimizers, strict=False)]
        scaled = [*map(_scaled, zip(*together, strict=True), groups)]
        of_rates = [factors for rate, factors in scaled if rate]
        fitting = _fitting(numbers, of_rates[0]) if of_rates and len(together) > 3 else None
        if fitting and fitting[1] >= min(known_steps, count):
            if all(_has(factors, *fitting) for factors in of_rates):
                schedule, steps = fitting
                return Taken(schedule, tuple(rate for rate, _ in scaled), called, steps)
            remedy = "one schedule multiplies the rates of all parameter groups: give all the same factor, as LambdaLR "
            remedy += f"with one function does, and eta_min=0 or training.schedule.final_factor; or {_IN_PARTS}"
        elif any(vars(scheduler).get("last_epoch", 0) > 0 for scheduler in schedulers):
            remedy = f"it has stepped before, and no schedule goes on from there: make it anew; or {_IN_PARTS}"
    rate = " and ".join(dict.fromkeys(f"{plain_number(group['lr']):.4g}" for group in groups))
    called = called or "which is gone by now"
    what = f"the optimizer has a learning rate scheduler, {called}, and a run would keep its rate of now, {rate}"
    raise OptionError(what, remedy=remedy)


def _schedulers_of(optimizer: Optimizer) -> list[LRScheduler]:
    holders = gc.get_referrers(optimizer)  # objects, or their dictionaries
    if dictionaries := [holder for holder in holders if type(holder) is dict and "last_epoch" in holder]:
        holders += gc.get_referrers(*dictionaries)
    of_ids = {id(holder): holder for holder in holders if issubclass(type(holder), LRScheduler)}
    inner = {id(scheduler) for outer in of_ids.values() for scheduler in vars(outer).get("_schedulers", ())}
    listed = of_ids.values()
    return [each for each in listed if id(each) not in inner and vars(each).get("optimizer") is optimizer]


def _scaled(rates: Sequence[float], group: Mapping[str, Any]) -> tuple[float, list[float]]:
    """The rate of a group at factor 1, and its factors; none if it has no rate."""
    highest = rates[0] if isclose(rates[0], max(rates), rel_tol=1e-4) else max(rates)  # some add up rounding errors
    initial = float(plain_number(group.get("initial_lr", highest)))
    rate = initial if isclose(initial, highest, rel_tol=1e-6) else highest
    return rate, [each / rate for each in rates] if rate > 0 else []


def _fitting(numbers: Sequence[int], factors: Sequence[float]) -> tuple[ScheduleOptions, int] | None:
    """A schedule with these factors, and in how many steps."""
    for fields in _candidates(numbers, factors):
        schedule = ScheduleOptions.model_validate(fields)
        if _has(factors, schedule, len(factors)):
            return schedule, len(factors)
        if schedule.name == "cosine" and _has(factors, schedule, len(factors), rises=True):
            return schedule, fields["total_steps"] + 1
    return None


def _has(factors: Sequence[float], schedule: ScheduleOptions, steps: int, *, rises: bool = False) -> bool:
    """Whether `schedule` has the first `steps` of `factors`, if it rises and falls again as torch's cosine does."""
    begin, length = schedule.warmup_steps, (schedule.total_steps or 0) - schedule.warmup_steps

    def ours(step: int) -> float:
        if rises and step > begin:
            past = (step - begin) % (2 * length)
            step = begin + min(past, 2 * length - past)
        return schedule.factor(step, steps)

    return all(isclose(ours(step), factors[step], rel_tol=1e-6, abs_tol=1e-9) for step in range(steps))


def _candidates(numbers: Sequence[int], factors: Sequence[float]) -> Iterator[dict[str, Any]]:
    """Schedules that may have these factors. Their lengths are among `numbers`, or sums of two."""
    warmups: list[dict[str, Any]] = [{}]
    if factors[0] < 1:
        warmups = [{"warmup_steps": steps, "start_factor": _rounded(factors[0])} for steps in numbers]
        warmups += [{"warmup_steps": round(1 / factors[0])}] if factors[0] > 1e-6 else []
    for warmup in warmups:
        steps = warmup.get("warmup_steps", 0)
        yield {"name": "constant", **warmup}
        for length in sorted({*numbers, *map(sum, combinations(numbers, 2))}):
            if steps < length < len(factors):
                final = {**warmup, "total_steps": length, "final_factor": _rounded(factors[length])}
                yield from ({"name": name, **final} for name in ("linear", "cosine"))
        for size in (1, *numbers):
            if steps + size < len(factors) and factors[steps] and factors[steps + size] > 0:
                gamma = float(f"{factors[steps + size] / factors[steps]:.10g}")
                yield {"name": "step", **warmup, "step_size": size, "gamma": gamma}


def _rounded(factor: float) -> float:
    return min(max(float(f"{factor:.10g}"), 0.0), 1.0)


def _rates(schedulers: Sequence[LRScheduler], optimizer: Optimizer, count: int) -> list[list[float]]:
    """The next rates of each group, by copies of `schedulers` on another optimizer; none if they set more."""
    twin = torch.optim.SGD([{"params": [torch.zeros(1)]} for _ in optimizer.param_groups])
    rates, fixed = list[list[float]](), list[dict[str, Any]]()
    for group, given in zip(twin.param_groups, optimizer.param_groups, strict=True):
        group.update({name: copy.copy(value) for name, value in given.items() if name != "params"})
        fixed.append({name: value for name, value in group.items() if name not in ("params", "lr")})
    # A lambda of the user's may raise, a cycle end, or a metric be wanting.
    with warnings.catch_warnings(action="ignore"), suppress(Exception):
        copies = copy.deepcopy(list(schedulers), {id(optimizer): twin})
        while len(rates) < count and all(group["lr"] >= 0 for group in twin.param_groups):
            rates.append([float(plain_number(group["lr"])) for group in twin.param_groups])
            for scheduler in copies:
                scheduler.step()
            if any({**group, **before} != group for group, before in zip(twin.param_groups, fixed, strict=True)):
                return []
    return rates


def _integers(value: object) -> Iterator[int]:
    """Those in attributes, arguments and closures of a scheduler."""
    if type(value) is int:
        yield value
    elif isinstance(value, Mapping):
        yield from _integers([pair for pair in value.items() if pair[0] != "optimizer"])
    elif isinstance(value, list | tuple):
        yield from chain.from_iterable(map(_integers, value))
    elif isinstance(value, LRScheduler):
        yield from _integers(vars(value))
    else:
        cells = [cell.cell_contents for cell in getattr(value, "__closure__", None) or ()]
        constants = getattr(getattr(value, "__code__", None), "co_consts", ())
        given = [getattr(value, name, None) for name in ("__defaults__", "args", "keywords")]
        yield from _integers([item for item in (*cells, *constants, *given) if item is not None])
