"""Reads a DeepSpeed config: JSON, also with comments and commas before a closing bracket, as DeepSpeed reads it.

The table of names says what becomes of each: it sets options (`deepspeed.py`), changes nothing here, is explained by a
note, or is an error. Any other name is noted with the nearest known one.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sambasim.bounded import LARGEST_TOML_BYTES, nests_too_deeply, read_text, shortened
from sambasim.errors import OptionError
from sambasim.options.base import Problem, did_you_mean, nearest, one_of, refusal, show

_SET_OPTIONS: Mapping[str, tuple[str, ...]] = {
    "": (
        "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping",
        "optimizer", "scheduler", "fp16", "bf16", "bfloat16", "zero_optimization",
    ),
    "optimizer": ("type", "params"),
    "scheduler": ("type", "params"),
    "fp16": (
        "enabled", "loss_scale", "initial_scale_power", "loss_scale_window", "hysteresis", "consecutive_hysteresis",
        "min_loss_scale",
    ),
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
_NOTED: Mapping[str, Mapping[str, str]] = {
    "": {
        "activation_checkpointing": "is for models that call deepspeed.checkpointing; --recompute computes again here",
        "data_types": "gradients are added up in their own type here",
        "gradient_accumulation_dtype": "gradients are added up in their own type here",
        "sparse_gradients": "gradients of embeddings are dense here",
        "pipeline": "stages are made by --pipeline-stages here",
        "tensor_parallel": "tensors are cut by --tensor-parallel weight --n-chips N here",
    },
    "zero_optimization": {
        "offload_optimizer": f"optimizer states {_HOST_MEMORY}",
        "offload_param": f"parameters {_HOST_MEMORY}",
        "cpu_offload": f"optimizer states {_HOST_MEMORY}",
        "cpu_offload_params": f"parameters {_HOST_MEMORY}",
    },
}

_TRAINS_OTHERWISE = "trains in another way, which sambasim does not have"
_LEAVE_OUT = "leave it out, or set it to false"
_REFUSED: Mapping[str, Mapping[str, tuple[str, str]]] = {
    "": {
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
    "zero_optimization": dict.fromkeys(
        ("zero_quantized_weights", "zero_quantized_gradients", "zenflow"),
        ("changes the numbers, and sambasim sends them as they are", _LEAVE_OUT),
    ),
}  # fmt: skip

_COMMENT = re.compile(r'"(?:\\.|[^"\\\n])*"|/\*.*?(?:\*/|\Z)|//[^\n]*|#[^\n]*', re.DOTALL)
_LAST_COMMA = re.compile(r'"(?:\\.|[^"\\\n])*"|,(?=\s*[}\]])')


@dataclass(frozen=True, slots=True)
class DeepSpeedFile:
    """A DeepSpeed config, read from `path`. `notes`: what it has that changes nothing here, or is not known; `refused`:
    what cannot be done here."""

    path: Path
    config: Mapping[str, object]
    notes: tuple[str, ...]
    refused: tuple[Problem, ...]

    def origin(self, key: str) -> str:
        """How errors name a value of this file."""
        return f"{self.path.name}: {key}"

    def error(self, problems: Sequence[Problem], remedy: str = "correct each of them") -> OptionError:
        """One error for all problems."""
        error = refusal(problems, where=str(self.path))
        return error if len(problems) == 1 else OptionError(error.what, where=error.where, remedy=remedy)


def read_deepspeed(path: Path) -> DeepSpeedFile:
    """Raises OptionError if the file cannot be read or is not JSON."""
    config = _parsed(path)
    without: dict[str, list[str]] = {}
    for name, *_ in _found(config, _CHANGES_NOTHING):
        table, _, key = name.rpartition(".")
        without.setdefault(f"in {table}: " if table else "", []).append(key)
    parts = "; ".join(f"{table}{', '.join(keys)}" for table, keys in without.items())
    notes = [f"{path.name}: these change nothing here: {parts}"] if without else []
    for name, value, what in _found(config, _NOTED):
        if _is_on(value):
            notes.append(f"{path.name}: {name}: {what}")
    notes += (f"{path.name}: {note}" for note in _unknown(config))
    refused = [
        Problem(name, what[0], what[1], show(value)) for name, value, what in _found(config, _REFUSED) if _is_on(value)
    ]
    return DeepSpeedFile(path, config, tuple(notes), tuple(refused))


def _tables(config: Mapping[str, object]) -> Iterator[tuple[str, Mapping[str, object]]]:
    """The tables whose fields are known one by one."""
    for table in _SET_OPTIONS:
        value = config if not table else config.get("bfloat16" if table == "bf16" and "bf16" not in config else table)
        if isinstance(value, Mapping):
            yield table, value


def _found(config: Mapping[str, object], known: Mapping[str, Any]) -> Iterator[tuple[str, object, Any]]:
    """Dotted name, value, and what is said of it, of each field of the file that is in `known`."""
    for table, fields in _tables(config):
        names = known.get(table, ())
        for key, value in fields.items():
            if key in names:
                yield f"{table}.{key}" if table else key, value, names[key] if isinstance(names, Mapping) else ""


def _is_on(value: object) -> bool:
    if isinstance(value, Mapping):
        return bool(value) and value.get("enabled", True) is not False and value.get("device") != "none"
    return bool(value)


def _unknown(config: Mapping[str, object]) -> Iterator[str]:
    for table, fields in _tables(config):
        known = [key for rows in (_SET_OPTIONS, _CHANGES_NOTHING, _NOTED, _REFUSED) for key in rows.get(table, ())]
        for key in fields:
            if key not in known and not key.startswith(("_", "//", "#", "comment")):
                guess = did_you_mean(nearest(key, known))
                name = f"{table}.{key}" if table else key
                yield f"{shortened(name)} is not known, and changes nothing" + (f"; {guess}" if guess else "")


def _parsed(path: Path) -> dict[str, object]:
    try:
        text = read_text(path, LARGEST_TOML_BYTES)
    except FileNotFoundError:
        raise OptionError(f"there is no DeepSpeed config {path}", remedy="check the path after --deepspeed") from None
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        what = f"the DeepSpeed config {path} cannot be read: {reason}"
        raise OptionError(what, remedy="--deepspeed ds_config.json") from None
    # Lines stay where they are, for errors.
    text = _COMMENT.sub(lambda found: found[0] if found[0][0] == '"' else re.sub(r"[^\n]", " ", found[0]), text)
    text = _LAST_COMMA.sub(lambda found: found[0] if found[0][0] == '"' else " ", text)
    try:
        config = json.loads(text, object_pairs_hook=_once, parse_float=_number)
    except json.JSONDecodeError as error:
        line = text.split("\n")[error.lineno - 1].strip()
        what = f"the DeepSpeed config is not valid JSON: {error.msg[:1].lower()}{error.msg[1:]}"
        raise OptionError(what, where=f"{path}:{error.lineno}: {shortened(line)}", remedy="correct that line") from None
    except RecursionError:
        raise OptionError(f"the DeepSpeed config {path} is nested too deeply", remedy="correct it there") from None
    except ValueError as error:
        what = f"the DeepSpeed config is not valid: {shortened(str(error))}"
        raise OptionError(what, where=str(path), remedy="correct it there") from None
    if not isinstance(config, dict):
        what = f"the DeepSpeed config is {show(config)}, not a table"
        raise OptionError(what, where=str(path), remedy='{"train_batch_size": 32, …}')
    if nests_too_deeply(config):
        raise OptionError(f"the DeepSpeed config {path} is nested too deeply", remedy="correct it there")
    return config


def _once(pairs: list[tuple[str, object]]) -> dict[str, object]:
    names = [name for name, _ in pairs]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"{one_of(twice)} is given twice in one table")
    return dict(pairs)


def _number(text: str) -> float:
    """A number with a point or an exponent; a whole one is an int: `5e8` elements, `1e3` steps."""
    value = float(text)
    return int(value) if value.is_integer() else value
