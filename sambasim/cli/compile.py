"""`sambasim compile`: a PyTorch model becomes a PEF."""

from pathlib import Path

import click

from sambasim.cli.shared import FILE, PanelCommand, PanelOption, field_options, kept_imports
from sambasim.options.compile import COMPILE_FLAGS, options_and_notes
from sambasim.options.flag import MODEL
from sambasim.terminal.output import phases, show

_FIRST = ("--config", "--data", "--loss", "--optimizer", "--batch-size", "--data-parallel")
_CONFIG = "A TOML file with the model, data, loss, optimizer and training."
_SET = "Set any field of the config, such as optimizer.lr=1e-3."


@click.command("compile", cls=PanelCommand, first=_FIRST)
@click.argument("model", required=False)
@click.option("--config", type=FILE, cls=PanelOption, panel=MODEL, help=_CONFIG)
@click.option("--set", "overrides", multiple=True, metavar="NAME=VALUE", cls=PanelOption, panel=MODEL, help=_SET)
@field_options(COMPILE_FLAGS)
@click.option("-v", "--verbose", is_flag=True, help="Print a table too, with the times of all phases.")
@click.option("--json", "json_output", is_flag=True, help="Print one JSON line instead.")
def compile_command(
    model: str | None,
    config: Path | None,
    overrides: tuple[str, ...],
    verbose: bool,
    json_output: bool,
    **flags: object,
) -> None:
    """Compile a PyTorch model into a PEF.

    MODEL is package.module:Name or path/file.py:Name, an nn.Module class or a function that returns one. Without MODEL
    and --config, the built-in quick start is compiled: a small network that classifies real images of digits.

    \b
    Examples:
      sambasim compile --data-parallel -ws 2
      sambasim compile --config configs/char_gpt.toml --set optimizer.lr=3e-4
      sambasim compile net.py:Net --data net.py:samples --loss cross_entropy --optimizer adamw --lr 3e-4 -b 32
    """
    _check_one_process()
    options, notes = options_and_notes(config, model, overrides, flags)

    with kept_imports():
        from sambasim.commands.compile import compile_named
        from sambasim.report.summaries import Compilation

    with phases(quiet=json_output) as report:
        done = compile_named(options, report)
    compiled, notices = done.compiled, [*done.compiled.notices, *notes]
    facts = compiled.program, compiled.path, compiled.digest, notices, compiled.phases_s, done.checked
    compilation = Compilation(*facts)
    if json_output:
        print(compilation.json())
    else:
        show(*compilation.report(details=verbose))


def _check_one_process() -> None:
    import os

    from sambasim.errors import LaunchError
    from sambasim.runtime.machine.launcher import find_launcher

    launcher = find_launcher(os.environ)
    if launcher and launcher.world_size > 1:
        raise LaunchError(
            f"{launcher.name} started {launcher.world_size} ranks, but a PEF is compiled by one process",
            remedy="sambasim compile … without mpirun; -ws says the smallest number of replicas",
        )
