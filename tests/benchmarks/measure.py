"""How a figure is taken: candidates in turn, several times, and the median of each."""

import json
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tests.support.installation import NO_ENV, THIS
from tests.support.mpi import ROOT

Action = Callable[[], Sequence[float]]
"""Does the work, and returns the seconds that it measured itself."""


@dataclass(frozen=True, slots=True)
class Figure:
    """`subject` against `peer`. `goal` is what is to hold, in words; `medians` has the figures of both, in `unit`."""

    name: str
    subject: str
    peer: str
    goal: str
    medians: Mapping[str, float]
    unit: str = "s"

    def __str__(self) -> str:
        """A line for people, and one of JSON."""
        subject, peer, unit = self.medians[self.subject], self.medians[self.peer], self.unit
        ratio, difference = subject / peer, subject - peer
        facts = {"name": self.name, "subject": self.subject, "ratio": ratio, "difference": difference, "unit": unit}
        return (
            f"{self.name}: {self.subject} {subject:.4g} {unit}, {self.peer} {peer:.4g} {unit}: ratio {ratio:.3f}, "
            f"difference {difference:+.4g} {unit} (goal: {self.goal})\n{json.dumps({**facts, **self.medians})}"
        )


def in_turns(actions: Mapping[str, Action], rounds: int, *, warm: bool = False) -> dict[str, float]:
    """The median of all that each action returns in `rounds` rounds; of `warm` ones, the first does not count."""
    found: dict[str, list[float]] = {name: [] for name in actions}
    for number in range(rounds + warm):
        for name, action in actions.items():
            values = action()
            found[name] += values if number or not warm else ()
    return {name: statistics.median(values) for name, values in found.items()}


def cpu_s(action: Callable[[], object]) -> Action:
    """Does `action`, and returns the processor seconds of the processes that it has started and that have ended."""

    def measured() -> Sequence[float]:
        before, _ = os.times(), action()
        after = os.times()
        used_s = after.children_user + after.children_system - before.children_user - before.children_system
        return [used_s]

    return measured


def timed(action: Callable[[], object]) -> Action:
    """Does `action`, and returns its seconds."""

    def measured() -> Sequence[float]:
        began_s = time.perf_counter()
        action()
        return [time.perf_counter() - began_s]

    return measured


def run_body(name: str, *arguments: str, np: int = 1, env: Mapping[str, str] = NO_ENV) -> Any:
    """Run `tests.benchmarks.bodies.NAME` on `np` ranks of one thread. Returns the last line it prints, parsed as JSON.
    Raises RuntimeError with what it printed if it fails."""
    command = ("-m", f"tests.benchmarks.bodies.{name}", *arguments)
    return json.loads(THIS.call(*command, folder=ROOT, np=np, env=env, program="python").splitlines()[-1])
