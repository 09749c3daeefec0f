"""What `sambasim plan` is asked, checked before any capture; and the best strategy as a config, also for DeepSpeed."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from math import ceil, prod
from pathlib import Path
from typing import Any, get_args

import tomli_w

from sambasim.commands.question import is_model
from sambasim.data.datasets import open_source
from sambasim.errors import OptionError
from sambasim.hardware.placement import Inventory, inventory_of
from sambasim.ir.program import Program
from sambasim.ir.types import SymbolKind
from sambasim.options.base import build
from sambasim.options.compile import BuildOptions, CompileOptions, ParallelOptions, compile_options, options_in_python
from sambasim.options.deepspeed import MICRO, STEPS, TRAIN
from sambasim.options.deepspeed_file import AUTO, LOSS_SCALE, OPTIMIZERS_BY_TYPE, SCHEDULERS, Row
from sambasim.options.problem import nearest, suggested
from sambasim.options.schedules import LossScaleOptions, ScheduleOptions
from sambasim.options.training import OptimizerOptions, Sections
from sambasim.pef import locate, read
from sambasim.report.plan import headline
from sambasim.simulation.planning.purchase import Wanted
from sambasim.simulation.planning.search import Plan
from sambasim.simulation.planning.strategy import VALUES, Space, Strategy, divisors
from sambasim.units import counted

_MOST_DIGITS = 12  # of a number in `--only`: longer ones name no strategy

_MOST_RANKS = 4
_TABLES = {"compile": BuildOptions.model_fields, "parallel": ParallelOptions.model_fields}


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
    tokens: float | None = None
    samples: float | None = None
    epochs: float | None = None
    days: float | None = None
    price: str | None = None


@dataclass(frozen=True, slots=True)
class PlanTask:
    """Options, the program of a PEF, and the strategies to price: of 1, 2, … ranks of this machine, or of RDUs."""

    asked: PlanRequest
    options: CompileOptions
    program: Program | None
    inventory: Inventory
    spaces: Sequence[Space]


def plan_task(asked: PlanRequest) -> PlanTask:
    """Raises OptionError for what cannot be planned, or cannot be written as a config."""
    emit = asked.emit
    if emit is not None and emit.suffix not in (".toml", ".json"):
        what = f"--emit {emit}: a config ends in .toml, or, for DeepSpeed, in .json"
        raise OptionError(what, remedy=f"--emit {emit.with_suffix('.toml')}")
    only = _only(asked.only)
    _check_training(asked)
    if asked.here:
        if asked.arch is not None:
            raise OptionError("--arch is for devices, and --here plans for this machine", remedy="leave out --arch")
        if ((asked.nodes or 1) > 1) != (asked.cluster is not None):
            what = "--here plans for several machines like this one by --nodes and --cluster, which names their link"
            measured = "mpirun -hosts a,b -ppn 1 -np 2 sambasim bench sync --hosts hosts.toml"
            raise OptionError(what, remedy=f"{measured}, then --nodes 2 --cluster hosts.toml; or leave out both")
        if not is_model(asked.subject):
            what = f"--here measures passes of several batch sizes, and a PEF as {asked.subject} has one"
            raise OptionError(what, remedy="plan the config or the model that it was compiled from")
    elif asked.ranks is not None:
        raise OptionError("--ranks is for this machine", remedy="add --here, or give --nodes instead")
    arch = "sn40" if asked.arch == "sn40l" else asked.arch
    inventory_of({}, arch=arch, cluster=asked.cluster)  # a wrong name is the first error
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
    inventory = inventory_of({}, arch=options.arch, cluster=asked.cluster)
    nodes, most = asked.nodes or 1, inventory.cluster.nodes
    if most is not None and nodes > most:
        raise OptionError(f"--nodes {nodes}, and {inventory.cluster.name} has {most}", remedy=f"--nodes {most}")
    inventory = replace(inventory, cluster=inventory.cluster.model_copy(update={"nodes": nodes}))
    return PlanTask(asked, options, program, inventory, _spaces(options, inventory, asked, dtypes, only))


_AMOUNTS = "--tokens, --samples or --epochs"


def _check_training(asked: PlanRequest) -> None:
    given = [name for name in ("tokens", "samples", "epochs") if getattr(asked, name) is not None]
    if len(given) > 1:
        what = f"--{given[0]} and --{given[1]} both say how long to train"
        raise OptionError(what, remedy=f"leave out --{given[1]}")
    for name in ("days", "price"):
        if getattr(asked, name) is not None and not given:
            raise OptionError(f"--{name} is of a training whose length is not given", remedy=f"add {_AMOUNTS}")
    if given and asked.here:
        raise OptionError(f"--{given[0]} is for devices, and --here plans for this machine", remedy="leave out --here")
    if asked.price is not None:
        _ = _price_of(asked.price, 1)


def _price_of(text: str, rdus_per_node: int) -> float:
    """Of an RDU-hour. Raises OptionError."""
    number, _, unit = text.partition("/")
    price = float(number) if re.fullmatch(r"\d*\.?\d+(e[+-]?\d+)?", number.strip()) else 0.0
    if not 0 < price < float("inf") or unit.strip() not in ("", "rdu-hour", "node-hour"):
        what = f"--price {text}: it is a number of an RDU-hour or of a node-hour"
        raise OptionError(what, remedy="such as --price 3.2/rdu-hour")
    return price / rdus_per_node if unit.strip() == "node-hour" else price


def wanted_of(task: PlanTask, program: Program) -> Wanted | None:
    """The training that is asked for, of `program`; None if none is. Raises OptionError, and DataError for epochs."""
    asked = task.asked
    price = None if asked.price is None else _price_of(asked.price, task.inventory.cluster.rdus_per_node)
    rows = (symbol.type for symbol in program.symbols.values() if symbol.kind is SymbolKind.INPUT)
    lengths = [prod(type_.shape[1:]) for type_ in rows if type_.dtype in ("int64", "int32") and len(type_.shape) > 1]
    tokens = max(lengths, default=None)
    if asked.tokens is not None:
        if tokens is None:
            what = f"--tokens: {program.name} takes no sequences of integers whose tokens could be counted"
            raise OptionError(what, remedy="--samples or --epochs")
        return Wanted(ceil(asked.tokens / tokens), tokens, asked.days, price)
    if asked.epochs is not None:
        count = len(open_source(task.options.data, None).train)
        if not count:
            raise OptionError("--epochs: the data is a stream without a length", remedy="--samples or --tokens")
        return Wanted(ceil(asked.epochs * count), tokens, asked.days, price)
    return None if asked.samples is None else Wanted(ceil(asked.samples), tokens, asked.days, price)


def _options(asked: PlanRequest) -> tuple[CompileOptions, Program | None]:
    subject, remedy = asked.subject, "plan the config or the model that it was compiled from"
    if is_model(subject):
        return compile_options(None, subject, asked.overrides, {}), None
    if asked.overrides:
        raise OptionError(f"--set changes a config, and {subject} is a PEF", remedy=f"sambasim plan {subject}")
    document = read(locate(subject, asked.output_folder))
    program, compiled = document.program, document.compile_options
    if (ranks := program.ranks_of_replica) > 1:
        what = f"a replica of {program.name} has {ranks} ranks already, and a plan begins with one"
        raise OptionError(what, remedy=remedy)
    if compiled.get("recompute") != "none":
        raise OptionError(f"{program.name} recomputes activations", remedy=remedy)
    return build(CompileOptions, {**document.training_defaults, "data": document.data_source, **compiled}), program


def _spaces(
    options: CompileOptions,
    inventory: Inventory,
    asked: PlanRequest,
    dtypes: tuple[str, ...],
    only: Mapping[str, Sequence[object]],
) -> Sequence[Space]:
    """The strategies of 1, 2, … ranks of this machine, or of so many RDUs. Raises OptionError if there are none."""
    of_a_rank = options.training.batch_size * options.training.accumulation_steps
    nodes = inventory.cluster.nodes or 1
    if asked.here:
        from sambasim.runtime.machine.launcher import cores_of_this_process, mpirun_here

        if options.optimizer is None:
            raise OptionError("a plan of steps needs an optimizer", remedy="--set optimizer.name=adamw")
        if len(dtypes) > 1:
            raise OptionError("--here measures passes of one dtype", remedy=f"--only dtype={dtypes[0]}")
        most = asked.ranks or min(2 * len(cores_of_this_process()), _MOST_RANKS)
        most = most if mpirun_here() is not None else 1
        batch = asked.global_batch or nodes * most * of_a_rank
        if nodes > 1:  # of which each has as many replicas
            known = {"replicas": range(nodes, nodes * most + 1, nodes), "stages": (1,), "chips": (1,), "zero": (1,)}
            of_nodes = {name: [value for value in only.get(name, of) if value in of] for name, of in known.items()}
            only = {**only, **of_nodes}
        spaces = [Space(nodes * count, most, batch, dtypes, only=only) for count in range(1, most + 1)]
        ranks = counted(nodes * most, "rank")
        what = f"no strategy of up to {ranks} gives a global batch of {batch:,} with these values"
        remedy = "another --global-batch, or fewer --only"
    else:
        cluster, tiles_of_rdu = inventory.cluster, inventory.device.tiles
        of_node = cluster.rdus_per_node
        rdus = nodes * of_node
        batch = asked.global_batch or rdus * of_a_rank
        tiles = () if tiles_of_rdu is None else tuple(divisors(tiles_of_rdu)[:-1])
        spaces = [Space(rdus, of_node, batch, dtypes, tiles, tiles_of_rdu, only)]
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
            remedy = suggested(name, kinds) or f"one of {', '.join(kinds)}"
            raise OptionError(f"--only {text}: a strategy has no {name!r}", remedy=remedy)
        parts = [part.strip() for part in values.split(",")]
        known = VALUES.get(name)
        if known is not None:
            if wrong := [part for part in parts if part not in known]:
                what = f"--only {text}: {wrong[0]!r} is none of {', '.join(known)}"
                raise OptionError(what, remedy=f"--only {name}={nearest(wrong[0], known) or known[0]}")
        elif "=" in values:
            each = text.replace(",", " --only ")
            raise OptionError(f"--only {text} names several fields", remedy=f"--only {each}")
        elif not all(part.isdecimal() and len(part) < _MOST_DIGITS for part in parts):
            raise OptionError(f"--only {text}: {name} takes whole numbers", remedy=f"--only {name}=1,2")
        chosen = parts if known is not None else [int(part) for part in parts]
        values_of[name] = list(dict.fromkeys([*values_of.get(name, ()), *chosen]))
    return values_of


def emitted(plan: Plan, chosen: CompileOptions, file: Path, asked: PlanRequest) -> tuple[str, list[str]]:
    """The best strategy of `plan`, which is `chosen`, as a config or for DeepSpeed; and what that cannot say."""
    strategy = plan.best[0].strategy
    if file.suffix == ".json":
        return json.dumps(as_deepspeed(chosen), indent=2) + "\n", list(beyond_deepspeed(chosen))
    sync = "--reduce-on-rdu " if strategy.path == "rdu" and strategy.copies > 1 else ""
    launcher = f"mpirun -np {strategy.ranks} " if strategy.ranks > 1 else ""
    commands = [f"sambasim compile {file}", f"{launcher}sambasim run {sync}--pef {chosen.name}"]
    if plan.device == "RDU":
        flags = f" --replicas {strategy.replicas} --sync {strategy.path}" if strategy.copies > 1 else ""
        commands.append(f"sambasim simulate {file}{flags}{f' --cluster {asked.cluster}' if asked.cluster else ''}")
    heading = [f"Planned from {asked.subject}: {headline(plan)}", "", *(f"  {command}" for command in commands)]
    return config_text(chosen, "\n".join(heading)), []


def config_text(options: CompileOptions, heading: str) -> str:
    """`heading` becomes the comment on top. Raises OptionError for options that do not go together."""
    given = options.model_dump(mode="json", exclude_defaults=True, exclude_none=True)
    tables: dict[str, object] = {name: given[name] for name in ("model", *Sections.model_fields) if name in given}
    of_parts = ((table, {name: given[name] for name in names if name in given}) for table, names in _TABLES.items())
    tables |= {table: values for table, values in of_parts if values}
    options_in_python(tables, {})
    comment = "".join(f"# {line}".rstrip() + "\n" for line in heading.splitlines())
    return f"{comment}\n{tomli_w.dumps(tables)}"


def as_deepspeed(options: CompileOptions) -> dict[str, object]:
    """The content of a ds_config.json for these options of training. `beyond_deepspeed` lists what it lacks."""
    training, optimizer = options.training, options.optimizer
    config: dict[str, object] = {
        TRAIN: training.batch_size * training.accumulation_steps * options.world_size,
        MICRO: training.batch_size // options.micro_batches,
        STEPS: training.accumulation_steps * options.micro_batches,  # DeepSpeed's pipelines have no other micro-batches
    }
    if optimizer is not None and not optimizer.is_own:
        kinds = {known.name: kind for kind, known in OPTIMIZERS_BY_TYPE.items()} | {"adam": "Adam"}
        others = {"name", "max_grad_norm", "max_grad_value", "no_decay", "groups"}
        others |= {*OPTIMIZERS_BY_TYPE[kinds[optimizer.name]].switches}
        params = optimizer.model_dump(mode="json", exclude=others, exclude_none=True)
        params |= {"adam_w_mode": False} if optimizer.name == "adam" else {}
        config["optimizer"] = {"type": kinds[optimizer.name], "params": params}
        if optimizer.max_grad_norm is not None:
            config["gradient_clipping"] = optimizer.max_grad_norm
        if training.schedule.counts_updates:
            config["scheduler"] = _scheduler(training.schedule, optimizer, training.steps)
    if options.dtype == "fp16":
        scale = training.loss_scale
        dynamic = {"loss_scale": 0, **_written(LOSS_SCALE, scale)}
        config["fp16"] = {"enabled": True, **(dynamic if scale.dynamic else {"loss_scale": scale.start})}
    if options.dtype == "bf16":
        config["bf16"] = {"enabled": True}
    if options.data_parallel:
        config["zero_optimization"] = {"stage": options.zero}
    return config


def beyond_deepspeed(options: CompileOptions) -> Iterator[str]:
    """What options of training say that a DeepSpeed config cannot."""
    schedule, stages, optimizer = options.training.schedule, options.pipeline_stages, options.optimizer
    is_plain = schedule.counts_updates or schedule == ScheduleOptions(total_steps=schedule.total_steps)
    lacks = {
        f"the schedule {schedule.name} with {schedule.warmup_steps} steps of warm-up, which the script must make":
            not is_plain,
        "bf16 without master weights: DeepSpeed keeps float32 copies of parameters":
            options.dtype == "bf16" and not options.keeps_master_weights,
        f"tensor parallelism over {options.n_chips} chips": options.tensor_parallel is not None,
        f"a pipeline of {stages} stages, which the script must make": stages > 1,
        "parameter groups, which the script must make":
            optimizer is not None and bool(optimizer.all_groups()),
        "an optimizer of your own, which the script must make":
            optimizer is not None and optimizer.is_own,
        "averages of the weights, which the script must make": options.ema is not None,
        "max_grad_value":
            optimizer is not None and optimizer.max_grad_value is not None,
        "amsgrad and maximize of Adam":
            optimizer is not None and optimizer.name in ("adam", "adamw") and (optimizer.amsgrad or optimizer.maximize),
        f"recomputation ({options.recompute}), which the model must ask for": options.recompute != "none",
    }  # fmt: skip
    return (what for what, is_lacking in lacks.items() if is_lacking)


def _scheduler(schedule: ScheduleOptions, optimizer: OptimizerOptions, steps: int | None) -> dict[str, object]:
    kind, scheduler = next(item for item in SCHEDULERS.items() if item[1].name == schedule.name)
    params = _written(scheduler.rows, schedule, optimizer.hyperparameters()["lr"], steps)
    if kind == "OneCycle":
        params["cycle_momentum"] = schedule.momentum is not None
        if schedule.momentum is not None:
            params["cycle_min_mom"], params["cycle_max_mom"] = schedule.momentum
    return {"type": kind, "params": params}


def _written(
    rows: Sequence[Row], table: ScheduleOptions | LossScaleOptions, lr: float = 0.0, steps: int | None = None
) -> dict[str, Any]:
    """The options of `table` as fields of a DeepSpeed config."""
    written: dict[str, Any] = {}
    for row in rows:
        value: Any = getattr(table, row.option, None)
        match row.kind:
            case "power":
                written[row.key] = round(value).bit_length() - 1
            case "rate":
                written[row.key] = lr
            case "share":
                written[row.key] = (value or 0.0) * lr
            case "total":
                written[row.key] = value or steps or AUTO
            case _ if value is not None or row.default is not None:
                written[row.key] = row.default if value is None else value
    return written
