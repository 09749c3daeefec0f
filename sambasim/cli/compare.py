"""`sambasim compare`: the first difference between two runs, PEFs, checkpoints or files of weights."""

from pathlib import Path

import click

from sambasim.cli import shared
from sambasim.terminal.output import show


@click.command("compare")
@click.argument("a")
@click.argument("b")
@click.option("--steps", metavar="FIRST-LAST", help="For runs and metrics: only these steps, such as 17, 1-40 or 100-.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON line with all differences.")
@shared.output_folder
def compare_command(a: str, b: str, steps: str | None, as_json: bool, output_folder: Path) -> None:
    """Find the first difference between two runs, PEFs, checkpoints or weights.

    A and B are two folders of `run --record-digests`, two PEFs (paths or names), two checkpoints, two .safetensors
    files of weights, or two .jsonl files of `run --metrics`. For runs, it is the first step, section and tensor that
    differ. If the runs have other threads, or another engine, torch or CPU, their bits may differ; the output says so
    first.

    The exit code is 0 if all bits are equal, 1 if something differs or is missing in A or B, and 2 or more for errors.
    A run may start later than the other, as a resumed one does.

    \b
    Examples:
      mpirun -np 2 sambasim run --pef digits --steps 40 --record-digests a
      mpirun -np 2 sambasim run --pef digits --steps 40 --record-digests b --reduce-on-rdu
      sambasim compare a b
      sambasim compare digits other/digits.pef
      sambasim compare saved/step-0000000050 elsewhere/step-0000000050
      sambasim compare before.safetensors after.safetensors --json
    """
    from sambasim.commands.compare import compare
    from sambasim.report.compare import comparison

    found = compare(a, b, steps, output_folder)
    if as_json:
        click.echo(found.model_dump_json())
    else:
        show(*comparison(found))
    if not found.equal:
        click.get_current_context().exit(1)
