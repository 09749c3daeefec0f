"""What the ranks of a job compare: the number of steps (DP09), and the files that they write (DP08).

`Job` watches samplers and files from the first contact of the ranks to their exit. `Check` is `sambasim app --check`.
"""

import atexit
import os
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import safetensors.torch as safetensors
from torch import Tensor, serialization

from sambasim.errors import DataParallelError
from sambasim.ir.graph import SectionKind
from sambasim.ir.program import Program
from sambasim.runtime.machine.communicator import Communicator
from sambasim.samba.checks import data
from sambasim.samba.checks.data import EVEN_BATCHES, Samplers
from sambasim.samba.process import Finding, app_line, current, own_line_of_app, report
from sambasim.units import counted

_EVEN_STEPS = f"session.run with OPT on every rank, not in `if rank == 0`; and {EVEN_BATCHES}"
Shown = TypeVar("Shown")
Leave: TypeAlias = Callable[[BaseException, Path | None], int]


@dataclass(frozen=True, slots=True)
class Point:
    """How far a replica is: before its `step`, or, if it has `ended`, at its end after that many steps."""

    step: int
    ended: bool = False

    @property
    def words(self) -> str:
        return f"came to its end after {counted(self.step, 'step')}" if self.ended else f"takes step {self.step}"


def meet(communicator: Communicator, own: Point, shown: Shown) -> tuple[Sequence[Point], Sequence[Shown]]:
    """Gathers the point of every rank, and what it shows. Only ranks that are `together` show the same type."""
    met = communicator.all_gather_object((own, shown))
    return [point for point, _ in met], [of_rank for _, of_rank in met]


def together(points: Sequence[Point]) -> bool:
    """Whether all have ended, or all are before the same step."""
    return all(point.ended for point in points) or len(set(points)) == 1


def different_steps(points: Sequence[Point], where: str | None) -> Finding | None:
    """DP09 for replicas that are not together."""
    if together(points):
        return None
    rank, other = next((rank, point) for rank, point in enumerate(points) if not together([points[0], point]))
    return Finding("DP09", f"replica 0 {points[0].words}, and replica {rank} {other.words}", where, _EVEN_STEPS)


class StatusPages:
    """One page of shared memory per rank of this node, with the number of steps with sync that it has started: there a
    replica that ends sees whether another waits in a step that it will never take. Collective."""

    _STEPS, _COMPARES, _ENDED = 0, 8, 16  # word offsets; _COMPARES: this step starts with a comparison

    def __init__(self, communicator: Communicator) -> None:
        self._window = communicator.allocate_shared(4096)
        pages = [part.data.cast("q") for part in self._window.parts]
        self._pages = dict(zip(communicator.local_ranks, pages, strict=True))
        self._own = pages[communicator.local_rank]

    def begin_step(self, *, compares: bool) -> None:
        """This replica starts a step with sync; `compares`: the replicas compare before it."""
        self._own[self._COMPARES] = compares
        self._window.sync()
        self._own[self._STEPS] += 1
        self._window.sync()

    def end(self) -> tuple[int, int] | None:
        """Wait until all replicas have ended or one compares: None. If one is in a step without comparison that this
        replica will not take: its rank and the number of the step."""
        self._own[self._ENDED] = 1
        while True:
            self._window.sync()
            for rank, page in self._pages.items():
                if page[self._STEPS] > self._own[self._STEPS]:
                    return None if page[self._COMPARES] else (rank, page[self._STEPS])
            if all(page[self._ENDED] for page in self._pages.values()):
                return None
            time.sleep(0.02)


_TOOL_FOLDERS = {"__pycache__", ".cache"}
_SYSTEM_FOLDERS = ("/dev/", "/proc/", "/sys/")
_NODE_FOLDERS = ("/tmp/", "/var/tmp/", "/dev/shm/")


