"""The figures of `plan`: what `sambasim plan --here` predicts, against runs on this machine; and memory by part,
against PyTorch's own accounting.

For each model the planner runs once, as a user would run it, and writes all strategies. Those of `PLANS` are then
compiled and trained by as many ranks as they need, with the threads that `sambasim run` uses; the best of the planner
is one of them.
"""

import csv
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch

from sambasim.commands.variants import changes_of
from sambasim.options.compile import CompileOptions, compile_options
from sambasim.simulation.planning.strategy import BY_HOST, Strategy
from tests.benchmarks.measure import Figure, run_body
from tests.support.compiled import compile_from_options
from tests.support.mpi import ROOT
from tests.support.torch_memory import FAMILIES, parts_of

RANKS = 4
RUN_S, FEWEST_STEPS, MOST_STEPS = 2.0, 8, 40
MEAN_STEP, WORST_STEP, MEAN_MEMORY, WORST_MEMORY, BEST = 0.15, 0.30, 0.05, 0.15, 0.05
MEMORY_FAMILIES = tuple(FAMILIES)[:10]
_TIMEOUT_S = 900.0


@dataclass(frozen=True, slots=True)
class Subject:
    """A model to plan: a config or a model, with fields that are set, and the samples of a step."""

    name: str
    model: str
    changes: Sequence[str]
    global_batch: int


SUBJECTS = (
    Subject("char_gpt", "configs/char_gpt.toml", ("model.args.width=256", "training.schedule.warmup_steps=1"), 24),
    Subject("resnet", "configs/resnet.toml", ("model.args.width=64", "training.schedule.warmup_steps=1"), 48),
    Subject(
        "split_gpt",
        "tests/benchmarks/workloads.py:SplitGPT",
        ("model.args.layers=2", "data.source=tests/benchmarks/workloads.py:text", "optimizer.name=adamw"),
        12,
    ),
)


def plans(batch: int) -> Sequence[Strategy]:
    """On 1 to 4 ranks, with a global batch that is a multiple of 12."""
    return (
        Strategy(1, samples=batch),
        Strategy(1, samples=batch // 2, passes=2),
        Strategy(2, samples=batch // 2),
        Strategy(1, stages=2, samples=batch // 4, passes=4),
        Strategy(3, samples=batch // 3),
        Strategy(4, samples=batch // 4),
        Strategy(2, stages=2, samples=batch // 12, passes=6),
        Strategy(2, samples=batch // 2, recompute="full"),
    )


def plan_figures() -> Iterator[Figure]:
    steps: list[float] = []
    memory: list[float] = []
    for subject in SUBJECTS:
        with tempfile.TemporaryDirectory() as folder:
            predicted = _predicted(subject, Path(folder) / "plans.csv")
            best = min(predicted, key=lambda one: predicted[one][0])
            measured = {}
            for strategy in dict.fromkeys((*plans(subject.global_batch), best)):
                step_s, held_bytes = _measured(subject, strategy, predicted[strategy][0], Path(folder))
                measured[strategy] = step_s
                steps.append(abs(predicted[strategy][0] / step_s - 1))
                memory.append(abs(predicted[strategy][1] / held_bytes - 1))
                title = f"{subject.name}, {strategy.ranks} ranks, {strategy}"
                both = {"predicted": predicted[strategy][0], "measured": step_s}
                yield Figure(f"step of {title}", "predicted", "measured", _within(WORST_STEP), both)
                both = {"predicted": predicted[strategy][1], "measured": held_bytes}
                yield Figure(f"memory of {title}", "predicted", "measured", _within(WORST_MEMORY), both, unit="bytes")
            both = {"first of the plan": measured[best], "best measured": min(measured.values())}
            goal = f"ratio at most {1 + BEST}"
            yield Figure(f"rank of {subject.name}: {best}", "first of the plan", "best measured", goal, both)
    for what, errors, mean, worst in (
        ("step", steps, MEAN_STEP, WORST_STEP),
        ("memory", memory, MEAN_MEMORY, WORST_MEMORY),
    ):
        for kind, error, bound in (("mean", statistics.mean(errors), mean), ("worst", max(errors), worst)):
            title = f"{kind} error of {what}, {len(errors)} plans"
            yield Figure(title, "error", "bound", "ratio at most 1", {"error": error, "bound": bound}, unit="")
    yield from _part_figures()


def _within(bound: float) -> str:
    return f"ratio within {bound:.0%} of 1"


def _part_figures() -> Iterator[Figure]:
    """Each part of the memory of a replica, as `estimate-memory` says, against what torch counts."""
    for family in MEMORY_FAMILIES:
        sets = [f"model.args.{one}" for one in FAMILIES[family]]
        options = compile_options(None, f"transformers:{family}", sets, {"data_parallel": True, "optimizer": "adamw"})
        for part, (estimated, counted) in parts_of(options, torch.float32).items():
            both = {"predicted": float(estimated), "torch": float(counted)}
            yield Figure(f"{part} of {family}", "predicted", "torch", _within(WORST_MEMORY), both, unit="bytes")


def _predicted(subject: Subject, file: Path) -> Mapping[Strategy, tuple[float, float]]:
    """The seconds of a step and the bytes of the fullest rank, of all strategies that fit."""
    sets = [text for one in subject.changes for text in ("--set", one)]
    command = [sys.executable, "-m", "sambasim", "plan", subject.model, *sets, "--here", "--ranks", str(RANKS)]
    command += ["--global-batch", str(subject.global_batch), "--all", str(file), "--json"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    if result.returncode:
        raise RuntimeError(result.stderr)
    with file.open() as rows:
        return {
            _strategy(row): (float(row["predicted_step_s"]), float(row["memory_bytes"]))
            for row in csv.DictReader(rows)
            if not row["problem"]
        }


def _strategy(row: Mapping[str, str]) -> Strategy:
    numbers = {one.name for one in fields(Strategy) if isinstance(getattr(Strategy(1), one.name), int)}
    values: dict[str, Any] = {
        one.name: int(row[one.name]) if one.name in numbers else row[one.name] or None for one in fields(Strategy)
    }
    return Strategy(**values)


def _measured(subject: Subject, strategy: Strategy, about_s: float, folder: Path) -> tuple[float, float]:
    """The seconds of a step, and the memory of the fullest rank."""
    pef = compile_from_options(_options(subject, strategy, folder)).path
    steps = max(FEWEST_STEPS, min(MOST_STEPS, round(RUN_S / about_s)))
    path = "host" if strategy.zero >= BY_HOST or strategy.copies == 1 else "device"
    threads = {"OMP_NUM_THREADS": ""}  # as many as a run has by default
    found = run_body("plan", str(pef), path, str(steps), np=strategy.ranks, env=threads)
    # The lower quartile, as the planner takes it: other programs on the machine make some steps longer.
    return sorted(found["steps_s"])[len(found["steps_s"]) // 4], float(found["held_bytes"])


def _options(subject: Subject, strategy: Strategy, folder: Path) -> CompileOptions:
    is_config = subject.model.endswith(".toml")
    config, target = (ROOT / subject.model, None) if is_config else (None, str(ROOT / subject.model))
    options = compile_options(config, target, subject.changes, {})
    return options.model_copy(update={**changes_of(strategy, options), "output_folder": folder})
