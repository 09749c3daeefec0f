"""Import boundaries that import-linter cannot check: single modules of torch, and what is imported at start.

The order of packages is in pyproject.toml, which `lint-imports` checks.
"""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "sambasim"
FILES = sorted(PACKAGE.rglob("*.py"))

LIGHT = "cli.main collectives errors hardware ir options pef records units"
"""What may be imported without waiting for torch, numpy or MPI."""


def module_of(file: Path) -> str:
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def test_only_capture_uses_the_export_of_torch() -> None:
    modules = "(export|_functorch|_dynamo)"
    uses = re.compile(rf"(import|from) torch\.{modules}\b|\btorch\.{modules}\.\w|from torch import [^\n]*\b{modules}\b")
    for use in ("import torch.export as e", "from torch import nn, export", "x = torch._dynamo.reset()"):
        assert uses.search(use), "the rule catches what it is for"
    for file in FILES:
        if not f"{module_of(file)}.".startswith("sambasim.compiler.capture.trace."):
            assert uses.search(file.read_text(encoding="utf-8")) is None, file


def test_every_package_has_a_layer() -> None:
    linter = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]
    layers = {name for layer in linter["contracts"][0]["layers"] for name in re.split(r" [:|] ", layer)}
    files = (file for file in FILES if (file.parent if file.name == "__init__.py" else file).parent == PACKAGE)
    assert {module_of(file) for file in files} - layers == {"sambasim.__main__"}


def heavy_after(statements: str) -> list[str]:
    body = f"import sys\n{statements}\nprint(*sorted({{'torch', 'mpi4py', 'numpy'}} & set(sys.modules)))"
    result = subprocess.run(
        [sys.executable, "-c", body], capture_output=True, text=True, cwd=ROOT, timeout=60, check=True
    )
    return result.stdout.splitlines()[-1].split()


def test_importing_is_light() -> None:
    assert heavy_after("\n".join(f"import sambasim.{module}" for module in LIGHT.split())) == []


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
