"""The ranks of an app: how they are connected, and what an error that escapes the script prints and does.

    what escaped          what is printed                                      exit code
    an error of sambasim  `error[code]: ...`, and the user's line              that of its family
    errors in `_ERRORS`   the same                                             2
    a missing package     the same                                             2
    KeyboardInterrupt     `interrupted`                                        130
    SystemExit            what Python prints                                   what the script chose
    anything else         the traceback from the script's first frame on       1

A rank of several must not exit while others wait for it in a collective or in MPI's start: there the `Supervisor` ends
the job. `sambasim app` calls `leave` with whatever escapes the script. For a plain `python SCRIPT.py`, `install`
replaces `sys.excepthook` and `sys.exit` when `sambaflow` is imported. Not handled then: an error before that import,
and a SystemExit of one rank that is raised without `sys.exit`, or before that rank has joined its job.
"""

import atexit
import functools
import signal
import sys
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, NoReturn

from sambasim.data.user_code import missing_remedy, summary, user_line
from sambasim.errors import LaunchError, MachineError, OptionError, SambasimError, exit_code, say
from sambasim.runtime.machine.communicator import Communicator
from sambasim.runtime.machine.launcher import find_launcher, launched_rank
from sambasim.runtime.machine.mpi import connect
from sambasim.runtime.run.run_observer import print_whole_lines
from sambasim.samba.checks import job
from sambasim.samba.process import current, typed_command

if TYPE_CHECKING:
    from sambasim.runtime.watch.supervisor import Failure

_ON_THE_HOST = 'device = "cpu", and no .cuda(): samba.session.run sends its inputs to the device itself'

_ERRORS: Mapping[tuple[str, ...], tuple[type[SambasimError], str, str]] = {
    (
        "initialize the default process group twice",
        "Error initializing torch.distributed using env:// rendezvous",
        "Distributed package doesn't have MPI built in",
    ): (
        LaunchError, "the app calls init_process_group by itself",
        "leave init_process_group out of the app: with --data-parallel, parse_app_args calls it",
    ),
    ("Default process group has not been initialized",): (
        LaunchError,
        "the app calls torch.distributed, which is not initialised: --data-parallel is missing, or this is no run",
        "add --data-parallel; or use samba.utils.get_rank() and get_world_size(), which are 0 and 1 without it",
    ),
    (
        "Torch not compiled with CUDA enabled", "module 'torch._C' has no attribute '_cuda_",
        "torch.cuda.Stream requires CUDA support", "Found no NVIDIA driver on your system",
        "No CUDA GPUs are available",
    ): (MachineError, "the app asks for the device cuda, and torch has none here", _ON_THE_HOST),
    ("Attempting to deserialize object on a CUDA device", "don't know how to restore data location"): (
        MachineError, "the app loads tensors to a device that torch does not have here",
        'torch.load(…, map_location="cpu")',
    ),
    ("pin_memory=True requires a CUDA or other accelerator",): (
        MachineError, "the app asks for pinned memory, and torch has no accelerator here", "leave pin_memory out",
    ),
    (
        "Cannot access accelerator device when none is", "device type at start of device string",
        "PyTorch is not linked with support for",
    ): (MachineError, "the app asks for a device that torch does not have here", _ON_THE_HOST),
}  # fmt: skip
"""Texts of torch's errors in apps that were written for another machine, and the error that is reported in their
place. They are looked up once they have escaped from the script, because the app may catch them."""


def translated(error: BaseException) -> BaseException:
    """The error of sambasim that `_ERRORS` has for `error`, or for a missing package, with the app's line; or `error`
    itself."""
    for texts, (kind, what, remedy) in _ERRORS.items():
        if isinstance(error, Exception) and any(text in str(error) for text in texts):
            return kind(what, where=user_line(error), remedy=remedy).with_traceback(error.__traceback__)
    if not isinstance(error, SambasimError) and (missing := missing_remedy(error)):
        return MachineError(f"the app raised {summary(error)}", where=user_line(error), remedy=missing)
    return error


JOIN_S = 30
"""How long a rank that fails before it has joined its job waits for the others, to end the job together."""


def communicator() -> Communicator:
    """The communicator of this process. The first call is collective, starts MPI, and raises as `connect` does."""
    context = current()
    if context.communicator is None:
        context.communicator = connect(typed_command())
        if context.communicator.world_size > 1:
            install()  # for apps that were started by plain `python`
            print_whole_lines()
        job.begin(context.communicator, leave)
    return context.communicator


