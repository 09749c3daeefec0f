"""The rows of the fidelity page against the code that they are about."""

import ast
import inspect
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

from sambasim import samba
from sambasim.samba.door.absent import AbsentNameError
from sambasim.samba.door.finder import exported_names
from sambasim.samba.door.table import MODULES, ROOT, children
from sambasim.samba.fidelity.api import API
from sambasim.samba.fidelity.behaviours import BEHAVIOURS
from sambasim.samba.fidelity.flags import FLAG_ROWS
from sambasim.samba.fidelity.page import flag_of, updated
from sambasim.samba.fidelity.row import Row, Status
from sambasim.samba.utils.flags import FLAGS
from tests.support.door import open_door

ROOT_FOLDER = Path(__file__).parents[2]
NAMES = {f"{ROOT}.{row.name}" for row in API}
WHOLE = {"sambaflow.samba.nn", "sambaflow.logging.samba_logger"}
"""Modules that one row is about: their names are torch's, and those of Python's logging."""


@pytest.fixture(autouse=True)
def door() -> Iterator[None]:
    with open_door():
        yield


def resolved(path: str) -> object:
    """What an app has under this path: the deepest module, then attributes, which are not computed."""
    words = path.split(".")
    modules = [".".join(words[:count]) for count in range(1, len(words) + 1)]
    module = [name for name in modules if name in MODULES][-1]
    value: object = import_module(module)
    rest = words[module.count(".") + 1 :]
    for index, word in enumerate(rest):
        last = index == len(rest) - 1
        value = inspect.getattr_static(value, word) if last and index else getattr(value, word)
    return value


def parameters(value: object) -> set[str]:
    """The names of what can be given to it."""
    if value is samba.SambaTensor:
        value = samba.SambaTensor.__new__
    return set(inspect.signature(value).parameters)  # type: ignore[arg-type]  # rows with keywords are callable


@pytest.mark.parametrize("row", API, ids=lambda row: row.name)
def test_a_row_resolves_and_takes_its_keywords(row: Row) -> None:
    assert row.status is not Status.ABSENT, "what is absent has no path to resolve"
    value = resolved(f"{ROOT}.{row.name}")
    if row.takes:
        assert set(row.takes) - parameters(value) == set()


@pytest.mark.parametrize("module", sorted(MODULES.keys() - WHOLE))
def test_every_name_of_a_module_has_a_row(module: str) -> None:
    if module.startswith("sambaflow.samba.nn"):
        return  # torch's, beside the one row
    # What a module is named after has the module's row: `samba.lazy_param.lazy_param`.
    own = f"{module}.{module.rpartition('.')[2]}"
    names = {f"{module}.{name}" for name in exported_names(module)} - MODULES.keys() - {own}
    if module == "sambaflow.samba":
        names |= {f"{module}.{name}" for name in samba.__all__}
    elsewhere = {name for name in names if any(row.startswith(f"{name}.") for row in NAMES)}
    # A class may be exported by several modules: one row about it is enough.
    known = {id(resolved(name)) for name in NAMES}
    assert {name for name in names - NAMES - elsewhere if id(resolved(name)) not in known} == set()


def test_what_is_known_by_its_name_alone_is_not_called_the_same() -> None:
    assert [row.name for row in API if row.name_alone and row.status is Status.SAME] == []


def test_no_row_is_there_twice() -> None:
    for rows in (API, FLAG_ROWS, BEHAVIOURS):
        assert len({row.name for row in rows}) == len(rows)


def test_every_flag_has_its_row_and_every_row_its_flag() -> None:
    assert [row.name for row in FLAG_ROWS] == [flag.names[0] for flag in FLAGS]


@pytest.mark.parametrize("row", FLAG_ROWS, ids=lambda row: row.name)
def test_a_flag_without_effect_says_so_in_both_places(row: Row) -> None:
    assert (row.status is Status.NO_EFFECT) == (flag_of(row).inert is not None)
    assert not (row.note and row.status is Status.NO_EFFECT), "its reason is the flag's own"


def test_what_is_simplified_absent_or_without_effect_says_why() -> None:
    silent = [row.name for row in (*API, *BEHAVIOURS) if row.status is not Status.SAME and not row.note]
    silent += [row.name for row in FLAG_ROWS if row.status is Status.SIMPLIFIED and not row.note]
    assert silent == []


@pytest.mark.parametrize("row", [row for row in BEHAVIOURS if row.test is not None], ids=lambda row: row.name)
def test_the_test_that_holds_a_behaviour_is_there(row: Row) -> None:
    file, _, name = str(row.test).partition("::")
    tests = ast.parse((ROOT_FOLDER / file).read_text(encoding="utf-8")).body
    assert name in [test.name for test in tests if isinstance(test, ast.FunctionDef)]
    assert name.startswith("test_")


def test_only_what_cannot_be_run_is_held_by_no_test() -> None:
    assert [row.name for row in BEHAVIOURS if row.test is None and row.status in (Status.SAME, Status.SIMPLIFIED)] == []


@pytest.mark.parametrize("module", sorted(MODULES))
def test_a_name_that_is_absent_raises_and_tells_what_is_near(module: str) -> None:
    facade = import_module(module)
    known = [*exported_names(module), *children(module)]
    near = next((name for name in known if len(name) > 5), None)
    with pytest.raises(AbsentNameError) as caught:
        getattr(facade, f"{near}x" if near else "absent_name")
    assert caught.value.what.startswith(f"sambasim has no {module}.")
    assert near is None or f"{module}.{near}" in str(caught.value.remedy)


def test_a_page_without_a_mark_is_refused() -> None:
    with pytest.raises(ValueError, match="the page has no <!-- api: written by make golden -->"):
        updated("# A page\n")
