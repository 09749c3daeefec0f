"""DeepSpeed configs as options: in the shapes of public repositories, what overrides what, and what is written."""

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from sambasim.commands.plan import as_deepspeed, beyond_deepspeed
from sambasim.errors import OptionError
from sambasim.options.compile import CompileOptions, compile_options
from sambasim.options.given import leaves
from sambasim.options.schedules import LossScaleOptions
from tests.support.deepspeed_configs import CONFIGS, TWO, compiled, run

# With two replicas, on the quick start: its batch is 32, its optimizer adamw with lr 0.005 and weight decay 0.01, its
# schedule cosine after 20 steps of warm-up. All that each config changes:
EXPECTED: Mapping[str, Mapping[str, object]] = {
    "Hugging Face, ZeRO-2": {"zero": 2, "schedule.name": "warmup", "schedule.warmup_steps": 20},
    "CIFAR": {
        "batch_size": 8, "lr": 0.001, "betas": (0.8, 0.999), "weight_decay": 3e-7, "max_grad_norm": 1.0, "zero": 0,
        "schedule.name": "warmup", "schedule.warmup_steps": 1000, "dtype": "fp16", "loss_scale.start": 2.0**15,
        "loss_scale.window": 500,
    },
    "BLOOM": {
        "batch_size": 2, "accumulation_steps": 8, "max_grad_norm": 1.0, "dtype": "bf16", "master_weights": True,
        "zero": 0,
    },
    "OneCycle": {
        "batch_size": 4, "accumulation_steps": 2, "lr": 0.001, "betas": (0.99, 0.99), "weight_decay": 0.0,
        "schedule.name": "one_cycle", "schedule.warmup_steps": 0, "schedule.start_factor": 0.1,
        "schedule.up_steps": 1000, "schedule.down_steps": 1000, "schedule.rate": 0.001, "schedule.step_size": 1000,
        "schedule.momentum": (0.85, 0.99),
    },
    "LRRangeTest": {
        "batch_size": 8, "name": "sgd", "lr": 0.0001, "momentum": 0.9, "dampening": 0.0, "nesterov": True,
        "weight_decay": 5e-4, "betas": None, "eps": None, "amsgrad": None,
        "schedule.name": "range_test", "schedule.warmup_steps": 0, "schedule.step_size": 200, "schedule.rate": 1.0,
        "schedule.staircase": True,
    },
    "instruction tuning, ZeRO-3 with offload": {
        "batch_size": 4, "accumulation_steps": 4, "zero": 3, "dtype": "bf16", "master_weights": True, "lr": 2e-5,
        "weight_decay": 0.0, "max_grad_norm": 1.0, "schedule.name": "warmup_decay", "schedule.warmup_steps": 30,
    },
    "offload as it was": {
        "batch_size": 8, "lr": 1e-4, "weight_decay": 0.0, "dtype": "fp16", "zero": 2, "loss_scale.dynamic": False,
        "loss_scale.start": 128.0,
    },
    "comments": {"batch_size": 8, "name": "adam", "lr": 3e-4, "weight_decay": 0.0, "max_grad_norm": 1.0},
    "monitors and profilers": {"batch_size": 8},
    "bfloat16 as it was": {
        "batch_size": 4, "accumulation_steps": 4, "dtype": "bf16", "master_weights": True, "lr": 1e-4,
        "betas": (0.9, 0.95), "weight_decay": 0.1, "max_grad_norm": 1.0, "schedule.name": "warmup_cosine",
        "schedule.warmup_steps": 50, "schedule.total_steps": 500, "schedule.start_factor": 0.1,
        "schedule.final_factor": 0.05, "schedule.warmup_curve": "linear", "zero": 0,
    },
    "ZeRO-Infinity": {
        "batch_size": 8, "name": "lion", "lr": 0.001, "betas": (0.95, 0.98), "eps": None, "amsgrad": None,
        "maximize": None, "weight_decay": 0.0,
        "dtype": "fp16", "zero": 3, "loss_scale.hysteresis": 4, "loss_scale.consecutive": True,
        "schedule.name": "warmup", "schedule.warmup_steps": 20, "schedule.warmup_curve": "linear",
    },
    "switched off": {"batch_size": 8, "lr": 0.001, "weight_decay": 0.0, "zero": 0},
    "a name with a mistake": {"batch_size": 8, "lr": 0.001, "weight_decay": 0.0},
}  # fmt: skip
_IMPLIED = {"schedule.warmup_curve": "log", "schedule.start_factor": 0.0}
"""What every schedule with a warm-up has, unless a row says otherwise."""


