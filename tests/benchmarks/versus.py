"""Two installations of sambasim, measured in one run, in turns: which figures are worse in this one than in the other.

    python -m tests.benchmarks versus --python OTHER/.venv/bin/python --checkout OTHER

All figures come from the command line (`run --metrics`, `run --json`, `bench collectives --json`), which is the same in
both; the models are those of workloads.py. Every run has one thread a rank.

    sync          an all-reduce of gradients at two ranks, by size: between devices, and through the host
    steps         a training step at two replicas, device and host sync: the median over the steps of a run
    arithmetic    a step at one replica, and forward and backward of it, by the plain engine
    memory        GPT-2 small at four replicas: proportional set sizes of all processes, median and maximum
    start         --help, a wrong flag, a run of one step at two replicas, an app that runs one step
    overhead      a step where every tenth is followed by a checkpoint, and how long the run waits for it
    compiling     GPT-2 small, BERT base and ResNet-50, compared with eager PyTorch where that is done, and not
"""

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sambasim.units import format_bytes
from tests.benchmarks import workloads
from tests.benchmarks.workloads import GPT2_SMALL, WORKLOADS, Workload
from tests.support.installation import THIS, Installation
from tests.support.mpi import processes_of

LIMIT = 1.03
COMPARED, NOT_COMPARED = "compile and compare", "compile"
LIMITS = {COMPARED: 1.4, NOT_COMPARED: 1.05}
"""Of figures that begin with such words."""

LARGE_MODELS = {
    "GPT2LMHeadModel": '{input_ids = "int64[128] < 50257", labels = "int64[128] < 50257"}',
    "BertForMaskedLM": '{input_ids = "int64[128] < 30522", labels = "int64[128] < 30522"}',
    "ResNetForImageClassification": '{pixel_values = "float32[3, 224, 224]", labels = "int64[] < 2"}',
}
"""Of transformers, with their own configs, which are those of GPT-2 small, BERT base and ResNet-50: their inputs."""
WARM_UP_STEPS = 5
_SAMPLE_S = 0.1
_MANY_STEPS = 1000
_RUNS_OF_SHORT_STEPS = 5
"""Where two ranks run decides over the time of steps of microseconds, and differs from run to run."""

