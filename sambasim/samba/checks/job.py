"""What the ranks of a job compare among each other: how many steps they take (DP09), and which files they write (DP08).

From the first contact of the ranks to their exit, `Job` watches samplers and files and holds a status page per rank.
"""

import atexit
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TypeVar

from sambasim.errors import DataParallelError
from sambasim.runtime.ranks import Communicator
from sambasim.samba.checks.data import EVEN_BATCHES, Samplers
from sambasim.samba.checks.findings import Finding, reporter
from sambasim.samba.checks.place import own_line_of_app

Shown = TypeVar("Shown")


@dataclass(frozen=True, slots=True)
class Point:
    """How far a replica is: before its `step`, or, if it has `ended`, at its end after that many steps."""

    step: int
    ended: bool = False

    @property
    def words(self) -> str:
        """For a message."""
        steps = "1 step" if self.step == 1 else f"{self.step} steps"
        return f"came to its end after {steps}" if self.ended else f"takes step {self.step}"


def meet(communicator: Communicator, own: Point, shown: Shown) -> tuple[Sequence[Point], Sequence[Shown]]:
    """Collective. The point of every rank, and what it shows. Only ranks that are `together` show the same type."""
    met = communicator.all_gather_object((own, shown))
    return [point for point, _ in met], [one for _, one in met]


def together(points: Sequence[Point]) -> bool:
    """Whether all have ended, or all are before the same step."""
    return all(point.ended for point in points) or len(set(points)) == 1


def different_steps(points: Sequence[Point], where: str | None) -> Finding | None:
    """DP09 for replicas that are not together."""
    if together(points):
        return None
    rank, other = next((rank, point) for rank, point in enumerate(points) if not together([points[0], point]))
    what = f"replica 0 {points[0].words}, and replica {rank} {other.words}"
    return Finding("DP09", what, where, EVEN_BATCHES)


class StatusPages:
    """One page of shared memory per rank of this node: how many steps with sync it has begun. No messages are sent.

    A replica that ends reads here whether another waits for it in a step that it will never take. Every rank makes
    this object at the same time.
    """

    _BYTES = 4096
    _STEPS, _COMPARES, _ENDED = 0, 8, 16  # word offsets; _COMPARES: this step begins with a comparison
    _POLL_S = 0.02

    def __init__(self, communicator: Communicator) -> None:
        topology = communicator.topology
        self._window = communicator.allocate_shared(self._BYTES)
        self._ranks = list(topology.local_ranks)
        self._pages = [self._window.of(index).data.cast("q") for index in range(topology.local_size)]
        self._own = self._pages[topology.local_rank]

    def begin_step(self, *, compares: bool) -> None:
        """This replica begins a step with sync; `compares` says whether the replicas compare before it."""
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
            for rank, page in zip(self._ranks, self._pages, strict=True):
                if page[self._STEPS] > self._own[self._STEPS]:
                    return None if page[self._COMPARES] else (rank, page[self._STEPS])
            if all(page[self._ENDED] for page in self._pages):
                return None
            time.sleep(self._POLL_S)


_WRITERS = (("torch.serialization", "_open_zipfile_writer", 0), ("safetensors.torch", "serialize_file", 1))
"""Functions that write a file from C++ or Rust: module, name, position of the path argument."""

_TOOL_FOLDERS = {"__pycache__", ".cache"}
_SYSTEM_FOLDERS = ("/dev/", "/proc/", "/sys/")
_NODE_FOLDERS = ("/tmp/", "/var/tmp/", "/dev/shm/")

Writer = Callable[..., object]


