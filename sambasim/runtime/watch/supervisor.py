"""The supervisor of one rank: an error on any rank ends the whole job within seconds, and is reported once.

If one rank just left, others in a collective would wait forever. So when an error escapes the `with` block, or the
watchdog finds that the job cannot continue, the rank

1. announces the error to every other rank, and waits PATIENCE_S for their announcements;
2. reports it, if of the ranks that announced one it is the lowest whose error no other rank caused;
3. exits: quietly if every rank has announced an error (a check that fails on all of them), else by MPI_Abort.

A timer ends the process if MPI itself does not return. If no rank was able to report, the status file stays.

SIGTERM (of schedulers), SIGINT (Ctrl-C) and SIGUSR1 ask a run to stop after its step; another one, a second later, ends
the process at once. Open MPI's mpirun forwards SIGUSR1, and kills its ranks half a second after any of the others. A
signal may reach only some ranks, so each sends its request with its loss.
"""

import faulthandler
import math
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Final, NamedTuple, NoReturn, Self, cast

from sambasim.errors import Interrupted, PeerError, exit_code
from sambasim.forks import STOP_SIGNALS
from sambasim.ir.mesh import Mesh
from sambasim.runtime.machine.communicator import NOTICE, Communicator, FailureNotice
from sambasim.runtime.machine.launcher import FORWARDING_S
from sambasim.runtime.watch.status_file import UNWATCHED, Activity, State, StatusFile, name_of
from sambasim.runtime.watch.watchdog import ANSWER_S, LEAST_LIMIT_S, OtherNodes, Watchdog, start_time

PATIENCE_S = 1.0
"""How long a failing rank waits for announcements. Ranks fail the same check within milliseconds."""
DEADLINE_S = 5  # a failing rank exits within this time, whatever happens
ALL_EXIT_S = 30
"""The same once all ranks exit together: MPI_Finalize is slow on a busy machine."""


class Failure(NamedTuple):
    """The error, its rank, and `who` that is. `alike`: all ranks failed with it; `doing`: the rank's activity."""

    error: BaseException
    rank: int
    who: str
    alike: bool
    doing: str | None = None

    @property
    def about(self) -> int:
        named = self.error.rank if isinstance(self.error, PeerError) else None
        return self.rank if named is None else named

    @property
    def reporter(self) -> str:
        if self.alike:
            return "every rank"
        return self.who if self.about == self.rank else f"seen by {self.who}"


