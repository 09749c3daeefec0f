"""`sambasim inspect` shows what is in a PEF; `sambasim verify` checks all of it."""

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from sambasim.bounded import printable
from sambasim.cli import shared
from sambasim.terminal.output import phases, show

if TYPE_CHECKING:
    from sambasim.ir.program import Program
    from sambasim.report.tables import Row


@click.command("inspect")
@shared.pef()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON line with all that the tables show, and more.")
@click.option("--section", type=int, metavar="N", help="Show only section N, with all its operators.")
@click.option("--graph", "as_graph", is_flag=True, help="Print the graphs, one operator per line.")
@click.option("--schedule", "as_schedule", is_flag=True, help="Draw the schedule of a pipeline, one line per rank.")
@shared.output_folder
@click.option("--all", "everything", is_flag=True, help="Also show symbols, runtime arguments and options.")
def inspect_command(
    pef: str,
    as_json: bool,
    section: int | None,
    as_graph: bool,
    as_schedule: bool,
    everything: bool,
    output_folder: Path,
) -> None:
    """Show what is in a PEF: sections, operators, symbols, sizes, options.

    PEF is a path, or NAME for OUT/NAME/NAME.pef. The sections are those of the training step, or of the evaluation
    graph if there is no training step.

    \b
    Examples:
      sambasim inspect digits
      sambasim inspect digits --all
      sambasim inspect out/digits/digits.pef --section 0
      sambasim inspect char_gpt --schedule
      sambasim inspect digits --json | python -m json.tool
    """
    from sambasim.errors import OptionError
    from sambasim.ir.printer import format_graph
    from sambasim.pef import locate, peek, read
    from sambasim.report.inspect import contents, inspection

    path = locate(pef, output_folder)
    if as_graph and (as_json or section is not None):
        other = "--json" if as_json else "--section"
        raise OptionError(
            f"--graph and {other} cannot be given together", remedy=f"sambasim inspect {path} {other} ..."
        )
    document = read(path)
    if as_graph:
        graphs = (format_graph(document.program, graph) for graph in document.program.graphs)
        print(printable("\n".join(graphs)), end="")
        return
    if as_schedule:
        _print_schedule(document.program)
        return
    facts = contents(path, peek(path), document)
    if section is not None:
        _print_section(facts, document.program, section, as_json)
    elif as_json:
        print(facts.model_dump_json())
    else:
        show(inspection(facts, everything=everything))


def _print_schedule(program: "Program") -> None:
    from sambasim.errors import OptionError
    from sambasim.ir.schedule import draw

    if program.schedule is None:
        raise OptionError(
            f"{program.name} is no pipeline, so it has no schedule", remedy="sambasim compile --pipeline-stages 2 …"
        )
    print(draw(program.schedule))


def _print_section(facts: "Row", program: "Program", index: int, as_json: bool) -> None:
    from sambasim.errors import OptionError
    from sambasim.ir.printer import format_section
    from sambasim.report.inspect import section_detail

    # The training step comes first if there is one.
    graph, graph_facts = program.graphs[0], facts.graphs[0]
    if not 0 <= index < len(graph.sections):
        raise OptionError(
            f"there is no section {index}: the graph {graph.name} of {facts.name} has {len(graph.sections)} sections",
            where=facts.pef,
            remedy=f"sambasim inspect {facts.pef}",
        )
    _, *lines = format_section(graph, graph.sections[index])
    if as_json:
        fields = graph_facts.sections[index].model_dump() | {"graph": graph.name}
        print(json.dumps(fields | {"nodes": [line.strip() for line in lines]}))
        return
    show(section_detail(graph_facts, graph_facts.sections[index]))
    print(printable("\n".join(lines)))


@click.command("verify")
@shared.pef()
@shared.output_folder
@click.option(
    "--against",
    metavar="MODEL",
    help="Also compare it with this model, package.module:Name or file.py:Name, in eager PyTorch.",
)
@click.option(
    "--check", type=click.IntRange(1), metavar="N", help="Steps of that comparison.  [default: as by compile]"
)
def verify_command(pef: str, output_folder: Path, against: str | None, check: int | None) -> None:
    """Check the format of a PEF, and every byte of its weights; with --against, that it computes what a model does.

    PEF is a path, or NAME for OUT/NAME/NAME.pef. The exit code is 0 if the PEF is valid, and 3 if it breaks a rule of
    the format. One rule needs torch, and is checked by `run`: that operators accept the arguments in the graph.
    With --against, the PEF and the model with its weights run the same steps, which are compared bit for bit; a
    difference is an error with exit code 2.

    \b
    Examples:
      sambasim verify out/digits/digits.pef
      sambasim verify net --against net.py:Net --check 100
    """
    from sambasim.errors import OptionError
    from sambasim.pef import check as checked_file
    from sambasim.pef import locate

    if check is not None and against is None:
        raise OptionError("--check has nothing to compare", remedy="name the model: --against package.module:Name")
    path = locate(pef, output_folder)
    document = checked_file(path)
    print(f"{path} is valid: it follows the rules of the PEF format, and every byte is as it was written")
    print(f"  digest          {document.digest}")
    print(f"  weights sha256  {document.weights_sha256}")
    print(f"  checked         {'no' if document.checked is None else document.checked}")
    if against is not None:
        _compare(path, against, check)


def _compare(path: Path, target: str, steps: int | None) -> None:
    with shared.kept_imports():
        from sambasim.commands.against import verify_against

    with phases(quiet=False) as on_phase:
        proof = verify_against(path, target, steps, on_phase)
    print(f"  against {target}: {proof.checked or 'PyTorch takes no batch of this kind'}")
    for notice in proof.notices:
        print(f"notice: {notice}")
