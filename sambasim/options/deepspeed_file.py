"""Reads a DeepSpeed config: JSON, also with comments and commas before a closing bracket, as DeepSpeed reads it.

Tables of names say what becomes of each: it sets options, changes nothing here, is explained by a note, or is an error.
Any other name is noted with the nearest known one. Other tables have the optimizers, schedulers and loss scales, with
their fields and defaults. What a value means is in `deepspeed.py`.
"""

import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

from sambasim.errors import LARGEST_COUNT, OptionError, is_too_deep, shortened
from sambasim.files import once
from sambasim.options.given import as_table, config_text
from sambasim.options.problem import Problem, show, suggested

AUTO = "auto"  # the value of a field that another config or a flag fills in, as in Hugging Face's Trainer

Type: TypeAlias = Literal["number", "positive", "whole", "switch"]
_NUMBER = ("a number", (int, float))
_TYPES: Mapping[Type, tuple[str, Sequence[type]]] = {
    "number": _NUMBER, "positive": _NUMBER, "whole": ("a whole number", (int,)), "switch": ("true or false", (bool,)),
}  # fmt: skip

Kind: TypeAlias = Type | Literal["power", "rate", "share", "warmup", "curve", "total"]
"""How a value is given: `power` is the exponent of 2; of a schedule, `rate` is the highest learning rate, `share` a
rate that is a factor of it here, `warmup` its steps, `curve` its form, `total` the steps of the run."""


class Row(NamedTuple):
    """A field `key` of a table, and the option of the same meaning: `deepspeed.py` reads it, and `commands/plan.py`
    writes it. `default` is DeepSpeed's; None: there is none."""

    key: str
    option: str
    kind: Kind
    default: Any = None
    least: int = 0


LOSS_SCALE = (
    Row("initial_scale_power", "start", "power", 16),
    Row("loss_scale_window", "window", "whole", 1000, least=1),
    Row("hysteresis", "hysteresis", "whole", 2, least=1),
    Row("consecutive_hysteresis", "consecutive", "switch", False),
    Row("min_loss_scale", "minimum", "positive", 1.0),
)
"""Of `fp16`, where the loss scale is not fixed."""

_SET_OPTIONS: Mapping[str, tuple[str, ...]] = {
    "": (
        "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping",
        "optimizer", "scheduler", "fp16", "bf16", "bfloat16", "zero_optimization",
    ),
    "optimizer": ("type", "params"),
    "scheduler": ("type", "params"),
    "fp16": ("enabled", "loss_scale", *(row.key for row in LOSS_SCALE)),
    "bf16": ("enabled",),
    "zero_optimization": ("stage",),
}  # fmt: skip

_CHANGES_NOTHING: Mapping[str, tuple[str, ...]] = {
    "": (
        # Monitors, profilers and what is printed.
        "tensorboard", "wandb", "comet", "csv_monitor", "comms_logger", "flops_profiler", "monitor_config",
        "steps_per_print", "wall_clock_breakdown", "memory_breakdown", "dump_state", "timers",
        # Where DeepSpeed keeps, sends and loads things.
        "aio", "autotuning", "checkpoint", "nebula", "hybrid_engine", "compile", "graph_harvesting",
        "communication_data_type", "seq_parallel_communication_data_type", "prescale_gradients",
        "gradient_predivide_factor", "fp32_allreduce", "disable_allgather", "allgather_size", "dataloader_drop_last",
        "use_node_local_storage", "load_universal_checkpoint", "zero_allow_untested_optimizer",
        "zero_force_ds_cpu_optimizer", "sparse_attention", "vocabulary_size",
    ),
    "optimizer": ("legacy_fusion",),
    "fp16": ("auto_cast",),
    "bf16": ("immediate_grad_update", "check_grad_overflow"),
    "zero_optimization": (
        "overlap_comm", "contiguous_gradients", "reduce_scatter", "reduce_bucket_size", "allgather_partitions",
        "allgather_bucket_size", "round_robin_gradients", "sub_group_size", "prefetch_bucket_size",
        "param_persistence_threshold", "model_persistence_threshold", "max_live_parameters", "max_reuse_distance",
        "gather_16bit_weights_on_model_save", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold",
        "stage3_model_persistence_threshold", "stage3_max_live_parameters", "stage3_max_reuse_distance",
        "stage3_gather_16bit_weights_on_model_save", "stage3_gather_fp16_weights_on_model_save",
        "stage3_use_all_reduce_for_fetch_params", "use_multi_rank_bucket_allreduce", "ignore_unused_parameters",
        "legacy_stage1", "elastic_checkpoint", "load_from_fp32_weights", "memory_efficient_linear",
        "pipeline_loading_checkpoint", "override_module_apply", "mics_shard_size",
        "mics_hierarchical_params_gather", "zero_hpz_partition_size", "zero_quantized_nontrainable_weights",
        "log_trace_cache_warnings", "cpu_offload_use_pin_memory",
    ),
}  # fmt: skip

