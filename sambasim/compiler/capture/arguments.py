"""What a run gives the parameters of `forward` and of the loss that neither the data nor a default does."""

import inspect
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from sambasim.errors import OptionError
from sambasim.options.schedules import COUNTERS, ArgumentOptions, arguments_of


def parameters_of(called: Any) -> Sequence[inspect.Parameter]:
    """Those of a model or a loss that have a name; none of a function in C."""
    called = getattr(called, "of_user", called)
    parameters: Sequence[inspect.Parameter] = ()
    with suppress(TypeError, ValueError):
        parameters = [*inspect.signature(getattr(called, "forward", called)).parameters.values()]
    return [one for one in parameters if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)]


def left_to_run(called: Any, table: Collection[str], has: Collection[str] = (), first: int = 0) -> tuple[str, ...]:
    """The parameters of a model or a loss that a run gives: those in `table`, the names in `[arguments]`, and without a
    default those called as a counter. Not those that it `has` from elsewhere, as its `first` ones."""
    parameters = [one for one in parameters_of(called)[first:] if one.name not in has]
    return tuple(p.name for p in parameters if p.name in table or (p.name in COUNTERS and p.default is p.empty))


def kept_default(called: Any, has: Collection[str]) -> str | None:
    """A parameter called as a counter that has a default, and no value from elsewhere."""
    named = (one.name for one in parameters_of(called) if one.name in COUNTERS and one.default is not one.empty)
    return next((name for name in named if name not in has), None)


def skipped(model: Any, values: int, table: Collection[str]) -> Sequence[str]:
    """The parameters to which none of the `values` of a tuple goes: those in `table`; and the counters, if others would
    get none."""
    of_run = left_to_run(model, table)
    by_place = [one for one in parameters_of(model) if one.kind is not one.KEYWORD_ONLY and one.name not in table]
    lacks = any(one.default is one.empty and one.name not in of_run for one in by_place[values:])
    return of_run if lacks else [name for name in of_run if name in table]


def in_first_step(step: Any, table: Mapping[str, ArgumentOptions], like: Tensor, *, checks: bool) -> dict[str, Tensor]:
    """What a run gives `step`, on the device of `like`. If it `checks`, raises OptionError for others in `table`."""
    for name in table.keys() - {*step.of_run} if checks else ():
        takers = (("forward()", step.model), ("the loss", step.loss))
        of_takers = ((called, ", ".join(one.name for one in parameters_of(taker))) for called, taker in takers)
        taken = "; ".join(f"{called} takes {parameters}" for called, parameters in of_takers if parameters)
        what = f"arguments.{name} is no parameter that the data leaves to a run: {taken}"
        raise OptionError(what, remedy=f"name one of them, or leave out arguments.{name}")
    options = arguments_of(step.of_run, table).items()
    return {name: like.new_full((), one.at(0, 0, 0.0), dtype=getattr(torch, one.dtype)) for name, one in options}
