"""Ten DeepSpeed configs, compiled and run, against a loop of plain PyTorch that does what DeepSpeed documents: learning
rates, clipping, loss scales, skipped steps, accumulation, and the weights at the end."""

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from sambasim.pef import map_weights, read
from tests.cli.typed import each, invoked, record
from tests.support import deepspeed
from tests.support.compiled import compile_from_options
from tests.support.deepspeed_configs import CONFIGS, TWO, compiled
from tests.support.whole import whole

STEPS = 9
SOURCE = ["data.source=tests.support.deepspeed:samples", "data.shuffle=false"]
HALF = {"enabled": True, "initial_scale_power": 19, "loss_scale_window": 3, "hysteresis": 2}
ADAM: dict[str, Any] = {"type": "Adam", "params": {"lr": 0.02, "betas": [0.8, 0.99], "weight_decay": 0.1}}
SGD = {"type": "SGD", "params": {"lr": 0.2, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}}


def scheduler(kind: str, **params: object) -> dict[str, Any]:
    return {"scheduler": {"type": kind, "params": params}}


WARMUP = {"warmup_min_lr": 0.001, "warmup_max_lr": 0.03, "warmup_num_steps": 4}
RANGE = {"lr_range_test_min_lr": 0.02, "lr_range_test_step_size": 3}
CYCLE = {
    "cycle_min_lr": 0.002, "cycle_max_lr": 0.05, "cycle_first_step_size": 3, "cycle_second_step_size": 2,
    "decay_step_size": 2, "decay_lr_rate": 0.5, "cycle_min_mom": 0.7, "cycle_max_mom": 0.95,
}  # fmt: skip
UP = {name: CYCLE[name] for name in ("cycle_min_lr", "cycle_max_lr", "cycle_first_step_size")}
COSINE = {"warmup_min_ratio": 0.0, "warmup_num_steps": 3, "cos_min_ratio": 0.1, "warmup_type": "linear"}
BATCH, MICRO, ACCUMULATED = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"
PLAIN_ADAM = {"type": "Adam", "params": {**ADAM["params"], "adam_w_mode": False}}
TORCH_ADAM = {"type": "AdamW", "params": {"lr": 0.05, "torch_adam": True}}
FALLING = {**HALF, "initial_scale_power": 18, "consecutive_hysteresis": True, "loss_scale_window": 2}