_HOST_MEMORY = "would be in host memory, and stay in device memory here; the numbers are the same"
_TRAINS_OTHERWISE = "trains in another way, which sambasim does not have"
_LEAVE_OUT = "leave it out, or set it to false"
_TOLD: Mapping[str, Mapping[str, str | tuple[str, str]]] = {
    "": {
        "activation_checkpointing": "is for models that call deepspeed.checkpointing; --recompute computes again here",
        "data_types": "gradients are added up in their own type here",
        "gradient_accumulation_dtype": "gradients are added up in their own type here",
        "sparse_gradients": "gradients of embeddings are dense here",
        "pipeline": "stages are made by --pipeline-stages here",
        "tensor_parallel": "tensors are cut by --tensor-parallel weight --n-chips N here",
        "amp": ("is NVIDIA's Apex, which sambasim does not have", '"bf16": {"enabled": true}, or fp16'),
        "elasticity": ("chooses batch sizes by the GPUs of a job", "give the batch sizes, and leave it out"),
        **dict.fromkeys(
            (
                "progressive_layer_drop", "curriculum_learning", "data_efficiency", "compression_training",
                "quantize_training", "eigenvalue",
            ),
            (_TRAINS_OTHERWISE, _LEAVE_OUT),
        ),
    },
    "fp16": {
        "fp16_master_weights_and_grads": ("keeps no float32 parameters, and here fp16 always has them", _LEAVE_OUT)
    },
    "zero_optimization": {
        "offload_optimizer": f"optimizer states {_HOST_MEMORY}",
        "offload_param": f"parameters {_HOST_MEMORY}",
        "cpu_offload": f"optimizer states {_HOST_MEMORY}",
        "cpu_offload_params": f"parameters {_HOST_MEMORY}",
        **dict.fromkeys(
            ("zero_quantized_weights", "zero_quantized_gradients", "zenflow"),
            ("changes the numbers, and sambasim sends them as they are", _LEAVE_OUT),
        ),
    },
}  # fmt: skip
"""Where it is on, a note, or an error and its remedy."""

_COMMENT = re.compile(r'"(?:\\.|[^"\\\n])*"|/\*.*?(?:\*/|\Z)|//[^\n]*|#[^\n]*', re.DOTALL)
_LAST_COMMA = re.compile(r'"(?:\\.|[^"\\\n])*"|,(?=\s*[}\]])')


