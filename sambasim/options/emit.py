"""Options of a compile as a config, and as that of DeepSpeed."""

from collections.abc import Iterator
from typing import Any

import tomli_w

from sambasim.options.compile import BuildOptions, CompileOptions, ParallelOptions, Sections, options_in_python
from sambasim.options.deepspeed import MICRO, STEPS, TRAIN
from sambasim.options.deepspeed_file import AUTO, LOSS_SCALE, OPTIMIZERS_BY_TYPE, SCHEDULERS, Row
from sambasim.options.training import LossScaleOptions, OptimizerOptions, ScheduleOptions


def config_text(options: CompileOptions, heading: str) -> str:
    """`heading` becomes the comment on top. What has its default value is left out. Raises OptionError for options that
    do not go together."""
    given = options.model_dump(mode="json", exclude_defaults=True, exclude_none=True)
    tables: dict[str, object] = {name: given[name] for name in Sections.model_fields if name in given}
    for table, fields in (("compile", BuildOptions.model_fields), ("parallel", ParallelOptions.model_fields)):
        if values := {name: given[name] for name in fields if name in given}:
            tables[table] = values
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
    if optimizer is not None:
        kinds = {known.name: kind for kind, known in OPTIMIZERS_BY_TYPE.items()} | {"adam": "Adam"}
        params = optimizer.model_dump(mode="json", exclude={"name", "max_grad_norm"}, exclude_none=True)
        params |= {"adam_w_mode": False} if optimizer.name == "adam" else {}
        config["optimizer"] = {"type": kinds[optimizer.name], "params": params}
        if optimizer.max_grad_norm is not None:
            config["gradient_clipping"] = optimizer.max_grad_norm
        if training.schedule.counts_updates:
            config["scheduler"] = _scheduler(training.schedule, optimizer, training.steps)
    if options.dtype == "fp16":
        config["fp16"] = _fp16(training.loss_scale)
    if options.dtype == "bf16":
        config["bf16"] = {"enabled": True}
    if options.data_parallel:
        config["zero_optimization"] = {"stage": options.zero}
    return config


def beyond_deepspeed(options: CompileOptions) -> Iterator[str]:
    """What options of training say that a DeepSpeed config cannot."""
    schedule = options.training.schedule
    if not schedule.counts_updates and schedule != ScheduleOptions(total_steps=schedule.total_steps):
        yield f"the schedule {schedule.name} with {schedule.warmup_steps} steps of warm-up, which the script must make"
    if options.dtype == "bf16" and not options.keeps_master_weights:
        yield "bf16 without master weights: DeepSpeed keeps float32 copies of parameters"
    if options.tensor_parallel is not None:
        yield f"tensor parallelism over {options.n_chips} chips"
    if options.pipeline_stages > 1:
        yield f"a pipeline of {options.pipeline_stages} stages, which the script must make"
    if options.recompute != "none":
        yield f"recomputation ({options.recompute}), which the model must ask for"


def _scheduler(schedule: ScheduleOptions, optimizer: OptimizerOptions, steps: int | None) -> dict[str, object]:
    kind, scheduler = next(item for item in SCHEDULERS.items() if item[1].name == schedule.name)

    def written(row: Row) -> object:
        value = getattr(schedule, row.option, None)
        match row.kind:
            case "rate":
                return optimizer.lr
            case "share":
                return (value or 0.0) * optimizer.lr
            case "total":
                return value or steps or AUTO
        return row.default if value is None else value

    params: dict[str, Any] = {row.key: value for row in scheduler.rows if (value := written(row)) is not None}
    if kind == "OneCycle":
        params["cycle_momentum"] = schedule.momentum is not None
        if schedule.momentum is not None:
            params["cycle_min_mom"], params["cycle_max_mom"] = schedule.momentum
    return {"type": kind, "params": params}


def _fp16(scale: LossScaleOptions) -> dict[str, object]:
    if not scale.dynamic:
        return {"enabled": True, "loss_scale": scale.start}
    power = round(scale.start).bit_length() - 1
    rows = {row.key: getattr(scale, row.option) for row in LOSS_SCALE}
    return {"enabled": True, "loss_scale": 0, "initial_scale_power": power, **rows}
