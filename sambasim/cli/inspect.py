"""`sambasim inspect`, `verify`, `compare` and `report`: what is in a PEF, and what came out of runs."""

import json
from pathlib import Path
from typing import Any

import click

from sambasim.cli import shared
from sambasim.errors import IncompleteError, OptionError, say
from sambasim.terminal.output import phases, report_error


@click.command("inspect")
@shared.pef()
@shared.as_json("Print one JSON line with all that the tables show, and more.")
@click.option("--section", type=int, metavar="N", help="Show only section N, with all its operators.")
@click.option("--graph", "as_graph", is_flag=True, help="Print the graphs, one operator per line.")
@click.option("--schedule", "as_schedule", is_flag=True, help="Draw the schedule of a pipeline, one line per rank.")
@click.option("--all", "whole", is_flag=True, help="Also show symbols, runtime arguments and options.")
def inspect_command(
    pef: str, as_json: bool, section: int | None, as_graph: bool, as_schedule: bool, whole: bool, output_folder: Path
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
    from sambasim.ir.graph import format_graph, format_section
    from sambasim.ir.schedule import draw
    from sambasim.pef import locate, read
    from sambasim.report.inspect import contents, inspection, section_detail

    path = locate(pef, output_folder)
    if as_graph and (as_json or section is not None):
        other = "--json" if as_json else "--section"
        what = f"--graph and {other} cannot be given together"
        raise OptionError(what, remedy=f"sambasim inspect {path} {other} ...")
    document = read(path)
    program = document.program
    if as_graph:
        every = [(graph, one.program.symbols) for one in document.graphs.values() for graph in one.program.graphs]
        every += [(update, {}) for one in document.graphs.values() for update in one.program.updates]
        return say("\n".join(format_graph(*pair) for pair in every).removesuffix("\n"))
    if as_schedule and program.schedule is None:
        what = f"{program.name} is no pipeline, so it has no schedule"
        raise OptionError(what, remedy="sambasim compile --pipeline-stages 2 …")
    if as_schedule and program.schedule is not None:
        return say(draw(program.schedule))
    facts = contents(path, document)
    if section is None:
        return shared.answer(as_json, facts.model_dump_json, lambda: [inspection(facts, everything=whole)])
    graph, graph_facts = program.graphs[0], facts.graphs[0]  # the training step, if there is one; of several the first
    if not 0 <= section < len(graph.sections):
        having = f"the graph {graph.name} of {facts.name} has {len(graph.sections)} sections"
        what = f"there is no section {section}: {having}"
        raise OptionError(what, where=facts.pef, remedy=f"sambasim inspect {facts.pef}")
    _, *lines = format_section(graph, graph.sections[section])
    own = graph_facts.sections[section]
    record = own.model_dump() | {"graph": graph.name, "nodes": [line.strip() for line in lines]}
    shared.answer(as_json, lambda: json.dumps(record), lambda: [section_detail(graph_facts, own), "\n".join(lines)])


_AGAINST = "Also compare it with this model, package.module:Name or file.py:Name, in eager PyTorch."
_CHECK = "Steps of that comparison.  [default: as by compile]"


@click.command("verify")
@shared.pef()
@click.option("--against", metavar="MODEL", help=_AGAINST)
@click.option("--check", type=click.IntRange(1), metavar="N", help=_CHECK)
def verify_command(pef: str, output_folder: Path, against: str | None, check: int | None) -> None:
    """Check the format of a PEF and every byte of its weights, or that it computes what a model does.

    PEF is a path, or NAME for OUT/NAME/NAME.pef. The exit code is 0 if the PEF is valid, and 3 if it breaks a rule of
    the format. One rule needs torch, and is checked by `run`: that operators accept the arguments in the graph.
    With --against, the PEF and the model with its weights run the same steps, which are compared bit for bit; a
    difference is an error with exit code 2.

    \b
    Examples:
      sambasim verify out/digits/digits.pef
      sambasim verify net --against net.py:Net --check 100
    """
    from sambasim.pef import check as checked_file
    from sambasim.pef import locate

    if check is not None and against is None:
        raise OptionError("--check has nothing to compare", remedy="name the model: --against package.module:Name")
    path = locate(pef, output_folder)
    document = checked_file(path)
    say(f"{path} is valid: it follows the rules of the PEF format, and every byte is as it was written")
    say(f"  digest          {document.digest}")
    say(f"  weights sha256  {document.weights_sha256}")
    say(f"  checked         {document.first.checked or 'no'}")
    if against is None:
        return
    with shared.kept_imports():
        from sambasim.commands.compile import verify_against

    with phases(quiet=False) as on_phase:
        proof = verify_against(path, against, check, on_phase)
    say(f"  against {against}: {proof.checked or 'PyTorch takes no batch of this kind'}")
    for notice in proof.notices:
        say(f"notice: {notice}")


@click.command("compare")
@click.argument("a")
@click.argument("b")
@click.option("--steps", metavar="FIRST-LAST", help="For runs and metrics: only these steps, such as 17, 1-40 or 100-.")
@shared.as_json("Print one JSON line with all differences.")
@shared.output_folder()
def compare_command(as_json: bool, **asked: Any) -> None:
    """Find the first difference between two runs, PEFs, checkpoints or weights.

    A and B are two folders of `run --record-digests`, two PEFs (paths or names), two checkpoints, two .safetensors
    files of weights, two .pt files of torch.save, as apps write, or two .jsonl files of `run --metrics`. For runs, it
    is the first step, section and tensor that differ. If the runs have other threads, or another engine, torch or CPU,
    their bits may differ; the output says so first.

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
    from sambasim.commands.results import compare
    from sambasim.report.compare import comparison

    try:
        compared = compare(**asked)
    except IncompleteError as error:
        report_error(error)
        click.get_current_context().exit(1)
    shared.answer(as_json, compared.model_dump_json, lambda: comparison(compared))
    if not compared.equal:
        click.get_current_context().exit(1)


_TABLES = "Write section_report.csv and summary.json here, as SambaTune names them."


@click.command("report")
@shared.pef("subject", "[PEF|MODEL|RUN.jsonl]")
@click.option("--html", "page", type=shared.FILE, metavar="FILE", help="Write the page here.")
@click.option("--tables", type=shared.FILE, metavar="FOLDER", help=_TABLES)
@click.option("--run", type=shared.FILE, metavar="RUN.jsonl", help="Add the measurements of this run of the PEF.")
@shared.arch
@shared.num_tiles
@shared.cluster
@click.option("--replicas", metavar="N,N,...", help="Replicas of the scaling curves.  [default: 1,2,4,...,1024]")
def report_command(
    subject: str, page: Path | None, tables: Path | None, run: Path | None, output_folder: Path, **asked: Any
) -> None:
    """Write one HTML page, or tables, about a PEF, a model or a run.

    For a PEF, a config (.toml) or a model (file.py:Name), everything is predicted: the timeline of a step, its sections
    and their limits, pipelines, memory over time, scaling, and the operators with their source lines; for replicas
    of several ranks their schedule, what each rank holds and where, and bytes by link. For a RUN.jsonl of
    `sambasim run --metrics`, everything is measured: its curves and its summary. The page needs no network.

    \b
    Examples:
      sambasim report digits --html digits.html
      sambasim report digits --html digits.html --arch sn40 --replicas 1,8,64
      sambasim report run.jsonl --html run.html
      sambasim report digits --run run.jsonl --html digits.html
      sambasim report configs/gpt_13b.toml --html gpt_13b.html
      sambasim report digits --tables out/digits
    """
    from sambasim.commands.results import measured, predicted_texts

    if subject.endswith((".jsonl", ".csv")):
        of_a_pef = {"tables": tables, "run": run, **asked}
        flags = [f"--{name.replace('_', '-')}" for name, value in of_a_pef.items() if value is not None]
        return shared.write_all(measured(subject, page, flags))

    from sambasim.commands.question import question_of

    question = question_of(subject, output_folder=output_folder, **asked)
    with phases(quiet=False) as on_phase:
        texts = predicted_texts(question, page, tables, run, on_phase)
    shared.write_all(texts)
