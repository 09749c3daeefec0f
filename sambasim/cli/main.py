"""The `sambasim` command: imports subcommands when they are needed, and turns errors into exit codes."""

import errno
import os
import signal
import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from types import FrameType
from typing import cast

import click

from sambasim.errors import OptionError, UserError, exit_code, say
from sambasim.terminal.output import report_error, set_up_streams

_PANELS: Mapping[str, Mapping[str, tuple[str, str]]] = {
    "Compile and run": {
        "compile": ("train", "Compile a PyTorch model into a PEF."),
        "run": ("train", "Train the model of a PEF with as many replicas as mpirun starts, or predict with it."),
        "app": ("apps", "Run a SambaFlow app unchanged: sambasim stands in for the package sambaflow."),
        "env": ("apps", "Print shell commands with which launch scripts for the hardware work unchanged."),
        "demo": ("train", "Compile the quick start, train it with both kinds of sync, and compare the two."),
    },
    "Inspect results": {
        "inspect": ("inspect", "Show what is in a PEF: sections, operators, symbols, sizes, options."),
        "verify": (
            "inspect",
            "Check the format of a PEF and every byte of its weights, or that it computes what a model does.",
        ),
        "compare": ("inspect", "Find the first difference between two runs, PEFs, checkpoints or weights."),
        "report": ("inspect", "Write one HTML page, or tables, about a PEF, a model or a run."),
    },
    "Predict": {
        "plan": ("predict", "Choose how to train a model on many RDUs: parallelism, ZeRO, recomputation and tiles."),
        "simulate": ("predict", "Predict a training step on a device: its time, its limits, its scaling."),
        "devices": ("predict", "List devices and clusters, and where replicas, or the ranks of a PEF, are on RDUs."),
        "tilestat": ("predict", "Predict how busy each tile is, in the columns of sntilestat."),
        "estimate-memory": ("predict", "Estimate the memory of one rank of a training step, by part."),
        "validate": ("predict", "Compare predictions with published measurements."),
    },
    "This machine": {
        "doctor": ("machine", "Check MPI, torch, cores, shared memory and compiler."),
        "bench": ("machine", "Measure gradient sync on this machine, or between hosts."),
    },
}
"""By heading of `--help` and name: the module of the command, whose import takes time, and the first sentence of its
help."""

_COMMANDS = {name: command for panel in _PANELS.values() for name, command in panel.items()}
_MODULES = {**{name: module for name, (module, _) in _COMMANDS.items()}, "stand-in": "apps"}


class _LazyGroup(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _MODULES:
            return None
        from sambasim.cli.shared import kept_imports

        with kept_imports():
            module = import_module(f"sambasim.cli.{_MODULES[cmd_name]}")
        return cast("click.Command", getattr(module, f"{cmd_name.replace('-', '_')}_command"))

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for title, panel in _PANELS.items():
            with formatter.section(title):
                formatter.write_dl([(name, text) for name, (_, text) in panel.items()])

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        for word in args:
            if any("\ud800" <= letter <= "\udfff" for letter in word):
                what = f"{word!a} is not UTF-8, as the names in records and safetensors files are"
                raise _UsageError(what, remedy="rename the file or the folder")
        return super().parse_args(ctx, args)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in _MODULES and not args[0].startswith("-"):
            import difflib

            guess = difflib.get_close_matches(args[0], _COMMANDS, n=1)
            meant = f"Did you mean {guess[0]!r}?" if guess else f"They are {', '.join(_COMMANDS)}."
            raise click.UsageError(f"No such command {args[0]!r}. {meant}", ctx)
        return super().resolve_command(ctx, args)


def _print_versions(ctx: click.Context, parameter: click.Parameter, asked: bool) -> None:
    """What a report of a bug needs: sambasim, Python, torch, MPI and CPU."""
    if not asked:
        return
    from sambasim.cli.machine import versions

    for name, value in versions().items():
        say(f"{name:<9}{value}")
    ctx.exit()


@click.group(
    cls=_LazyGroup,
    # Scripts for SambaFlow write `--reduce_on_rdu` as well as `--reduce-on-rdu`.
    context_settings={
        "help_option_names": ["-h", "--help"],
        "token_normalize_func": lambda token: token.replace("_", "-"),
    },
)
@click.option(
    "--version", is_flag=True, is_eager=True, expose_value=False, callback=_print_versions, help="Show the versions."
)
def sambasim() -> None:
    """SambaNova's SambaFlow workflow, without the hardware.

    \b
    Compile a PyTorch model into a PEF, and train it with two replicas:
      sambasim compile --data-parallel -ws 2
      mpirun -np 2 sambasim run --reduce-on-rdu --pef out/digits/digits.pef

    
    Completion of commands, options and the names of PEFs, for bash; zsh and fish have zsh_source and fish_source:
      eval "$(_SAMBASIM_COMPLETE=bash_source sambasim)"
    """


def main() -> None:
    """Run the command line, and exit with the exit code of the error, if there is one."""
    set_up_streams()
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else the command is to ignore it
        signal.signal(signal.SIGINT, _interrupt)
    code = _code_of(lambda: sambasim.main(prog_name="sambasim", standalone_mode=False))
    flush_codes = [_code_of(lambda: sys.stdout.flush()), _code_of(lambda: sys.stderr.flush())]
    sys.exit(code or max(flush_codes))


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Raises KeyboardInterrupt; during the import of torch, which would turn that into errors of its own, ends."""
    if getattr(getattr(sys.modules.get("torch"), "__spec__", None), "_initializing", False):
        report_error(KeyboardInterrupt())
        os._exit(exit_code(KeyboardInterrupt()))
    signal.default_int_handler(number, frame)


def _code_of(work: Callable[[], object]) -> int:
    """Run `work`, print its error if it fails, and return the exit code."""
    try:
        code = work()
    except click.exceptions.Exit as error:
        code = error.exit_code
    except BaseException as error:
        error = _of_click(error)
        if not isinstance(error, SystemExit):
            report_error(error)
        elif not isinstance(error.code, int | None):
            say(str(error.code), sys.stderr)
        code = exit_code(error)
    return code if isinstance(code, int) else 0


class _UsageError(UserError, code="usage"):
    """What was typed is no command of sambasim."""


def _of_click(error: BaseException) -> BaseException:
    """An error of click, or about a path that was typed, as one of sambasim; others as they are."""
    match error:
        case OSError(errno=errno.EACCES | errno.ENAMETOOLONG, filename=str(path)):  # Path.exists and others raise it
            return OptionError(f"{path} cannot be reached: {error.strerror}", remedy="check it: namei -l PATH")
        case click.Abort():
            return KeyboardInterrupt()
        case click.exceptions.NoArgsIsHelpError():
            say(error.format_message(), sys.stderr)
            return SystemExit(error.exit_code)
        case click.UsageError():
            typed = [word for word in sys.argv[1:2] if not word.startswith("-")]
            command = error.ctx.command_path if error.ctx else " ".join(["sambasim", *typed])
            return _UsageError(error.format_message(), remedy=f"{command} --help")
        case click.ClickException():
            return _UsageError(error.format_message())
    return error
