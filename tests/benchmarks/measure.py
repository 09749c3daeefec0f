"""How a figure is taken: candidates in turn, several times, and the median of each."""

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from tests.support.mpi import ROOT, mpirun

_TIMEOUT_S = 1800

Action = Callable[[], float | None]
"""Does the work once. Returns the seconds that it measured itself, or None: then the whole call is timed."""


@dataclass(frozen=True, slots=True)
class Figure:
    """`subject` against `peer`. `goal` is what is to hold, in words; `medians` has the figures of both, in `unit`."""

    name: str
    subject: str
    peer: str
    goal: str
    medians: Mapping[str, float]
    unit: str = "s"


def compare(name: str, subject: tuple[str, Action], peer: tuple[str, Action], goal: str, runs: int) -> Figure:
    """`runs` rounds of the subject and the peer, in turn, after one round that does not count."""
    seconds: dict[str, list[float]] = {subject[0]: [], peer[0]: []}
    for round_number in range(runs + 1):
        for title, action in (subject, peer):
            began_s = time.perf_counter()
            measured_s = action()
            elapsed_s = time.perf_counter() - began_s if measured_s is None else measured_s
            if round_number:
                seconds[title].append(elapsed_s)
    medians = {title: statistics.median(values) for title, values in seconds.items()}
    return Figure(name, subject[0], peer[0], goal, medians)


def run_body(name: str, *arguments: str, np: int = 1, env: Mapping[str, str] = MappingProxyType({})) -> Any:
    """Run `tests.benchmarks.bodies.NAME` on `np` ranks of one thread. Returns the last line it prints, parsed as JSON.

    Raises RuntimeError with its stderr if it fails.
    """
    launcher = [mpirun(), "-np", str(np)] if np > 1 else []
    command = [*launcher, sys.executable, "-m", f"tests.benchmarks.bodies.{name}", *arguments]
    environ = {**os.environ, "OMP_NUM_THREADS": "1", **env}
    result = subprocess.run(
        command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
    )
    if result.returncode:
        raise RuntimeError(result.stderr)
    return json.loads(result.stdout.splitlines()[-1])


def print_figure(figure: Figure) -> None:
    subject, peer, unit = figure.medians[figure.subject], figure.medians[figure.peer], figure.unit
    ratio, difference = subject / peer, subject - peer
    print(f"{figure.name}: {figure.subject} {subject:.4g} {unit}, {figure.peer} {peer:.4g} {unit}: ", end="")
    print(f"ratio {ratio:.3f}, difference {difference:+.4g} {unit} (goal: {figure.goal})")
    facts = {"name": figure.name, "ratio": ratio, "difference": difference, "unit": unit}
    print(json.dumps({**facts, **figure.medians}), flush=True)
