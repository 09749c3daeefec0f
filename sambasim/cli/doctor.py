"""`sambasim doctor`: what this machine has for a run, and what would be wrong."""

from typing import TYPE_CHECKING

import click

from sambasim.cli.terminal import show
from sambasim.errors import MachineError

if TYPE_CHECKING:
    from sambasim.cli.examination import Examination


@click.command("doctor")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of the table.")
@click.pass_context
def doctor_command(context: click.Context, as_json: bool) -> None:
    """Show MPI, torch, cores, shared memory and compiler, and what would stop a run.

    The exit code is not 0 if a run with several replicas would fail.
    """
    from sambasim.cli.examination import examine

    examination = examine()
    if as_json:
        print(examination.model_dump_json(indent=2))
    else:
        _show(examination)
    context.exit(MachineError.exit_code if examination.stops_a_run else 0)


def _show(examination: "Examination") -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True, style="bold")
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for finding in examination.findings:
        mark = Text("STOP", "red") if finding.stops_a_run else Text("note", "yellow") if finding.trouble else "ok"
        table.add_row(finding.name, mark, finding.value)
        if finding.trouble:
            table.add_row("", "", finding.trouble)
        if finding.remedy:
            table.add_row("", "", f"try: {finding.remedy}")
    verdict = "Something above would stop a run." if examination.stops_a_run else "Nothing here would stop a run."
    show(table, "", verdict)
