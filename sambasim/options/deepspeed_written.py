"""A DeepSpeed config that says what options of `compile` say: the inverse of `deepspeed.py`."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from sambasim.options.deepspeed_batch import MICRO, STEPS, TRAIN
from sambasim.options.deepspeed_file import AUTO
from sambasim.options.training import LossScaleOptions, OptimizerOptions, ScheduleOptions

if TYPE_CHECKING:
    from sambasim.options.compile import CompileOptions

_TYPES = {"adam": "Adam", "adamw": "AdamW", "sgd": "SGD", "lion": "Lion", "adagrad": "Adagrad"}


def as_deepspeed(options: "CompileOptions") -> dict[str, object]:
    """The content of a ds_config.json for these options of training. `beyond_deepspeed` lists what it lacks."""
    training, optimizer = options.training, options.optimizer
    config: dict[str, object] = {
        TRAIN: training.batch_size * training.accumulation_steps * options.world_size,
        MICRO: training.batch_size // options.micro_batches,
        STEPS: training.accumulation_steps * options.micro_batches,  # DeepSpeed's pipelines have no other micro-batches
    }
    if optimizer is not None:
        config["optimizer"] = _optimizer(optimizer)
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


def beyond_deepspeed(options: "CompileOptions") -> Iterator[str]:
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


def _optimizer(optimizer: OptimizerOptions) -> dict[str, object]:
    fields = optimizer.model_dump(mode="json", exclude={"name", "max_grad_norm"}, exclude_none=True)
    if optimizer.name == "adam":
        fields["adam_w_mode"] = False
    return {"type": _TYPES[optimizer.name], "params": fields}


def _scheduler(schedule: ScheduleOptions, optimizer: OptimizerOptions, steps: int | None) -> dict[str, object]:
    lr, low = optimizer.lr, (schedule.start_factor or 0.0) * optimizer.lr
    warmup = {"warmup_num_steps": schedule.warmup_steps, "warmup_type": schedule.warmup_curve or "log"}
    rates = {"warmup_min_lr": low, "warmup_max_lr": lr}
    total = {"total_num_steps": schedule.total_steps or steps or AUTO}
    if schedule.name == "warmup":
        return {"type": "WarmupLR", "params": {**rates, **warmup}}
    if schedule.name == "warmup_decay":
        return {"type": "WarmupDecayLR", "params": {**rates, **warmup, **total}}
    if schedule.name == "warmup_cosine":
        ratios = {"warmup_min_ratio": schedule.start_factor or 0.0, "cos_min_ratio": schedule.final_factor}
        return {"type": "WarmupCosineLR", "params": {**ratios, **warmup, **total}}
    if schedule.name == "range_test":
        test = {"min_lr": lr, "step_size": schedule.step_size, "step_rate": schedule.rate}
        test["staircase"] = schedule.staircase or False
        return {"type": "LRRangeTest", "params": {f"lr_range_test_{name}": value for name, value in test.items()}}
    cycle: dict[str, Any] = {
        "cycle_min_lr": low,
        "cycle_max_lr": lr,
        "cycle_first_step_size": schedule.up_steps,
        "cycle_second_step_size": schedule.down_steps or schedule.up_steps,
        "decay_step_size": schedule.step_size or 0,
        "decay_lr_rate": schedule.rate or 0.0,
        "cycle_momentum": schedule.momentum is not None,
    }
    if schedule.momentum is not None:
        cycle["cycle_min_mom"], cycle["cycle_max_mom"] = schedule.momentum
    return {"type": "OneCycle", "params": cycle}


def _fp16(scale: LossScaleOptions) -> dict[str, object]:
    if not scale.dynamic:
        return {"enabled": True, "loss_scale": scale.start}
    return {
        "enabled": True,
        "loss_scale": 0,
        "initial_scale_power": round(scale.start).bit_length() - 1,
        "loss_scale_window": scale.window,
        "hysteresis": scale.hysteresis,
        "consecutive_hysteresis": scale.consecutive,
        "min_loss_scale": scale.minimum,
    }