Figures = dict[str, float]
"""By name, with the unit at its end."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """An installation, and the folder in which its PEFs are."""

    installation: Installation
    folder: Path

    def compile(self) -> None:
        for workload in (*WORKLOADS, GPT2_SMALL):
            model, samples = (f"{workloads.__file__}:{part.__name__}" for part in (workload.model, workload.samples))
            sets = _sets(f"data.source={samples}", f"optimizer.name={workload.optimizer}")
            sets += _sets(f"optimizer.lr={workload.learning_rate}")
            flags = ["-b", str(workload.batch_size), "--data-parallel", "--pef-name", workload.name]
            self.call("compile", model, *sets, *flags)
        self.call("compile", "--data-parallel")
        self.call("app", self.app, "compile", "-b", "32", "--pef-name", "app")

    @property
    def app(self) -> str:
        return str(self.installation.checkout / "examples" / "sambaflow" / "logistic_regression.py")

    def call(self, *command: str, np: int = 1, check: bool = True) -> str:
        return self.installation.call(*command, folder=self.folder, np=np, check=check)

    def seconds(self, *command: str, np: int = 1, check: bool = True) -> float:
        began_s = time.perf_counter()
        self.call(*command, np=np, check=check)
        return time.perf_counter() - began_s

    def train(self, workload: Workload, *flags: str, np: int) -> tuple[Figures, list[Figures]]:
        """A run of the workload: its summary, and the records of its steps and checkpoints after the warm-up."""
        metrics = self.folder / "metrics.jsonl"
        steps = WARM_UP_STEPS + workload.steps
        common = ("--threads", "1", "--no-evaluate", "--json", "--metrics", str(metrics), "--steps", str(steps))
        summary = json.loads(self.call("run", "--pef", workload.name, *common, *flags, np=np))
        records = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
        metrics.unlink()
        return summary, [line for line in records if line["kind"] != "summary" and line["step"] > WARM_UP_STEPS]


def _sets(*texts: str) -> list[str]:
    return [word for text in texts for word in ("--set", text)]


def sync(candidate: Candidate) -> Figures:
    flags = ("--min-bytes", "64KiB", "--max-bytes", "64MiB", "--paths", "device,host-mpi", "--json")
    record = json.loads(candidate.call("bench", "collectives", *flags, np=2))
    return {
        f"sync, {path['path']}, {format_bytes(size['size_bytes'])}, s": path["measured_s"]
        for size in record["sizes"]
        for path in size["paths"]
    }


def steps(candidate: Candidate) -> Figures:
    figures = {}
    for workload in WORKLOADS:
        runs = _RUNS_OF_SHORT_STEPS if workload.steps >= _MANY_STEPS else 1
        for path, flags in {"device": ["--reduce-on-rdu"], "host": []}.items():
            medians = [_median(candidate.train(workload, *flags, np=2)[1], "step_s") for _ in range(runs)]
            figures[f"step of {workload.name}, np 2, {path}, s"] = statistics.median(medians)
    return figures


def arithmetic(candidate: Candidate) -> Figures:
    figures = {}
    for workload in WORKLOADS:
        summary, records = candidate.train(workload, np=1)
        figures[f"step of {workload.name}, np 1, s"] = _median(records, "step_s")
        figures[f"forward and backward of {workload.name}, np 1, s"] = summary["model_s"] / summary["steps"]
    return figures


def memory(candidate: Candidate) -> Figures:
    job = uuid.uuid4().hex
    flags = ("--threads", "1", "--no-evaluate", "--json", "--reduce-on-rdu", "--steps", "6")
    argv = candidate.installation.argv("run", "--pef", GPT2_SMALL.name, *flags, np=4)
    environ = candidate.installation.environ(job)
    held_bytes = []
    with subprocess.Popen(argv, cwd=candidate.folder, env=environ, stdout=subprocess.DEVNULL) as process:
        while process.poll() is None:
            held_bytes.append(sum(map(_proportional_bytes, processes_of(job))))
            time.sleep(_SAMPLE_S)
    if process.returncode:
        raise RuntimeError(f"{' '.join(argv)}: exit code {process.returncode}")
    most = max(held_bytes)
    while_training = [value for value in held_bytes if value > most / 2]
    name = f"memory, {GPT2_SMALL.name}, np 4"
    return {f"{name}, median, bytes": statistics.median(while_training), f"{name}, maximum, bytes": most}


def start(candidate: Candidate) -> Figures:
    run_a_step = ("run", "--pef", "digits", "--reduce-on-rdu", "--no-evaluate", "--steps", "1")
    test_app = ("app", candidate.app, "test", "-b", "32", "--pef", "app")
    return {
        "sambasim --help, s": candidate.seconds("--help"),
        "a wrong flag, s": candidate.seconds("run", "--pfe", "x", check=False),
        "a run of one step, np 2, s": candidate.seconds(*run_a_step, np=2),
        "an app's first step, s": candidate.seconds(*test_app),
    }


def overhead(candidate: Candidate) -> Figures:
    workload, folder = WORKLOADS[0], candidate.folder / "checkpoints"
    flags = ("--reduce-on-rdu", "--checkpoint-dir", str(folder), "--checkpoint-every", "10steps", "--keep", "1")
    _, records = candidate.train(workload, *flags, np=2)
    shutil.rmtree(folder)
    of_steps = {f"step of {workload.name}, np 2, checkpoint every 10steps, s": _median(records, "step_s")}
    return of_steps | {f"checkpoint of {workload.name}, np 2, s": _median(records, "checkpoint_s")}


def compiling(candidate: Candidate) -> Figures:
    can_compare = "--check" in candidate.call("compile", "--help")
    figures = {}
    for name, inputs in LARGE_MODELS.items():
        sets = _sets("optimizer.name=adamw", "data.source=synthetic", f"data.inputs={inputs}")
        command = ("compile", f"transformers:{name}", "--pef-name", "large", *sets, "-b", "2")
        for words, flags in {COMPARED: (), NOT_COMPARED: ("--check", "0") if can_compare else ()}.items():
            figures[f"{words}, {name}, s"] = candidate.seconds(*command, *flags)
    return figures


MEASUREMENTS = {measure.__name__: measure for measure in (sync, steps, arithmetic, memory, start, overhead, compiling)}
TURNS = {"sync": 4, "start": 4}
"""How often the short ones, which vary most, are measured in a round; the others: once."""


def _median(records: Sequence[Figures], field: str) -> float:
    return statistics.median(record[field] for record in records if field in record)


def _proportional_bytes(pid: int) -> int:
    """Pss of a process: of a page that k processes share, each counts 1/k. 0 if it has ended."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:")), 0)


