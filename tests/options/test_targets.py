"""A wrong name of a model is the first error, and says what to type."""

import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from sambasim.data.user_code import load_object
from sambasim.errors import ModelError, OptionError
from sambasim.options.compile import compile_options
from sambasim.options.grammar import missing
from sambasim.options.problem import Problem


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with `net.py`, and `models` in a folder and `apart.py` above it."""
    here = tmp_path / "here"
    (here / "inner" / "models").mkdir(parents=True)
    (here / "net.py").write_text("class Net: pass\n")
    (here / "all.py").write_text("from net import *\n")
    (tmp_path / "apart.py").write_text("")
    monkeypatch.chdir(here)
    return here


_NOT_NEAR = "no such package is installed, and no such folder or file is near"
_OR_A_FILE = "or for a file of yours path/file.py:resnet50"


@pytest.mark.parametrize(
    ("target", "what", "remedy"),
    [
        ("gone.py:Net", "there is no file {folder}/gone.py", "check the path, or name another: path/file.py:NAME"),
        ("nets.py:Net", "there is no file {folder}/nets.py", "did you mean {folder}/net.py?"),
        ("net.py:Nett", "{folder}/net.py has no Nett", "did you mean Net?"),
        ("net.py:Zoo", "{folder}/net.py has no Zoo", "it has Net"),
        ("nett:Net", "there is no module nett", "did you mean net:Net?"),
        ("transformer:GPT2LMHeadModel", "there is no module transformer", "did you mean transformers:GPT2LMHeadModel?"),
        ("torchvison.models:vgg", "there is no module torchvison", "did you mean torchvision.models:vgg?"),
        ("torchxyz:resnet50", f"there is no module torchxyz: {_NOT_NEAR}", f"pip install torchxyz, {_OR_A_FILE}"),
        ("models:Net", "there is no module models", "run it from the folder that holds models: cd inner"),
        ("apart:Net", "there is no module apart", "run it from the folder that holds apart: cd .."),
        ("tomllib:Net", None, None),
        ("all.py:Net", None, None),
    ],
)
def test_what_a_target_lacks_is_found_without_an_import(
    folder: Path, target: str, what: str | None, remedy: str | None
) -> None:
    if what is None or remedy is None:
        assert missing(target) is None
        return
    with pytest.raises(ModelError) as caught:
        compile_options(None, target, [], {})  # the optimizer is missing too
    assert caught.value.what.endswith(f": {what.format(folder=folder)}")
    assert caught.value.remedy == remedy.format(folder=folder)


def test_a_model_of_transformers_is_found_without_an_import() -> None:
    if find_spec("transformers") is None:
        pytest.skip("transformers is not installed")
    what, again = "transformers has no model ", "check the name, or pip install -U transformers"
    slip, other = (Problem("", f"{what}{name}") for name in ("GPT2LMHedModel", "Qqqqq"))
    assert missing("transformers:GPT2LMHedModel") == slip._replace(remedy="did you mean GPT2LMHeadModel?")
    assert missing("transformers:Qqqqq") == other._replace(remedy=again)
    assert missing("transformers:GPT2LMHeadModel") is None


def test_a_package_that_is_not_installed_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setitem(sys.modules, "torchvision", None)
    what = f"there is no module torchvision: {_NOT_NEAR}"
    assert missing("torchvision.models:resnet50") == Problem("", what, f"pip install torchvision, {_OR_A_FILE}")


@pytest.mark.parametrize(
    ("target", "remedy"),
    [
        ("json.decode:JSONDecoder", "did you mean json.decoder:JSONDecoder?"),
        ("json.qqqq:JSONDecoder", "check the name, or the version of json"),
        ("json:decodr", "did you mean JSONDecoder?"),
        ("json:decodr.JSONDecoder", "did you mean decoder?"),  # a module is meant only before another name
    ],
)
def test_a_part_of_a_package_that_is_not_there_is_named(folder: Path, target: str, remedy: str) -> None:
    with pytest.raises(ModelError) as caught:
        load_object(target, "model")
    assert caught.value.remedy == remedy


def test_a_config_that_is_not_there_has_a_remedy_for_every_command(folder: Path) -> None:
    for name in ("gpt.pef", "gpt.py", "gpt.toml"):
        (folder / name).write_text("")
    for given in ("gpd.toml", "gpt"):
        with pytest.raises(OptionError, match=rf"there is no config file {given}") as caught:
            compile_options(Path(given), None, [], {})
        assert caught.value.remedy == "did you mean gpt.toml?"
    with pytest.raises(OptionError) as caught:
        compile_options(Path("other.toml"), None, [], {})
    assert caught.value.remedy == f"check the path: {folder}/other.toml"
