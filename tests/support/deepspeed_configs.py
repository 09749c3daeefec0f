"""DeepSpeed configs in the shapes of public repositories, written for these tests; the options that a compile or a run
gets from one, and the error if it is refused."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from sambasim.errors import OptionError
from sambasim.options.compile import CompileOptions, compile_options
from sambasim.options.given import given_overrides
from sambasim.options.run import ResolvedRun, resolve_run, run_options, with_deepspeed

CONFIGS: dict[str, str] = {
    "Hugging Face, ZeRO-2": """{
        "fp16": {"enabled": "auto", "loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16, "hysteresis":
        2, "min_loss_scale": 1}, "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto",
        "weight_decay": "auto"}}, "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": "auto", "warmup_max_lr":
        "auto", "warmup_num_steps": "auto"}}, "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu",
        "pin_memory": true}, "allgather_partitions": true, "allgather_bucket_size": 2e8, "overlap_comm": true,
        "reduce_scatter": true, "reduce_bucket_size": 2e8, "contiguous_gradients": true}, "gradient_accumulation_steps":
        "auto", "gradient_clipping": "auto", "steps_per_print": 2000, "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto", "wall_clock_breakdown": false
    }""",
    "CIFAR": """{
        "train_batch_size": 16, "optimizer": {"type": "Adam", "params": {"lr": 0.001, "betas": [0.8, 0.999], "eps":
        1e-8, "weight_decay": 3e-7}}, "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 0, "warmup_max_lr":
        0.001, "warmup_num_steps": 1000}}, "gradient_clipping": 1.0, "prescale_gradients": false, "bf16": {"enabled":
        false}, "fp16": {"enabled": true, "fp16_master_weights_and_grads": false, "loss_scale": 0, "loss_scale_window":
        500, "hysteresis": 2, "min_loss_scale": 1, "initial_scale_power": 15}, "zero_optimization": {"stage": 0,
        "cpu_offload": false}
    }""",
    "BLOOM": """{
        "train_micro_batch_size_per_gpu": 2, "train_batch_size": 32, "gradient_clipping": 1.0, "zero_optimization":
        {"stage": 0}, "bf16": {"enabled": true}
    }""",
    "OneCycle": """{
        "train_batch_size": 16, "gradient_accumulation_steps": 2, "optimizer": {"type": "Adam", "params": {"lr": 0.001,
        "betas": [0.8, 0.9]}}, "scheduler": {"type": "OneCycle", "params": {"cycle_first_step_size": 1000,
        "cycle_first_stair_count": 500, "cycle_second_step_size": 1000, "cycle_second_stair_count": 500,
        "decay_step_size": 1000, "cycle_min_lr": 0.0001, "cycle_max_lr": 0.0010, "decay_lr_rate": 0.001,
        "cycle_min_mom": 0.85, "cycle_max_mom": 0.99, "decay_mom_rate": 0.0}}
    }""",
    "LRRangeTest": """{
        "train_batch_size": 16, "zero_allow_untested_optimizer": true, "zero_optimization": true, "optimizer": {"type":
        "SGD", "params": {"lr": 0.1, "momentum": 0.9, "weight_decay": 5e-4, "nesterov": true}}, "scheduler": {"type":
        "LRRangeTest", "params": {"lr_range_test_min_lr": 0.0001, "lr_range_test_step_size": 200,
        "lr_range_test_staircase": true}}
    }""",
    "instruction tuning, ZeRO-3 with offload": """{
        "bf16": {"enabled": true}, "optimizer": {"type": "AdamW", "params": {"lr": 2e-5, "betas": [0.9, 0.999], "eps":
        1e-8, "weight_decay": 0}}, "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto",
        "warmup_min_lr": 0, "warmup_max_lr": 2e-5, "warmup_num_steps": 30}}, "zero_optimization": {"stage": 3,
        "offload_param": {"device": "cpu", "pin_memory": true}, "memory_efficient_linear": false, "sub_group_size": 1e9,
        "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto", "stage3_param_persistence_threshold":
        "auto", "stage3_max_live_parameters": 1e9, "stage3_max_reuse_distance": 1e9,
        "stage3_gather_16bit_weights_on_model_save": true}, "gradient_accumulation_steps": 4,
        "train_micro_batch_size_per_gpu": 4, "gradient_clipping": 1.0
    }""",
    "offload as it was": """{
        "train_micro_batch_size_per_gpu": 8, "gradient_accumulation_steps": 1, "steps_per_print": 100, "optimizer":
        {"type": "Adam", "params": {"lr": 1e-4, "bias_correction": true}}, "pipeline": {"seed_layers": true}, "fp16":
        {"enabled": true, "loss_scale": 128.0, "initial_scale_power": 32}, "zero_optimization": {"stage": 2,
        "cpu_offload": true, "contiguous_gradients": true, "overlap_comm": true, "reduce_bucket_size": 3000000}
    }""",
    "comments": """{
        # Written by hand.
        "train_batch_size": 16, // of all GPUs
        /* The optimizer
           of the paper. */
        "optimizer": {"type": "Adam", "params": {"torch_adam": true, "adam_w_mode": false, "lr": 3e-4,}},
        "_comment": "a # b // c",
        "gradient_clipping": 1.0,
    }""",
    "monitors and profilers": """{
        "train_batch_size": 16, "steps_per_print": 1, "dump_state": true, "wall_clock_breakdown": true,
        "memory_breakdown": true, "tensorboard": {"enabled": true}, "wandb": {"enabled": true, "group": "g", "project":
        "p"}, "csv_monitor": {"enabled": true, "output_path": "out/"}, "comet": {"enabled": false}, "comms_logger":
        {"enabled": true, "verbose": false, "prof_all": true}, "flops_profiler": {"enabled": true, "profile_step": 1,
        "module_depth": -1, "top_modules": 1}, "autotuning": {"enabled": false}, "aio": {"block_size": 1048576,
        "queue_depth": 8}, "checkpoint": {"tag_validation": "Warn"}, "nebula": {"enabled": false}, "compile":
        {"backend": "inductor"}, "hybrid_engine": {"enabled": false, "inference_tp_size": 1, "release_inference_cache":
        false}, "sparse_attention": {"mode": "fixed", "block": 16}, "activation_checkpointing":
        {"partition_activations": true, "cpu_checkpointing": false, "contiguous_memory_optimization": false,
        "number_checkpoints": null, "synchronize_checkpoint_boundary": false, "profile": false}
    }""",
    "bfloat16 as it was": """{
        "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 4, "bfloat16": {"enabled": true},
        "data_types": {"grad_accum_dtype": "fp32"}, "communication_data_type": "fp32", "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}},
        "scheduler": {"type": "WarmupCosineLR", "params": {"total_num_steps": 500, "warmup_min_ratio": 0.1,
        "warmup_num_steps": 50, "cos_min_ratio": 0.05, "warmup_type": "linear"}},
        "zero_optimization": {"elastic_checkpoint": true, "round_robin_gradients": true}
    }""",
    "ZeRO-Infinity": """{
        "train_batch_size": 16, "optimizer": {"type": "Lion", "params": {"lr": 1e-4, "betas": [0.95, 0.98]}}, "fp16":
        {"enabled": true, "auto_cast": false, "consecutive_hysteresis": true, "hysteresis": 4}, "aio": {"block_size":
        262144, "thread_count": 1, "single_submit": false}, "scheduler": {"type": "WarmupLR", "params":
        {"warmup_num_steps": 20, "warmup_type": "linear"}}, "zero_optimization": {"stage": 3, "offload_optimizer":
        {"device": "nvme", "nvme_path": "/local", "buffer_count": 4}, "offload_param": {"device": "nvme", "buffer_size":
        1e8}}
    }""",
    "switched off": """{
        "train_batch_size": 16, "amp": {"enabled": false, "opt_level": "O1"}, "elasticity": {"enabled": false}, "fp16":
        {"enabled": false}, "bf16": {"enabled": "auto"}, "progressive_layer_drop": {"enabled": false},
        "curriculum_learning": {"enabled": false, "curriculum_type": "seqlen"}, "data_efficiency": {"enabled": false},
        "gradient_clipping": 0.0, "optimizer": {"type": "Adam", "params": {"lr": 0.001}}, "sparse_gradients": false,
        "zero_optimization": {"offload_param": {"device": "none"}}
    }""",
    "a name with a mistake": """{
        "train_batch_size": 16, "gradient_cliping": 1.0, "zero_optimization": {"stage": 1, "overlap_com": true},
        "optimizer": {"type": "adamw", "params": {"lr": 0.001}}
    }""",
}

TWO = {"data_parallel": True, "world_size": 2}


def compiled(
    text: str | Mapping[str, Any],
    folder: Path,
    flags: Mapping[str, object] = TWO,
    overrides: list[str] | None = None,
    config: Path | None = None,
    target: str | None = None,
) -> CompileOptions:
    file = folder / "ds_config.json"
    file.write_text(text if isinstance(text, str) else json.dumps(text))
    return compile_options(config, target, overrides or [], {**flags, "deepspeed": file})


def refused(
    text: str | Mapping[str, Any], folder: Path, flags: Mapping[str, object] = TWO, target: str | None = None
) -> str:
    with pytest.raises(OptionError) as error:
        compiled(text, folder, flags, target=target)
    return str(error.value).replace(str(folder), "FOLDER")


def run(
    text: Mapping[str, Any],
    folder: Path,
    options: CompileOptions,
    overrides: list[str] | None = None,
    replicas: int = 2,
) -> ResolvedRun:
    """A run of what was compiled with `options`."""
    file = folder / "run.json"
    file.write_text(json.dumps(text))
    training, data, how = json.loads(
        json.dumps([options.training_defaults(), options.data.model_dump(mode="json"), options.model_dump(mode="json")])
    )
    chosen = run_options({"pef": "digits", "deepspeed": file}, given_overrides(overrides or []))
    chosen, given, _ = with_deepspeed(chosen, training, how, replicas)
    return resolve_run(chosen, training, data, given)
