"""Many mutants, tried by worker processes; one that dies is a finding, and another takes its place."""

import json
import os
import selectors
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from tests.fuzz.subject import Subject
from tests.fuzz.worker import SAMPLES

TURNS = 400
"""Mutants of one process. A run that fails ends its process, as a rule, and leaves its communicator to that."""

PATIENCE_S = 90
"""A worker that says nothing for so long hangs where no alarm reaches it."""

WARM_UP_S = 300
"""Before its first mutant, a worker imports and compiles, on whatever else the machine does."""


@dataclass(slots=True)
class Tally:
    """What came out: `mutants` tried, `sound` ones among them, and the findings, each a JSON object."""

    mutants: int = 0
    sound: int = 0
    mutations: Counter[str] = field(default_factory=Counter)
    findings: list[dict[str, object]] = field(default_factory=list)


@dataclass(slots=True)
class _Worker:
    process: subprocess.Popen[str]
    numbers: range
    later: range
    now: dict[str, object]
    heard_s: float


def campaign(subject: Subject, folder: Path, seed: int, numbers: range, workers: int = 2, minutes: float = 60) -> Tally:
    """Tries the mutants `numbers` of `seed` in `folder`, where samples and the mutants of findings are kept."""
    (folder / SAMPLES).mkdir(parents=True, exist_ok=True)
    # Mutants are not of this account, whatever the samples are.
    environment = os.environ | {"XDG_STATE_HOME": str(folder / "state"), "OMP_NUM_THREADS": "1"}
    if not any((folder / SAMPLES).iterdir()):
        (folder / "made").mkdir(exist_ok=True)
        for path in subject.make_samples(folder / "made"):
            (folder / SAMPLES / path.name).write_bytes(path.read_bytes())
    return _Campaign(subject, folder, seed, environment).run(numbers, workers, time.monotonic() + 60 * minutes)


class _Campaign:
    def __init__(self, subject: Subject, folder: Path, seed: int, environment: dict[str, str]) -> None:
        self._subject, self._folder, self._seed, self._environment = subject, folder, seed, environment
        self._tally = Tally()
        self._selector = selectors.DefaultSelector()

    def run(self, numbers: range, workers: int, until_s: float) -> Tally:
        for offset in range(min(workers, len(numbers))):
            self._start(numbers[offset::workers])
        while self._selector.get_map():
            for key, _ in self._selector.select(timeout=5):
                self._hear(key.data)
            for key in list(self._selector.get_map().values()):
                worker: _Worker = key.data
                late = time.monotonic() > until_s
                patience_s = PATIENCE_S if worker.now else WARM_UP_S
                if late or time.monotonic() > worker.heard_s + patience_s:
                    worker.process.kill()
                    self._end(worker, "" if late else f"nothing was heard of it for {patience_s} s", go_on=not late)
        return self._tally

    def _start(self, numbers: range) -> None:
        now, left = numbers[:TURNS], numbers[TURNS:]
        words = (self._subject.name, self._folder, self._seed, now.start, now.stop, now.step)
        process = subprocess.Popen(
            [sys.executable, "-X", "faulthandler", "-m", "tests.fuzz.worker", *map(str, words)],
            stdout=subprocess.PIPE,
            stderr=(self._folder / f"stderr-{numbers.start}").open("w"),
            text=True,
            env=self._environment,
        )
        assert process.stdout is not None
        worker = _Worker(process, now, left, {}, time.monotonic())
        self._selector.register(process.stdout, selectors.EVENT_READ, worker)

    def _hear(self, worker: _Worker) -> None:
        assert worker.process.stdout is not None
        line = worker.process.stdout.readline()
        if not line:
            code = worker.process.wait()
            self._end(worker, f"the process ended with {code}" if code else "", go_on=True)
            return
        worker.heard_s = time.monotonic()
        told = json.loads(line)
        if "finding" in told:
            self._keep(told)
        elif "number" in told:
            worker.now = told
            self._tally.mutants += 1
            self._tally.mutations[told["mutation"]] += 1
        elif told.get("sound"):
            self._tally.sound += 1
        else:
            worker.now |= told

    def _end(self, worker: _Worker, why: str, *, go_on: bool) -> None:
        assert worker.process.stdout is not None
        self._selector.unregister(worker.process.stdout)
        worker.process.wait()
        worker.process.stdout.close()
        if not why:
            if worker.later and go_on:
                self._start(worker.later)
            return
        if "number" not in worker.now:
            told = (self._folder / f"stderr-{worker.numbers.start}").read_text()[-2000:]
            raise RuntimeError(f"a worker ended before its first mutant: {why}\n{told}")
        self._keep({"finding": why, **worker.now})
        done = worker.numbers.index(int(str(worker.now["number"]))) + 1
        left = range(worker.numbers[0], (worker.later or worker.numbers)[-1] + 1, worker.numbers.step)[done:]
        if go_on and left:
            self._start(left)

    def _keep(self, finding: dict[str, object]) -> None:
        self._tally.findings.append(finding)
        samples = [path.read_bytes() for path in sorted((self._folder / SAMPLES).iterdir())]
        _, data = self._subject.mutant(self._seed, int(str(finding["number"])), samples)
        kept = self._folder / "findings"
        kept.mkdir(exist_ok=True)
        (kept / f"{self._seed}-{finding['number']}{self._subject.suffix}").write_bytes(data)
        with (kept / "findings.jsonl").open("a") as file:
            file.write(json.dumps(finding) + "\n")
