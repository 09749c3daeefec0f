"""Finding what a target names, and saying which of the many things went wrong when it cannot be found."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from sambasim.data.user_code import call_object, load_object
from sambasim.errors import DataError, ModelError


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty working directory. What is imported from it is forgotten again."""
    monkeypatch.chdir(tmp_path)
    path, modules = list(sys.path), set(sys.modules)
    yield tmp_path
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def test_a_name_in_a_file_and_in_a_module_of_the_working_directory(folder: Path) -> None:
    (folder / "deep").mkdir()
    (folder / "deep" / "net_of_one_name.py").write_text("class Net:\n    class Inner: pass\n")
    (folder / "plain_module_7.py").write_text("answer = 42\n")
    assert load_object("plain_module_7:answer", "model") == 42
    net = load_object("deep/net_of_one_name.py:Net", "model")
    assert isinstance(net, type)
    assert load_object(f"{folder}/deep/net_of_one_name.py:Net", "model") is net, "one file is loaded once"
    assert load_object("deep/net_of_one_name.py:Net.Inner", "model") is vars(net)["Inner"]
    assert net.__module__ == "sambasim_file_net_of_one_name", "a name that does not depend on the machine"


def test_a_file_named_as_a_module_of_python_shadows_nothing(folder: Path) -> None:
    (folder / "colorsys.py").write_text("value = 1\n")
    sys.modules.pop("colorsys", None)
    assert load_object("colorsys.py:value", "model") == 1
    import colorsys

    assert colorsys.rgb_to_hsv(0, 0, 0) == (0, 0, 0)


def test_a_neighbour_can_be_imported_while_loading_and_later(folder: Path) -> None:
    (folder / "deep").mkdir()
    (folder / "deep" / "neighbour_one.py").write_text("value = 1\n")
    (folder / "deep" / "neighbour_two.py").write_text("value = 2\n")
    (folder / "deep" / "data.py").write_text(
        "from neighbour_one import value\n"
        "def later():\n    import neighbour_two\n    return value, neighbour_two.value\n"
    )
    assert call_object("deep/data.py:later", {}, "data source") == (1, 2)


@pytest.mark.parametrize(
    ("target", "what", "text"),
    [
        ("net", "model", 'the model "net" must be package.module:name or path/file.py:name'),
        ("none.py:Net", "model", "the model none.py:Net: there is no file {folder}/none.py"),
        ("nets.py:Net", "model", "did you mean {folder}/net.py?"),
        ("no_such_module:Net", "data source", "the data source no_such_module:Net: there is no module no_such_module"),
        ("net.py:Nett", "model", "the model net.py:Nett: {folder}/net.py has no Nett\n  try:   did you mean Net?"),
        ("needs.py:Net", "model", "try:   install torchvisionn, or run where it can be imported"),
        ("package.needs:Net", "model", "where: {folder}/package/needs.py:1: import package.gone"),
        ("inner/relative.py:Net", "model", "try:   name it by its package: inner.relative:Net"),
        ("inner/deep/own.py:Net", "model", "try:   name it by its package: inner.deep.own:Net"),
        ("inner/deep.py:Net", "model", "try:   install torchvisionn, or run where it can be imported"),
        ("raises.py:Net", "model", "where: {folder}/raises.py:3: return 1 / 0"),
        ("broken.py:Net", "model", "where: {folder}/broken.py:2: class Net(:"),
        ("exits.py:Net", "data source", "where: {folder}/exits.py:2: sys.exit(1)"),
    ],
)
def test_what_cannot_be_found_is_reported(folder: Path, target: str, what: str, text: str) -> None:
    (folder / "package").mkdir()
    (folder / "package" / "__init__.py").write_text("")
    (folder / "package" / "needs.py").write_text("import package.gone\n")
    (folder / "inner" / "deep").mkdir(parents=True)
    (folder / "inner" / "__init__.py").write_text("")
    (folder / "inner" / "relative.py").write_text("from .layers import Layer\n")
    (folder / "inner" / "deep" / "own.py").write_text("from inner.layers import Layer\n")
    (folder / "inner" / "deep.py").write_text("import torchvisionn\n")
    (folder / "net.py").write_text("class Net: pass\n")
    (folder / "needs.py").write_text("# a comment\nimport torchvisionn\n")
    (folder / "raises.py").write_text("import json\ndef f():\n    return 1 / 0\njson.loads('1')\nf()\n")
    (folder / "broken.py").write_text("# a comment\nclass Net(:\n    pass\n")
    (folder / "exits.py").write_text("import sys\nsys.exit(1)\n")
    with pytest.raises(ModelError if what == "model" else DataError) as caught:
        load_object(target, what)
    assert text.format(folder=folder) in str(caught.value)


def test_arguments_that_do_not_fit_are_reported_with_the_signature(folder: Path) -> None:
    (folder / "data.py").write_text("number = 3\ndef f(path, size=3): raise ValueError('no such corpus')\n")
    with pytest.raises(DataError) as caught:
        call_object("data.py:f", {"pth": "x"}, "data source")
    assert "data.py:f(path, size=3) cannot be called with data.args {'pth': 'x'}: missing a" in caught.value.what
    with pytest.raises(DataError, match=r"the data source data.py:number is of type int, which cannot be called"):
        call_object("data.py:number", {}, "data source")
    with pytest.raises(DataError, match=r"the data source data.py:f raised ValueError: no such corpus") as caught:
        call_object("data.py:f", {"path": "x"}, "data source")
    assert caught.value.where == f"{folder}/data.py:2: def f(path, size=3): raise ValueError('no such corpus')"


def test_a_similar_name_that_a_module_imports_when_it_is_asked_for(folder: Path) -> None:
    (folder / "lazy_module_7.py").write_text("def __dir__(): return ['GPT2LMHeadModel']\n")
    with pytest.raises(ModelError) as raised:
        load_object("lazy_module_7:GPT2LMHedModel", "model")
    assert raised.value.remedy == "did you mean GPT2LMHeadModel?"
