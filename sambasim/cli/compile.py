"""`sambasim compile`: a PyTorch model becomes a PEF."""

from pathlib import Path

import click

from sambasim.cli.imports import kept_imports
from sambasim.cli.terminal import show


@click.command("compile")
@click.argument("model", required=False)
@click.option("--config", type=click.Path(path_type=Path), help="A TOML file: model, data, loss, optimizer, training.")
@click.option(
    "--set", "overrides", multiple=True, metavar="NAME=VALUE", help="Any field of the config: optimizer.lr=1e-3."
)
@click.option("--pef-name", help="Name of the PEF. Default: the model's.")
@click.option("--output-folder", type=click.Path(path_type=Path), help="Where OUT/NAME/NAME.pef goes. Default: out.")
@click.option("-b", "--batch-size", type=int, help="Samples of one replica in one micro-step. Default: 1.")
@click.option("--grad-accumulation-steps", type=int, help="Micro-steps in one optimizer step.")
@click.option("--data-parallel", is_flag=True, default=None, help="Add gradient groups, REDUCE and GATHER sections.")
@click.option("-ws", "--world-size", "--ws", type=int, help="Smallest number of replicas that may run it. Default: 1.")
@click.option("--inference", is_flag=True, default=None, help="Forward only: no loss, no optimizer.")
@click.option("--o0", "opt_level", flag_value="o0", help="One operator a section.")
@click.option("--o1", "opt_level", flag_value="o1", help="Operators of one module share a section, at most 8.")
@click.option("--o3", "opt_level", flag_value="o3", help="The cut that is predicted fastest. The default.")
@click.option("--arch", type=click.Choice(["sn10", "sn30", "sn40"]), help="The device. Default: sn30.")
@click.option("--num-tiles", type=int, help="Tiles of the device that one replica has. Default: all.")
@click.option(
    "--gradient-groups",
    type=click.Choice(["section", "parameter"]),
    help="What one gradient group holds: the gradients of a backward section (the default), or of one parameter.",
)
@click.option("--json", "json_output", is_flag=True, help="Print one JSON line instead of tables.")
def compile_command(
    model: str | None, config: Path | None, overrides: tuple[str, ...], json_output: bool, **flags: object
) -> None:
    """Compile a PyTorch model into a PEF.

    MODEL is package.module:Name or path/file.py:Name, an nn.Module class or a function that returns one. Without MODEL
    and --config, the built-in quick start is compiled: a small network that classifies real images of digits.

    \b
    Examples:
      sambasim compile --data-parallel -ws 2
      sambasim compile --config configs/char_gpt.toml --set optimizer.lr=3e-4
      sambasim compile net.py:Net --set data.source=net.py:samples --set loss.name=cross_entropy \\
                       --set optimizer.name=adamw -b 32
    """
    from sambasim.options.compile import compile_options

    _refuse_several_ranks()
    options = compile_options(config, model, overrides, flags)

    with kept_imports():
        from sambasim.cli.progress import phases
        from sambasim.compiler.front import compile_from_options
        from sambasim.report.summaries import Compilation, compiled_json, compiled_report

    with phases(quiet=json_output) as hear:
        compiled = compile_from_options(options, hear)
    facts = Compilation(compiled.program, compiled.path, compiled.digest, compiled.notices, compiled.phases_s)
    if json_output:
        print(compiled_json(facts))
    else:
        show(*compiled_report(facts))


def _refuse_several_ranks() -> None:
    """Raises LaunchError under an mpirun of several ranks, which would all write one file."""
    import os

    from sambasim.errors import LaunchError
    from sambasim.runtime.launcher import launcher_size

    launched = launcher_size(os.environ)
    if launched and launched[1] > 1:
        raise LaunchError(
            f"{launched[0]} started {launched[1]} ranks, but a PEF is compiled by one process",
            remedy="sambasim compile … without mpirun; -ws says the smallest number of replicas",
        )
