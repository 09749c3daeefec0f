"""What is refused in a DeepSpeed config: every mistake is named with its place, all of them in one error."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from sambasim.errors import OptionError
from sambasim.options.compile import compile_options
from sambasim.options.run import run_options
from tests.support.deepspeed_configs import CONFIGS, TWO, compiled, refused, run

_MICRO, _STEPS = "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"
_ON = {"enabled": True}


def test_batch_sizes_that_disagree_are_one_error(tmp_path: Path) -> None:
    text = {"train_batch_size": 64, _MICRO: 4, _STEPS: 2}
    assert refused(text, tmp_path, {**TWO, "grad_accumulation_steps": 4}) == (
        "train_batch_size = 64: is not train_micro_batch_size_per_gpu 4 × gradient_accumulation_steps 4 "
        "(from --grad-accumulation-steps; the file has 2) × world size 2 (-ws 2) = 32\n"
        "  where: FOLDER/ds_config.json\n"
        '  try:   "train_batch_size": 32; or --data-parallel -ws 4'
    )
    assert "is no multiple of train_micro_batch_size_per_gpu 5 × world size 2 (-ws 2) = 10" in refused(
        {"train_batch_size": 32, _MICRO: 5}, tmp_path
    )
    assert "train_batch_size = 1: is no multiple of" in refused({"train_batch_size": 1}, tmp_path)


def test_one_error_lists_all_that_is_wrong(tmp_path: Path) -> None:
    text = {
        "train_batch_size": 64, _MICRO: 4, _STEPS: 2, "gradient_clipping": -1, "amp": _ON,
        "optimizer": {"type": "AdamW", "params": {"learning_rate": 0.1, "max_grad_norm": 1}},
        "fp16": {**_ON, "hysteresis": 0}, "zero_optimization": {"stage": 4},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 1.5, "warmup_type": "cubic"}},
    }  # fmt: skip
    first, *lines, where, remedy = refused(text, tmp_path).splitlines()
    assert first == "9 options are wrong:"
    assert [line.strip().partition(":")[0] for line in lines] == [
        'amp = {"enabled"', "fp16.hysteresis = 0", "optimizer.params.learning_rate = 0.1",
        "optimizer.params.max_grad_norm = 1", "scheduler.params.warmup_num_steps = 1.5",
        'scheduler.params.warmup_type = "cubic"', "gradient_clipping = -1", "zero_optimization.stage = 4",
        "train_batch_size = 64",
    ]  # fmt: skip
    assert (where, remedy) == ("  where: FOLDER/ds_config.json", "  try:   correct each of them")


def _optimizer(kind: str, **params: object) -> dict[str, object]:
    return {"train_batch_size": 8, "optimizer": {"type": kind, "params": params}}


def _scheduler(kind: str, **params: object) -> dict[str, object]:
    return {"train_batch_size": 8, "scheduler": {"type": kind, "params": params}}


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('{"a": 1', "the DeepSpeed config is not valid JSON: expecting ',' delimiter"),
        ('{\n // x\n "a": tru,\n "b": 1}', 'ds_config.json:3: "a": tru,\n  try:   correct that line'),
        ('{"a": 1, "a": 2}', "is not valid: a is given twice in one table"),
        ('{"gradient_clipping": Infinity}', "gradient_clipping = Infinity: must be a finite number"),
        ("[1]", "the DeepSpeed config is [1], not a table"),
        ("[" * 40 + "]" * 40, ", not a table"),
        ('{"wandb": ' + "[" * 40 + "]" * 40 + "}", "is nested too deeply"),
        ({"train_batch_size": "8"}, 'train_batch_size = "8": must be a whole number, or auto'),
        ({"train_batch_size": 10**12}, "must be at most 1,000,000,000"),
        ({"train_batch_size": 8, "gradient_clipping": 10**400}, "must be a finite number"),
        ('{"train_batch_size": 8, "gradient_clipping": 1e999}', "must be a finite number"),
        ({"train_batch_size": 0}, "train_batch_size = 0: must be at least 1"),
        (
            _optimizer("Lamb"),
            'optimizer.type = "Lamb": must be Adam, AdamW, SGD, Lion, Adagrad, RMSprop, Adamax or NAdam: sam',
        ),
        (_optimizer("AdmaW"), "did you mean AdamW?"),
        (_optimizer("Adam", bias_correction=False), "bias_correction = false: cannot be imitated"),
        (_optimizer("Adam", amsgrad=True), "optimizer.params.amsgrad = true: cannot be imitated"),
        (_optimizer("SGD", beta=0.9), "optimizer.params.beta = 0.9: is not for SGD, which takes lr, momentum"),
        (_optimizer("Adam", max_grad_norm=1.0), '"gradient_clipping": … at the top of the file'),
        (_optimizer("Adam", lr="1e-3"), 'optimizer.lr = "1e-3" (from ds_config.json: optimizer.params.lr): must be a'),
        (_optimizer("Adam", betas=[0.9]), "optimizer.betas = [0.9] (from ds_config.json: optimizer.params.betas)"),
        (_optimizer("Adam", betas=[0.9, 1.5]), "optimizer.betas = 1.5 (from ds_config.json: optimizer.params.betas)"),
        ({"train_batch_size": 8, "optimizer": {"params": {}}}, "optimizer.type: is missing"),
        ({"train_batch_size": 8, "optimizer": "Adam"}, 'optimizer = "Adam": must be a table, {…}'),
        (_scheduler("CosineAnnealingLR"), 'scheduler.type = "CosineAnnealingLR": must be WarmupLR, WarmupDecayLR'),
        (_scheduler("WarmupDecayLR"), "scheduler.params.total_num_steps: is missing"),
        (_scheduler("WarmupLR", warmup_max_lr=0), "scheduler.params.warmup_max_lr = 0: must be above 0"),
        (_scheduler("WarmupLR", warmup_steps=3), "is not for WarmupLR, which takes warmup_max_lr, warmup_min_lr"),
        (_scheduler("WarmupLR", last_batch_iteration=7), "must be -1: a run resumes from a checkpoint"),
        (_scheduler("OneCycle"), "scheduler.params.cycle_max_lr: is missing"),
        (_scheduler("OneCycle", cycle_min_lr=0.1, cycle_max_lr=0.2, decay_mom_rate=0.1), "makes beta1 grow without"),
        (_scheduler("LRRangeTest", lr_range_test_staircase=1), "must be true or false, or auto"),
        ({"train_batch_size": 8, "fp16": _ON, "bf16": _ON}, "fp16.enabled = true: does not go with bf16.enabled"),
        ({"train_batch_size": 8, "fp16": {**_ON, "initial_scale_power": 40}}, "must be at most 32"),
        ({"train_batch_size": 8, "fp16": {**_ON, "loss_scale": 100}}, "(from ds_config.json: fp16): must be a power"),
        ({"train_batch_size": 8, "zero_optimization": {"stage": 4}}, "stage = 4: must be 0, 1, 2 or 3"),
        ({"train_batch_size": 8, "zero_optimization": {"zero_quantized_weights": True}}, "changes the numbers"),
        ({"train_batch_size": 8, "amp": _ON}, 'amp = {"enabled": true}: is NVIDIA\'s Apex'),
        ({"train_batch_size": 8, "elasticity": _ON}, "chooses batch sizes by the GPUs of a job"),
        ({"train_batch_size": 8, "curriculum_learning": _ON}, "trains in another way, which sambasim does not have"),
        (
            {"train_batch_size": 8, "fp16": {**_ON, "fp16_master_weights_and_grads": True}},
            "keeps no float32 parameters",
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
    options = compiled(one_cycle, tmp_path)
    assert options.training.schedule.momentum is None
    assert "cycle_momentum has no effect: sgd has no betas, as in DeepSpeed" in options.notes[-1]


def test_inference_takes_none(tmp_path: Path) -> None:
    assert "leave out --deepspeed or --inference" in refused(CONFIGS["BLOOM"], tmp_path, {"inference": True})
    with pytest.raises(OptionError, match="is for training, and this is inference"):
        run_options({"pef": "digits", "deepspeed": tmp_path / "ds_config.json", "inference": True})


def test_a_batch_size_is_needed_and_one_that_is_auto_is_not_called_missing(tmp_path: Path) -> None:
    told = refused("{}", tmp_path, {}, "net:Net")
    assert f"train_batch_size: is missing, and so is {_MICRO}: DeepSpeed needs one of them" in told
    assert "or --batch-size 8" in told
    for sizes in ("train_batch_size",), ("train_batch_size", _MICRO):
        text = dict.fromkeys(sizes, "auto")
        told = refused(text, tmp_path, {}, "net:Net")
        assert f'{sizes[-1]} = "auto": needs a value from elsewhere' in told
        assert "missing" not in told
        remedied = compiled(text, tmp_path, {"batch_size": 8}, ["optimizer.name=sgd"], target="net:Net")
        assert remedied.training.batch_size == 8


@pytest.mark.parametrize("sizes", [("16", None, None), (16, "4", 1), (16, 3, "2"), ("16", "4", "2"), ("64", None, "2")])
def test_batch_sizes_in_quotes_are_the_only_errors(sizes: tuple[object, ...], tmp_path: Path) -> None:
    text = {key: size for key, size in zip(("train_batch_size", _MICRO, _STEPS), sizes, strict=True) if size}
    told = refused(text, tmp_path)
    quoted = [size for size in sizes if isinstance(size, str)]
    assert told.count("must be a whole number, or auto") == told.count("without quotes") == len(quoted)
    assert told.startswith(f"{len(quoted)} options are wrong") == (len(quoted) > 1)
    assert "is missing" not in told


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "latin.json").write_bytes(b'{"a": "\xe9"}')
    files = {"no.json": "there is no DeepSpeed config", "": "cannot be read", "latin.json": "it is not UTF-8 text"}
    for name, told in files.items():
        with pytest.raises(OptionError, match=told):
            compile_options(None, None, [], {"deepspeed": tmp_path / name})


def test_one_error_lists_all_that_was_compiled_otherwise(tmp_path: Path) -> None:
    options = compiled(CONFIGS["BLOOM"], tmp_path)
    text = {
        "train_batch_size": 32, _MICRO: 4, "gradient_clipping": 0, "fp16": {"enabled": True},
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
