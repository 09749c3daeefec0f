"""TOML files, `--set` and flags: which of them wins, what is too large, and where outputs can be written."""

import json
import os
import string
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sambasim.errors import OptionError
from sambasim.files import check_output_file, check_output_folder
from sambasim.hardware.spec import load_device
from sambasim.options.base import dotted_names
from sambasim.options.compile import QUICK_START, CompileFile, compile_options
from sambasim.options.fields import COMPILE_FLAGS, RUN_FLAGS
from sambasim.options.given import assign, given_overrides, read_toml
from sambasim.options.run import RunOptions
from tests.support.mpi import ROOT

BARE = st.text(string.ascii_letters + string.digits + "_-", min_size=1, max_size=8)
SCALARS = st.one_of(
    st.booleans(),
    st.integers(-(2**62), 2**62),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(st.characters(codec="utf-8", exclude_categories=["Cs", "Cc"]), max_size=12),
)
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=3), max_leaves=5)


def apply_overrides(mapping: Mapping[str, object], *overrides: str) -> dict[str, object]:
    return assign(mapping, given_overrides(overrides))


@given(path=st.lists(BARE, min_size=1, max_size=4), value=VALUES)
def test_an_override_reads_back_as_its_value(path: list[str], value: object) -> None:
    # JSON writes these values as TOML does, but for characters that need two code units.
    found: Any = apply_overrides({}, f"{'.'.join(path)}={json.dumps(value, ensure_ascii=False)}")
    for part in path:
        found = found[part]
    assert found == value
    assert type(found) is type(value)


def test_the_last_override_wins_a_bare_word_is_text_and_an_empty_value_removes_the_name() -> None:
    before = {"a": {"b": 1, "c": 2}, "d": 3}
    assert apply_overrides(before, "a.b=4", "a.b=true") == {"a": {"b": True, "c": 2}, "d": 3}
    assert before == {"a": {"b": 1, "c": 2}, "d": 3}
    assert apply_overrides(before, "a.b=net.py:Net ", "d=1\nb=2") == {"a": {"b": "net.py:Net", "c": 2}, "d": "1\nb=2"}
    assert apply_overrides(before, "a.b=") == {"a": {"c": 2}, "d": 3}


def test_flags_win_over_set_over_model_over_toml_over_defaults(tmp_path: Path) -> None:
    config = tmp_path / "net.toml"
    config.write_text(
        '[model]\ntarget = "a:A"\n[optimizer]\nname = "sgd"\nlr = 0.1\nmomentum = 0.5\n'
        "[training]\nbatch_size = 2\nseed = 1"
    )
    flags = {"batch_size": 4, "world_size": None}
    options = compile_options(config, "b:B", ["optimizer.lr=0.2", "training.batch_size=3"], flags)
    optimizer, training = options.optimizer, options.training
    assert optimizer is not None
    assert (options.model.target, options.world_size, training.batch_size, training.seed) == ("b:B", 1, 4, 1)
    assert (optimizer.lr, optimizer.momentum, optimizer.dampening) == (0.2, 0.5, 0.0)
    assert compile_options(config, "b:B", ["model.target=c:C"], {}).model.target == "c:C"


def test_paths_are_relative_to_the_config_and_on_the_command_line_to_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, here = tmp_path / "configs", tmp_path / "here"
    folder.mkdir()
    here.mkdir()
    monkeypatch.chdir(here)
    config = folder / "net.toml"
    config.write_text(
        '[model]\ntarget = "../net.py:Net"\n[data]\nsource = "x.npz"\n'
        '[loss]\nname = "loss.py:f"\n[optimizer]\nname = "sgd"'
    )
    options = compile_options(config, None, [], {})
    assert options.loss is not None
    given = options.model.target, options.data.source, options.loss.name
    assert given == (f"{tmp_path}/net.py:Net", f"{folder}/x.npz", f"{folder}/loss.py:f")
    assert options.output_folder == Path("out"), "outputs are relative to the working directory"
    assert compile_options(None, str(config), [], {}) == options
    typed = compile_options(config, "net.py:Other", ["data.source=data.py:f"], {})
    assert (typed.model.target, typed.data.source) == (f"{here}/net.py:Other", f"{here}/data.py:f")


