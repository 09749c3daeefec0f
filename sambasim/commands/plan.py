"""What `sambasim plan` is asked, checked before anything is captured; and the config of the best strategy."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import get_args

from sambasim.bounded import shortened
from sambasim.commands.question import is_model, options_of_model
from sambasim.errors import OptionError
from sambasim.hardware.spec import ALIASES, ClusterSpec, DeviceSpec, load_cluster, load_device
from sambasim.ir.program import Program
from sambasim.options.base import did_you_mean, nearest
from sambasim.options.compile import BuildOptions, CompileOptions, ParallelOptions, options_in_python
from sambasim.options.emit import as_deepspeed, beyond_deepspeed, config_text
from sambasim.pef import locate, read
from sambasim.report.plan import headline
from sambasim.simulation.planning.search import Plan
from sambasim.simulation.planning.strategy import VALUES, Space, Strategy, divisors
from sambasim.units import counted

_DIGITS = 12
"""Of a number in `--only`: longer ones name no strategy."""

_MOST_RANKS = 4


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """The arguments of `plan`. `emit`: the file for the best strategy."""

    subject: str
    output_folder: Path
    overrides: Sequence[str]
    cluster: str | None
    nodes: int | None
    here: bool
    ranks: int | None
    global_batch: int | None
    arch: str | None
    goal: str
    only: Sequence[str]
    emit: Path | None


@dataclass(frozen=True, slots=True)
class PlanTask:
    """Options, the program of a PEF, and the strategies to price: of 1, 2, … ranks of this machine, or of RDUs."""

    asked: PlanRequest
    options: CompileOptions
    program: Program | None
    device: DeviceSpec
    cluster: ClusterSpec
    spaces: Sequence[Space]


def plan_task(asked: PlanRequest) -> PlanTask:
    """Raises OptionError for what cannot be planned, or cannot be written as a config."""
    emit = asked.emit
    if emit is not None and emit.suffix not in (".toml", ".json"):
        what = f"--emit {emit}: a config ends in .toml, or, for DeepSpeed, in .json"
        raise OptionError(what, remedy=f"--emit {emit.with_suffix('.toml')}")
    only = _only(asked.only)
    _check_place(asked)
    arch = next((alias for alias, name in ALIASES.items() if name == asked.arch), asked.arch)
    for load, name in ((load_device, arch), (load_cluster, asked.cluster)):
        if name is not None:
            load(name)  # a wrong name is the first error
    options, program = _options(asked)
    options = options.model_copy(update={"arch": arch or options.arch})
    dtypes = tuple(map(str, only.get("dtype", (options.dtype,))))
    if options.inference:
        raise OptionError("a plan is for training, and this is for inference", remedy="leave out inference")
    if program is not None and (others := [dtype for dtype in dtypes if dtype != options.dtype]):
        remedy = f"--only dtype={options.dtype}, or plan the config or the model"
        raise OptionError(f"--only dtype={others[0]}: the PEF is {options.dtype}", remedy=remedy)
    known = get_args(BuildOptions.model_fields["arch"].annotation)
    if emit is not None and options.arch not in known:
        what = f"--emit writes a config, and a config compiles for {', '.join(known)}, not {options.arch}"
        raise OptionError(what, remedy="leave out --emit, or give one of them as --arch")
    if emit is not None and options.model.target is None:
        what = "--emit writes a config, and this PEF was compiled in Python or by an app: it names no model"
        raise OptionError(what, remedy="leave out --emit")
    device = load_device(options.arch)
    cluster = load_cluster(asked.cluster or device.cluster)
    spaces = _spaces(options, device, cluster, asked, dtypes, only)
    return PlanTask(asked, options, program, device, cluster, spaces)


def _options(asked: PlanRequest) -> tuple[CompileOptions, Program | None]:
    subject, remedy = asked.subject, "plan the config or the model that it was compiled from"
    if is_model(subject):
        return options_of_model(subject, asked.overrides), None
    if asked.overrides:
        raise OptionError(f"--set changes a config, and {subject} is a PEF", remedy=f"sambasim plan {subject}")
    document = read(locate(subject, asked.output_folder))
    program, compiled = document.program, document.compile_options
    if (ranks := program.ranks_of_replica) > 1:
        what = f"a replica of {program.name} has {ranks} ranks already, and a plan begins with one"
        raise OptionError(what, remedy=remedy)
    if compiled.get("recompute") != "none":
        raise OptionError(f"{program.name} recomputes activations", remedy=remedy)
    tables: dict[str, object] = {"data": document.data_source, "model": compiled.get("model")}
    tables |= {name: value for name, value in document.training_defaults.items() if value is not None}
    for table, kind in (("compile", BuildOptions), ("parallel", ParallelOptions)):
        tables[table] = {name: compiled[name] for name in kind.model_fields if name in compiled}
    return options_in_python(tables, {}).options, program


def _check_place(asked: PlanRequest) -> None:
    """Raises OptionError for flags that do not go together, and for what --here cannot measure."""
    if not asked.here:
        if asked.ranks is not None:
            raise OptionError("--ranks is for this machine", remedy="add --here, or give --nodes instead")
        return
    for flag, value in (("--cluster", asked.cluster), ("--nodes", asked.nodes), ("--arch", asked.arch)):
        if value is not None:
            raise OptionError(f"{flag} is for devices, and --here plans for this machine", remedy=f"leave out {flag}")
    if not is_model(asked.subject):
        what = f"--here measures passes of several batch sizes, and a PEF as {asked.subject} has one"
        raise OptionError(what, remedy="plan the config or the model that it was compiled from")


def _spaces(
    options: CompileOptions,
    device: DeviceSpec,
    cluster: ClusterSpec,
    asked: PlanRequest,
    dtypes: tuple[str, ...],
    only: Mapping[str, Sequence[object]],
) -> Sequence[Space]:
    """The strategies of 1, 2, … ranks of this machine, or of so many RDUs. Raises OptionError if there are none."""
    of_a_rank = options.training.batch_size * options.training.accumulation_steps
    if asked.here:
        from sambasim.runtime.machine.launcher import mpirun_here
        from sambasim.runtime.machine.resources import cores_of_this_process  # torch

        if options.optimizer is None:
            raise OptionError("a plan of steps needs an optimizer", remedy="--set optimizer.name=adamw")
        if len(dtypes) > 1:
            raise OptionError("--here measures passes of one dtype", remedy=f"--only dtype={dtypes[0]}")
        most = asked.ranks or min(2 * len(cores_of_this_process()), _MOST_RANKS)
        most = most if mpirun_here() is not None else 1
        batch = asked.global_batch or most * of_a_rank
        spaces = [Space(count, most, batch, dtypes, only=only) for count in range(1, most + 1)]
        what = f"no strategy of up to {counted(most, 'rank')} gives a global batch of {batch:,} with these values"
        remedy = "another --global-batch, or fewer --only"
    else:
        nodes, of_node = asked.nodes or 1, cluster.rdus_per_node
        if cluster.nodes is not None and nodes > cluster.nodes:
            what = f"--nodes {nodes}, and {cluster.name} has {cluster.nodes}"
            raise OptionError(what, remedy=f"--nodes {cluster.nodes}")
        rdus = nodes * of_node
        batch = asked.global_batch or rdus * of_a_rank
        tiles = () if device.tiles is None else tuple(divisors(device.tiles)[:-1])
        spaces = [Space(rdus, of_node, batch, dtypes, tiles, device.tiles, only)]
        what = f"--only leaves no strategy with a global batch of {batch:,} on {rdus} RDUs"
        remedy = "other values, or another --global-batch: replicas × chips × samples × passes"
    if not any(True for space in spaces for _ in space.strategies()):
        raise OptionError(what, remedy=remedy)
    return spaces


def _only(allowed: Sequence[str]) -> Mapping[str, Sequence[object]]:
    """The values that `--only` allows, by field of a strategy. Raises OptionError."""
    kinds = {field.name: field for field in fields(Strategy)}
    values_of: dict[str, Sequence[object]] = {}
    for text in allowed:
        name, _, values = text.partition("=")
        if name not in kinds:
            remedy = did_you_mean(nearest(name, kinds)) or f"one of {', '.join(kinds)}"
            raise OptionError(f"--only {text}: a strategy has no {name!r}", remedy=remedy)
        parts = [part.strip() for part in values.split(",")]
        known = VALUES.get(name)
        if known is not None:
            if wrong := [part for part in parts if part not in known]:
                what = f"--only {text}: {wrong[0]!r} is none of {', '.join(known)}"
                raise OptionError(what, remedy=f"--only {name}={nearest(wrong[0], known) or known[0]}")
        elif "=" in values:
            each = shortened(text.replace(",", " --only "))
            raise OptionError(f"--only {shortened(text)} names several fields", remedy=f"--only {each}")
        elif not all(part.isdecimal() and len(part) < _DIGITS for part in parts):
            raise OptionError(f"--only {shortened(text)}: {name} takes whole numbers", remedy=f"--only {name}=1,2")
        chosen = parts if known is not None else [int(part) for part in parts]
        values_of[name] = list(dict.fromkeys([*values_of.get(name, ()), *chosen]))
    return values_of


def emitted(plan: Plan, chosen: CompileOptions, file: Path, asked: PlanRequest) -> tuple[str, list[str]]:
    """The best strategy of `plan`, which is `chosen`, as a config or for DeepSpeed; and what that cannot say."""
    strategy = plan.best[0].strategy
    if file.suffix == ".json":
        return json.dumps(as_deepspeed(chosen), indent=2) + "\n", list(beyond_deepspeed(chosen))
    sync = "" if strategy.by_host or strategy.copies == 1 else "--reduce-on-rdu "
    launcher = f"mpirun -np {strategy.ranks} " if strategy.ranks > 1 else ""
    commands = [f"sambasim compile --config {file}", f"{launcher}sambasim run {sync}--pef {chosen.name}"]
    if plan.device == "RDU":
        path = "host" if strategy.by_host else "rdu"
        flags = f" --replicas {strategy.replicas} --sync {path}" if strategy.copies > 1 else ""
        commands.append(f"sambasim simulate {file}{flags}{f' --cluster {asked.cluster}' if asked.cluster else ''}")
    heading = [f"Planned from {asked.subject}: {headline(plan)}", "", *(f"  {command}" for command in commands)]
    return config_text(chosen, "\n".join(heading)), []
