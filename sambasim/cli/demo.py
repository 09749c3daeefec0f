"""`sambasim demo`: the quick start, end to end, by the command lines that a user would type.

It compiles the quick start for two replicas, trains it with gradient sync on the device and again through the host, and
lays the two summaries side by side: same bits, other bytes moved.
"""

from pathlib import Path

import click

from sambasim.cli.terminal import show


@click.command("demo")
@click.option(
    "--output-folder",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("out"),
    show_default=True,
    help="Where the PEF and the metrics go.",
)
@click.option("--smoke", is_flag=True, help="Train three steps only, and ask for equal weights but no accuracy.")
@click.pass_context
def demo_command(context: click.Context, output_folder: Path, smoke: bool) -> None:
    """Compile the quick start, train it twice under mpirun, and compare device sync with host sync.

    The exit code is not 0 if the two differ in a bit of their weights, or learn too little.
    """
    from rich.text import Text

    from sambasim.cli import demonstration

    summaries = demonstration.demonstrate(output_folder, smoke=smoke, execute=demonstration.execute_here)
    show(demonstration.side_by_side(summaries))
    complaints = demonstration.judge(summaries, least_accuracy=None if smoke else demonstration.LEAST_ACCURACY)
    for complaint in complaints:
        show(Text.assemble(("FAILED", "red"), f" {complaint}"))
    if not complaints:
        show(Text.assemble(("PASSED", "green"), " device sync and host sync gave the same weights, bit for bit."))
    context.exit(1 if complaints else 0)
