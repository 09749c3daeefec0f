"""Every row of the API table is exercised by a test of this folder, and no test claims a row that there is not."""

import ast
import re
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from pathlib import Path

from sambasim.samba.fidelity.api import API
from sambasim.samba.fidelity.row import Status

FOLDER = Path(__file__).parent


def marked() -> Iterator[Callable[..., object]]:
    """The tests beside this one that are marked with rows."""
    for file in FOLDER.glob("test_*.py"):
        for value in vars(import_module(f"tests.samba.api.{file.stem}")).values():
            if hasattr(value, "exercises"):
                yield value


def parts_of(file: str) -> Mapping[str, str]:
    """What a file of this folder defines at its top, and the code of each, without its docstring and its marks."""
    parts = {}
    for node in ast.parse((FOLDER / f"{file}.py").read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            begin = 1 if ast.get_docstring(node) else 0
            arguments = ast.unparse(node.args) if isinstance(node, ast.FunctionDef) else ""
            decorators = [code for code in map(ast.unparse, node.decorator_list) if not code.startswith("exercises(")]
            parts[node.name] = "\n".join([*decorators, arguments, *map(ast.unparse, node.body[begin:])])
        elif isinstance(node, ast.Assign):
            parts |= {ast.unparse(target): ast.unparse(node.value) for target in node.targets}
    return parts


def words_of(test: str, parts: Mapping[str, str]) -> set[str]:
    """The words in the code of a test, and of the fixtures, functions and scripts that it uses."""
    words: set[str] = set()
    left = [test]
    while left:
        new = set(re.findall(r"\w+", parts[left.pop()].replace("\\n", "\n"))) - words
        words |= new
        left += [word for word in new if word in parts]
    return words


def test_every_row_is_exercised_and_every_mark_is_a_row() -> None:
    wanted = {row.name for row in API if row.status is not Status.ABSENT}
    exercised = {name for test in marked() for name in vars(test)["exercises"]}
    assert wanted - exercised == set()
    assert exercised - wanted == set()


def test_a_test_uses_what_it_is_marked_with() -> None:
    idle = []
    for test in marked():
        parts = {**parts_of("conftest"), **parts_of(test.__module__.rpartition(".")[2])}
        words = words_of(test.__name__, parts)
        idle += [(test.__name__, row) for row in vars(test)["exercises"] if row.rpartition(".")[2] not in words]
    assert idle == []


def test_a_test_without_a_body_uses_nothing() -> None:
    assert words_of("test_nothing", {"test_nothing": "\npass", "pef": "samba.session.compile()"}) == {"pass"}