class Supervisor:
    """Ends the job if an error escapes its `with` block; between `start` and `finish` also if the job is stalled.
    `report` prints it on one rank; the job gets its `exit_code`. With one rank errors pass through."""

    def __init__(
        self,
        communicator: Communicator,
        report: Callable[[Failure], None],
        exit_code: Callable[[BaseException], int] = exit_code,
    ) -> None:
        self._communicator, self._report, self._exit_code = communicator, report, exit_code
        self._ending = threading.Lock()
        self._timeout_s, self._mesh = 0.0, Mesh({})
        self.file: StatusFile | None = None
        self._paths: Sequence[Path] = ()
        self._watchdog: Watchdog | None = None
        self.activity: Activity = UNWATCHED

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None and self._communicator.world_size > 1:
            self._end_job(error)

    @property
    def who(self) -> str:
        """This rank, its host, and its coordinates: `rank 3 on node7: dp 0, pp 1, tp 1`."""
        world = self._communicator
        label = self._mesh.label(world.rank)
        return f"rank {world.rank} on {world.host_name}{label and f': {label}'}"

    def start(self, pef: Path, log_dir: Path | None, timeout_s: float, mesh: Mesh) -> None:
        """Collective. Create the status files, in `log_dir`, beside the PEF or in /tmp, and start the watchdog; with
        one rank neither. `timeout_s`: how long ranks wait for one without progress. Raises MachineError."""
        world = self._communicator
        if world.world_size == 1:
            faulthandler.cancel_dump_traceback_later()
            return
        self._timeout_s, self._mesh = timeout_s, mesh
        first = world.local_ranks[0]
        if world.rank == first:
            folders = [log_dir or pef.resolve().parent, Path(tempfile.gettempdir())]
            self.file = StatusFile.create(folders, name_of(pef.stem, world.host_name, os.getpid()), world.local_size)
        paths = world.all_gather_object(None if self.file is None else self.file.path)
        self._paths = [path for path in paths if path is not None]
        self.file = self.file or StatusFile.attach(cast("Path", paths[first]))
        self.activity = self.file.activity(world.local_rank)
        self.activity.begin(world.rank, world.host_name, os.getpid(), mesh.label(world.rank))
        everybody = world.all_gather_object((os.getpid(), start_time("self"), world.host_name))
        of_node = [everybody[rank] for rank in world.local_ranks]
        started_at = [started if start_time(pid) == started else None for pid, started, _ in of_node]
        faulthandler.cancel_dump_traceback_later()
        if not world.serves_threads:
            return  # this MPI may be used by one thread only, so there is no watchdog
        others = OtherNodes(world, [host for _, _, host in everybody], mesh) if world.node_count > 1 else None
        self._watchdog = Watchdog(self.file, started_at, world.local_rank, timeout_s, others, self._end_job)
        self._watchdog.start()

    def finish(self) -> None:
        """Collective. The run has ended: stop the watchdog, and limit the time that MPI takes to end."""
        if self.file is None:
            return
        self.activity.waits("waiting for peers to end")
        self._communicator.barrier()
        if self._watchdog is not None:
            self._watchdog.stop(wait_s=2 * ANSWER_S)
        self.activity.does("done, MPI is ending")
        limit_time(self._timeout_s, self._communicator.rank)

    def release(self) -> None:
        if self.file is None:
            return
        faulthandler.cancel_dump_traceback_later()
        self.activity.state(State.ENDED)
        if all(status.state is State.ENDED for status in self.file.ranks()):
            with suppress(OSError):
                self.file.path.unlink(missing_ok=True)

    def _end_job(self, error: BaseException) -> NoReturn:
        """Called in the main thread or in the watchdog's; the first one ends the process."""
        if not self._ending.acquire(blocking=False):
            while True:
                time.sleep(DEADLINE_S)
        _exit_within(DEADLINE_S)
        world = self._communicator
        doing = None if self.file is None else str(self.file.ranks()[world.local_rank])
        self.activity.state(State.LEAVING)
        if self._watchdog is not None:
            self._watchdog.stop()
            error = self._watchdog.death() or error
        own = FailureNotice(f"{type(error).__name__}: {error}", self._exit_code(error), isinstance(error, PeerError))
        notices = {world.rank: own}
        for rank in range(world.world_size):
            if rank != world.rank:
                world.post(own, rank, NOTICE)
        until = time.monotonic() + PATIENCE_S
        while len(notices) < world.world_size and time.monotonic() < until:
            time.sleep(0.005)
            notices.update(world.posted(NOTICE))
        all_exit = len(notices) == world.world_size
        alike = all_exit and all(notice.words == own.words for notice in notices.values())
        # The lowest rank whose error was not caused by another rank; else the lowest.
        reporter = min([rank for rank, notice in notices.items() if not notice.secondary] or notices)
        reports, code = reporter == world.rank, notices[reporter].exit_code
        if reports and not (alike and isinstance(error, SystemExit)):
            shown = None if alike or own.secondary else doing
            self._report(Failure(error, world.rank, self.who, alike, shown))
            sys.stderr.flush()
        if reports or all_exit:
            if self._watchdog is not None:
                self._watchdog.stop(wait_s=1.0)
            self.activity.state(State.ENDED)
            for path in self._paths:  # those of other hosts too, where they share a disk
                with suppress(OSError):
                    path.unlink(missing_ok=True)
        if all_exit and threading.current_thread() is threading.main_thread():
            _exit_within(ALL_EXIT_S)
            raise SystemExit(code) from None
        # The reporting rank aborts the job, this rank included. If it has died, this rank does.
        time.sleep(FORWARDING_S if reports else 2 * PATIENCE_S)
        world.abort(max(code, 1))


def limit_time(seconds: float, rank: int) -> None:
    """From now on, where MPI starts or ends and may hang: exit with code 1 after `seconds`, at least LEAST_LIMIT_S, and
    print where it was, rank 0 first. `start` and `release` of a supervisor remove the limit."""
    faulthandler.dump_traceback_later(max(seconds, LEAST_LIMIT_S) + rank, file=2, exit=True)


def _exit_within(seconds: float) -> None:
    """This process exits after `seconds` without output, even if no Python can run. Replaces an earlier timer."""
    devnull = os.open(os.devnull, os.O_WRONLY)  # where it writes tracebacks; must stay open
    faulthandler.dump_traceback_later(seconds, file=devnull, exit=True)