def read_deepspeed(path: Path) -> tuple["Table", list[str]]:
    """The whole file; its problems are what cannot be done here. And notes on what it has that changes nothing here, or
    is not known. Raises OptionError if the file cannot be read or is not JSON."""
    config = _parsed(path)
    silent: dict[str, list[str]] = {}
    noted, unknown, refused = list[str](), list[str](), list[Problem]()
    for table, options in _SET_OPTIONS.items():
        silenced, told = _CHANGES_NOTHING.get(table, ()), _TOLD.get(table, {})
        typed = "bfloat16" if table == "bf16" and "bf16" not in config else table
        for key, value in (as_table(config.get(typed)) if table else config).items():
            name = f"{table}.{key}" if table else key
            if key in silenced:
                silent.setdefault(f"in {table}: " if table else "", []).append(key)
            elif key in told:
                match told[key] if _is_on(value) else None:
                    case str(note):
                        noted.append(f"{name}: {note}")
                    case what, remedy:
                        refused.append(Problem(name, what, remedy, value))
            elif key not in options and not key.startswith(("_", "//", "#", "comment")):
                guess = suggested(key, (*options, *silenced, *told))
                unknown.append(f"{shortened(name)} is not known, and changes nothing{f'; {guess}' if guess else ''}")
    parts = "; ".join(f"{table}{', '.join(keys)}" for table, keys in silent.items())
    all_notes = [*([f"these change nothing here: {parts}"] if silent else []), *noted, *unknown]
    return Table("", config, refused), [f"{path.name}: {note}" for note in all_notes]


def _is_on(value: object) -> bool:
    if isinstance(value, Mapping):
        return bool(value) and value.get("enabled", True) is not False and value.get("device") != "none"
    return bool(value)


def _parsed(path: Path) -> dict[str, object]:
    text = config_text(path, "DeepSpeed config", "check the path after --deepspeed", "--deepspeed ds_config.json")
    # Lines stay where they are, for errors.
    text = _COMMENT.sub(lambda found: found[0] if found[0][0] == '"' else re.sub(r"[^\n]", " ", found[0]), text)
    text = _LAST_COMMA.sub(lambda found: found[0] if found[0][0] == '"' else " ", text)
    try:
        config = json.loads(text, object_pairs_hook=once, parse_float=_number)
        if isinstance(config, dict) and is_too_deep(config):
            raise RecursionError
    except json.JSONDecodeError as error:
        line = text.split("\n")[error.lineno - 1].strip()
        what = f"the DeepSpeed config is not valid JSON: {error.msg[:1].lower()}{error.msg[1:]}"
        raise OptionError(what, where=f"{path}:{error.lineno}: {line}", remedy="correct that line") from None
    except RecursionError:
        raise OptionError(f"the DeepSpeed config {path} is nested too deeply", remedy="correct it there") from None
    except ValueError as error:
        what = f"the DeepSpeed config is not valid: {error}"
        raise OptionError(what, where=str(path), remedy="correct it there") from None
    if not isinstance(config, dict):
        what = f"the DeepSpeed config is {show(config)}, not a table"
        raise OptionError(what, where=str(path), remedy='{"train_batch_size": 32, …}')
    return config


def _number(text: str) -> float:
    """A number with a point or an exponent; a whole one is an int: `5e8` elements, `1e3` steps."""
    value = float(text)
    return int(value) if value.is_integer() else value


class Scheduler(NamedTuple):
    """A scheduler of DeepSpeed: its name here, its parameters, and others, which are read by themselves."""

    name: str
    rows: Sequence[Row]
    others: Sequence[str] = ()

    @property
    def keys(self) -> list[str]:
        return [*(row.key for row in self.rows), *self.others]


