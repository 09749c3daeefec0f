"""DeepSpeed configs as options: 31 in the shapes of public repositories, what overrides what, and what is refused."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from sambasim.errors import OptionError
from sambasim.options.compile import CompileOptions, Compiling, compile_options, compile_options_and_notes
from sambasim.options.deepspeed_written import as_deepspeed, beyond_deepspeed
from sambasim.options.load import given_overrides
from sambasim.options.run import ResolvedRun, leaves, resolve_run, run_options, with_deepspeed
from sambasim.options.training import LossScaleOptions
from tests.support.deepspeed_configs import CONFIGS

TWO = {"data_parallel": True, "world_size": 2}


def compiled(
    text: str | Mapping[str, Any],
    folder: Path,
    flags: Mapping[str, object] = TWO,
    overrides: list[str] | None = None,
    config: Path | None = None,
) -> Compiling:
    file = folder / "ds_config.json"
    file.write_text(text if isinstance(text, str) else json.dumps(text))
    return compile_options_and_notes(config, None, overrides or [], flags, file)


def refused(text: str | Mapping[str, Any], folder: Path, flags: Mapping[str, object] = TWO) -> str:
    with pytest.raises(OptionError) as error:
        compiled(text, folder, flags)
    return str(error.value).replace(str(folder), "FOLDER")


# With two replicas, on the quick start: its batch is 32, its optimizer adamw with lr 0.005 and weight decay 0.01, its
# schedule cosine after 20 steps of warm-up. All that each config changes:
EXPECTED: Mapping[str, Mapping[str, object]] = {
    "Hugging Face, ZeRO-2": {"zero": 2, "schedule.name": "warmup", "schedule.warmup_steps": 20},
    "Hugging Face, ZeRO-3": {"zero": 3, "schedule.name": "warmup_decay", "schedule.warmup_steps": 20},
    "Hugging Face, ZeRO-3 without an optimizer": {"zero": 3},
    "getting started": {"batch_size": 4, "lr": 0.00015, "weight_decay": 0.0, "dtype": "fp16"},
    "CIFAR": {
        "batch_size": 8, "lr": 0.001, "betas": (0.8, 0.999), "weight_decay": 3e-7, "max_grad_norm": 1.0, "zero": 0,
        "schedule.name": "warmup", "schedule.warmup_steps": 1000, "dtype": "fp16", "loss_scale.start": 2.0**15,
        "loss_scale.window": 500,
    },
    "BERT pretraining": {
        "batch_size": 8, "accumulation_steps": 4, "lr": 0.006, "betas": (0.9, 0.99), "max_grad_norm": 1.0,
        "dtype": "fp16",
    },
    "SQuAD": {
        "batch_size": 3, "accumulation_steps": 4, "lr": 3e-5, "weight_decay": 0.0, "max_grad_norm": 1.0,
        "dtype": "fp16",
    },
    "Megatron, ZeRO-1": {
        "batch_size": 4, "accumulation_steps": 4, "max_grad_norm": 1.0, "dtype": "fp16", "loss_scale.start": 2048.0,
        "loss_scale.window": 500,
    },
    "Megatron, curriculum off": {
        "batch_size": 4, "accumulation_steps": 4, "max_grad_norm": 1.0, "dtype": "fp16", "zero": 2,
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
        "batch_size": 8, "name": "sgd", "lr": 0.0001, "momentum": 0.9, "dampening": 0.0, "nesterov": False,
        "weight_decay": 0.0, "betas": None, "eps": None, "schedule.name": "range_test", "schedule.warmup_steps": 0,
        "schedule.step_size": 200, "schedule.rate": 5.0,
    },
    "a static loss scale": {
        "batch_size": 8, "accumulation_steps": 2, "lr": 5e-5, "dtype": "fp16", "loss_scale.dynamic": False,
        "loss_scale.start": 128.0,
    },
    "chat, with a hybrid engine": {
        "batch_size": 4, "accumulation_steps": 2, "zero": 3, "dtype": "fp16", "loss_scale.window": 100,
        "max_grad_norm": 1.0,
    },
    "instruction tuning, ZeRO-3 with offload": {
        "batch_size": 4, "accumulation_steps": 4, "zero": 3, "dtype": "bf16", "master_weights": True, "lr": 2e-5,
        "weight_decay": 0.0, "max_grad_norm": 1.0, "schedule.name": "warmup_decay", "schedule.warmup_steps": 30,
    },
    "vision and language, ZeRO-2": {"zero": 2},
    "Lightning": {"batch_size": 4, "zero": 2, "max_grad_norm": 0.5},
    "SGD": {
        "batch_size": 16, "name": "sgd", "lr": 0.05, "momentum": 0.9, "dampening": 0.0, "nesterov": True,
        "weight_decay": 5e-4, "betas": None, "eps": None,
    },
    "offload as it was": {"batch_size": 8, "lr": 1e-4, "weight_decay": 0.0, "dtype": "fp16", "zero": 2},
    "comments": {"batch_size": 8, "lr": 3e-4, "weight_decay": 0.1, "max_grad_norm": 1.0},
    "monitors and profilers": {"batch_size": 8},
    "torch's Adam": {"batch_size": 8, "name": "adam", "lr": 1e-3},
    "WarmupCosineLR": {
        "batch_size": 8, "lr": 4e-4, "weight_decay": 0.0, "schedule.name": "warmup_cosine",
        "schedule.warmup_steps": 50, "schedule.total_steps": 500, "schedule.start_factor": 0.1,
        "schedule.final_factor": 0.05, "schedule.warmup_curve": "linear", "dtype": "bf16", "master_weights": True,
        "zero": 2,
    },
    "Accelerate": {
        "batch_size": 4, "accumulation_steps": 2, "zero": 3, "max_grad_norm": 1.0, "dtype": "bf16",
        "master_weights": True,
    },
    "AlexNet in a pipeline": {"batch_size": 8, "accumulation_steps": 2, "lr": 0.001, "weight_decay": 0.0},
    "bfloat16 as it was": {
        "batch_size": 4, "accumulation_steps": 4, "dtype": "bf16", "master_weights": True, "lr": 1e-4,
        "betas": (0.9, 0.95), "weight_decay": 0.1, "max_grad_norm": 1.0,
    },
    "ZeRO-Infinity": {
        "batch_size": 8, "lr": 1e-5, "dtype": "fp16", "zero": 3, "loss_scale.hysteresis": 4,
        "loss_scale.consecutive": True,
    },
    "switched off": {"batch_size": 8, "lr": 0.001, "weight_decay": 0.0},
    "a name with a mistake": {"batch_size": 8, "lr": 0.001, "weight_decay": 0.0},
    "Lion": {
        "batch_size": 8, "name": "lion", "lr": 0.001, "betas": (0.95, 0.98), "eps": None, "weight_decay": 0.0,
        "schedule.name": "warmup", "schedule.warmup_steps": 20, "schedule.warmup_curve": "linear",
    },
    "a step rate in stairs": {
        "batch_size": 2, "lr": 0.001, "weight_decay": 0.0, "schedule.name": "range_test", "schedule.warmup_steps": 0,
        "schedule.step_size": 10, "schedule.rate": 1.0, "schedule.staircase": True,
    },
}  # fmt: skip
_IMPLIED = {"schedule.warmup_curve": "log", "schedule.start_factor": 0.0}
"""What every schedule with a warm-up has, unless a row says otherwise."""


def _flat(options: CompileOptions) -> dict[str, object]:
    """All options by their names, without the tables that hold them."""
    tables = options.model_dump(exclude={"model", "data", "loss"})
    names = {f"{table}." for table in ("optimizer", "training")}
    found = dict(leaves(tables))
    return {next((name[len(one) :] for one in names if name.startswith(one)), name): found[name] for name in found}


def test_each_config_has_a_row() -> None:
    assert CONFIGS.keys() == EXPECTED.keys()
    assert len(CONFIGS) >= 30


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_in_the_shape_of_a_public_repository(name: str, tmp_path: Path) -> None:
    options = compiled(CONFIGS[name], tmp_path).options
    before, after = _flat(compile_options(None, None, [], TWO)), _flat(options)
    expected = dict(EXPECTED[name])
    if str(expected.get("schedule.name")).startswith("warmup"):
        expected = {**_IMPLIED, **expected}
    changed = {key: value for key, value in after.items() if value != before.get(key)}
    assert changed == {key: value for key, value in expected.items() if value != before.get(key)}


def test_notes_say_what_has_no_effect(tmp_path: Path) -> None:
    def notes(name: str, flags: Mapping[str, object] = TWO) -> list[str]:
        return [note.removeprefix("ds_config.json: ") for note in compiled(CONFIGS[name], tmp_path, flags).notes]

    assert notes("monitors and profilers") == [
        "these change nothing here: steps_per_print, dump_state, wall_clock_breakdown, memory_breakdown, tensorboard, "
        "wandb, csv_monitor, comet, comms_logger, flops_profiler, autotuning, aio, checkpoint, nebula, compile",
        "activation_checkpointing: is for models that call deepspeed.checkpointing; --recompute computes again here",
    ]
    assert notes("a name with a mistake") == [
        "gradient_cliping is not known, and changes nothing; did you mean gradient_clipping?",
        "zero_optimization.overlap_com is not known, and changes nothing; did you mean overlap_comm?",
    ]
    assert notes("offload as it was", {"world_size": 1}) == [
        "these change nothing here: steps_per_print; in zero_optimization: contiguous_gradients, overlap_comm, "
        "reduce_bucket_size",
        "zero_optimization.cpu_offload: optimizer states would be in host memory, and stay in device memory here; "
        "the numbers are the same",
        "zero_optimization.stage = 2 has no effect: nothing is cut without --data-parallel",
    ]
    assert notes("switched off") == notes("comments") == []


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
    options = compiled(text, tmp_path, {"lr": 0.2}, ["training.accumulation_steps=3"], config).options
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
    training = compiled(text, tmp_path, flags).options.training
    assert (training.batch_size, training.accumulation_steps) == found


@pytest.mark.parametrize("flags", [{**TWO, "dtype": "fp32"}, {**TWO, "dtype": "bf16"}, TWO])
def test_a_dtype_that_is_given_drops_what_the_file_says_of_its_own(flags: Mapping[str, object], tmp_path: Path) -> None:
    overrides = [] if "dtype" in flags else ["compile.dtype=fp32"]
    for text in ({"fp16": {"enabled": True, "initial_scale_power": 12}}, {"bf16": {"enabled": True}}):
        options = compiled({"train_batch_size": 8, **text}, tmp_path, flags, overrides).options
        assert options.dtype == flags.get("dtype", "fp32")
        assert options.training.loss_scale == LossScaleOptions()
        assert options.master_weights is ("bf16" in text and options.dtype == "bf16")


def test_batch_sizes_that_disagree_are_one_error(tmp_path: Path) -> None:
    text = {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2}
    assert refused(text, tmp_path, {**TWO, "grad_accumulation_steps": 4}) == (
        "train_batch_size = 64: is not train_micro_batch_size_per_gpu 4 × gradient_accumulation_steps 4 "
        "(from --grad-accumulation-steps; the file has 2) × world size 2 (-ws 2) = 32\n"
        "  where: FOLDER/ds_config.json\n"
        '  try:   "train_batch_size": 32; or --data-parallel -ws 4'
    )
    assert "is no multiple of train_micro_batch_size_per_gpu 5 × world size 2 (-ws 2) = 10" in refused(
        {"train_batch_size": 32, "train_micro_batch_size_per_gpu": 5}, tmp_path
    )
    assert "train_batch_size = 1: is no multiple of" in refused({"train_batch_size": 1}, tmp_path)


def test_one_error_lists_all_that_is_wrong(tmp_path: Path) -> None:
    text = {
        "train_batch_size": 64, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2,
        "gradient_clipping": -1, "optimizer": {"type": "AdamW", "params": {"learning_rate": 0.1, "max_grad_norm": 1}},
        "fp16": {"enabled": True, "hysteresis": 0}, "zero_optimization": {"stage": 4},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 1.5, "warmup_type": "cubic"}},
    }  # fmt: skip
    lines = refused(text, tmp_path).splitlines()
    assert lines[0] == "8 options are wrong:"
    assert [line.strip().partition(":")[0] for line in lines[1:9]] == [
        "fp16.hysteresis = 0", "optimizer.params.learning_rate = 0.1", "optimizer.params.max_grad_norm = 1",
        "scheduler.params.warmup_num_steps = 1.5", 'scheduler.params.warmup_type = "cubic"',
        "gradient_clipping = -1", "zero_optimization.stage = 4", "train_batch_size = 64",
    ]  # fmt: skip
    assert lines[9:] == ["  where: FOLDER/ds_config.json", "  try:   correct each of them"]


def test_what_cannot_be_done_is_listed_with_what_is_wrong(tmp_path: Path) -> None:
    text = {
        "train_batch_size": 8, "amp": {"enabled": True}, "optimizer": {"type": "Lamb"},
        "fp16": {"enabled": True}, "bf16": {"enabled": True}, "zero_optimization": {"stage": 4},
    }  # fmt: skip
    lines = refused(text, tmp_path).splitlines()
    assert lines[0] == "4 options are wrong:"
    names = ["amp", "fp16.enabled", "optimizer.type", "zero_optimization.stage"]
    assert [line.split()[0] for line in lines[1:5]] == names


def _optimizer(kind: str, **params: object) -> dict[str, object]:
    return {"train_batch_size": 8, "optimizer": {"type": kind, "params": params}}


def _scheduler(kind: str, **params: object) -> dict[str, object]:
    return {"train_batch_size": 8, "scheduler": {"type": kind, "params": params}}


_HALF = {"enabled": True}


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('{"a": 1', "the DeepSpeed config is not valid JSON: expecting ',' delimiter"),
        ('{\n // x\n "a": tru,\n "b": 1}', 'ds_config.json:3: "a": tru,\n  try:   correct that line'),
        ('{"a": 1, "a": 2}', "is not valid: a is given twice in one table"),
        ('{"gradient_clipping": Infinity}', "Infinity is not a number of JSON"),
        ("[1]", "the DeepSpeed config is [1], not a table"),
        ("[" * 40 + "]" * 40, "not a table"),
        ('{"wandb": ' + "[" * 40 + "]" * 40 + "}", "is nested too deeply"),
        ({"train_batch_size": "8"}, 'train_batch_size = "8": must be a whole number, or auto'),
        ({"train_batch_size": 10**12}, "must be at most 1,000,000,000"),
        ({"train_batch_size": 8, "gradient_clipping": 10**400}, "must be a finite number"),
        ('{"train_batch_size": 8, "gradient_clipping": 1e999}', "must be a finite number"),
        ({"train_batch_size": 0}, "train_batch_size = 0: must be at least 1"),
        (_optimizer("Lamb"), 'optimizer.type = "Lamb": must be Adam, AdamW, SGD, Lion or Adagrad: sambasim has no oth'),
        (_optimizer("OneBitAdam"), 'optimizer.type = "OneBitAdam": must be Adam'),
        (_optimizer("AdmaW"), "did you mean AdamW?"),
        (_optimizer("Adam", bias_correction=False), "bias_correction = false: cannot be imitated"),
        (_optimizer("Adam", amsgrad=True), "optimizer.params.amsgrad = true: cannot be imitated"),
        (_optimizer("SGD", beta=0.9), "optimizer.params.beta = 0.9: is not for SGD, which takes lr, momentum"),
        (_optimizer("Adam", max_grad_norm=1.0), '"gradient_clipping": … at the top of the file'),
        (
            _optimizer("Adam", lr="1e-3"),
            'optimizer.lr = "1e-3" (from ds_config.json: optimizer.params.lr): must be a n',
        ),
        (_optimizer("Adam", betas=[0.9]), "optimizer.betas = [0.9] (from ds_config.json: optimizer.params.betas)"),
        (_optimizer("Adam", betas=[0.9, 1.5]), "optimizer.betas = 1.5 (from ds_config.json: optimizer.params.betas)"),
        ({"train_batch_size": 8, "optimizer": {"params": {}}}, "optimizer.type: is missing"),
        ({"train_batch_size": 8, "optimizer": "Adam"}, 'optimizer = "Adam": must be a table, {…}'),
        (_scheduler("CosineAnnealingLR"), 'scheduler.type = "CosineAnnealingLR": must be WarmupLR, WarmupDecayLR'),
        (_scheduler("WarmupLr"), "did you mean WarmupLR?"),
        (_scheduler("WarmupDecayLR"), "scheduler.params.total_num_steps: is missing"),
        (_scheduler("WarmupLR", warmup_max_lr=0), "scheduler.params.warmup_max_lr = 0: must be above 0"),
        (_scheduler("WarmupLR", warmup_steps=3), "is not for WarmupLR, which takes warmup_min_lr, warmup_max_lr"),
        (_scheduler("WarmupLR", last_batch_iteration=7), "must be -1: a run resumes from a checkpoint"),
        (_scheduler("OneCycle"), "scheduler.params.cycle_max_lr: is missing"),
        (_scheduler("OneCycle", cycle_min_lr=0.1, cycle_max_lr=0.2, decay_mom_rate=0.1), "makes beta1 grow without"),
        (_scheduler("LRRangeTest", lr_range_test_staircase=1), "must be true or false, or auto"),
        ({"train_batch_size": 8, "fp16": _HALF, "bf16": _HALF}, "fp16.enabled = true: does not go with bf16.enabled"),
        ({"train_batch_size": 8, "fp16": {**_HALF, "initial_scale_power": 40}}, "must be at most 32"),
        ({"train_batch_size": 8, "fp16": {**_HALF, "loss_scale": 100}}, "(from ds_config.json: fp16): must be a power"),
        ({"train_batch_size": 8, "zero_optimization": {"stage": 4}}, "stage = 4: must be 0, 1, 2 or 3"),
        ({"train_batch_size": 8, "zero_optimization": {"zero_quantized_weights": True}}, "changes the numbers"),
        ({"train_batch_size": 8, "amp": _HALF}, 'amp = {"enabled": true}: is NVIDIA\'s Apex'),
        ({"train_batch_size": 8, "elasticity": _HALF}, "chooses batch sizes by the GPUs of a job"),
        ({"train_batch_size": 8, "curriculum_learning": _HALF}, "trains in another way, which sambasim does not have"),
        (
            {"train_batch_size": 8, "fp16": {**_HALF, "fp16_master_weights_and_grads": True}},
            "fp16.fp16_master_weights_and_grads = true: keeps no float32 parameters",
        ),
    ],
)
def test_what_is_wrong_is_named(text: str | Mapping[str, Any], told: str, tmp_path: Path) -> None:
    assert told in refused(text, tmp_path)


def test_a_cycled_momentum_needs_an_optimizer_with_one(tmp_path: Path) -> None:
    schedule = ["name=one_cycle", "warmup_steps=0", "up_steps=3", "momentum=[0.8, 0.9]"]
    cycled = [f"training.schedule.{one}" for one in schedule]
    told = r"training.schedule.momentum \(from --set\): changes beta1, which sgd does not have"
    with pytest.raises(OptionError, match=told):
        compile_options(None, None, [*cycled, "optimizer.name=sgd"], {})
    assert compile_options(None, None, cycled, {}).training.schedule.momentum == (0.8, 0.9)
    one_cycle = json.loads(CONFIGS["OneCycle"]) | {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    options, notes = compiled(one_cycle, tmp_path)
    assert options.training.schedule.momentum is None
    assert "cycle_momentum has no effect: sgd has no betas, as in DeepSpeed" in notes[-1]


def test_inference_takes_none(tmp_path: Path) -> None:
    assert "leave out --deepspeed or --inference" in refused(CONFIGS["SGD"], tmp_path, {"inference": True})
    with pytest.raises(OptionError, match="is for training, and this is inference"):
        run_options({"pef": "digits", "deepspeed": tmp_path / "ds_config.json", "inference": True})


def test_without_any_batch_size_one_is_needed(tmp_path: Path) -> None:
    (tmp_path / "empty.json").write_text("{}")
    with pytest.raises(OptionError) as error:
        compile_options_and_notes(None, "net:Net", [], {}, tmp_path / "empty.json")
    told = "train_batch_size: is missing, and so is train_micro_batch_size_per_gpu: DeepSpeed needs one of them"
    assert told in str(error.value)
    assert "or --batch-size 8" in str(error.value)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    for path, told in ((tmp_path / "no.json", "there is no DeepSpeed config"), (tmp_path, "cannot be read")):
        with pytest.raises(OptionError, match=told):
            compile_options_and_notes(None, None, [], {}, path)
    (tmp_path / "latin.json").write_bytes(b'{"a": "\xe9"}')
    with pytest.raises(OptionError, match="it is not UTF-8 text"):
        compile_options_and_notes(None, None, [], {}, tmp_path / "latin.json")


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
        json.dumps([options.training_defaults(), options.data_source(), options.model_dump(mode="json")])
    )
    chosen = run_options({"pef": "digits", "deepspeed": file}, given_overrides(overrides or []))
    chosen, mapped = with_deepspeed(chosen, training, how, replicas)
    return resolve_run(chosen, training, data, mapped.given)


def test_a_run_changes_what_a_run_may_change(tmp_path: Path) -> None:
    options = compiled(CONFIGS["instruction tuning, ZeRO-3 with offload"], tmp_path).options
    text = json.loads(CONFIGS["instruction tuning, ZeRO-3 with offload"])
    assert run(text, tmp_path, options).changed == ()
    text["optimizer"]["params"]["betas"] = [0.8, 0.9]
    text["gradient_clipping"] = 0.25
    text["gradient_accumulation_steps"] = 8
    text["scheduler"] = {"type": "WarmupLR", "params": {"warmup_max_lr": 0.5, "warmup_num_steps": 3}}
    resolved = run(text, tmp_path, options, ["optimizer.eps=1e-6", "training.schedule.warmup_steps=4"])
    assert set(resolved.changed) == {
        "optimizer.lr = 0.5 (compiled: 2e-05)", "optimizer.betas = [0.8, 0.9] (compiled: [0.9, 0.999])",
        "optimizer.eps = 1e-06 (compiled: 1e-08)", "optimizer.max_grad_norm = 0.25 (compiled: 1.0)",
        "training.accumulation_steps = 8 (compiled: 4)", 'training.schedule.name = "warmup" (compiled: "warmup_decay")',
        "training.schedule.warmup_steps = 4 (compiled: 30)",
    }  # fmt: skip


def test_one_error_lists_all_that_was_compiled_otherwise(tmp_path: Path) -> None:
    options = compiled(CONFIGS["BLOOM"], tmp_path).options
    text = {
        "train_batch_size": 32, "train_micro_batch_size_per_gpu": 4, "gradient_clipping": 0, "fp16": {"enabled": True},
        "zero_optimization": {"stage": 2}, "optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}},
    }  # fmt: skip
    with pytest.raises(OptionError) as error:
        run(text, tmp_path, options)
    assert str(error.value).replace(str(tmp_path), "FOLDER") == (
        "6 options are wrong:\n"
        "    train_micro_batch_size_per_gpu = 4: the PEF was compiled for batches of 2 samples\n"
        '    fp16.enabled: the PEF was compiled with "bf16", and not "fp16", for the dtype\n'
        '    optimizer.type: the PEF was compiled with "adamw", and not "sgd", for the optimizer\n'
        "    optimizer.params.momentum = 0.9: the PEF was compiled without it\n"
        "    gradient_clipping = 0: the PEF was compiled with 1.0\n"
        "    zero_optimization.stage: the PEF was compiled with 0, and not 2, for --zero\n"
        "  where: FOLDER/run.json\n"
        "  try:   compile it with --deepspeed FOLDER/run.json"
    )


def test_the_batch_of_a_run_has_its_number_of_replicas(tmp_path: Path) -> None:
    options = compiled(CONFIGS["BLOOM"], tmp_path).options
    text = {"train_batch_size": 32, "train_micro_batch_size_per_gpu": "auto"}
    assert [run(text, tmp_path, options, replicas=n).training.accumulation_steps for n in (2, 4, 8)] == [8, 4, 2]
    with pytest.raises(OptionError) as error:
        run(text, tmp_path, options, replicas=3)
    assert "per_gpu 2 (auto) × world size 3 (3 replicas) = 6" in str(error.value)
    wrong = {"train_batch_size": 32, "optimizer": {"type": "AdamW", "params": {"lr": "x"}}}
    with pytest.raises(OptionError, match=r'lr = "x" \(from run.json: optimizer.params.lr\): must be a number'):
        run(wrong, tmp_path, options)


@pytest.mark.parametrize("name", CONFIGS)
def test_what_is_written_says_the_same(name: str, tmp_path: Path) -> None:
    options = compiled(CONFIGS[name], tmp_path, overrides=["training.schedule.total_steps=2000"]).options
    written = as_deepspeed(options)
    again = compiled(written, tmp_path, overrides=["training.schedule.total_steps=2000"]).options
    assert again == options
    assert written["train_batch_size"] == 2 * options.training.batch_size * options.training.accumulation_steps
    beyond = list(beyond_deepspeed(options))
    scheduled = options.training.schedule.name != "cosine"
    assert beyond == ([] if scheduled else ["the schedule cosine with 20 steps of warm-up, which the script must make"])


def test_micro_batches_of_a_pipeline_are_written_as_accumulation_steps() -> None:
    flags = {"data_parallel": True, "world_size": 2, "batch_size": 32, "pipeline_stages": 2, "micro_batches": 8}
    written = as_deepspeed(compile_options(None, None, ["training.accumulation_steps=3"], flags))
    assert written["train_micro_batch_size_per_gpu"] == 4
    assert written["gradient_accumulation_steps"] == 24
    assert written["train_batch_size"] == 4 * 24 * 2


def test_what_cannot_be_written_is_listed() -> None:
    overrides = ["training.schedule.name=constant", "training.schedule.warmup_steps=0"]
    assert list(beyond_deepspeed(compile_options(None, None, overrides, {}))) == []
    flags = {"dtype": "bf16", "pipeline_stages": 2, "micro_batches": 2, "recompute": "full"}
    assert [line.partition(":")[0] for line in beyond_deepspeed(compile_options(None, None, overrides, flags))] == [
        "bf16 without master weights", "a pipeline of 2 stages, which the script must make",
        "recomputation (full), which the model must ask for",
    ]  # fmt: skip
