"""The errors of a config, a `--set` or a flag."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from sambasim.errors import OptionError
from sambasim.options.compile import compile_options

SOUND = """
[model]
target = "net.py:Net"
[data]
source = "digits"
[loss]
name = "cross_entropy"
[optimizer]
name = "adamw"
[training]
epochs = 3
"""

_ON_CHIPS = ["parallel.tensor_parallel=batch", "parallel.n_chips=2"]
_IN_STAGES = ["parallel.pipeline_stages=2", "parallel.micro_batches=4"]

REFUSED = [
    (["optimizer.lr=-1"], "optimizer.lr = -1 (from --set): must be at least 0"),
    (["optimizer.lr='1e-3'"], "must be a number\n  try:   write it without quotes: lr = 1e-3"),
    (["data.shuffle='false'"], "write it without quotes: shuffle = false"),
    (["optimizer.lr=" + "9" * 400], "999… (from --set): must be a finite number"),
    (["optimizer.lr=" + "9" * 5000], "999… (from --set): must be a number"),
    (["training.batch_size=-1"], "training.batch_size = -1 (from --set): must be at least 1"),
    (["training.schedule.warmup_steps=" + "9" * 400], "must be at most 1,000,000,000"),
    (["optimizer.lr=nan"], "optimizer.lr = NaN (from --set): must be a finite number"),
    (["model.target=net.toml"], "sambasim compile net.toml, without"),
    (["optimizer.weigth_decay=0"], "did you mean optimizer.weight_decay?"),
    (["lr=0.1"], "did you mean optimizer.lr?"),
    (["optimizer.name=adm"], 'optimizer.name = "adm" (from --set): must be sgd, adam, adamw, adagrad, rmsprop, '),
    (["optimizer.momentum=0.9"], "is not for adamw, which takes lr, betas, eps, amsgrad, maximize"),
    (["optimizer.betas=[0.9]"], "optimizer.betas = [0.9] (from --set): has too few values"),
    (["optimizer.name=sgd", "optimizer.nesterov=true"], "needs momentum above 0 and dampening 0; here"),
    (['optimizer.groups=[{match=["a"], betaz=1}]'], "did you mean optimizer.groups.betas?"),
    (["optimizer.groups=[{lr=1.0}]"], "optimizer.groups.match (from --set): is missing\n  try:   write match = …"),
    (["optimizer.groups=[{match=[]}]"], "optimizer.groups.match = [] (from --set): has too few values"),
    (['optimizer.groups=[{match=["a"], momentum=0.9}]'], "optimizer.groups.momentum (from --set): is not for adamw"),
    (['optimizer.groups=[{match=["a"], max_grad_norm=1.0}]'], "did you mean optimizer.max_grad_norm?"),
    (["optimizer.no_decay=', '"], 'optimizer.no_decay = ", " (from --set): has no pattern'),
    (["optimizer=3"], "optimizer = 3 (from --set): must be a table"),
    (["loss.name=crossentropy"], "did you mean cross_entropy?"),
    (["loss.name=net.py:f", "loss.mean_over=elements"], "in a function losses.sum(), mask.sum()"),
    (["loss.args.label_smoothin=0.1"], "is not an argument of cross_entropy; it takes ignore_index, label_"),
    (["model.target=net.py"], "add the name: net.py:NAME"),
    (["model.target=package.net.Net"], "put a colon before the name: package.net:Net"),
    (["model.target='dir/net:Net'"], "a file's name ends in .py: dir/net.py:Net"),
    (["model.args.day=2024-01-01"], 'model.args.day = "2024-01-01" (from --set): must be text, a number'),
    (["model.args.scales=[1.0, inf]"], "model.args.scales = Infinity (from --set): must be a finite number"),
    (["data.source=digts"], "did you mean digits?"),
    (["data.source=images.csv"], "must be digits, synthetic, module:function, FILE.npz or FILE.safetensors"),
    (["data.evaluation_fraction=1"], "data.evaluation_fraction = 1 (from --set): must be below 1"),
    (["data.source=x.npz", "data.args.a=1"], "are for a data function, and a file takes none"),
    (["data.source=synthetic", "data.args.sed=1"], "is not an argument of synthetic data, which takes seed only"),
    (["data.source=synthetic", "data.inputs.x='float32 3'"], "must be a dtype and the shape of one sample"),
    (["data.source=synthetic", "data.inputs.x='float32[3] < 4'"], "which only integers can have; float32 is not"),
    (["data.source=synthetic", "data.inputs.x='int8[] < 1000'"], "must have a bound from 1 to 127"),
    (["training.steps=5", "training.epochs=3"], "cannot be given together with epochs, 3"),
    (["training.schedule.name=step"], "training.schedule.step_size: is missing"),
    (["training.schedule.total_steps=5", "training.schedule.warmup_steps=5"], "must be below total_steps, 5"),
    (["compile.inference=true", "parallel.data_parallel=true", "parallel.zero=2"], "has no states to keep in slices"),
    (["parallel.n_chips=2"], "add --tensor-parallel weight"),
    (["parallel.tensor_parallel=batch"], "add --n-chips 2"),
    ([*_ON_CHIPS, "compile.inference=true"], "does not go with inference"),
    ([*_ON_CHIPS, "training.batch_size=9"], "parallel.n_chips = 2 (from --set): does not divide the batch"),
    ([*_ON_CHIPS, "training.batch_size=9", *_IN_STAGES], "--batch-size 16"),
    ([*_ON_CHIPS, "training.batch_size=12", *_IN_STAGES], "parallel.micro_batches = 4 (from --set): does not divide"),
    (["parallel.tensor_plan.a=colwise"], "parallel.tensor_plan (from --set): needs weights to be cut"),
    (["parallel.tensor_plan.a=colwise", *_ON_CHIPS], "add --tensor-parallel weight --n-chips 2"),
    (
        ['parallel.tensor_plan."a.*.b"=columnwise', *_ON_CHIPS[1:], "parallel.tensor_parallel=weight"],
        'parallel.tensor_plan."a.*.b" = "columnwise" (from --set): must be colwise, rowwise or replicate\n  try:   did',
    ),
    (["compile.pef_name=net.pef"], "--pef-name net"),
    (["optimizer.lr"], "--set optimizer.lr has no value"),
    (["model.target.x=3"], "and not a table"),
    (["optimizer.betas=[0.9"], "has a value that is not TOML"),
]  # fmt: skip


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A sound one, in the working directory."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.toml").write_text(SOUND)
    compile_options(tmp_path / "net.toml", None, [], {})
    return tmp_path / "net.toml"


@pytest.mark.parametrize(("overrides", "text"), REFUSED)
def test_is_refused_in_these_words(config: Path, overrides: Sequence[str], text: str) -> None:
    with pytest.raises(OptionError) as caught:
        compile_options(config, None, overrides, {})
    assert text in str(caught.value)


def test_a_flag_replaces_what_does_not_go_with_it(config: Path) -> None:
    config.write_text(
        '[model]\ntarget = "net.py:Net"\n[data]\nsource = "net.py:samples"\nargs = { n = 3 }\n'
        'evaluation_fraction = 0.5\n[loss]\nname = "cross_entropy"\nargs = { label_smoothing = 0.1 }\n'
        '[optimizer]\nname = "adamw"\nlr = 0.5\nbetas = [0.8, 0.9]\n[training]\nepochs = 3\n'
    )
    flags = {"steps": 5, "data": "digits", "loss": "nll", "optimizer": "sgd"}
    left: dict[str, dict[str, object]] = {
        "training": {"steps": 5, "epochs": None}, "data": {"args": {}, "evaluation_fraction": 0.0},
        "loss": {"args": {}}, "optimizer": {"betas": None, "lr": 0.5, "momentum": 0.0},
    }  # fmt: skip
    options = compile_options(config, None, [], flags).model_dump()
    assert {table: {name: options[table][name] for name in fields} for table, fields in left.items()} == left
    data = compile_options(config, None, [], {"data": "net.py:samples"}).data
    assert (data.args, data.evaluation_fraction) == ({"n": 3}, 0.5)


def test_all_problems_are_in_one_error_with_their_remedies(config: Path) -> None:
    config.write_text(SOUND.replace("epochs = 3", "epochs = 0\nbatchsize = 4").replace('"adamw"', '"adamw"\nlr = -1'))
    with pytest.raises(OptionError) as caught:
        compile_options(config, None, ["data.source=digts"], {"world_size": 2})
    assert str(caught.value).splitlines() == [
        "5 options are wrong:",
        '    data.source = "digts" (from --set): must be digits, synthetic, module:function, FILE.npz or '
        "FILE.safetensors (did you mean digits?)",
        "    optimizer.lr = -1: must be at least 0",
        "    training.epochs = 0: must be at least 1 (--set training.epochs=1)",
        "    training.batchsize: is not an option (did you mean training.batch_size?)",
        "    parallel.world_size = 2 (from --world-size): needs data parallelism (add --data-parallel)",
        f"  where: {config}",
        "  try:   correct each of them; --set NAME=VALUE overrides the config",
    ]


def test_a_flag_that_is_wrong_is_not_blamed_on_a_file() -> None:
    for flag, told in {
        "world_size": "parallel.world_size = 2 (from --world-size): needs data parallelism\n  try:   add --data",
        "worldsize": "worldsize: is not a flag\n  try:   did you mean world_size?",
        "zzz": "zzz: is not a flag; they are deepspeed, pef_name",
        "ema_decay": "ema_decay: is not a flag\n  try:   did you mean ema?",
        "mean_over": "mean_over: is not a flag\n  try:   --set loss.mean_over=…",
    }.items():
        with pytest.raises(OptionError) as caught:
            compile_options(None, None, [], {flag: 2})
        assert str(caught.value).startswith(told)
        assert caught.value.where is None


def test_training_without_an_optimizer_is_refused_and_inference_is_not(config: Path) -> None:
    config.with_name("net.py").write_text("class Net: pass\n")
    with pytest.raises(OptionError, match=r"optimizer.name: is missing, and training needs one") as caught:
        compile_options(None, "net.py:Net", [], {})
    assert caught.value.remedy == "--set optimizer.name=adamw (for inference: --set compile.inference=true)"
    assert compile_options(None, "net.py:Net", [], {"inference": True}).optimizer is None


def test_a_config_without_a_model_or_with_an_integer_of_thousands_of_digits_is_refused(config: Path) -> None:
    config.write_text("")
    with pytest.raises(OptionError, match=r"no model is named") as caught:
        compile_options(config, None, [], {})
    assert caught.value.where == str(config)
    config.write_text(SOUND.replace("epochs = 3", f"epochs = {'9' * 5000}"))
    with pytest.raises(OptionError, match=r"the config is not valid TOML: exceeds the limit"):
        compile_options(config, None, [], {})