SAVE: Final = 1
"""The request for a checkpoint; one to stop is the number of the signal, which is larger. The largest request of all
ranks counts."""

SAME_S = 1.0
"""Signals within this time are one request: mpirun forwards what all processes of its group receive."""
_wakeup_fds: set[int] = set()
_masks = threading.local()


class StopSignals:
    """Within its block, in the main thread, the first signal is passed to `notify`, and a later one ends the process,
    by a thread that reads the pipe of the interpreter's handler, because a wait in MPI runs no Python handler."""

    def __init__(self, notify: Callable[[str], object] = lambda name: None) -> None:
        self.notify = notify
        self._handlers: dict[signal.Signals, object] = {}
        self.received = 0  # the number of the signal
        self._is_reported = self._has_ended = False

    def __enter__(self) -> "StopSignals":
        try:
            self._handlers = {number: signal.signal(number, self._on_signal) for number in STOP_SIGNALS}
        except ValueError:  # not the main thread
            return self
        reads, self._writes = os.pipe()
        os.set_blocking(self._writes, False)
        self._wakeup_fd = signal.set_wakeup_fd(self._writes, warn_on_full_buffer=False)
        _wakeup_fds.add(self._writes)
        threading.Thread(target=_exit_at_second, args=(reads,), name="second signal", daemon=True).start()
        return self

    def __exit__(self, *exception: object) -> None:
        if not self._handlers:
            return
        signal.set_wakeup_fd(self._wakeup_fd)
        _wakeup_fds.discard(self._writes)
        os.close(self._writes)  # ends the thread
        self._has_ended = True
        if self._is_reported and not self.received:
            return  # another rank was signalled: the signal to this one may still come, and must not kill it
        self._restore()

    def request(self) -> int:
        """The request to stop, or 0."""
        if self.received:
            self.report(self.received)  # not in the handler, which may interrupt a print
        return self.received

    def report(self, number: int) -> None:
        """Notify of signal `number`, received by this rank or another, unless one was reported before."""
        if not self._is_reported:
            self._is_reported = True
            self.notify(signal.Signals(number).name)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.received = self.received or number
        if self._has_ended:
            self._restore()

    def _restore(self) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)  # type: ignore[arg-type]  # what signal() returned is what it takes


def _exit_at_second(pipe: int) -> None:
    first_s = math.inf
    while numbers := os.read(pipe, 64):
        for number in numbers:
            if number in STOP_SIGNALS:
                first_s = min(first_s, time.monotonic())
                if time.monotonic() - first_s > SAME_S:
                    os._exit(128 + number)
    os.close(pipe)


# A forked process, such as a data worker, must not write to the pipe of its parent: Ctrl-C reaches both, and would
# count twice. Signals are blocked until its end of the pipe is closed.


def _block() -> None:
    _masks.before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)


def _unblock() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _masks.before)


def _close_and_unblock() -> None:
    if _wakeup_fds:
        signal.set_wakeup_fd(-1)
    while _wakeup_fds:
        os.close(_wakeup_fds.pop())
    _unblock()


os.register_at_fork(before=_block, after_in_parent=_unblock, after_in_child=_close_and_unblock)


def interrupted(number: int, step: int, saved: Path | None, files: Sequence[Path], kept: str | None) -> Interrupted:
    """The error after signal `number`. `saved`: the checkpoint of `step`, if any; `files`: what has its weights;
    `kept`: older checkpoints, None if the run saves none."""
    names = " and ".join(map(str, files))
    if saved is not None:
        clause, remedy = f"which is saved as {saved}", "the same command with --resume continues from there"
        clause += f", its weights as {names}" if files else ""
    elif files:
        clause, remedy = f"whose weights are saved as {names}", f"--weights {files[0]} starts from them"
        remedy += "; --checkpoint-dir DIR saves checkpoints, from which --resume continues"
    elif kept is not None:
        clause = f"which could not be saved; {kept}"
        remedy = "see above why; the same command with --resume continues from a checkpoint"
    else:
        clause = "and nothing of it is saved"
        remedy = "--checkpoint-dir DIR saves checkpoints, from which --resume continues"
    what = f"{signal.Signals(number).name}: the run has ended after step {step}, {clause}"
    return Interrupted(number, what, remedy=remedy)
