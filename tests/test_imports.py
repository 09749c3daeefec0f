"""Import boundaries that import-linter cannot check: single modules of torch, and what is imported at start.

The order of packages is in pyproject.toml, which `lint-imports` checks.
"""

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "sambasim"
FILES = sorted(PACKAGE.rglob("*.py"))

CAPTURE = "sambasim.compiler.capture.trace"
ONLY_IN_CAPTURE = ("torch.export", "torch._functorch", "torch._dynamo")
LIGHT = "cli.main collectives errors hardware ir options pef records units"
"""What may be imported without waiting for torch, numpy or MPI."""


def module_of(file: Path) -> str:
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def names_in(source: str) -> Iterator[str]:
    """Every dotted name that is imported or used, with `import ... as` undone."""
    tree = ast.parse(source)
    aliases: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name
                aliases |= {alias.asname: alias.name} if alias.asname else {}
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                yield f"{node.module}.{alias.name}"
                aliases[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            first, _, rest = ast.unparse(node).partition(".")
            yield f"{aliases.get(first, first)}.{rest}"


def capture_names(source: str) -> list[str]:
    if not any(one.rpartition(".")[2] in source for one in ONLY_IN_CAPTURE):
        return []
    return [name for name in names_in(source) if f"{name}.".startswith(tuple(f"{one}." for one in ONLY_IN_CAPTURE))]


def test_only_capture_uses_the_export_of_torch() -> None:
    for use in ("import torch as t; t._dynamo.reset()", "from torch import (nn,\n export)", "x = torch.export"):
        assert capture_names(use), "the rule catches what it is for"
    for file in FILES:
        if not f"{module_of(file)}.".startswith(f"{CAPTURE}."):
            assert capture_names(file.read_text(encoding="utf-8")) == [], file


def test_every_package_has_a_layer() -> None:
    linter = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]
    layers = {name for layer in linter["contracts"][0]["layers"] for name in re.split(r" [:|] ", layer)}
    files = (file for file in FILES if (file.parent if file.name == "__init__.py" else file).parent == PACKAGE)
    assert {module_of(file) for file in files} - layers == {"sambasim.__main__"}


def heavy_after(statements: str) -> list[str]:
    body = (
        f"import sys\n{statements}\nprint(*sorted({{'torch', 'torch._dynamo', 'mpi4py', 'numpy'}} & set(sys.modules)))"
    )
    result = subprocess.run(
        [sys.executable, "-c", body], capture_output=True, text=True, cwd=ROOT, timeout=60, check=True
    )
    return result.stdout.splitlines()[-1].split()


def test_importing_is_light() -> None:
    assert heavy_after("\n".join(f"import sambasim.{module}" for module in LIGHT.split())) == []
    assert "torch" not in heavy_after("import sambasim.cli.machine")  # `--version` tells of a torch that is broken
    assert "torch._dynamo" not in heavy_after("import sambasim.samba")  # a second more for each start of an app


@pytest.mark.parametrize("arguments", [["--help"], ["compile", "--help"], ["run", "--no-such-flag"]])
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