_RATES = (Row("warmup_max_lr", "lr", "rate", 1e-3), Row("warmup_min_lr", "start_factor", "share", 0.0))
_WARMUP = (Row("warmup_num_steps", "warmup_steps", "warmup", 1000), Row("warmup_type", "warmup_curve", "curve", "log"))
_TOTAL = Row("total_num_steps", "total_steps", "total")
_RATIOS = (Row("warmup_min_ratio", "start_factor", "number", 0.0), Row("cos_min_ratio", "final_factor", "number", 1e-4))
_CYCLE = (
    Row("cycle_max_lr", "lr", "rate"),
    Row("cycle_min_lr", "start_factor", "share"),
    Row("cycle_first_step_size", "up_steps", "whole", 2000, least=1),
    Row("cycle_second_step_size", "down_steps", "whole", least=1),
    Row("decay_lr_rate", "rate", "number", 0.0),
    Row("decay_step_size", "step_size", "whole", 0),
)
_CYCLED = (
    "cycle_first_stair_count", "cycle_second_stair_count", "cycle_momentum", "cycle_min_mom", "cycle_max_mom",
    "decay_mom_rate",
)  # fmt: skip
_TEST = (
    Row("lr_range_test_min_lr", "lr", "rate", 1e-3),
    Row("lr_range_test_step_size", "step_size", "whole", 2000, least=1),
    Row("lr_range_test_step_rate", "rate", "number", 1.0),
    Row("lr_range_test_staircase", "staircase", "switch", False),
)
SCHEDULERS: Mapping[str, Scheduler] = {
    "WarmupLR": Scheduler("warmup", (*_RATES, *_WARMUP)),
    "WarmupDecayLR": Scheduler("warmup_decay", (*_RATES, *_WARMUP, _TOTAL)),
    "WarmupCosineLR": Scheduler("warmup_cosine", (*_RATIOS, *_WARMUP, _TOTAL)),
    "OneCycle": Scheduler("one_cycle", _CYCLE, _CYCLED),
    "LRRangeTest": Scheduler("range_test", _TEST),
}


class Optimizer(NamedTuple):
    """An optimizer of DeepSpeed: its name here, its defaults where they are other than torch's, and switches with the
    one value that can be imitated."""

    name: str
    defaults: Mapping[str, object] = {}
    switches: Mapping[str, bool] = {}


ADAM = Optimizer("adamw", {"weight_decay": 0.0}, {"bias_correction": True, "amsgrad": False, "maximize": False})
OPTIMIZERS_BY_TYPE: Mapping[str, Optimizer] = {
    "Adam": ADAM,
    "AdamW": ADAM,
    "SGD": Optimizer("sgd"),
    "Lion": Optimizer("lion", {"lr": 1e-3}),
    "Adagrad": Optimizer("adagrad"),
    "RMSprop": Optimizer("rmsprop"),
    "Adamax": Optimizer("adamax"),
    "NAdam": Optimizer("nadam"),
}


@dataclass(frozen=True, slots=True)
class Table:
    """One table of the file, at `name`: reads fields with a type, and collects in `problems` what is wrong."""

    name: str
    fields: Mapping[str, object]
    problems: list[Problem] = field(default_factory=list)

    def table(self, key: str) -> "Table":
        value = self.fields.get(key) or {}
        name = f"{self.name}.{key}" if self.name else key
        if not isinstance(value, Mapping):
            self.wrong(key, "must be a table, {…}")
            value = {}
        return Table(name, value, self.problems)

    def wrong(self, key: str, what: str, remedy: str | None = None) -> None:
        name = shortened(f"{self.name}.{key}" if self.name else key)
        self.problems.append(Problem(name, what, remedy, self.fields.get(key, ...)))

    def says_auto(self, key: str) -> bool:
        return self.fields.get(key) == AUTO

    def read(self, key: str, kind: Type, default: Any = None, *, least: int = 0, most: int = LARGEST_COUNT) -> Any:
        """A number of at least 0, one above 0, a whole number in bounds, or a switch: `default` if it is not given, or
        wrong; None if it is `auto`. Other numbers than whole ones must be given, or have a default."""
        value: Any = self.fields.get(key, default)
        words, types = _TYPES[kind]
        of_float = float in types
        if of_float and default is None and key not in self.fields:
            self.wrong(key, "is missing", f'"{key}": 1e-3')
        if value == AUTO or (value is None and kind != "switch"):
            return None
        if type(value) not in types:
            is_quoted = kind == "whole" and isinstance(value, str) and value.isdigit()
            self.wrong(key, f"must be {words}, or auto", f'"{key}": {value}, without quotes' if is_quoted else None)
        elif kind == "positive" and value <= 0:
            self.wrong(key, "must be above 0")
        elif value < least:
            self.wrong(key, f"must be at least {least}")
        elif not value <= (sys.float_info.max if of_float else most):
            self.wrong(key, "must be a finite number" if of_float else f"must be at most {most:,}")
        else:
            return float(value) if of_float else value
        return default
