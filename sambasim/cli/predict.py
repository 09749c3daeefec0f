"""`sambasim plan`, `simulate`, `tilestat`, `devices`, `estimate-memory` and `validate`: predictions for devices."""

import sys
from pathlib import Path
from typing import Any

import click

from sambasim.cli import shared
from sambasim.cli.shared import COUNT, FILE, REPLICAS, answer
from sambasim.errors import say
from sambasim.terminal.output import phases

AMOUNT = click.FloatRange(min=0, min_open=True)

_SET = "For a config or a model: set any field."
_RANKS = "With --here: the most ranks.  [default: twice the cores, at most 4]"
_BATCH = "Samples of one optimizer step.  [default: the batch of the config on each RDU or rank]"
_GOALS = click.Choice(["throughput", "memory", "cost"])
_GOAL = "The most samples/s, the least memory of an RDU, or the fewest RDU-seconds a sample."
_ONLY = (
    "Keep strategies with these values: replicas, stages, tensor, chips, zero, samples, passes, schedule,"
    " recompute, dtype (by default that of the config) or tiles."
)
_TOKENS = (
    "Train on so many tokens, such as 2e12: how long it takes on each number of RDUs, up to --nodes, and its cost."
)
_AMOUNTS = "The same, for so many"
_DAYS = "With one of these: name the fewest RDUs that take so many days at most."
_PRICE = "With one of these: the cost, at so much an RDU-hour or node-hour, such as 3.2/rdu-hour."
_EMIT = "Write the best one as a config for `sambasim compile`, or, as .json, for DeepSpeed."


@click.command("plan")
@shared.pef("subject", "[SUBJECT]")
@shared.overrides(_SET)
@shared.cluster
@click.option("--nodes", type=REPLICAS, help="Nodes of the cluster.  [default: 1]")
@click.option("--here", is_flag=True, help="Plan for this machine: measure its rates, and predict steps under mpirun.")
@click.option("--ranks", type=click.IntRange(min=1), help=_RANKS)
@click.option("--global-batch", type=COUNT, help=_BATCH)
@shared.arch
@click.option("--goal", type=_GOALS, default="throughput", show_default=True, help=_GOAL)
@click.option("--only", multiple=True, metavar="NAME=VALUE,...", help=_ONLY)
@click.option("--tokens", type=AMOUNT, help=_TOKENS)
@click.option("--samples", type=AMOUNT, help=f"{_AMOUNTS} samples.")
@click.option("--epochs", type=AMOUNT, help=f"{_AMOUNTS} epochs of the data.")
@click.option("--days", type=AMOUNT, help=_DAYS)
@click.option("--price", metavar="PRICE/UNIT", help=_PRICE)
@click.option("--explain", is_flag=True, help="Say which terms make the best one faster than the next.")
@click.option("--all", "all_file", type=FILE, help="Write every strategy as CSV, also those that do not fit.")
@click.option("--html", "html_file", type=FILE, help="Write a page with the plot of time and memory.")
@click.option("--emit", type=FILE, help=_EMIT)
@shared.as_json("Print one JSON line.")
def plan_command(
    explain: bool, all_file: Path | None, html_file: Path | None, emit: Path | None, as_json: bool, **asked: Any
) -> None:
    """Choose how to train a model on many RDUs: parallelism, ZeRO, recomputation and tiles.

    SUBJECT is a config (.toml), a model (file.py:Name) or a PEF of one rank. A model is captured on tensors without
    memory, so it can have any size. Every strategy that fills at most the cluster and gives the global batch is
    priced by the device model: all by an estimate, and the best of each shape of the mesh as it is compiled. Nothing
    is measured, and no step of RDUs with pipelines, cut tensors or ZeRO was ever published. In the table, memory is
    that of the fullest RDU; host, bubble and sync are shares of the step of the slowest RDU: in which its host starts
    sections and moves inputs and outputs, it waits for other stages, and sync does not overlap. The rest computes. If
    no strategy fits, the exit code is 1.

    With --here, passes of the model are measured on this machine, and steps of `mpirun -np N sambasim run` predicted.
    With --nodes and --cluster too, for so many machines like this one: `mpirun -hosts a,b -ppn 1 -np 2 sambasim bench
    sync --hosts FILE` measures their link, and writes it as a cluster.

    \b
    Examples:
      sambasim plan configs/char_gpt.toml --global-batch 512
      sambasim plan configs/gpt_13b.toml --cluster sn30-8 --nodes 8 --global-batch 512 --explain
      sambasim plan configs/char_gpt.toml --nodes 2 --only tensor=none --emit plan.toml
      sambasim plan configs/gpt_13b.toml --nodes 16 --global-batch 512 --tokens 3e9 --days 30 --price 3.2/rdu-hour
      sambasim plan configs/char_gpt.toml --here --ranks 2 --explain
      sambasim plan configs/char_gpt.toml --here --cluster hosts.toml --nodes 2
      sambasim plan transformers:GPT2LMHeadModel --set optimizer.name=adamw --global-batch 512
    """
    from sambasim.commands.plan import PlanRequest, emitted, plan_task
    from sambasim.files import check_output_files
    from sambasim.report.page import plan_page
    from sambasim.report.plan import plan_csv, plan_json, plan_report

    request = PlanRequest(emit=emit, **asked)
    files = {"--all": ("the CSV file", all_file), "--html": ("the page", html_file), "--emit": ("the config", emit)}
    check_output_files(files, Path(request.subject))
    task = plan_task(request)
    with shared.kept_imports():
        from sambasim.commands.variants import changes_of, plan

    with phases(quiet=as_json) as on_phase:
        chosen = plan(task, on_phase, with_frontier=html_file is not None)
    answer(as_json, lambda: plan_json(chosen), lambda: plan_report(chosen, explain=explain))
    texts = {file: text(chosen) for file, text in ((all_file, plan_csv), (html_file, plan_page)) if file is not None}
    if emit is not None and chosen.best:
        options = task.options.model_copy(update=changes_of(chosen.best[0].strategy, task.options))
        texts[emit], left_out = emitted(chosen, options, emit, request)
        for what in left_out:
            say(f"{emit} cannot say: {what}", sys.stderr)
    shared.write_all(texts, quiet=as_json)
    if not chosen.best:
        sys.exit(1)


