"""Each option of `run` and `compile` as a flag, by --set as in TOML, and as a keyword of Python gives one result."""

import json
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import click
import pytest

from sambasim.cli.train import compile_command, run_command
from sambasim.options.compile import CompileOptions, compile_options, options_in_python
from sambasim.options.fields import COMPILE_FLAGS, RUN_FLAGS
from sambasim.options.flag import Setting
from sambasim.options.given import given_overrides, given_settings
from sambasim.options.run import RunOptions, run_options

_OF_KIND: dict[Any, Any] = {int: 3, float: 0.5, Path: "there/file.x", str: "net.py:name"}
_VALUES: dict[str, Any] = {
    "save": "w.safetensors", "save_ema": "w.safetensors", "predictions": "w.safetensors", "weights": "w.pt",
    "record_steps": "2-3", "checkpoint_every": "5steps", "evaluate_every": "5steps", "resume": "auto",
    "optimizer": "sgd", "loss": "mse", "pef_name": "net", "schedule": "gpipe", "opt_level": "o1", "arch": "sn40",
    "no_decay": "*.bias,*norm*", "data": "synthetic", "parameter_servers": 0, "zero": 2, "dtype": "bf16",
    "lr_schedule": "cosine", "host_sync": "gloo", "engine": "inductor", "world_size": 1, "tensor_parallel": "batch",
    "metrics": "m.csv", "evaluation_metrics": "f1", "micro_batches": 1, "n_chips": 1, "keep_best": "loss",
}  # fmt: skip
_BESIDE: dict[str, dict[str, Any]] = {
    "master_weights": {"dtype": "bf16"}, "enable_stoc_rounding": {"dtype": "bf16"}, "exact": {"resume": "auto"},
    "resume": {}, "predictions": {"inference": True}, "trace_steps": {"trace": "t.json"},
    "record_steps": {"record_digests": "d"}, "parameter_servers": {"host_sync": "parameter-server"},
    "load_best": {"keep_best": "loss"}, "callback_ranks": {"callback": "net.py:name"},
    "tensor_parallel": {"n_chips": 2, "batch_size": 2}, "schedule": {"pipeline_stages": 2},
    "zero": {"data_parallel": True}, "momentum": {"optimizer": "sgd"},
}  # fmt: skip
"""Options without which another is an error."""


def _value(keyword: str, setting: Setting) -> Any:
    if setting.kind is bool:
        return setting.default is not True
    if keyword not in _VALUES and get_origin(setting.kind) is Literal:
        return get_args(setting.kind)[-1]
    return _VALUES.get(keyword, _OF_KIND.get(setting.kind))


def _typed(settings: Any, keywords: dict[str, Any]) -> list[str]:
    """The flags as they are typed."""
    words = []
    for keyword, value in keywords.items():
        flag = settings[keyword].flag
        if flag.choices:
            words.append(f"--{value}")
        elif isinstance(value, bool):
            words.append(flag.names[-1].split("/")[not value])
        else:
            words += [flag.names[-1].split("/")[0], str(value)]
    return words


def _parsed(command: click.Command, words: list[str]) -> dict[str, Any]:
    with command.make_context("it", words, resilient_parsing=False) as context:
        others = {"argument", "overrides", "model", "config", "target", "as_json"}
        others |= {"output_folder"} if command is run_command else {"verbose"}
        return {name: value for name, value in context.params.items() if name not in others}


@pytest.mark.parametrize("keyword", COMPILE_FLAGS)
def test_options_of_compile(keyword: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    setting = COMPILE_FLAGS[keyword]
    Path("ds.json").write_text(json.dumps({"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "Lion"}}))
    value = "ds.json" if keyword == "deepspeed" else _value(keyword, setting)
    keywords = {keyword: value, **_BESIDE.get(keyword, {})}
    tables: dict[str, Any] = {"model": {"target": "net.py:Net"}, "data": {"source": "net.py:samples"}}
    config = Path("net.toml")
    config.write_text('model.target = "net.py:Net"\ndata.source = "net.py:samples"\noptimizer.name = "adamw"\n')
    tables = {"model": {"target": f"{tmp_path}/net.py:Net"}, "data": {"source": f"{tmp_path}/net.py:samples"}}
    in_python = options_in_python({**tables, "optimizer": {"name": "adamw"}}, keywords)
    flags = _parsed(compile_command, _typed(COMPILE_FLAGS, keywords))
    assert compile_options(config, None, (), flags) == in_python
    if keyword == "deepspeed":
        return  # a file of options, as a config is
    named = {COMPILE_FLAGS[name].name: one for name, one in keywords.items()}
    by_set = tuple(f"{name}={json.dumps(one)}" for name, one in named.items())
    assert compile_options(config, None, by_set, {}) == in_python
    assert options_in_python({**tables, "optimizer": {"name": "adamw"}}, {"set": named}) == in_python
    assert _leaf(in_python, setting) == (Path(value) if setting.kind is Path else value)


def _leaf(options: CompileOptions | RunOptions, setting: Setting) -> Any:
    *tables, field = setting.name.split(".")
    held: Any = options
    for table in tables:
        held = held[table] if isinstance(held, dict) else getattr(held, table, options)
    return held[field] if isinstance(held, dict) else getattr(held, field)


@pytest.mark.parametrize("keyword", [keyword for keyword in RUN_FLAGS if keyword != "pef"])
def test_options_of_run(keyword: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    setting = RUN_FLAGS[keyword]
    beside = {name: value for name, value in _BESIDE.get(keyword, {}).items() if name in RUN_FLAGS}
    keywords = {keyword: _value(keyword, setting), **beside}
    if setting.name.startswith("checkpoint.") and keyword != "checkpoint_dir":
        keywords["checkpoint_dir"] = "ck"
    in_python = run_options({"pef": "net", **keywords})
    flags = _parsed(run_command, ["--pef", "net", *_typed(RUN_FLAGS, keywords)])
    assert run_options({**flags, "pef": "net"}) == in_python
    value = _value(keyword, setting)
    assert _leaf(in_python, setting) in (value, Path(str(value)), str(Path.cwd() / str(value)), [value])
    if setting.name.startswith("overrides."):
        named = {RUN_FLAGS[name].name.removeprefix("overrides."): one for name, one in keywords.items()}
        by_set = given_overrides([f"{name}={json.dumps(one)}" for name, one in named.items()])
        assert run_options({"pef": "net"}, by_set) == in_python
        assert run_options({"pef": "net"}, given_settings(named)) == in_python


def test_python_has_true_and_lists_where_a_flag_has_no_value_or_commas() -> None:
    assert run_options({"pef": "net", "resume": True, "checkpoint_dir": "ck"}).checkpoint.resume == "newest"
    assert run_options({"pef": "net", "resume": False, "checkpoint_dir": "ck"}).checkpoint.resume is None
    tables = {"model": {"target": "net.py:Net"}, "optimizer": {"name": "adamw"}}
    by_list = options_in_python(tables, {"no_decay": ["*.bias", "*norm*"]})
    assert by_list == options_in_python(tables, {"no_decay": "*.bias,*norm*"})
