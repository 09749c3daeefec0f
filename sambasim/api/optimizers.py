"""The `[optimizer]` table of an optimizer of torch, which must do in a step what its class does, and the schedule that
has the rates of its scheduler."""

import copy
import gc
import warnings
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from math import isclose
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from sambasim.commands.torch_optimizers import options_of_group, plain_number, refuse_changed_step
from sambasim.compiler.capture.tensors import held_by
from sambasim.errors import ModelError, OptionError
from sambasim.optimizers import OPTIMIZERS
from sambasim.options.base import one_of, show
from sambasim.options.schedule import ScheduleOptions
from sambasim.options.training import OptimizerOptions
from sambasim.runtime.run.plan import learning_rate_factor

_LONGEST_SCHEDULE = 20_000
"""The most steps of a scheduler that are tried."""


def options_of_optimizer(optimizer: torch.optim.Optimizer, model: nn.Module) -> OptimizerOptions:
    """The options of `optimizer`, which has one parameter group with all trained parameters of `model`. Raises
    OptionError for another class, several groups, a scheduler, and a step that is not torch's; ModelError for other
    parameters."""
    kinds = {getattr(torch.optim, entry.torch_name): kind for kind, entry in OPTIMIZERS.items() if entry.torch_name}
    torchs = next((kind for kind in type(optimizer).__mro__ if kind in kinds), None)
    if torchs is None:
        raise OptionError(
            f"a PEF has no optimizer {type(optimizer).__name__}",
            remedy=f"one of torch.optim.{one_of(one.__name__ for one in kinds)}, or a name: {one_of(OPTIMIZERS)}",
        )
    name = torchs.__name__
    made = f"torch.optim.{name}(model.parameters(), …)"
    if (count := len(optimizer.param_groups)) > 1:
        raise OptionError(
            f"{name} has {count} parameter groups, and a run of a PEF trains one",
            remedy=f"{made}; SambaFlow apps can have several",
        )
    (group,) = optimizer.param_groups
    _refuse_scheduler(optimizer, group)
    refuse_changed_step(optimizer, f"torch.optim.{name}")
    if unknown := group.keys() - optimizer.defaults.keys() - {"params", "param_names", "name"}:
        raise OptionError(
            f"the parameter group of {name} has {one_of(sorted(unknown))}, which is no option of torch.optim.{name}",
            remedy="leave it out: torch does not read it, and neither does a run",
        )
    _check_parameters(optimizer, group, model, made)
    return options_of_group(kinds[torchs], group, f"torch.optim.{name}")


def _check_parameters(optimizer: torch.optim.Optimizer, group: Mapping[str, Any], model: nn.Module, made: str) -> None:
    name, given = type(optimizer).__name__, {id(parameter) for parameter in group["params"]}
    trained = [held for held in held_by(model) if held.is_parameter and held.tensor.requires_grad]
    if left := [held.name for held in trained if id(held.tensor) not in given]:
        raise ModelError(
            f"{name} does not update {left[0]}" + (f" and {len(left) - 1} more" if len(left) > 1 else ""),
            remedy=f"make it from all of them, {made}, or freeze the others",
        )
    if others := len(given - {id(held.tensor) for held in held_by(model)}):
        raise ModelError(
            f"{name} also updates {others} parameters that the model does not have",
            remedy=f"{made}, made for this model",
        )
    if len(group["params"]) > len(given):
        raise ModelError(f"{name} has a parameter twice, and would update it twice in a step", remedy=made)


