"""The walls between the rooms that import-linter cannot see: parts of a package, and what is imported when.

import-linter checks the rooms themselves; its contracts are in pyproject.toml.
"""

import ast
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "sambasim"
FILES = sorted(PACKAGE.rglob("*.py"))

ONLY_HERE = {
    "mpi4py": "sambasim.runtime.communicator",
    "torch.export": "sambasim.compiler.capture",
    "torch._functorch": "sambasim.compiler.capture",
    "torch._dynamo": "sambasim.compiler.capture",
}
"""What is named in one module only (or in the modules below it)."""

LIGHT = (
    "sambasim", "sambasim.cli.main", "sambasim.collectives", "sambasim.errors", "sambasim.hardware", "sambasim.ir",
    "sambasim.options", "sambasim.records", "sambasim.units",
)  # fmt: skip
"""What may be imported without waiting for torch or numpy, and without loading MPI."""

SUBPROCESS_TIMEOUT_S = 60


def module_of(file: Path) -> str:
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def dotted(node: ast.expr) -> str | None:
    """`torch.export.export` as text; None for anything that is not a chain of names."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        owner = dotted(node.value)
        return f"{owner}.{node.attr}" if owner else None
    return None


def names_in(source: str) -> Iterator[str]:
    """Every dotted name that is imported or used, wherever in the file, with `import ... as` undone."""
    tree = ast.parse(source)
    aliases: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name
                if alias.asname:
                    aliases[alias.asname] = alias.name
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                yield f"{node.module}.{alias.name}"
                aliases[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    for node in ast.walk(tree):
        name = dotted(node) if isinstance(node, ast.Attribute) else None
        if name:
            first, _, rest = name.partition(".")
            yield f"{aliases.get(first, first)}.{rest}"


def is_within(name: str, owner: str) -> bool:
    return name == owner or name.startswith(f"{owner}.")


def trespasses(source: str, module: str) -> set[str]:
    """What `module` names though it belongs to another one."""
    return {
        name
        for name in names_in(source)
        for thing, owner in ONLY_HERE.items()
        if is_within(name, thing) and not is_within(module, owner)
    }


@pytest.mark.parametrize("file", FILES, ids=module_of)
def test_third_parties_stay_in_their_rooms(file: Path) -> None:
    assert trespasses(file.read_text(encoding="utf-8"), module_of(file)) == set()


@pytest.mark.parametrize(
    ("source", "owner"),
    [
        ("import torch.export", "sambasim.compiler.capture"),
        ("import torch\ndef f():\n    return torch.export.export(m, ())", "sambasim.compiler.capture"),
        ("import torch as t\nt.export.export(m, ())", "sambasim.compiler.capture"),
        ("from torch import export", "sambasim.compiler.capture"),
        ("from torch import export as e\ne.export(m, ())", "sambasim.compiler.capture"),
        ("from torch._functorch.aot_autograd import aot_export_joint", "sambasim.compiler.capture.joint"),
        ("def f():\n    from mpi4py import MPI", "sambasim.runtime.communicator"),
    ],
)
def test_a_trespass_is_seen_however_it_is_written(source: str, owner: str) -> None:
    assert trespasses(source, "sambasim.compiler.build") != set()
    assert trespasses(source, owner) == set()


def test_every_room_has_a_contract() -> None:
    """A room that no contract names has no walls."""
    rooms = {module_of(file) for file in FILES if file.parent.parent == PACKAGE and file.name == "__init__.py"}
    rooms |= {module_of(file) for file in FILES if file.parent == PACKAGE and file.name != "__init__.py"}
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"][
        "contracts"
    ]
    guarded = {module for contract in contracts for module in contract.get("source_modules", [])}
    assert rooms - guarded == {"sambasim.cli", "sambasim.__main__"}


def heavy_after(statements: str) -> list[str]:
    body = f"import sys\n{statements}\nprint(*sorted({{'torch', 'mpi4py', 'numpy', 'plotly'}} & set(sys.modules)))"
    result = subprocess.run(
        [sys.executable, "-c", body], capture_output=True, text=True, cwd=ROOT, timeout=SUBPROCESS_TIMEOUT_S, check=True
    )
    return result.stdout.splitlines()[-1].split()


@pytest.mark.parametrize("module", LIGHT)
def test_importing_is_light(module: str) -> None:
    assert heavy_after(f"import {module}") == []


@pytest.mark.parametrize(
    "arguments", [["--help"], ["compile", "--help"], ["run", "--help"], ["report", "--help"], ["run", "--no-such-flag"]]
)
def test_help_and_a_wrong_flag_are_light(arguments: list[str]) -> None:
    statements = (
        f"sys.argv = ['sambasim', *{arguments!r}]\n"
        "from sambasim.cli.main import main\n"
        "try:\n"
        "    main()\n"
        "except SystemExit:\n"
        "    pass"
    )
    assert heavy_after(statements) == []
