"""How an error is told: once, on standard error, with what to type next."""

import os
import sys
import traceback
from collections.abc import Sequence

import click

from sambasim.bounded import one_line, printable
from sambasim.errors import Interrupted, SambasimError
from sambasim.runtime.first_word import let_the_first_tell
from sambasim.runtime.launcher import launched_rank

_INTERRUPTED = 130  # 128 + SIGINT, as shells have it


def exit_code_of(error: BaseException) -> int:
    """The exit code of a command that ended with `error`."""
    if isinstance(error, SambasimError | click.ClickException):
        return error.exit_code
    if isinstance(error, KeyboardInterrupt | click.Abort):
        return _INTERRUPTED
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    return 70


def explain(error: BaseException, told_by: str | None = None, beneath: Sequence[tuple[str, str]] = ()) -> None:
    """Print `error`, and beneath it lines with a title each. Of several processes that a launcher started, and that all
    fail before they have found each other, only the first prints, and the others leave it time to. `told_by` names the
    rank and host, where a rank of a job tells its error."""
    if told_by is None and launched_rank(os.environ) != 0:
        if not isinstance(error, Interrupted | KeyboardInterrupt | click.Abort):
            let_the_first_tell(os.environ)
        return
    lines = [f"  {title + ':':<6} {text}" for title, text in beneath]
    told = "\n".join([_words(error, f" ({told_by})" if told_by else ""), *lines])
    print(printable(told), file=sys.stderr)


def _words(error: BaseException, behind: str) -> str:
    if isinstance(error, Interrupted):
        return str(error)
    if isinstance(error, SambasimError):
        return f"error[{error.code}]{behind}: {error}"
    if isinstance(error, click.exceptions.NoArgsIsHelpError):
        return error.format_message()
    if isinstance(error, click.UsageError):
        typed = [word for word in sys.argv[1:2] if not word.startswith("-")]
        command = error.ctx.command_path if error.ctx else " ".join(["sambasim", *typed])
        return f"error[usage]{behind}: {error.format_message()}\n  try:   {command} --help"
    if isinstance(error, click.ClickException):
        return f"error[usage]{behind}: {error.format_message()}"
    if isinstance(error, KeyboardInterrupt | click.Abort):
        return f"interrupted{behind}"
    trace = "".join(traceback.format_exception(error))  # for the report, and only where the mistake is ours
    return (
        f"{trace}error[internal]{behind}: this is a mistake of sambasim's own, please report it: {one_line(str(error))}"
    )
