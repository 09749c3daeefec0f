"""How a script ends: what is told when an error escapes it, with which exit code, and that its whole job ends with it.

    what escaped          what is told                                         exit code
    an error of ours      `error[code]: ...`, and the script's line            that of its family
    some of torch's       as one of ours, which `translation.py` has           2
    KeyboardInterrupt     `interrupted`                                        130
    SystemExit            what Python tells                                    what the script chose
    anything else         the script's own traceback, without frames above it  1

One rank of several must not leave while others wait for it in a collective, or in MPI's start: there the job ends as
`runtime.guard` ends it. Only a rank that exits with 0 just goes: it has come to its end.

`sambasim app` calls `leave` with whatever escapes the script. In a plain `python SCRIPT.py` there is nobody around the
script, so `install` puts itself into `sys.excepthook` and `sys.exit` when `sambaflow` is imported. Three things it
cannot see there: what fails before that import; a SystemExit that one rank alone raises by other means than `sys.exit`;
and one that a rank alone raises before it has joined its job.
"""

import atexit
import functools
import os
import signal
import sys
import traceback
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, NoReturn, cast

from sambasim.errors import LaunchError, OptionError, SambasimError
from sambasim.runtime.first_word import let_the_first_tell
from sambasim.runtime.launcher import find_launcher, launched_rank
from sambasim.samba.shim.translation import translated

if TYPE_CHECKING:
    from sambasim.runtime.guard import Failure
    from sambasim.runtime.ranks import Communicator

FINDING_S = 30
"""How long a rank that fails before it has joined its job waits for the others, to end the job together."""

_INTERRUPTED = 130  # 128 + SIGINT, as shells have it

_has_left = False
"""Whether `leave` has told what ends this process: a sys.exit that follows is part of the same end."""


def exit_code_of(error: BaseException) -> int:
    """The exit code of a script that `error` escaped from."""
    if isinstance(error, SambasimError):
        return error.exit_code
    if isinstance(error, KeyboardInterrupt):
        return _INTERRUPTED
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    return 1


def leave(error: BaseException, script: Path | None) -> int:
    """Tell `error`, which escaped from the script, and end the job that this process is a rank of.

    script: the file that runs as `__main__`; None where there is none

    Returns the exit code of this process, unless the job is aborted and this process with it.
    """
    global _has_left
    error = translated(error)
    code = exit_code_of(error)
    _has_left = code != 0
    if code == 0:
        return code  # the script has come to its end, this rank perhaps a little earlier than others
    trace = error.__traceback__ = _below(error.__traceback__, script)
    communicator = _joined()
    # The others may wait for this rank to join them, so it will. But they may also never come, and then this is its
    # last word. Errors of ours before that are every rank's, and one tells them; of the app's own who knows.
    told = communicator is None and (launched_rank(os.environ) == 0 or not isinstance(error, SambasimError))
    if told:
        _tell(error, script)
    communicator = communicator or _find_the_others(error)
    _compare_no_more()
    if communicator is None or communicator.world_size == 1:
        if not told and communicator is not None:
            _tell(error, script)
        elif not told:
            let_the_first_tell(os.environ)
        return code

    from sambasim.runtime.guard import ends_the_job

    def tell(failure: "Failure") -> None:
        error.__traceback__ = trace  # raising it once more, below, added a frame of ours
        where = "every rank" if failure.alike else f"rank {failure.rank} on {failure.host_name}"
        if not told:
            _tell(error, script, f" ({where})")

    try:
        with ends_the_job(communicator, tell=tell, exit_code=exit_code_of):
            raise error
    except SystemExit as leaving:
        return exit_code_of(leaving)


