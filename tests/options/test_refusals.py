"""What is refused in a config, a `--set` or a flag, and in which words."""

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

REFUSED = [
    (["optimizer.lr=-1"], "optimizer.lr = -1 (from --set): must be at least 0"),
    (["optimizer.lr=fast"], 'optimizer.lr = "fast" (from --set): must be a number'),
    (["optimizer.lr=nan"], "must be a finite number"),
    (["optimizer.lr='0.1'"], 'optimizer.lr = "0.1" (from --set): must be a number'),
    (["optimizer.learning_rate=1"], "optimizer.learning_rate (from --set): is not an option"),
    (["optimizer.weigth_decay=0"], "did you mean optimizer.weight_decay?"),
    (["lr=0.1"], "did you mean optimizer.lr?"),
    (["training.lr=0.1"], "did you mean optimizer.lr?"),
    (["trainig.epochs=1"], "did you mean training?"),
    (["trainig.epochs=1"], "trainig (from --set): is not an option"),
    (["compile.world-size=1"], "did you mean compile.world_size?"),
    (["optimizer.name=adm"], 'optimizer.name = "adm" (from --set): must be sgd, adam, adamw, adagrad or lion'),
    (["optimizer.name=adm"], "did you mean adam?"),
    (["optimizer.momentum=0.9"], "is not for adamw, which takes lr, betas, eps, weight_decay, max_grad_norm"),
    (["optimizer.eps=0"], "optimizer.eps = 0 (from --set): must be above 0"),
    (["optimizer.betas=[0.9]"], "optimizer.betas = [0.9] (from --set): has too few values"),
    (["optimizer.betas=[0.9, 1.0]"], "must be below 1"),
    (["optimizer.max_grad_norm=0"], "must be above 0"),
    (["optimizer.name=sgd", "optimizer.nesterov=true"], "needs momentum above 0 and dampening 0; here"),
    (["optimizer=3"], "optimizer = 3 (from --set): must be a table"),
    (["loss.name=crossentropy"], "did you mean cross_entropy?"),
    (["loss.name=crossentropy"], "huber, bce_with_logits, nll, kl_div or module:function"),
    (["loss.args.label_smoothin=0.1"], "is not an argument of cross_entropy; it takes ignore_index or label_smoothing"),
    (["loss.name=mse", "loss.args.beta=1"], "is not an argument of mse; it takes no arguments"),
    (["model.target=net.py"], "add the name: net.py:NAME"),
    (["model.target=package.net.Net"], "put a colon before the name: package.net:Net"),
    (["model.target='dir/net:Net'"], "a file's name ends in .py: dir/net.py:Net"),
    (["model.target='net.py:'"], "must be package.module:name or path/file.py:name"),
    (["model.args.day=2024-01-01"], 'model.args.day = "2024-01-01" (from --set): must be text, a number'),
    (["model.args.scales=[1.0, inf]"], "model.args.scales = inf (from --set): must be a finite number"),
    (["data.source=digts"], "did you mean digits?"),
    (["data.source=images.csv"], "must be digits, synthetic, module:function, FILE.npz or FILE.safetensors"),
    (["data.evaluation_fraction=1"], "data.evaluation_fraction = 1 (from --set): must be below 1"),
    (["data.workers=-1"], "must be at least 0"),
    (["data.prefetch_factor=2"], "data.prefetch_factor (from --set): needs workers"),
    (["data.shuffle=1"], "data.shuffle = 1 (from --set): must be true or false"),
    (["data.samples=5"], "data.samples (from --set): is for synthetic data only"),
    (["data.source=x.npz", "data.args.a=1"], "are for a data function, and a file takes none"),
    (["data.source=synthetic", "data.args.sed=1"], "is not an argument of synthetic data, which takes seed only"),
    (["data.source=synthetic", "data.inputs.x='flaot32[3]'"], "did you mean float32?"),
    (["data.source=synthetic", "data.inputs.x='float32 3'"], "must be a dtype and the shape of one sample"),
    (["data.source=synthetic", "data.inputs.x='float32[3] < 4'"], "which only integers can have; float32 is not"),
    (["data.source=synthetic", "data.inputs.x='int8[] < 1000'"], "must have a bound from 1 to 127"),
    (["data.source=synthetic", "data.inputs.x='float32[0]'"], "at least one element along each dimension"),
    (["training.batch_size=0"], "training.batch_size = 0 (from --set): must be at least 1"),
    (["training.batch_size=1.5"], "must be a whole number"),
    (["training.batch_size=true"], "training.batch_size = true (from --set): must be a whole number"),
    (["training.steps=5"], "cannot be given together with epochs, 3"),
    (["training.seed=-1"], "must be at least 0"),
    (["training.schedule.name=step"], "training.schedule.step_size: is missing"),
    (["training.schedule.step_size=2"], "is not for constant"),
    (["training.schedule.total_steps=5", "training.schedule.warmup_steps=5"], "must be below total_steps, 5"),
    (["compile.world_size=2"], "needs data parallelism"),
    (["compile.world_size=0"], "must be at least 1"),
    (["compile.inference=true", "compile.data_parallel=true"], "does not go with inference, which has no gradients"),
    (["compile.opt_level=o2"], "must be o0, o1 or o3"),
    (["compile.arch=sn31"], "must be sn10, sn30 or sn40"),
    (["compile.pef_name=a/b"], "must be a plain file name"),
    (["compile.pef_name=.."], "must be a plain file name"),
    (["compile.pef_name=net.pef"], "--pef-name net"),
    (["optimizer.lr"], "--set optimizer.lr has no value"),
    (["=3"], "--set =3 does not start with a valid name"),
    (["a b=3"], "--set a b=3 does not start with a valid name"),
    (["model.target.x=3"], "and not a table"),
    (["optimizer.betas=[0.9"], "has a value that is not TOML"),
]  # fmt: skip


