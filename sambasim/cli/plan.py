"""`sambasim plan`: which parallelism a model should use on a cluster."""

import gc
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

import click

from sambasim.bounded import shortened
from sambasim.cli import shared
from sambasim.cli.plan_subject import (
    check_place,
    check_subject,
    plan_this_machine,
    programs_of,
    spaces_here,
    subject_of,
)
from sambasim.cli.terminal import phases, show
from sambasim.options.flags import LARGEST_COUNT, MOST_REPLICAS

if TYPE_CHECKING:
    from sambasim.hardware.spec import ClusterSpec, DeviceSpec
    from sambasim.options.compile import CompileOptions
    from sambasim.simulation.planning.search import Plan
    from sambasim.simulation.planning.strategy import Space


@click.command("plan")
@click.argument("subject", shell_complete=shared.pef_names)
@click.option("--set", "overrides", multiple=True, metavar="NAME=VALUE", help="For a config or a model: set any field.")
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
    subject: str,
    overrides: tuple[str, ...],
    cluster: str | None,
    nodes: int | None,
    here: bool,
    ranks: int | None,
    global_batch: int | None,
    arch: str | None,
    goal: str,
    only: tuple[str, ...],
    explain: bool,
    all_file: Path | None,
    html_file: Path | None,
    emit: Path | None,
    as_json: bool,
    output_folder: Path,
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
    from sambasim.errors import OptionError
    from sambasim.hardware.budget import load_calibration
    from sambasim.hardware.spec import ALIASES, load_cluster, load_device
    from sambasim.options.load import check_output_file
    from sambasim.report.page import plan_page
    from sambasim.report.plan import plan_csv, plan_json, plan_report
    from sambasim.simulation.planning.search import Goal, Planner

    files = {"--all": (all_file, "the CSV file"), "--html": (html_file, "the page"), "--emit": (emit, "the config")}
    for flag, (file, what) in files.items():
        if file is not None:
            check_output_file(file, what, f"{flag} FILE")
            others = [Path(subject), *(other for name, (other, _) in files.items() if name != flag and other)]
            if file in others:
                raise OptionError(f"{flag} {file} would overwrite another file of this command", remedy="another name")
    if emit is not None and emit.suffix not in (".toml", ".json"):
        what = f"--emit {emit}: a config ends in .toml, or, for DeepSpeed, in .json"
        raise OptionError(what, remedy=f"--emit {emit.with_suffix('.toml')}")
    wanted = _only(only)
    check_place(subject, cluster, nodes, arch, ranks, here=here)
    arch = next((alias for alias, name in ALIASES.items() if name == arch), arch)
    for load, name in ((load_device, arch), (load_cluster, cluster)):
        if name is not None:
            load(name)  # raises an error before the model is captured
    options, program = subject_of(subject, overrides, output_folder, arch)
    check_subject(options, wanted, emitted=emit is not None, of_pef=program is not None)
    device = load_device(options.arch)
    where = load_cluster(cluster or device.cluster)
    if here:
        spaces = spaces_here(options, ranks, global_batch, wanted)
    else:
        spaces = [_space(options, device, where, nodes or 1, global_batch, wanted)]
    programs = programs_of(options, program, wanted, quiet=as_json)
    with phases(quiet=as_json) as report:
        if here:
            found = plan_this_machine(options, programs.program, spaces, Goal(goal), report)
        else:
            (space,) = spaces
            planner = Planner(programs, device, where, options.opt_level, load_calibration())
            with _without_collections():
                found = planner.plan(options.name, space, Goal(goal), on_phase=report)
                if html_file is not None:
                    report("compile and price the frontier of time and memory")
                    found = planner.with_priced_frontier(found)
    if as_json:
        print(plan_json(found))
    else:
        show(*plan_report(found, explain=explain))
    texts: dict[Path, str] = {}
    if all_file is not None:
        texts[all_file] = plan_csv(found)
    if html_file is not None:
        texts[html_file] = plan_page(found)
    shared.write_all(texts, quiet=as_json)
    if emit is not None and found.best:
        shared.write_all({emit: _emitted(found, options, subject, emit, cluster)}, quiet=as_json)
    if not found.best:
        sys.exit(1)


