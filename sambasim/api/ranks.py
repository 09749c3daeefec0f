"""The ranks of a script: this process, or those of mpirun. Errors that leave the API speak Python, and not of flags."""

import atexit
import os
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from types import TracebackType

from sambasim import leave_script
from sambasim.commands.run import checked_pef, failure_details
from sambasim.data.user_code import generators_kept
from sambasim.errors import LaunchError, SambasimError
from sambasim.options.python_words import in_python
from sambasim.options.run import RunOptions
from sambasim.runtime.machine.communicator import Communicator, single_rank
from sambasim.runtime.machine.launcher import check_alone, find_launcher, pmi_socket
from sambasim.runtime.machine.mpi import connect, has_ended
from sambasim.runtime.watch.status_file import Activity
from sambasim.runtime.watch.supervisor import Failure, Supervisor
from sambasim.terminal.output import report_error
from sambasim.units import numbered

_CALLED, _LEFT = "called sambasim.", "left the program"
_joined: set[int] = set()
"""The process, once it has joined; a child that it forks has its memory, and is no rank."""


@contextmanager
def speaks_python(*, compiles: bool = False) -> Iterator[None]:
    """A decorator of a function of the API. `compiles`: its keywords are the flags of `sambasim compile`."""
    try:
        yield
    except SambasimError as error:
        _translate(error, compiles=compiles)
        raise


def said(text: str, *, compiles: bool = False) -> str:
    """A message in words of Python; not the user's line."""
    return in_python(text, compiles=compiles, typed=sys.argv)


def _translate(error: SambasimError, *, compiles: bool = False) -> None:
    error.what = said(error.what, compiles=compiles)
    error.remedy = error.remedy and said(error.remedy, compiles=compiles)
    error.args = (error.what,)


def connected() -> Communicator:
    """Collective at its first call. The ranks that mpirun started; else one, without MPI."""
    launcher = find_launcher()
    check_alone(os.environ, command())
    return single_rank(socket.gethostname()) if launcher is None or launcher.world_size == 1 else _of_mpirun()


@cache
def _of_mpirun() -> Communicator:
    """From now on an exception that ends this process ends the others, which would wait for it."""
    world, hook = connect(command()), sys.excepthook

    def report(failure: Failure) -> None:
        if isinstance(failure.error, SambasimError):
            _report(failure)
        else:
            hook(type(failure.error), failure.error, failure.error.__traceback__)

    def end_all(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        with Supervisor(world, report=report):
            raise error.with_traceback(trace)

    sys.excepthook = end_all
    atexit.unregister(leave_script)
    atexit.register(leave_script)
    _joined.add(os.getpid())
    return world


def same_call(world: Communicator, does: str) -> None:
    """Collective. Ends the job if other ranks do another thing than this one."""
    of_ranks = world.all_gather_object(does)
    if any(other != does for other in of_ranks):
        known = [one if str(one).startswith((_CALLED, _LEFT)) else "went on" for one in of_ranks]
        ranks = {one: [rank for rank, other in enumerate(known) if other == one] for one in known}
        what = ", and ".join(f"{numbered('rank', of_one)} {one}" for one, of_one in ranks.items())
        remedy = "call it on every rank: not in `if rank == 0:`, nor after a return, exit or error of one rank alone"
        atexit.unregister(leave_script)
        with Supervisor(world, report=_report):
            raise LaunchError(what, remedy=remedy)


def leave(ends_itself: bool) -> None:
    """At the end of a script, a rank joins the others, whose next call would wait for it in vain. `ends_itself`: it is
    a command or an app, unless it has joined them already."""
    launcher, has_joined = find_launcher(), os.getpid() in _joined
    is_child = bool(_joined) and not has_joined
    joins = has_joined or not (ends_itself or is_child or pmi_socket() is None)
    if joins and launcher is not None and launcher.world_size > 1 and not has_ended():
        with suppress(SambasimError, SystemExit):
            same_call(_of_mpirun(), _LEFT)


def command() -> list[str]:
    """What was typed, without mpirun."""
    return ["python", *sys.argv]


@contextmanager
def supervised(world: Communicator, options: RunOptions) -> Iterator[tuple[Path, Activity]]:
    """Collective. Checks the PEF that `options` name, whose path it gives. Within the block, an error of one rank ends
    all of them, and is printed once; one rank alone raises it. Random numbers of this process are as before afterwards.
    """
    same_call(world, f"{_CALLED}{'predict' if options.inference else 'run'}")
    path, mesh = checked_pef(options, Path("out"), world, command())

    def report(failure: Failure) -> None:
        _report(failure, failure_details(failure, options))

    with generators_kept(), Supervisor(world, report=report) as supervisor:
        if world.world_size > 1:  # it also cancels the timer of this process's faulthandler
            supervisor.start(path, options.log_dir, options.sync_timeout, mesh)
        yield path, supervisor.activity
        supervisor.finish()
    supervisor.release()
    world.barrier()  # the status file of the next run has the same name
    world.close()


def _report(failure: Failure, details: Sequence[tuple[str, str]] = ()) -> None:
    if isinstance(failure.error, SambasimError):
        _translate(failure.error)
    report_error(failure.error, failure.reporter, details)