CASES: Mapping[str, tuple[int, dict[str, Any]]] = {
    "Adam is AdamW": (
        1, {BATCH: 16, "optimizer": ADAM, "gradient_clipping": 0.05,
            **scheduler("OneCycle", cycle_momentum=False, **UP)},
    ),
    "Adam without AdamW": (
        1, {MICRO: 4, ACCUMULATED: 3, "optimizer": PLAIN_ADAM, **scheduler("WarmupLR", warmup_type="linear", **WARMUP)},
    ),
    "torch's AdamW decays by default": (
        2, {BATCH: 16, "optimizer": TORCH_ADAM, **scheduler("WarmupDecayLR", total_num_steps=8, **WARMUP)},
    ),
    "SGD, accumulated": (
        2, {BATCH: 32, MICRO: 4, "optimizer": SGD, "gradient_clipping": 0.1,
            **scheduler("LRRangeTest", lr_range_test_step_rate=2, **RANGE)},
    ),
    "range test in stairs": (
        1, {BATCH: 8, "optimizer": SGD, **scheduler("LRRangeTest", lr_range_test_staircase=True, **RANGE)},
    ),
    "OneCycle": (2, {BATCH: 16, "optimizer": ADAM, **scheduler("OneCycle", **CYCLE)}),
    "WarmupCosineLR in bf16": (
        1, {BATCH: 16, "optimizer": ADAM, "bf16": {"enabled": True},
            **scheduler("WarmupCosineLR", total_num_steps=STEPS, **COSINE)},
    ),
    "fp16 whose scale falls": (
        1, {BATCH: 16, "optimizer": ADAM, "fp16": HALF, "gradient_clipping": 0.2, **scheduler("WarmupLR", **WARMUP)},
    ),
    "fp16, ZeRO-2, consecutive hysteresis": (
        2, {BATCH: 32, ACCUMULATED: 2, "optimizer": SGD, "fp16": FALLING, "zero_optimization": {"stage": 2},
            **scheduler("WarmupLR", **WARMUP | {"warmup_num_steps": 1})},
    ),
    "fp16 with a static scale": (1, {BATCH: 8, "optimizer": ADAM, "fp16": {"enabled": True, "loss_scale": 256}}),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_it_trains_as_deepspeed_documents(name: str, tmp_path: Path) -> None:
    world, config = CASES[name]
    file = tmp_path / "ds_config.json"
    file.write_text(json.dumps(config))
    words = ["tests.support.deepspeed:Net", *each("--set", SOURCE), "--deepspeed", str(file)]
    words += ["--data-parallel", "-ws", str(world)] if world > 1 else []
    pef = Path(record("compile", *words, "--output-folder", str(tmp_path))["pef"])
    run = ["--pef", str(pef), "--deepspeed", str(file), "--steps", str(STEPS), "--threads", "1"]
    run += ["--emulate-replicas", str(world)] if world > 1 else []
    out = ["--metrics", str(tmp_path / "metrics"), "--save", str(tmp_path / "w.safetensors")]
    result = invoked("run", *run, *out)
    assert result.exit_code == 0, result.output
    lines = [json.loads(line) for line in (tmp_path / "metrics").read_text().splitlines()]
    steps = [line for line in lines if line["kind"] == "step"]

    symbols, stored = read(pef).program.symbols, map_weights(pef)
    weights = {
        symbols[one].torch_names[0]: tensor.float() for one, tensor in stored.items() if symbols[one].torch_names
    }
    theirs, net = deepspeed.train(config, weights, world, STEPS)
    half = "fp16" in config or "bf16" in config
    loose = partial(pytest.approx, rel=2e-2, abs=2e-3) if half else partial(pytest.approx, rel=1e-5)
    assert [one["lr"] for one in steps] == pytest.approx([one.lr for one in theirs], rel=1e-12)
    assert [one["loss"] for one in steps] == loose([one.loss for one in theirs])
    if "fp16" in config:
        assert [one["loss_scale"] for one in steps] == [one.scale for one in theirs]
    if "fp16" in config or "gradient_clipping" in config:
        for ours, reference in zip(steps, theirs, strict=True):
            assert ours["grad_norm"] == (None if reference.norm is None else loose(reference.norm))
    if "initial_scale_power" in config.get("fp16", {}):
        assert 2 <= sum(one.norm is None for one in theirs) <= STEPS - 4
    trained = load_file(tmp_path / "w.safetensors")
    for path, weight in net.state_dict().items():
        rtol, atol = (2e-2, 2e-3) if half else (1e-4, 1e-6)
        torch.testing.assert_close(trained[path].float(), weight.float(), rtol=rtol, atol=atol)
        assert not torch.allclose(weight.float(), weights[path], rtol=1e-2)


@whole
@pytest.mark.parametrize("name", CONFIGS)
def test_every_shape_compiles_and_runs(name: str, tmp_path: Path) -> None:
    overrides = [*SOURCE, "optimizer.name=adamw"] if '"optimizer"' not in CONFIGS[name] else SOURCE
    batch_size = {"batch_size": 4} if '"train_micro_batch_size_per_gpu": "auto"' in CONFIGS[name] else {}
    flags = {"output_folder": tmp_path, **TWO, **batch_size}
    options = compiled(CONFIGS[name], tmp_path, flags, overrides, target="tests.support.deepspeed:Net")
    run = ["--pef", str(compile_from_options(options).path), "--deepspeed", str(tmp_path / "ds_config.json")]
    result = invoked("run", *run, "--steps", "2", "--emulate-replicas", "2", "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["steps"] == 2