def _find_the_others(error: BaseException) -> "Communicator | None":
    """Join the job that this process failed to join, so that it can be ended; None where there is none.

    MPI's start waits for every rank. Where they do not come, the operating system ends this process, and the launcher
    the job.
    """
    launcher = find_launcher(os.environ)
    if launcher is None or launcher.world_size == 1 or isinstance(error, KeyboardInterrupt):
        return None
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(FINDING_S)
    try:
        from sambasim.samba.context import communicator

        return communicator()
    except SambasimError:
        return None  # what keeps it from joining is often what has just been told
    finally:
        signal.alarm(0)


@functools.cache
def install() -> None:
    """Let this process end as this module says, whatever runs it. A second call changes nothing.

    A prompt where somebody types goes on after an error: there nothing is changed.
    """
    if sys.flags.interactive or hasattr(sys, "ps1"):
        return
    sys.excepthook = _on_error
    sys.exit = _exit


def _on_error(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> NoReturn:
    """In place of `sys.excepthook`."""
    # Python takes the exit code of a SystemExit that leaves the hook; it would be 1 otherwise.
    raise SystemExit(leave(error.with_traceback(trace), _main_script()))


def _exit(status: object = None, /) -> NoReturn:
    """In place of `sys.exit`."""
    leaving = SystemExit(status)
    if exit_code_of(leaving) != 0 and not _has_left:
        # Registered now, so that it comes before anything at exit that would wait for the other ranks.
        atexit.register(_leave_by_exit, leaving)
    raise leaving


def _leave_by_exit(leaving: SystemExit) -> None:
    communicator = _joined()
    if communicator is not None and communicator.world_size > 1:
        leave(leaving, None)


def _joined() -> "Communicator | None":
    """The ranks of this job, if this process has found them."""
    # Looked up and not imported: a process that has not loaded the context has found nobody, and may be too far at its
    # end to load anything.
    loaded = sys.modules.get("sambasim.samba.context")
    return None if loaded is None else cast("Communicator | None", loaded.current().communicator)


def _compare_no_more() -> None:
    """The ranks of a job that fails do not meet again."""
    job = sys.modules.get("sambasim.samba.checks.job")
    if job is not None:
        job.abandon()


def _main_script() -> Path | None:
    file = getattr(sys.modules["__main__"], "__file__", None)
    return Path(file) if file else None


def _tell(error: BaseException, script: Path | None, behind: str = "") -> None:
    """Print `error` on standard error. `behind` names the rank and host, where one rank of several tells."""
    sys.stdout.flush()  # so that what the script printed stands above
    if isinstance(error, SambasimError):
        _name_line(error, script)
        print(f"error[{error.code}]{behind}: {error}", file=sys.stderr)
    elif isinstance(error, KeyboardInterrupt):
        print(f"interrupted{behind}", file=sys.stderr)
    elif isinstance(error, SystemExit):
        if behind:
            print(f"a rank left while others worked{behind}: exit code {exit_code_of(error)}", file=sys.stderr)
    else:
        if isinstance(error, AttributeError) and str(error).endswith("has no attribute 'output_tensors'"):
            error.add_note(
                "  try:   call samba.utils.trace_graph(model, inputs, optim, pef=args.pef) first: it sets them"
            )
        trace = "".join(traceback.format_exception(error))
        print(f"the script failed{behind}\n{trace}" if behind else trace, end="", file=sys.stderr)


def _name_line(error: SambasimError, script: Path | None) -> None:
    """Say where in the script it was, unless the error names a place, or was made where the command was typed."""
    if error.where is not None or script is None or isinstance(error, OptionError | LaunchError):
        return
    lines = [line for frame, line in traceback.walk_tb(error.__traceback__) if _is_of(frame, script)]
    if lines:
        error.where = f"{script}:{lines[-1]}"


def _below(trace: TracebackType | None, script: Path | None) -> TracebackType | None:
    """`trace` from the script's first frame on; None if it has none, as where the script's text is wrong."""
    while trace is not None and script is not None and not _is_of(trace.tb_frame, script):
        trace = trace.tb_next
    return trace


def _is_of(frame: FrameType, script: Path) -> bool:
    return Path(frame.f_code.co_filename) == script