_LEVEL = "The grouping with the shortest predicted step.  [default: as compiled]"
_SIZES = "Batch sizes of a replica.  [default: as compiled]"
_NUMBERS = "Numbers of replicas, such as 1,2,4,1024."
_SECTIONS = "How many of the slowest sections to print."
_TRACE = "Write one step as a trace for Perfetto: the most replicas, the last sync path, the first batch size."


@click.command("simulate")
@shared.pef("subject", "[SUBJECT]")
@shared.overrides(_SET)
@shared.arch
@shared.num_tiles
@click.option("--o0", "level", flag_value="o0", help="One operator per section.")
@click.option("--o1", "level", flag_value="o1", help="Operators of one module share a section, at most 8.")
@click.option("--o3", "level", flag_value="o3", help=_LEVEL)
@click.option("-b", "--batch-size", "batch_sizes", metavar="N,...", help=_SIZES)
@click.option("--replicas", metavar="N,...", default="1", show_default=True, help=_NUMBERS)
@click.option("--sync", default="host,rdu", show_default=True, help="Sync paths of gradients: host, rdu, or both.")
@shared.cluster
@click.option("--sections", type=click.IntRange(min=0), default=10, show_default=True, help=_SECTIONS)
@click.option("--csv", type=FILE, help="Write one row for each number of replicas as CSV.")
@click.option("--plot", type=FILE, help="Draw samples/s over replicas as SVG.")
@click.option("--trace", type=FILE, help=_TRACE)
@shared.as_json("Print one JSON line for each batch size, with every section.")
def simulate_command(
    sections: int, csv: Path | None, plot: Path | None, trace: Path | None, as_json: bool, **asked: Any
) -> None:
    """Predict a training step on a device: its time, its limits, its scaling.

    SUBJECT is a PEF, by path or name, a config (.toml) or a model (file.py:Name). A model is captured on tensors
    without memory, so it can have any size. Nothing is measured. Operators are grouped into sections as `compile` does
    it for this device and these tiles. For another batch size, the times of a PEF are scaled, and a model is captured
    again. Replicas of several ranks keep their sections and, in a PEF, its batch size. `sambasim validate` shows the
    errors of such predictions.

    \b
    Examples:
      sambasim simulate digits
      sambasim simulate digits --arch sn40 --replicas 1,2,4,8,16 --sync rdu
      sambasim simulate configs/char_gpt.toml --batch-size 16,64,256 --num-tiles 4
      sambasim simulate digits --replicas 1,8,64,512 --csv scaling.csv --plot scaling.svg
    """
    from sambasim.commands.question import predicted, question_of
    from sambasim.files import check_output_files
    from sambasim.report.formats import predicted_trace
    from sambasim.report.simulation import csv_rows, scaling_plot, simulation_json, simulation_report
    from sambasim.report.tables import csv_text

    check_output_files({"--csv": ("the CSV file", csv), "--plot": ("the plot", plot), "--trace": ("the trace", trace)})
    question = question_of(**asked)
    sync = question.sync
    with phases(quiet=as_json) as on_phase:
        predictions = predicted(question, on_phase)
    lines = (line for prediction in predictions for line in simulation_json(prediction, sync))
    answer(as_json, lambda: "\n".join(lines), lambda: simulation_report(predictions, sync, sections))
    texts = {}
    if csv is not None:
        texts[csv] = csv_text(csv_rows([step for prediction in predictions for step in prediction.along(sync)]))
    if trace is not None:
        texts[trace] = predicted_trace(max(predictions[0].steps[sync[-1]], key=lambda step: step.mesh.world_size))
    if plot is not None:
        texts[plot] = scaling_plot(predictions, sync)
    shared.write_all(texts, quiet=as_json)