def _flat(options: CompileOptions) -> dict[str, object]:
    """All options by their names, without the tables that hold them."""
    found = leaves(options.model_dump(exclude={"model", "data", "loss"}))
    return {name.removeprefix("optimizer.").removeprefix("training."): value for name, value in found.items()}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_in_the_shape_of_a_public_repository_sets_its_options_and_is_written_so(
    name: str, tmp_path: Path
) -> None:
    options, steps = compiled(CONFIGS[name], tmp_path), ["training.schedule.total_steps=2000"]
    assert any("is not known" in note for note in options.notes) == (name == "a name with a mistake")
    before, after = _flat(compile_options(None, None, [], TWO)), _flat(options)
    implied = _IMPLIED if str(EXPECTED[name].get("schedule.name")).startswith("warmup") else {}
    changed = {key: value for key, value in after.items() if value != before.get(key)}
    assert changed == {key: value for key, value in {**implied, **EXPECTED[name]}.items() if value != before.get(key)}
    options = compiled(CONFIGS[name], tmp_path, overrides=steps)
    written, training = as_deepspeed(options), options.training
    assert compiled(written, tmp_path, overrides=steps).model_dump() == options.model_dump()
    assert written["train_batch_size"] == 2 * training.batch_size * training.accumulation_steps
    lacking = ["the schedule cosine with 20 steps of warm-up, which the script must make"]
    assert list(beyond_deepspeed(options)) == lacking * (training.schedule.name == "cosine")


def test_notes_say_what_has_no_effect(tmp_path: Path) -> None:
    def notes(name: str, flags: Mapping[str, object] = TWO) -> list[str]:
        return [note.removeprefix("ds_config.json: ") for note in compiled(CONFIGS[name], tmp_path, flags).notes]

    assert notes("monitors and profilers") == [
        "these change nothing here: steps_per_print, dump_state, wall_clock_breakdown, memory_breakdown, tensorboard, "
        "wandb, csv_monitor, comet, comms_logger, flops_profiler, autotuning, aio, checkpoint, nebula, compile, "
        "hybrid_engine, sparse_attention",
        "activation_checkpointing: is for models that call deepspeed.checkpointing; --recompute computes again here",
    ]
    assert notes("a name with a mistake") == [
        "gradient_cliping is not known, and changes nothing; did you mean gradient_clipping?",
        "zero_optimization.overlap_com is not known, and changes nothing; did you mean overlap_comm?",
    ]
    assert notes("offload as it was", {"world_size": 1}) == [
        "these change nothing here: steps_per_print; in zero_optimization: contiguous_gradients, overlap_comm, "
        "reduce_bucket_size",
        "pipeline: stages are made by --pipeline-stages here",
        "zero_optimization.cpu_offload: optimizer states would be in host memory, and stay in device memory here; "
        "the numbers are the same",
        "zero_optimization.stage = 2 has no effect: nothing is cut without --data-parallel",
    ]
    assert notes("switched off") == notes("comments") == []
    never = compiled('{"train_batch_size": 8, "steps_per_print": Infinity}', tmp_path).notes
    assert [*never] == ["ds_config.json: these change nothing here: steps_per_print"]


def test_flags_override_the_file_and_the_file_a_config(tmp_path: Path) -> None:
    config = tmp_path / "net.toml"
    config.write_text(
        '[model]\ntarget = "net:Net"\n[optimizer]\nname = "sgd"\nlr = 0.5\nmomentum = 0.9\nmax_grad_norm = 3.0\n'
        '[training]\nbatch_size = 5\nsteps = 9\n[training.schedule]\nname = "cosine"\nfinal_factor = 0.5\n'
        "total_steps = 70\nwarmup_steps = 7\n"
    )
    text = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "Adam", "params": {"lr": 0.1, "weight_decay": "auto"}},
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": {"warmup_num_steps": "auto", "warmup_max_lr": "auto", "total_num_steps": "auto"},
        },
    }
    options = compiled(text, tmp_path, {"lr": 0.2}, ["training.accumulation_steps=3"], config)
    training, optimizer = options.training, options.optimizer
    assert optimizer is not None
    assert (optimizer.name, optimizer.lr, optimizer.momentum, optimizer.max_grad_norm) == ("adamw", 0.2, None, 3.0)
    assert optimizer.weight_decay == 0.01, "auto, and nothing else says it: that of torch"
    assert (training.batch_size, training.accumulation_steps, training.steps) == (4, 3, 9)
    schedule = training.schedule
    assert (schedule.name, schedule.warmup_steps, schedule.total_steps) == ("warmup_decay", 7, 70)
    assert schedule.final_factor == 0.0, "of the schedule of the config only what is auto stays"


