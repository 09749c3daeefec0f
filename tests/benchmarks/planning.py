"""The figures of `plan`: what `sambasim plan --here` predicts, against runs on this machine.

For each model the planner runs once, as a user would run it, and writes all strategies. Those of `plans` are then
compiled and trained by as many ranks as they need, with the threads that `sambasim run` uses; the best of the planner
is one of them.
"""

import csv
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from sambasim.commands.variants import changes_of
from sambasim.options.compile import CompileOptions, compile_options
from sambasim.simulation.planning.strategy import BY_HOST, Strategy
from tests.benchmarks.measure import Figure, run_body
from tests.support.compiled import compile_from_options
from tests.support.installation import THIS
from tests.support.mpi import ROOT

RANKS = 4
RUN_S, FEWEST_STEPS, MOST_STEPS = 2.0, 8, 40
BOUNDS = {"step": (0.15, 0.30), "memory": (0.05, 0.15)}
"""Of the mean error, and of the worst."""
BEST = 0.05
ALL_THREADS = {"OMP_NUM_THREADS": ""}  # as many as a run has by default


@dataclass(frozen=True, slots=True)
class Subject:
    """A model to plan: a config or a model, with fields that are set, and the samples of a step."""

    name: str
    model: str
    changes: Sequence[str]
    global_batch: int


_WORKLOADS = "tests/benchmarks/workloads.py"
SUBJECTS = (
    Subject("char_gpt", "configs/char_gpt.toml", ("model.args.width=256", "training.schedule.warmup_steps=1"), 24),
    Subject("resnet", "configs/resnet.toml", ("model.args.width=64", "training.schedule.warmup_steps=1"), 48),
    Subject("split_gpt", f"{_WORKLOADS}:SplitGPT",
            ("model.args.layers=2", f"data.source={_WORKLOADS}:text", "optimizer.name=adamw"), 12),
)  # fmt: skip


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


def plan(folder: Path) -> Iterator[Figure]:
    errors: dict[str, list[float]] = {what: [] for what in BOUNDS}
    for subject in SUBJECTS:
        predicted = _predicted(subject, folder / "plans.csv")
        best = min(predicted, key=lambda strategy: predicted[strategy][0])
        steps_s = {}
        for strategy in dict.fromkeys((*plans(subject.global_batch), best)):
            measured = _measured(subject, strategy, predicted[strategy][0], folder)
            steps_s[strategy] = measured[0]
            title = f"{subject.name}, {strategy.ranks} ranks, {strategy}"
            for what, unit, ours, real in zip(BOUNDS, ("s", "bytes"), predicted[strategy], measured, strict=True):
                errors[what].append(abs(ours / real - 1))
                of_both = {"predicted": ours, "measured": real}
                goal = f"ratio within {BOUNDS[what][1]:.0%} of 1"
                yield Figure(f"{what} of {title}", "predicted", "measured", goal, of_both, unit)
        both = {"first of the plan": steps_s[best], "best measured": min(steps_s.values())}
        goal = f"ratio at most {1 + BEST}"
        yield Figure(f"rank of {subject.name}: {best}", "first of the plan", "best measured", goal, both)
    for what, of_plans in errors.items():
        of_all = {"mean": statistics.mean(of_plans), "worst": max(of_plans)}
        for (kind, error), bound in zip(of_all.items(), BOUNDS[what], strict=True):
            title, both = f"{kind} error of {what}, {len(of_plans)} plans", {"error": error, "bound": bound}
            yield Figure(title, "error", "bound", "ratio at most 1", both, unit="")


def _predicted(subject: Subject, file: Path) -> Mapping[Strategy, tuple[float, float]]:
    """The seconds of a step and the bytes of the fullest rank, of all strategies that fit."""
    sets = [text for change in subject.changes for text in ("--set", change)]
    flags = ["--here", "--ranks", str(RANKS), "--global-batch", str(subject.global_batch), "--all", str(file), "--json"]
    THIS.call("plan", subject.model, *sets, *flags, folder=ROOT, env=ALL_THREADS)
    fitting = (row for row in csv.DictReader(file.open()) if not row["problem"])
    return {_strategy(row): (float(row["predicted_step_s"]), float(row["memory_bytes"])) for row in fitting}


def _strategy(row: Mapping[str, str]) -> Strategy:
    plain, values = Strategy(1), dict[str, Any]()
    for name in (field.name for field in fields(Strategy)):
        values[name] = int(row[name]) if isinstance(getattr(plain, name), int) else row[name] or None
    return Strategy(**values)


def _measured(subject: Subject, strategy: Strategy, about_s: float, folder: Path) -> tuple[float, float]:
    """The seconds of a step, and the memory of the fullest rank."""
    pef = compile_from_options(_options(subject, strategy, folder)).path
    steps = max(FEWEST_STEPS, min(MOST_STEPS, round(RUN_S / about_s)))
    path = "host" if strategy.zero >= BY_HOST or strategy.copies == 1 else "device"
    found = run_body("memory", str(pef), path, str(steps), np=strategy.ranks, env=ALL_THREADS)
    # The lower quartile, as the planner takes it: other programs on the machine make some steps longer.
    return sorted(found["steps_s"])[len(found["steps_s"]) // 4], float(found["alone_bytes"])


def _options(subject: Subject, strategy: Strategy, folder: Path) -> CompileOptions:
    is_config = subject.model.endswith(".toml")
    config, target = (ROOT / subject.model, None) if is_config else (None, str(ROOT / subject.model))
    options = compile_options(config, target, subject.changes, {})
    return options.model_copy(update={**changes_of(strategy, options), "output_folder": folder})