def _only(given: Sequence[str]) -> Mapping[str, Sequence[object]]:
    """The values that `--only` allows, by field of a strategy. Raises OptionError."""
    from sambasim.errors import OptionError
    from sambasim.options.load import did_you_mean, nearest
    from sambasim.simulation.planning.strategy import VALUES, Strategy

    kinds = {one.name: one for one in fields(Strategy)}
    found: dict[str, Sequence[object]] = {}
    for text in given:
        name, _, values = text.partition("=")
        if name not in kinds:
            raise OptionError(
                f"--only {text}: a strategy has no {name!r}",
                remedy=did_you_mean(nearest(name, kinds)) or f"one of {', '.join(kinds)}",
            )
        parts = [part.strip() for part in values.split(",")]
        known = VALUES.get(name)
        if known is not None:
            if wrong := [part for part in parts if part not in known]:
                meant = nearest(wrong[0], known) or known[0]
                raise OptionError(
                    f"--only {text}: {wrong[0]!r} is none of {', '.join(known)}", remedy=f"--only {name}={meant}"
                )
        elif "=" in values:
            each = shortened(text.replace(",", " --only "))
            raise OptionError(f"--only {shortened(text)} names several fields", remedy=f"--only {each}")
        elif not all(part.isdecimal() and len(part) < _DIGITS for part in parts):
            raise OptionError(f"--only {shortened(text)}: {name} takes whole numbers", remedy=f"--only {name}=1,2")
        allowed = parts if known is not None else [int(part) for part in parts]
        found[name] = list(dict.fromkeys([*found.get(name, ()), *allowed]))
    return found


_DIGITS = 12
"""Of a number in `--only`: longer ones name no strategy."""


@contextmanager
def _without_collections() -> Iterator[None]:
    """No garbage collections: a plan makes millions of objects, and no cycles."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _space(
    options: "CompileOptions",
    device: "DeviceSpec",
    cluster: "ClusterSpec",
    nodes: int,
    global_batch: int | None,
    only: Mapping[str, Sequence[object]],
) -> "Space":
    """Raises OptionError if it has no strategy."""
    from sambasim.errors import OptionError
    from sambasim.simulation.planning.strategy import Space, divisors

    if cluster.nodes is not None and nodes > cluster.nodes:
        raise OptionError(f"--nodes {nodes}, and {cluster.name} has {cluster.nodes}", remedy=f"--nodes {cluster.nodes}")
    rdus = nodes * cluster.rdus_per_node
    of_an_rdu = options.training.batch_size * options.training.accumulation_steps
    dtypes = only.get("dtype", (options.dtype,))
    space = Space(
        rdus=rdus,
        rdus_per_node=cluster.rdus_per_node,
        global_batch=global_batch or rdus * of_an_rdu,
        dtypes=tuple(map(str, dtypes)),
        tiles=() if device.tiles is None else tuple(divisors(device.tiles)[:-1]),
        tiles_of_rdu=device.tiles,
        only=only,
    )
    if next(space.strategies(), None) is None:
        raise OptionError(
            f"--only leaves no strategy with a global batch of {space.global_batch:,} on {rdus} RDUs",
            remedy="other values, or another --global-batch: replicas × chips × samples × passes",
        )
    return space


def _emitted(plan: "Plan", options: "CompileOptions", subject: str, file: Path, cluster: str | None) -> str:
    """The best strategy of `plan` as a config, of DeepSpeed if `file` is JSON."""
    from sambasim.commands.variants import changes_of
    from sambasim.options.compile import config_text
    from sambasim.options.deepspeed_written import as_deepspeed, beyond_deepspeed
    from sambasim.report.plan import headline

    strategy = plan.best[0].strategy
    chosen = options.model_copy(update=changes_of(strategy, options))
    if file.suffix == ".json":
        for left_out in beyond_deepspeed(chosen):
            print(f"{file} cannot say: {left_out}", file=sys.stderr)
        return json.dumps(as_deepspeed(chosen), indent=2) + "\n"
    sync = "" if strategy.by_host or strategy.copies == 1 else "--reduce-on-rdu "
    launcher = f"mpirun -np {strategy.ranks} " if strategy.ranks > 1 else ""
    commands = [f"compile --config {file}", f"run {sync}--pef {options.name}"]
    if plan.device == "RDU":
        path = "host" if strategy.by_host else "rdu"
        flags = f" --replicas {strategy.replicas} --sync {path}" if strategy.copies > 1 else ""
        commands.append(f"simulate {file}{flags}{f' --cluster {cluster}' if cluster else ''}")
    lines = [f"  {launcher * one.startswith('run')}sambasim {one}" for one in commands]
    return config_text(chosen, "\n".join([f"Planned from {subject}: {headline(plan)}", "", *lines]))