@pytest.mark.parametrize(
    ("sizes", "flags", "found"),
    [
        ((32, 4, 4), TWO, (4, 4)),
        ((32, 4, None), TWO, (4, 4)),
        ((32, None, 4), TWO, (4, 4)),
        ((32, None, None), TWO, (16, 1)),
        ((None, 4, 2), TWO, (4, 2)),
        ((None, 4, None), TWO, (4, 1)),
        ((128, "auto", "auto"), {**TWO, "grad_accumulation_steps": 2}, (32, 2)),
        (("auto", "auto", "auto"), TWO, (32, 1)),
        ((32, None, None), {**TWO, "batch_size": 2}, (2, 8)),
        ((32, 4, None), {"grad_accumulation_steps": 8}, (4, 8)),
        ((None, None, None), {**TWO, "grad_accumulation_steps": 3}, (32, 3)),
    ],
)
def test_batch_sizes_follow_the_rule_of_deepspeed(
    sizes: tuple[object, ...], flags: Mapping[str, object], found: tuple[int, int], tmp_path: Path
) -> None:
    keys = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    text = {key: size for key, size in zip(keys, sizes, strict=True) if size is not None}
    training = compiled(text, tmp_path, flags).training
    assert (training.batch_size, training.accumulation_steps) == found


def test_a_run_changes_what_a_run_may_change(tmp_path: Path) -> None:
    options = compiled(CONFIGS["instruction tuning, ZeRO-3 with offload"], tmp_path)
    text = json.loads(CONFIGS["instruction tuning, ZeRO-3 with offload"])
    assert run(text, tmp_path, options).changed == ()
    text["optimizer"]["params"]["betas"] = [0.8, 0.9]
    text |= {"gradient_clipping": 0.25, "gradient_accumulation_steps": 8}
    text["scheduler"] = {"type": "WarmupLR", "params": {"warmup_max_lr": 0.5, "warmup_num_steps": 3}}
    resolved = run(text, tmp_path, options, ["optimizer.eps=1e-6", "training.schedule.warmup_steps=4"])
    assert set(resolved.changed) == {
        "optimizer.lr = 0.5 (compiled: 2e-05)", "optimizer.betas = [0.8, 0.9] (compiled: [0.9, 0.999])",
        "optimizer.eps = 1e-06 (compiled: 1e-08)", "optimizer.max_grad_norm = 0.25 (compiled: 1.0)",
        "training.accumulation_steps = 8 (compiled: 4)", 'training.schedule.name = "warmup" (compiled: "warmup_decay")',
        "training.schedule.warmup_steps = 4 (compiled: 30)",
    }  # fmt: skip


def test_the_batch_of_a_run_has_its_number_of_replicas(tmp_path: Path) -> None:
    options = compiled(CONFIGS["BLOOM"], tmp_path)
    text = {"train_batch_size": 32, "train_micro_batch_size_per_gpu": "auto"}
    assert [run(text, tmp_path, options, replicas=n).training.accumulation_steps for n in (2, 4, 8)] == [8, 4, 2]
    with pytest.raises(OptionError) as error:
        run(text, tmp_path, options, replicas=3)
    assert "per_gpu 2 (auto) × world size 3 (3 replicas) = 6" in str(error.value)
    wrong = {"train_batch_size": 32, "optimizer": {"type": "AdamW", "params": {"lr": "x"}}}
    with pytest.raises(OptionError, match=r'lr = "x" \(from run.json: optimizer.params.lr\): must be a number'):
        run(wrong, tmp_path, options)


@pytest.mark.parametrize("flags", [{**TWO, "dtype": "fp32"}, {**TWO, "dtype": "bf16"}, TWO])
@pytest.mark.parametrize("half", [{"fp16": {"enabled": True, "initial_scale_power": 12}}, {"bf16": {"enabled": True}}])
def test_a_dtype_that_is_given_drops_what_the_file_says_of_its_own(
    flags: Mapping[str, object], half: Mapping[str, object], tmp_path: Path
) -> None:
    overrides = [] if "dtype" in flags else ["compile.dtype=fp32"]
    options = compiled({"train_batch_size": 8, **half}, tmp_path, flags, overrides)
    assert options.dtype == flags.get("dtype", "fp32")
    assert options.training.loss_scale == LossScaleOptions()
    assert options.master_weights is ("bf16" in half and options.dtype == "bf16")


def test_micro_batches_are_written_as_accumulation_steps_and_what_cannot_be_written_is_listed() -> None:
    of_stages = {**TWO, "batch_size": 32, "pipeline_stages": 2, "micro_batches": 8}
    written = as_deepspeed(compile_options(None, None, ["training.accumulation_steps=3"], of_stages))
    assert list(written.values())[:3] == [4 * 24 * 2, 4, 24], "of all, of one micro-batch, steps"
    overrides = ["training.schedule.name=constant", "training.schedule.warmup_steps=0"]
    assert list(beyond_deepspeed(compile_options(None, None, overrides, {}))) == []
    flags = {"dtype": "bf16", "pipeline_stages": 2, "micro_batches": 2, "recompute": "full", "ema": 0.9}
    assert [line.partition(":")[0] for line in beyond_deepspeed(compile_options(None, None, overrides, flags))] == [
        "bf16 without master weights", "a pipeline of 2 stages, which the script must make",
        "averages of the weights, which the script must make", "recomputation (full), which the model must ask for",
    ]  # fmt: skip