@pytest.mark.parametrize(("overrides", "text"), REFUSED)
def test_is_refused_in_these_words(tmp_path: Path, overrides: Sequence[str], text: str) -> None:
    config = tmp_path / "net.toml"
    config.write_text(SOUND)
    compile_options(config, None, [], {})  # sound before
    with pytest.raises(OptionError) as caught:
        compile_options(config, None, overrides, {})
    assert text in str(caught.value)


def test_every_problem_is_told_at_once_with_its_remedy(tmp_path: Path) -> None:
    config = tmp_path / "net.toml"
    config.write_text(SOUND.replace("epochs = 3", "epochs = 0\nbatchsize = 4").replace('"adamw"', '"adamw"\nlr = -1'))
    with pytest.raises(OptionError) as caught:
        compile_options(config, None, ["data.source=digts"], {"world_size": 2})
    assert str(caught.value).splitlines() == [
        "5 options are wrong:",
        '    data.source = "digts" (from --set): must be digits, synthetic, module:function, FILE.npz or '
        "FILE.safetensors (did you mean digits?)",
        "    optimizer.lr = -1: must be at least 0",
        "    training.epochs = 0: must be at least 1",
        "    training.batchsize: is not an option (did you mean training.batch_size?)",
        "    compile.world_size = 2 (from --world-size): needs data parallelism (add --data-parallel)",
        f"  where: {config}",
        "  try:   correct each of them; --set NAME=VALUE overrides the config",
    ]


def test_one_problem_has_its_own_remedy() -> None:
    with pytest.raises(OptionError) as caught:
        compile_options(None, None, [], {"world_size": 2})
    assert caught.value.what == "compile.world_size = 2 (from --world-size): needs data parallelism"
    assert caught.value.remedy == "add --data-parallel"
    assert caught.value.where is None, "what was typed on the command line is not blamed on a file"


def test_training_without_an_optimizer_is_refused_and_inference_is_not() -> None:
    with pytest.raises(OptionError, match=r"optimizer.name: is missing, and training needs one") as caught:
        compile_options(None, "net.py:Net", [], {})
    assert caught.value.remedy == "--set optimizer.name=adamw (or --inference)"
    assert compile_options(None, "net.py:Net", [], {"inference": True}).optimizer is None


def test_a_config_without_a_model_is_refused(tmp_path: Path) -> None:
    config = tmp_path / "empty.toml"
    config.write_text("")
    with pytest.raises(OptionError, match=r"no model is named") as caught:
        compile_options(config, None, [], {})
    assert caught.value.where == str(config)


def test_a_keyword_that_is_no_flag_is_refused() -> None:
    with pytest.raises(OptionError, match=r"worldsize: is not a flag; they are pef_name"):
        compile_options(None, None, [], {"worldsize": 2})