def table(other: Mapping[str, Sequence[float]], this: Mapping[str, Sequence[float]]) -> tuple[list[str], int]:
    """A line for each figure: the medians over all turns, then the median of the ratios within a turn, because the
    machine's speed drifts, and half the distance of their quartiles. And how many ratios are above LIMIT."""
    lines, worse = [f"{'figure':<60} {'other':>10} {'this':>10} {'ratio':>6} {'noise':>6}"], 0
    for name, values in other.items():
        medians = f"{statistics.median(values):>10.4g} {statistics.median(this[name]):>10.4g}"
        ratios = [new / old for new, old in zip(this[name], values, strict=True)]
        ratio = statistics.median(ratios)
        low, _, high = statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else (0.0, 0.0, 0.0)
        is_worse = ratio > LIMITS.get(name.partition(",")[0], LIMIT)
        worse += is_worse
        lines.append(f"{name:<60} {medians} {ratio:>6.3f} {(high - low) / 2:>6.1%}{'  WORSE' * is_worse}")
    return lines, worse


def main(arguments: Sequence[str]) -> int:
    """Returns the exit code: 1 if a figure is worse by more than LIMIT."""
    name, raw = "python -m tests.benchmarks versus", argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog=name, description=__doc__, formatter_class=raw)
    parser.add_argument("--python", type=Path, required=True, help="Python of the other installation.")
    parser.add_argument("--checkout", type=Path, required=True, help="Its sources.")
    parser.add_argument("--rounds", type=int, default=5, help="How often each figure is measured. Default: 5.")
    parser.add_argument("--only", default=",".join(MEASUREMENTS), help="Names of the list above, with commas.")
    args = parser.parse_args(arguments)
    measurements = [MEASUREMENTS[name] for name in args.only.split(",")]
    with tempfile.TemporaryDirectory() as folder:
        other = Installation(args.python.absolute(), args.checkout.absolute())
        candidates = [Candidate(one, Path(folder, name)) for name, one in (("other", other), ("this", THIS))]
        for candidate in candidates:
            candidate.folder.mkdir()
            candidate.compile()
            start(candidate)  # builds what is built at the first use
        figures: list[dict[str, list[float]]] = [defaultdict(list), defaultdict(list)]
        pairs = list(zip(candidates, figures, strict=True))
        for round_number in range(args.rounds):
            for measure in measurements:
                print(f"round {round_number + 1}: {measure.__name__}", file=sys.stderr, flush=True)
                for turn in range(TURNS.get(measure.__name__, 1)):
                    # What ran before has an effect, so each is first in every second turn.
                    for candidate, measured in pairs if (round_number + turn) % 2 == 0 else pairs[::-1]:
                        for name, value in measure(candidate).items():
                            measured[name].append(value)
    lines, worse = table(*figures)
    verdict = f"{worse} of {len(lines) - 1} figures are worse by more than {LIMIT - 1:.0%}, or their own limit"
    print("\n".join([*lines, verdict]))
    return 1 if worse else 0