@click.command("tilestat")
@shared.pef("subject", "[SUBJECT]")
@shared.arch
@shared.num_tiles
@shared.as_json("Print one JSON line.")
def tilestat_command(as_json: bool, **asked: Any) -> None:
    """Predict how busy each tile is, in the columns of sntilestat.

    The columns are shares of a step in which a tile executes, loads or waits. SUBJECT is a PEF, a config or a model, as
    for `sambasim simulate`. The prediction is for one replica, without gradient sync. Nothing is measured.

    \b
    Examples:
      sambasim tilestat digits
      sambasim tilestat out/digits/digits.pef --arch sn10 --num-tiles 2
      sambasim tilestat digits --json
    """
    from sambasim.commands.question import predicted_alone, question_of
    from sambasim.report.formats import tilestat, tilestat_view
    from sambasim.report.tables import json_line

    question = question_of(replicas="1", **asked)
    with phases(quiet=as_json) as on_phase:
        prediction = predicted_alone(question, on_phase, one_device=True)
    answer(as_json, lambda: json_line(tilestat(prediction)), lambda: tilestat_view(prediction))


@click.command("devices")
@shared.pef(required=False, text="Take device and tiles from this PEF.")
@click.option("--cluster", metavar="NAME|FILE", help="Show only this cluster.  [default: all]")
@click.option("--arch", metavar="NAME|FILE", help="Show only this device.  [default: all]")
@click.option("--num-tiles", type=int, help="Tiles that one replica has.  [default: as in the PEF, else all of an RDU]")
@click.option("--replicas", type=REPLICAS, help="Number of replicas.  [default: as many as fit on one node]")
@shared.as_json("Print one JSON line, in SI base units.")
def devices_command(pef: str | None, as_json: bool, output_folder: Path, **asked: Any) -> None:
    """List devices and clusters, and where replicas, or the ranks of a PEF, are on RDUs.

    Each figure has its source. If nobody published it, the source is "estimate", or how it was derived. A run with
    `--cluster` has the same placement, on one simulated node for each node of the MPI job.

    \b
    Examples:
      sambasim devices
      sambasim devices --arch sn30 --num-tiles 4 --replicas 20
      sambasim devices --pef digits --cluster farm.toml --json
    """
    from sambasim.commands.question import placed
    from sambasim.pef import locate
    from sambasim.report.devices import inventory_json, inventory_report

    inventory = placed(None if pef is None else locate(pef, output_folder), **asked)
    answer(as_json, lambda: inventory_json(inventory), lambda: inventory_report(inventory))


@click.command("estimate-memory")
@click.argument("subject", metavar="MODEL|CONFIG")
@shared.overrides("Set any field of the config.")
@click.option("-b", "--batch-size", type=COUNT, help="Samples of a pass.  [default: as configured, or 1]")
@click.option("--replicas", type=REPLICAS, default=8, show_default=True, help="Replicas over which ZeRO cuts.")
@shared.as_json("Print one JSON line, in bytes.")
def estimate_memory_command(replicas: int, as_json: bool, **asked: Any) -> None:
    """Estimate the memory of one rank of a training step, by part.

    The first line is the total for the dtype, optimizer, ZeRO and recomputation asked for: as configured, else fp32,
    AdamW, ZeRO 1 and none. Tables show what others would need. No weights are made: MODEL can have any size.

    A class of the package transformers is made from its config, whose fields are model.args. If no data source is
    named, a sample has the length that the config is for, up to 2,048 tokens, or its image size.

    \b
    Examples:
      sambasim estimate-memory transformers:GPT2LMHeadModel
      sambasim estimate-memory transformers:GPT2LMHeadModel --set model.args.n_layer=4 -b 8 --replicas 16
      sambasim estimate-memory transformers:LlamaForCausalLM --set compile.dtype=bf16 --set parallel.zero=3
      sambasim estimate-memory configs/char_gpt.toml --set parallel.recompute=full --json
    """
    from sambasim.commands.question import options_of_estimate
    from sambasim.report.memory import memory_json, memory_report

    options = options_of_estimate(**asked)
    with shared.kept_imports():
        from sambasim.commands.variants import memory_choices

    with phases(quiet=as_json) as on_phase:
        choices = memory_choices(options, replicas, on_phase)
    answer(as_json, lambda: memory_json(*choices), lambda: memory_report(*choices))


@click.command("validate")
@click.argument("words", required=False)
@click.option("--only", metavar="WORDS", help="Only rows with these words in their name, as the argument.")
@shared.as_json("Print one JSON line instead of a table.")
def validate_command(words: str | None, only: str | None, as_json: bool) -> None:
    """Compare predictions with published measurements.

    Each model is captured on tensors without memory and predicted on the device and tiles of the measurement. All rows
    take one to two minutes.

    \b
    Examples:
      sambasim validate
      sambasim validate --only "1 layer"
    """
    from sambasim.commands.question import validated
    from sambasim.report.devices import validation_table

    with phases(quiet=as_json) as on_phase:
        record = validated(only or words, on_phase)
    answer(as_json, record.model_dump_json, lambda: [validation_table(record)])
