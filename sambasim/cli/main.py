"""The `sambasim` command: finds its subcommands when they are asked for, and turns errors into exit codes."""

import sys
from collections.abc import Callable, Mapping
from importlib import import_module

import click

from sambasim import __version__
from sambasim.cli import streams
from sambasim.cli.failure import exit_code_of, explain

_COMMANDS: Mapping[str, str] = {
    "compile": "sambasim.cli.compile:compile_command",
    "run": "sambasim.cli.run:run_command",
    "app": "sambasim.cli.app:app_command",
    "env": "sambasim.cli.env:env_command",
    "inspect": "sambasim.cli.inspect:inspect_command",
    "compare": "sambasim.cli.compare:compare_command",
    "simulate": "sambasim.cli.simulate:simulate_command",
    "devices": "sambasim.cli.devices:devices_command",
    "report": "sambasim.cli.report:report_command",
    "tilestat": "sambasim.cli.tilestat:tilestat_command",
    "validate": "sambasim.cli.validate:validate_command",
    "verify": "sambasim.cli.verify:verify_command",
    "doctor": "sambasim.cli.doctor:doctor_command",
    "bench": "sambasim.cli.bench:bench_command",
    "demo": "sambasim.cli.demo:demo_command",
    "stand-in": "sambasim.cli.stand_in:stand_in_command",
}
"""By name: where the command is. Its module is imported only when it is needed, so that help is instant."""


class _LazyGroup(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        module, name = _COMMANDS[cmd_name].split(":")
        command: click.Command = getattr(import_module(module), name)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in _COMMANDS and not args[0].startswith("-"):
            import difflib

            guess = difflib.get_close_matches(args[0], _COMMANDS, n=1)
            meant = f"Did you mean {guess[0]!r}?" if guess else f"They are {', '.join(_COMMANDS)}."
            raise click.UsageError(f"No such command {args[0]!r}. {meant}", ctx)
        return super().resolve_command(ctx, args)


def _spell_as_samba_does(token: str) -> str:
    """SambaFlow's scripts write `--reduce_on_rdu` as well as `--reduce-on-rdu`."""
    return token.replace("_", "-")


@click.group(
    cls=_LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"], "token_normalize_func": _spell_as_samba_does},
)
@click.version_option(__version__, prog_name="sambasim")
def sambasim() -> None:
    """SambaNova's SambaFlow workflow, without the hardware.

    \b
    Compile a PyTorch model into a PEF, and train it with two replicas:
      sambasim compile --data-parallel -ws 2
      mpirun -np 2 sambasim run --reduce-on-rdu --pef out/digits/digits.pef
    """


def main() -> None:
    """Run the command line, and exit with the code of the error's family."""
    streams.settle()
    code = _code_of(lambda: sambasim.main(prog_name="sambasim", standalone_mode=False))
    unsaid = _code_of(streams.flush)
    sys.exit(code or unsaid)


def _code_of(work: Callable[[], object]) -> int:
    """The exit code of `work`; what it raised has been told."""
    try:
        code = work()
    except click.exceptions.Exit as error:
        code = error.exit_code
    except BaseException as error:
        if not isinstance(error, SystemExit):
            explain(error)
        elif not isinstance(error.code, int | None):
            print(error.code, file=sys.stderr)
        code = exit_code_of(error)
    return code if isinstance(code, int) else 0