def test_without_model_and_config_it_is_the_quick_start() -> None:
    options = compile_options(None, None, [], {"arch": "sn40l"})
    assert options.model.target == "sambasim.quickstart.digits:DigitsClassifier"
    assert (options.pef_path, options.arch) == (Path("out/digits/digits.pef"), "sn40"), "as its file is called"
    assert (ROOT / "configs" / "digits.toml").read_text() == QUICK_START.read_text()


def test_every_flag_sets_an_option_that_there_is() -> None:
    known = set(dotted_names(CompileFile))
    assert {setting.name for setting in COMPILE_FLAGS.values()} <= known | {"deepspeed"}
    run = set(dotted_names(RunOptions)) | {f"overrides.{name}" for name in dotted_names(CompileFile)}
    assert {setting.name for setting in RUN_FLAGS.values()} <= run
    tables = [[*dict.fromkeys(one.name.rpartition(".")[0] for one in of.values())] for of in (COMPILE_FLAGS, RUN_FLAGS)]
    of_training = ["training", "training.schedule"]
    of_step = ["loss", "optimizer", "ema", *of_training]
    assert tables[0] == ["", "compile", "parallel", "data", *of_step], "the order of --help"
    overrides = [f"overrides.{table}" for table in ("data", *of_training, "optimizer")]
    assert tables[1] == ["", *overrides, "overrides.evaluation", "checkpoint"]


def test_broken_toml_is_reported_with_its_line(tmp_path: Path) -> None:
    config = tmp_path / "net.toml"
    config.write_text("[model]\ntarget = 'a'\ntarget = 'b'\n")
    with pytest.raises(OptionError, match="the config is not valid TOML: cannot overwrite a value") as caught:
        read_toml(config)
    assert caught.value.where == f"{config}:3: target = 'b'"


def test_a_config_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe")
    with (tmp_path / "large.toml").open("wb") as file:
        file.truncate(1 << 40)  # a sparse file, which would take all memory
    os.mkfifo(tmp_path / "pipe.toml")
    for path, told in {
        "none.toml": "there is no config file .*none.toml", "": "cannot be read: Is a directory",
        "bytes.toml": "cannot be read: it is not UTF-8 text", "pipe.toml": "it is not a regular file",
        "/dev/zero": "it is not a regular file", "large.toml": r"cannot be read: it has more than 4\.0 MiB",
    }.items():  # fmt: skip
        with pytest.raises(OptionError, match=told):
            read_toml(tmp_path / path)


@pytest.mark.parametrize("text", ["[" + "a." * 300 + "b]", "a = " + "[" * 9000])
def test_nesting_is_bounded(text: str, tmp_path: Path) -> None:
    (tmp_path / "deep.toml").write_text(text)
    with pytest.raises(OptionError, match=r"is nested too deeply|is not valid TOML"):
        read_toml(tmp_path / "deep.toml")
    with pytest.raises(OptionError, match=r"is nested too deeply|is no TOML"):
        load_device(str(tmp_path / "deep.toml"))


def test_what_cannot_be_written_is_refused_and_nothing_is_left(tmp_path: Path) -> None:
    (tmp_path / "old.jsonl").write_text("kept")
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    for link, target in (("linked", "folder"), ("away", "nowhere")):
        (tmp_path / link).symlink_to(tmp_path / target)
    before = sorted(tmp_path.rglob("*"))
    for name in ("new.jsonl", "deep/er/new.jsonl", "old.jsonl", "linked/new.jsonl"):
        check_output_file(tmp_path / name, "the metrics file", "--metrics FILE")
        check_output_folder((tmp_path / name).parent / "logs", "the logs", "--log-dir FOLDER")
    check_output_file(Path("/dev/null"), "the metrics file", "--metrics FILE")
    refused = {"old.jsonl/new.jsonl": "old.jsonl is not a folder", "away/new.jsonl": "away is not a folder"}
    refused |= {"pipe": "pipe is a named pipe, which waits for a reader", "folder": "folder is a folder"}
    for name, why in refused.items():
        with pytest.raises(OptionError) as caught:
            check_output_file(tmp_path / name, "the metrics file", "--metrics FILE")
        assert caught.value.what == f"the metrics file cannot be written to {tmp_path / name}"
        assert (caught.value.where, caught.value.remedy) == (f"{tmp_path}/{why}", "--metrics FILE")
    assert sorted(tmp_path.rglob("*")) == before
    assert (tmp_path / "old.jsonl").read_text() == "kept"