@dataclass(slots=True)
class Files:
    """The files that the app opens for writing, from `start` until `active` is False: by Python's audit hook, and by
    torch and safetensors. Appending is left out: the lines of each rank survive."""

    node_of: Sequence[int]
    active: bool = False
    _new: dict[str, str] = field(default_factory=dict)
    _writers: dict[tuple[int | None, str], dict[int, str]] = field(default_factory=dict)
    _reported: set[str] = field(default_factory=set)
    _process: int = field(default_factory=os.getpid)

    def start(self) -> None:
        """Watches from now on. Called once in a process."""
        self.active = True
        sys.addaudithook(self._on_audit)
        # These write from C++ and Rust.
        for module, name, path_at in ((serialization, "_open_zipfile_writer", 0), (safetensors, "serialize_file", 1)):
            setattr(module, name, partial(self._watched, getattr(module, name), path_at))

    def take_new(self) -> Mapping[str, str]:
        """The files that this rank has opened since the last call, each with the line of the app."""
        new, self._new = self._new, {}
        return new

    def compare(self, replicas: Sequence[Mapping[str, str]]) -> None:
        """Report files that several ranks have written. `replicas` holds `take_new` of each rank."""
        for rank, opened in enumerate(replicas):
            for path, where in opened.items():
                local = path.startswith((*_NODE_FOLDERS, f"{tempfile.gettempdir()}/"))
                self._writers.setdefault((self.node_of[rank] if local else None, path), {}).setdefault(rank, where)
        for (_, path), writers in self._writers.items():
            where = writers[min(writers)]
            if len(writers) > 1 and where not in self._reported:
                self._reported.add(where)
                what = f"ranks {', '.join(map(str, sorted(writers)))} write the same file, {path}"
                report(Finding("DP08", what, where, "if dist.get_rank() == 0: …, or the rank in the name"))

    def _note(self, path: object) -> None:
        """`path` is being opened for writing. Files of sambasim and of child processes do not count."""
        if not self.active or not isinstance(path, str | bytes | os.PathLike) or os.getpid() != self._process:
            return
        file = os.path.abspath(os.fsdecode(path))
        ignored = file.startswith(_SYSTEM_FOLDERS) or file.endswith(".lock")
        if file in self._new or ignored or not _TOOL_FOLDERS.isdisjoint(Path(file).parts):
            return
        if (where := own_line_of_app()) is not None:
            self.note(file, where)

    def note(self, file: str, where: str) -> None:
        """The app writes the whole of `file`, an absolute path, in the line `where`."""
        self._new.setdefault(file, where)

    def _on_audit(self, event: str, arguments: tuple[object, ...]) -> None:
        if event == "open" and self.active:
            path, mode, flags = arguments
            if "w" in mode if isinstance(mode, str) else isinstance(flags, int) and flags & os.O_TRUNC:
                self._note(path)

    def _watched(self, original: Callable[..., object], path_at: int, *given: object, **keywords: object) -> object:
        if len(given) > path_at:
            self._note(given[path_at])
        return original(*given, **keywords)


class Job:
    """The watched samplers and files of this process. A loaded PEF sets `steps` and `compare_last`.

    leave: reports an error, ends the job, and returns the exit code
    compare_last: compares after the last step; a rank without a PEF only takes part"""

    def __init__(self, communicator: Communicator, leave: Leave) -> None:
        self.communicator, self.leave, self.steps = communicator, leave, 0
        self.where: str | None = None  # the line of the app that took the last step with a comparison
        self.samplers, self.files = Samplers(), Files(communicator.node_of)
        self.pages = StatusPages(communicator)
        self.compare_last: Callable[[], object] = lambda: communicator.all_gather_object(None)


def begin(communicator: Communicator, leave: Leave) -> None:
    """Watch from now on, if there are several replicas or a check. Every rank calls it once."""
    context = current()
    if communicator.world_size > 1 or context.reporter.on_demand:
        job = context.parts[Job] = Job(communicator, leave)
        job.samplers.start()
        job.files.start()
        atexit.register(finish)