exit_code_of = functools.partial(exit_code, other=1)


def leave(error: BaseException, script: Path | None) -> int:
    """Reports `error`, which escaped from `script`, the file that runs as `__main__`, and ends the job that this
    process is a rank of. Returns the exit code of this process, unless the job is aborted."""
    error = translated(error)
    code = exit_code_of(error)
    current().has_left = code != 0
    if code == 0:  # the rank has reached the end of the script
        return code
    trace = error.__traceback__ = _from_script(error.__traceback__, script)
    joined = current().communicator
    # Joining MPI may hang, so a rank that has not joined reports first. A SambasimError that was raised before is the
    # same on every rank, so only rank 0 reports it.
    reported = joined is None and (launched_rank() == 0 or not isinstance(error, SambasimError))
    if reported:
        _report(error, script)
    joined = joined or _join(error)
    if joined is None or joined.world_size == 1:
        if not reported and joined is not None:
            _report(error, script)
        elif not reported and (launcher := find_launcher()) is not None:
            time.sleep(launcher.wait_for_report_s)
        return code

    from sambasim.runtime.watch.supervisor import Supervisor

    def report(failure: "Failure") -> None:
        error.__traceback__ = trace  # raising it again, below, added a frame
        if not reported:
            _report(error, script, f" ({failure.reporter})")

    try:
        with Supervisor(joined, report=report, exit_code=exit_code_of):
            raise error
    except SystemExit as leaving:
        return exit_code_of(leaving)


def _join(error: BaseException) -> Communicator | None:
    """Join the job that this process has not joined yet, so that it can be ended; None if there is none. MPI's start
    waits for every rank. If they do not come, SIGALRM ends this process, and the launcher the job."""
    launcher = find_launcher()
    if launcher is None or launcher.world_size == 1 or isinstance(error, KeyboardInterrupt):
        return None
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(JOIN_S)
    try:
        return communicator()
    except SambasimError:
        return None  # what keeps it from joining is often what has just been reported
    finally:
        signal.alarm(0)


@functools.cache
def install() -> None:
    """Make this process end as described above, whatever runs it. Not at an interactive prompt, which continues after
    an error."""
    if not (sys.flags.interactive or hasattr(sys, "ps1")):
        sys.excepthook, sys.exit = _excepthook, _exit


def _excepthook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> NoReturn:
    # Python exits with the code of a SystemExit that escapes the hook; otherwise it would be 1.
    file = getattr(sys.modules["__main__"], "__file__", None)
    raise SystemExit(leave(error.with_traceback(trace), Path(file) if file else None))


def _exit(status: object = None, /) -> NoReturn:
    leaving = SystemExit(status)

    def leave_job() -> None:
        joined = current().communicator
        if joined is not None and joined.world_size > 1:
            leave(leaving, None)

    if exit_code_of(leaving) != 0 and not current().has_left:
        # Registered now, so that it runs before any exit handler that would wait for the other ranks.
        atexit.register(leave_job)
    raise leaving


def _report(error: BaseException, script: Path | None, reporter: str = "") -> None:
    """Print `error` on standard error. `reporter` names the rank and host, if there are several ranks."""
    sys.stdout.flush()  # so that what the script printed comes first
    if isinstance(error, SambasimError):
        if error.where is None and script is not None and not isinstance(error, OptionError | LaunchError):
            error.where = user_line(error)
        say(f"error[{error.code}]{reporter}: {error}", sys.stderr)
    elif isinstance(error, KeyboardInterrupt):
        print(f"interrupted{reporter}", file=sys.stderr)
    elif isinstance(error, SystemExit):
        if reporter:
            print(f"a rank left while others worked{reporter}: exit code {exit_code_of(error)}", file=sys.stderr)
    else:
        if isinstance(error, AttributeError) and str(error).endswith("has no attribute 'output_tensors'"):
            remedy = "call samba.utils.trace_graph(model, inputs, optim, pef=args.pef) first: it sets them"
            error.add_note(f"  try:   {remedy}")
        trace = "".join(traceback.format_exception(error))
        print(f"the script failed{reporter}\n{trace}" if reporter else trace, end="", file=sys.stderr)


def _from_script(trace: TracebackType | None, script: Path | None) -> TracebackType | None:
    """`trace` from the script's first frame on; None if it has none, as after a syntax error in the script."""
    while trace is not None and script is not None and Path(trace.tb_frame.f_code.co_filename) != script:
        trace = trace.tb_next
    return trace
