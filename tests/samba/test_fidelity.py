"""The tables of the README of `sambasim.samba` against the code that they are about."""

import inspect
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, get_args

import pytest
from torch import nn

from sambasim import samba
from sambasim.samba.flags import FLAGS
from sambasim.samba.models import add_old_methods
from sambasim.samba.notices import AbsentNameError
from sambasim.samba.process import Code
from sambasim.samba.session import Session
from sambasim.samba.shim import ABSENT, MODULES, ROOT, children, exported_names
from sambasim.samba.trace import _trace_graph
from tests.support.door import open_door

PAGE = Path(samba.__file__).with_name("README.md")
TEXT = PAGE.read_text(encoding="utf-8")


class Row(NamedTuple):
    """One line of a table: the code spans of its first cell, and the cells behind it."""

    names: tuple[str, ...]
    cells: tuple[str, ...]


def rows(section: str) -> list[Row]:
    """The lines of the tables below the heading `## section`, without their headings."""
    lines = TEXT.partition(f"\n## {section}\n")[2].partition("\n## ")[0].splitlines()
    lines = [line for line in lines if line.startswith("|")]
    heads = {index + offset for index, line in enumerate(lines) if line.startswith("|---") for offset in (-1, 0)}
    table = [re.split(r"\s\|(?=\s|$)", line[1:-1]) for index, line in enumerate(lines) if index not in heads]
    cells = [tuple(cell.strip() for cell in row) for row in table]
    return [Row(tuple(re.findall(r"`([^`]+)`", first)) or (first,), tuple(rest)) for first, *rest in cells]


NAMES, FLAG_ROWS, BEHAVIOURS, FOUND = map(rows, ("Names", "Flags", "Behaviours", "Findings"))
HERE = [name for row in NAMES for name in row.names if row.cells[0] != "absent"]
GONE = [name for row in NAMES for name in row.names if row.cells[0] == "absent"]


@pytest.fixture(autouse=True)
def door() -> Iterator[None]:
    with open_door():
        yield


def resolved(name: str) -> Any:
    """What an app has under this name: the deepest module, then attributes. The last is not computed."""
    if name.startswith(("model.", "parameter.")):
        model = samba.from_torch_model_(nn.Linear(1, 1))
        add_old_methods(model)
        owner, attribute = name.split(".")
        return getattr(model if owner == "model" else model.weight, attribute)
    path = [ROOT, *name.split(".")]
    depth = max(count for count in range(1, len(path) + 1) if ".".join(path[:count]) in MODULES)
    value: Any = import_module(".".join(path[:depth]))
    *words, last = path[depth:] or [""]
    for word in words:
        value = getattr(value, word)
    if not last:
        return value
    return inspect.getattr_static(value, last) if words else getattr(value, last)


@pytest.mark.parametrize("row", [row for row in NAMES if row.cells[0] != "absent"], ids=lambda row: row.names[0])
def test_names_are_there_and_take_the_keywords_of_their_row(row: Row) -> None:
    keywords = {word for shape in re.findall(r"`(\([^`]*)`", row.cells[-1]) for word in re.findall(r"(\w+)=", shape)}
    for name in row.names:
        value = resolved(name)
        if keywords:
            with_signature = {samba.SambaTensor: samba.SambaTensor.__new__, samba.utils.trace_graph: _trace_graph}
            parameters = inspect.signature(with_signature.get(value, value)).parameters
            takes_any = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters.values())
            assert takes_any or keywords <= parameters.keys()


@pytest.mark.parametrize("name", GONE)
def test_the_use_of_an_absent_name_raises(name: str) -> None:
    owner, _, last = name.rpartition(".")
    value = samba.SambaTensor(shape=(1,)) if owner == "samba.SambaTensor" else resolved(owner)
    with pytest.raises(AbsentNameError, match=last):
        getattr(value, last)()


def test_absent_names_of_modules_are_those_of_the_import_shim() -> None:
    known = {f"{module}.{name}" for module, names in ABSENT.items() for name in names}
    of_classes = {name for name in GONE if name.startswith(("samba.session.", "samba.SambaTensor."))}
    assert {f"{ROOT}.{name}" for name in {*GONE} - of_classes} == known


def test_every_name_of_a_module_has_a_row() -> None:
    whole = {"sambaflow.logging.samba_logger", "sambaflow.samba.nn", "sambaflow.samba.nn.parameter"}  # one row for each
    listed = {f"{ROOT}.{name}" for row in NAMES for name in row.names}
    listed |= {name.rpartition(".")[0] for name in listed}
    values = {id(resolved(name)) for name in HERE}  # what several modules export has one row
    for module in MODULES.keys() - whole:
        # A thing that a module is named after has the module's row.
        of_modules = {one.rpartition(".")[2] for one in MODULES}
        names = {f"{module}.{name}" for name in {*exported_names(module)} - of_modules}
        missing = names - MODULES.keys() - listed
        assert [name for name in missing if id(resolved(name.removeprefix(f"{ROOT}."))) not in values] == []
    public = {name for name in {*dir(Session), *vars(samba.session)} if not name.startswith("_")} - {"ctx", "profiler"}
    assert public - {name.removeprefix("samba.session.") for name in HERE} == set()


@pytest.mark.parametrize("table", [NAMES, FLAG_ROWS, BEHAVIOURS])
def test_a_status_is_one_of_four_and_what_differs_has_a_note(table: list[Row]) -> None:
    for row in table:
        assert row.cells[0] in ("same", "simplified", "no effect", "absent"), row
        assert row.cells[-1] or row.cells[0] == "same", row


def test_every_flag_has_its_row_and_says_whether_it_has_an_effect() -> None:
    in_code = [(flag.names, flag.inert is not None) for flag in FLAGS]
    assert [(row.names, row.cells[0] == "no effect") for row in FLAG_ROWS] == in_code
    assert {row.names[0] for row in FOUND} == set(get_args(Code)), "and every kind of finding"


def test_the_tests_of_behaviours_are_there() -> None:
    links = [link for row in BEHAVIOURS for link in re.findall(r"\[test\]\(([^)]+)\)", row.cells[1])]
    assert len(links) > 30
    for link in links:
        file, _, name = link.partition("#")
        assert f"\ndef {name}(" in (PAGE.parent / file).read_text(encoding="utf-8"), link


@pytest.mark.parametrize("module", sorted(MODULES))
def test_a_misspelt_name_raises_an_error_with_the_nearest(module: str) -> None:
    facade = import_module(module)
    near = next((name for name in [*exported_names(module), *children(module)] if len(name) > 5), None)
    with pytest.raises(AbsentNameError) as caught:
        getattr(facade, f"{near}x" if near else "absent_name")
    assert caught.value.what.startswith(f"sambasim has no {module}.")
    assert near is None or f"{module}.{near}" in str(caught.value.remedy)