def _refuse_scheduler(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> None:
    """Raises OptionError if a scheduler sets the rates of `optimizer`, with the schedule of a run that has them."""
    holders = gc.get_referrers(optimizer)  # objects, or their dictionaries
    if dictionaries := [holder for holder in holders if type(holder) is dict and "last_epoch" in holder]:
        holders += gc.get_referrers(*dictionaries)
    schedulers = [
        holder
        for holder in holders
        if issubclass(type(holder), LRScheduler) and vars(holder).get("optimizer") is optimizer
    ]
    schedulers = list({id(scheduler): scheduler for scheduler in schedulers}.values())
    inner = {id(scheduler) for outer in schedulers for scheduler in vars(outer).get("_schedulers", ())}
    schedulers = [scheduler for scheduler in schedulers if id(scheduler) not in inner]
    if not schedulers and "initial_lr" not in group:
        return
    remedy = (
        'make it without: no schedule of a PEF has its rates; or run in parts: lr=…, checkpoint_dir=…, resume="newest"'
    )
    if schedulers and (fitting := _schedule_of(schedulers, optimizer)):
        lr, schedule, steps = fitting
        settings = ", ".join(f'"training.schedule.{name}": {show(value)}' for name, value in schedule.items())
        remedy = (
            f"make it without, and give lr={lr:.10g}, set={{{settings}}}: the same rates in {steps:,} optimizer steps"
        )
    called = " and ".join(type(scheduler).__name__ for scheduler in schedulers) or "which is gone by now"
    raise OptionError(
        f"the optimizer has a learning rate scheduler, {called}, and a run would keep its rate of now, "
        f"{plain_number(group['lr']):.4g}",
        remedy=remedy,
    )


def _schedule_of(
    schedulers: Sequence[LRScheduler], optimizer: torch.optim.Optimizer
) -> tuple[float, dict[str, object], int] | None:
    """The rate and the schedule of a run that has the rates of `schedulers`, called after each step, and in how many
    steps; None if none has."""
    numbers = sorted(
        {number for scheduler in schedulers for number in _integers(vars(scheduler)) if 0 < number < 10**9}
    )
    rates = _rates(schedulers, optimizer, min(2 * sum(numbers) + 1000, _LONGEST_SCHEDULE))
    if len(rates) < 4 or max(rates) <= 0:
        return None
    highest = rates[0] if isclose(rates[0], max(rates), rel_tol=1e-4) else max(rates)  # some add up rounding errors
    factors = [rate / highest for rate in rates]
    for fields in _candidates(numbers, factors):
        schedule = ScheduleOptions.model_validate(fields)
        ends = max(fields.get("total_steps", len(factors)), *numbers, 3)  # after a cosine torch's rises again
        wanted = factors[: ends + 1]
        ours = (learning_rate_factor(schedule, step, len(factors)) for step in range(len(wanted)))
        if all(isclose(factor, other, rel_tol=1e-6, abs_tol=1e-9) for factor, other in zip(ours, wanted, strict=True)):
            return highest, fields, len(wanted)
    return None


def _candidates(numbers: Sequence[int], factors: Sequence[float]) -> Iterator[dict[str, Any]]:
    """Schedules that may have these factors. Their lengths are among `numbers`, or sums of two."""
    warmups: list[dict[str, Any]] = [{}]
    if factors[0] < 1:
        warmups = [{"warmup_steps": steps, "start_factor": _rounded(factors[0])} for steps in numbers]
        warmups += [{"warmup_steps": round(1 / factors[0])}] if factors[0] > 1e-6 else []
    for warmup in warmups:
        steps = warmup.get("warmup_steps", 0)
        if steps:
            yield {"name": "constant", **warmup}
        for length in sorted({*numbers, *map(sum, combinations(numbers, 2))}):
            if steps < length < len(factors):
                final = {"total_steps": length, "final_factor": _rounded(factors[length])}
                yield {"name": "linear", **warmup, **final}
                yield {"name": "cosine", **warmup, **final}
        for size in (1, *numbers):
            if steps + size < len(factors) and factors[steps] and factors[steps + size] > 0:
                gamma = float(f"{factors[steps + size] / factors[steps]:.10g}")
                yield {"name": "step", **warmup, "step_size": size, "gamma": gamma}


def _rounded(factor: float) -> float:
    return min(max(float(f"{factor:.10g}"), 0.0), 1.0)


def _rates(schedulers: Sequence[LRScheduler], optimizer: torch.optim.Optimizer, count: int) -> list[float]:
    """The rates of the next `count` steps, by copies of `schedulers` on another optimizer; none if they need metrics,
    or set more than rates."""
    twin = torch.optim.SGD([torch.zeros(1)])
    (group,) = twin.param_groups
    group.update({name: copy.copy(value) for name, value in optimizer.param_groups[0].items() if name != "params"})
    rates, others = [], {name: value for name, value in group.items() if name not in ("params", "lr")}
    try:
        copies = copy.deepcopy(list(schedulers), {id(optimizer): twin})
        for _ in range(count):
            rates.append(float(plain_number(group["lr"])))
            with warnings.catch_warnings(action="ignore"):
                for scheduler in copies:
                    scheduler.step()
            if any(group[name] != value for name, value in others.items()):
                return []
    except Exception:  # of a lambda of the user's, of a cycle that ends, or for want of a metric
        return rates
    return rates


def _integers(value: object) -> Iterator[int]:
    """Those in attributes, arguments and closures of a scheduler."""
    if type(value) is int:
        yield value
    elif isinstance(value, Mapping):
        yield from (number for pair in value.items() if pair[0] != "optimizer" for number in _integers(pair))
    elif isinstance(value, list | tuple):
        yield from (number for item in value for number in _integers(item))
    elif isinstance(value, LRScheduler):
        yield from _integers(vars(value))
    else:
        cells = [cell.cell_contents for cell in getattr(value, "__closure__", None) or ()]
        constants = getattr(getattr(value, "__code__", None), "co_consts", ())
        given = [getattr(value, name, None) for name in ("__defaults__", "args", "keywords")]
        yield from _integers([item for item in (*cells, *constants, *given) if item is not None])