@dataclass(slots=True)
class Files:
    """The files that the app opens for writing between `start` and `stop`: by Python's audit hook, and by torch and
    safetensors. Appending is left out: the lines of each rank survive."""

    node_of: Sequence[int]
    _new: dict[str, str] = field(default_factory=dict)
    _writers: dict[tuple[int | None, str], dict[int, str]] = field(default_factory=dict)
    _reported: set[str] = field(default_factory=set)
    _active: bool = False
    _process: int = field(default_factory=os.getpid)
    _originals: dict[tuple[str, str], Writer] = field(default_factory=dict)

    def start(self) -> None:
        """Watch. Called once: an audit hook cannot be removed."""
        self._active = True
        sys.addaudithook(self._on_audit)
        for module_name, name, position in _WRITERS:
            module = import_module(module_name)
            original: Writer = getattr(module, name)
            self._originals[module_name, name] = original
            setattr(module, name, self._watched(original, position))

    def stop(self) -> None:
        """Restore torch and safetensors, and record nothing more."""
        self._active = False
        while self._originals:
            (module_name, name), original = self._originals.popitem()
            setattr(import_module(module_name), name, original)

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
                remedy = "if torch.distributed.get_rank() == 0: …, or a name with the rank in it"
                reporter.report(Finding("DP08", what, where, remedy))

    def note(self, path: object) -> None:
        """`path` is being opened for writing. Files of sambasim and of child processes do not count."""
        if not self._active or not isinstance(path, str | bytes | os.PathLike) or os.getpid() != self._process:
            return
        file = os.path.abspath(os.fsdecode(path))
        ignored = file.startswith(_SYSTEM_FOLDERS) or file.endswith(".lock")
        if file in self._new or ignored or not _TOOL_FOLDERS.isdisjoint(Path(file).parts):
            return
        where = own_line_of_app()
        if where is not None:
            self._new[file] = where

    def _on_audit(self, event: str, arguments: tuple[object, ...]) -> None:
        if event == "open" and self._active:
            path, mode, flags = arguments
            if "w" in mode if isinstance(mode, str) else isinstance(flags, int) and flags & os.O_TRUNC:
                self.note(path)

    def _watched(self, original: Writer, position: int) -> Writer:
        def watched(*arguments: object, **keywords: object) -> object:
            if len(arguments) > position:
                self.note(arguments[position])
            return original(*arguments, **keywords)

        return watched


class Job:
    """What is watched in this process. A loaded PEF sets `steps`, `settle` and `compare_last`."""

    def __init__(self, communicator: Communicator) -> None:
        self.communicator = communicator
        self.samplers = Samplers()
        self.files = Files(communicator.node_of)
        self.pages = StatusPages(communicator)
        self.steps = 0
        self.settle: Callable[[], None] = lambda: None
        """Reports what a loaded PEF has held back."""
        self.compare_last: Callable[[], None] = self._compare_nothing

    def stop(self) -> None:
        """Watch no more."""
        self.samplers.stop()
        self.files.stop()

    def _compare_nothing(self) -> None:
        """A rank without a PEF takes part in the last comparison of the others."""
        self.communicator.all_gather_object(None)


_job: Job | None = None


def begin(communicator: Communicator) -> None:
    """Watch from now on, if there are several replicas or a check. Every rank calls it once."""
    global _job
    if communicator.world_size > 1 or reporter.on_demand:
        _job = Job(communicator)
        _job.samplers.start()
        _job.files.start()
        atexit.register(finish)


def current() -> Job | None:
    """What is watched now."""
    return _job


def finish() -> None:
    """Compare for the last time, report findings of other ranks, and watch no more. Collective; later calls do nothing.

    If another rank is still taking steps, its next comparison reports DP09. If it waits for this rank in a step without
    comparison, this rank reports DP09 and ends the job.
    """
    job = _job
    if job is None:
        return
    reporter.at_exit = True
    job.settle()
    end = Point(job.steps, ended=True)
    abandon()
    waiting = job.pages.end()
    if waiting is not None:
        _end_the_job(job.communicator.rank, end, *waiting)
    points, shown = meet(job.communicator, end, (job.files.take_new(), reporter.findings))
    if together(points):
        for rank, (_, findings) in enumerate(shown):
            reporter.report_from(rank, findings)
        job.files.compare([opened for opened, _ in shown])
        job.compare_last()


def _end_the_job(own_rank: int, end: Point, rank: int, step: int) -> None:
    from sambasim.samba.shim.ending import leave

    words = f"DP09: replica {own_rank} {end.words}, and replica {rank} waits for it in step {step}"
    os._exit(leave(DataParallelError(words, remedy=EVEN_BATCHES), None))


def abandon() -> None:
    """Watch no more, and compare nothing: the job has failed."""
    global _job
    if _job is not None:
        _job.stop()
        _job = None
