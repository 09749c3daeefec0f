"""`sambasim plan`: which parallelism a model should use on a cluster."""

import sys
from pathlib import Path
from typing import Any

import click

from sambasim.bounded import LARGEST_COUNT, MOST_REPLICAS
from sambasim.cli import shared
from sambasim.errors import OptionError
from sambasim.terminal.output import phases, show


@click.command("plan")
@shared.pef("subject", "[SUBJECT]")
@shared.overrides("For a config or a model: set any field.")
@shared.cluster
@click.option("--nodes", type=click.IntRange(min=1, max=MOST_REPLICAS), help="Nodes of the cluster.  [default: 1]")
@click.option("--here", is_flag=True, help="Plan for this machine: measure its rates, and predict steps under mpirun.")
@click.option(
    "--ranks", type=click.IntRange(min=1), help="With --here: the most ranks.  [default: twice the cores, at most 4]"
)
@click.option(
    "--global-batch",
    type=click.IntRange(min=1, max=LARGEST_COUNT),
    help="Samples of one optimizer step.  [default: the batch of the config on each RDU or rank]",
)
@shared.arch
@click.option(
    "--goal",
    type=click.Choice(["throughput", "memory", "cost"]),
    default="throughput",
    show_default=True,
    help="The most samples/s, the least memory of an RDU, or the fewest RDU-seconds a sample.",
)
@click.option(
    "--only",
    multiple=True,
    metavar="NAME=VALUE,...",
    help="Keep strategies with these values: replicas, stages, tensor, chips, zero, samples, passes, schedule,"
    " recompute, dtype (by default that of the config) or tiles.",
)
@click.option("--explain", is_flag=True, help="Say which terms make the best one faster than the next.")
@click.option("--all", "all_file", type=shared.FILE, help="Write every strategy as CSV, also those that do not fit.")
@click.option("--html", "html_file", type=shared.FILE, help="Write a page with the plot of time and memory.")
@click.option(
    "--emit",
    type=shared.FILE,
    help="Write the best one as a config for `sambasim compile --config`, or, as .json, for DeepSpeed.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON line.")
@shared.output_folder
def plan_command(
    explain: bool, all_file: Path | None, html_file: Path | None, emit: Path | None, as_json: bool, **asked: Any
) -> None:
    """Choose how to train a model on many RDUs: data, pipeline and tensor parallelism, ZeRO, recomputation, tiles.

    SUBJECT is a config (.toml), a model (file.py:Name) or a PEF of one rank. A model is captured on tensors without
    memory, so it can have any size. Every strategy that fills at most the cluster and gives the global batch is
    priced by the device model: all by an estimate, and the best of each shape of the mesh as it is compiled. Nothing
    is measured, and no step of RDUs with pipelines, cut tensors or ZeRO was ever published. In the table, memory is
    that of the fullest RDU; host is the share of the step in which it starts sections and moves inputs and outputs,
    bubble the share of the step in which RDUs wait for other stages, on average, and sync the share of sync that does
    not overlap. If no strategy fits, the exit code is 1.

    With --here, passes of the model are measured on this machine, and steps of `mpirun -np N sambasim run` predicted.

    \b
    Examples:
      sambasim plan configs/char_gpt.toml --global-batch 512
      sambasim plan configs/gpt_13b.toml --cluster sn30-8 --nodes 8 --global-batch 512 --explain
      sambasim plan configs/char_gpt.toml --nodes 2 --only tensor=none --emit plan.toml
      sambasim plan configs/char_gpt.toml --here --ranks 2 --explain
      sambasim plan transformers:GPT2LMHeadModel --set optimizer.name=adamw --global-batch 512
    """
    from sambasim.commands.outputs import check_output_file
    from sambasim.commands.plan import PlanRequest, emitted, plan_task
    from sambasim.report.page import plan_page
    from sambasim.report.plan import plan_csv, plan_json, plan_report

    request = PlanRequest(emit=emit, **asked)
    files = {"--all": (all_file, "the CSV file"), "--html": (html_file, "the page"), "--emit": (emit, "the config")}
    for flag, (file, what) in files.items():
        if file is not None:
            check_output_file(file, what, f"{flag} FILE")
            others = [Path(request.subject), *(other for name, (other, _) in files.items() if name != flag and other)]
            if file in others:
                raise OptionError(f"{flag} {file} would overwrite another file of this command", remedy="another name")
    task = plan_task(request)
    with shared.kept_imports():
        from sambasim.commands.planner import options_of_best, plan

    with phases(quiet=as_json) as on_phase:
        found = plan(task, on_phase, with_frontier=html_file is not None)
    if as_json:
        print(plan_json(found))
    else:
        show(*plan_report(found, explain=explain))
    texts: dict[Path, str] = {}
    if all_file is not None:
        texts[all_file] = plan_csv(found)
    if html_file is not None:
        texts[html_file] = plan_page(found)
    if emit is not None and found.best:
        texts[emit], left_out = emitted(found, options_of_best(found, task.options), emit, request)
        for what in left_out:
            print(f"{emit} cannot say: {what}", file=sys.stderr)
    shared.write_all(texts, quiet=as_json)
    if not found.best:
        sys.exit(1)
