"""How an error is reported: once, on standard error, with what to type next."""

import os
import sys
import time
import traceback
from collections.abc import Sequence

import click

from sambasim.bounded import one_line, printable
from sambasim.errors import Interrupted, SambasimError, exit_code
from sambasim.runtime.launcher import find_launcher


def exit_code_of(error: BaseException) -> int:
    """The exit code of a command that ended with `error`."""
    if isinstance(error, click.ClickException):
        return error.exit_code
    return exit_code(KeyboardInterrupt() if isinstance(error, click.Abort) else error, other=70)


def report_error(error: BaseException, reporter: str | None = None, details: Sequence[tuple[str, str]] = ()) -> None:
    """Print `error`, and below it `details`, each a title and a text.

    reporter: the rank and host that report; None before the ranks have found each other. Then all fail, and only rank 0
        prints; the others wait until it has.
    """
    launcher = find_launcher(os.environ)
    if reporter is None and launcher is not None and launcher.rank > 0:
        if not isinstance(error, Interrupted | KeyboardInterrupt | click.Abort):
            time.sleep(launcher.wait_for_report_s)
        return
    lines = [f"  {title + ':':<6} {text}" for title, text in details]
    print(printable("\n".join([_text(error, f" ({reporter})" if reporter else ""), *lines])), file=sys.stderr)


def _text(error: BaseException, reporter: str) -> str:
    if isinstance(error, Interrupted):
        return str(error)
    if isinstance(error, SambasimError):
        return f"error[{error.code}]{reporter}: {error}"
    if isinstance(error, click.exceptions.NoArgsIsHelpError):
        return error.format_message()
    if isinstance(error, click.UsageError):
        typed = [word for word in sys.argv[1:2] if not word.startswith("-")]
        command = error.ctx.command_path if error.ctx else " ".join(["sambasim", *typed])
        return f"error[usage]{reporter}: {error.format_message()}\n  try:   {command} --help"
    if isinstance(error, click.ClickException):
        return f"error[usage]{reporter}: {error.format_message()}"
    if isinstance(error, KeyboardInterrupt | click.Abort):
        return f"interrupted{reporter}"
    trace = "".join(traceback.format_exception(error))
    return f"{trace}error[internal]{reporter}: this is a bug in sambasim, please report it: {one_line(str(error))}"
