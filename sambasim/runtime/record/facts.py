"""What decides the bits of a run, for the run.json of its digests."""

import platform
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from sambasim import __version__
from sambasim.options.grammar import StepRange
from sambasim.records.digests import RecordedRun, SectionName
from sambasim.runtime.outcome import exempt
from sambasim.runtime.plan import Plan
from sambasim.runtime.setup import Setup
from sambasim.runtime.team import Team

_PARTS = ("data", "loss", "optimizer", "training")
_Leaf = bool | int | float | str | None


def recorded_run(setup: Setup, team: Team, plan: Plan, asked: StepRange) -> RecordedRun:
    """The facts of a run of `plan`, of which the steps that were `asked` for are recorded."""
    graph = setup.program.training
    last = plan.steps if asked.last is None else min(asked.last, plan.steps)
    unit = "unit of compiled sections" if team.engine.inductor else "section"
    return RecordedRun(
        by=f"sambasim {__version__}",
        pef=setup.program.name,
        pef_digest=setup.document.digest,
        threads=setup.threads,
        engine=team.engine.name,
        torch=torch.__version__,
        cpu=f"{platform.machine()} {setup.instructions}",
        exempt_from_exactness=tuple(exempt(setup, team)),
        world_size=setup.world_size,
        emulated=setup.emulated > 1,
        sync=team.transport.title,
        seed=setup.seed,
        options=dict(_options(setup)),
        steps=plan.steps,
        first_step=asked.first,
        last_step=last,
        sections=tuple(SectionName(one.index, one.kind.value, one.name) for one in graph.sections) if graph else (),
        sees=f"values that leave their {unit}",
    )


def _options(setup: Setup) -> Iterator[tuple[str, _Leaf]]:
    for part in _PARTS:
        options = getattr(setup.resolved, part)
        if options is not None:
            yield from _leaves(part, options.model_dump(mode="json"))
    if setup.options.weights is not None:
        yield "weights", str(setup.options.weights)


def _leaves(name: str, value: Any) -> Iterator[tuple[str, _Leaf]]:
    """By dotted name; a list as one text."""
    if isinstance(value, Mapping):
        for key, below in value.items():
            yield from _leaves(f"{name}.{key}", below)
    else:
        yield name, value if isinstance(value, _Leaf) else repr(value)