def finish() -> None:
    """Compare for the last time, report findings of other ranks, and watch no more. Collective; a job that has ended or
    failed does nothing. Another rank that still takes steps reports DP09 in its next comparison; if it waits in a step
    without one, this rank reports it and ends the job."""
    context = current()
    job = context.part(Job)
    if job is None or context.has_left:
        return
    context.reporter.at_exit = True
    del context.parts[Job]
    job.files.active = False
    end = Point(job.steps, ended=True)
    if waiting := job.pages.end():
        rank, step = waiting
        words = f"DP09: replica {job.communicator.rank} {end.words}, and replica {rank} waits for it in step {step}"
        os._exit(job.leave(DataParallelError(words, where=job.where, remedy=_EVEN_STEPS), None))
    points, shown = meet(job.communicator, end, (job.files.take_new(), context.reporter.findings))
    if together(points):
        for rank, (_, findings) in enumerate(shown):
            context.reporter.report_from(rank, findings)
        job.files.compare([opened for opened, _ in shown])
        job.compare_last()


class CheckIsOver(BaseException):
    """The steps of a check have been run. No Exception, so that apps do not catch it."""


class Check:
    """A check over at most `limit` steps: optimizer steps, or forwards of an inference PEF. It reports all findings at
    the end and no error before, so that one check finds everything. If `epochs_cut`, the app prints other losses than
    in a run."""

    def __init__(self, limit: int) -> None:
        self.steps, self._limit, self.epochs_cut = 0, limit, False
        self._fed: list[tuple[str, ...]] = []
        self._forward: tuple[str, ...] = ()
        self._where: str | None = None

    def note(self, program: Program, kinds: Collection[SectionKind], batch: Mapping[str, Tensor]) -> None:
        """Sections of `kinds` are about to run on `batch`. Raises CheckIsOver after the last step."""
        if SectionKind.OPT in kinds or program.training is None:
            if self.steps == self._limit:
                raise CheckIsOver
            self.steps += 1
        self._where = app_line()
        if SectionKind.FWD in kinds:
            for finding in data.lossy(program, batch, self._where):
                report(finding)
            self._forward = data.sample_digests(batch) if current().trains else ()
        if SectionKind.BCKWD in kinds:  # a forward without it was an evaluation
            self._fed.append(self._forward)

    def short_epoch(self, batch_size: int, batches_of_a_step: int, indices: Iterator[Any]) -> Iterable[Any]:
        """The indices of an epoch, cut to half of the steps of a check, so that a second epoch is seen too, with the
        remainder that fills no batch."""
        whole = list(indices)
        rest = len(whole) % batch_size
        kept = min(len(whole) - rest, max(self._limit // 2, 1) * batches_of_a_step * batch_size)
        self.epochs_cut |= kept + rest < len(whole)
        return [*whole[:kept], *whole[len(whole) - rest :]]

    def end(self) -> Sequence[Finding]:
        """The findings of all ranks, each once. Collective if the ranks are connected."""
        job, reporter = current().part(Job), current().reporter
        if job is None:
            return reporter.findings
        communicator = job.communicator
        # A rank that is still taking steps raises CheckIsOver at its next, and then comes here.
        while not together(meet(communicator, Point(self.steps, ended=True), None)[0]):
            pass
        # Without a DistributedSampler, only the samples themselves show who got which.
        fed = communicator.all_gather_object(None if job.samplers.feeding()[0] else self._fed)
        if None not in fed and len(fed) > 1 and not reporter.has("DP04"):
            report(data.shared_samples([samples for samples in fed if samples is not None], self._where))
        finish()
        of_all_ranks = communicator.all_gather_object(reporter.findings)
        by_key = {(finding.code, finding.what): finding for findings in reversed(of_all_ranks) for finding in findings}
        return [by_key[key] for key in sorted(by_key)]


def begin_check(steps: int) -> Check:
    context = current()
    context.reporter.on_demand = True
    check = context.parts[Check] = Check(steps)
    return check
