"""What is imported at start. Which package may import which is in pyproject.toml."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
LIGHT = "cli.main collectives errors hardware ir options pef records units"
"""What may be imported without waiting for torch, numpy or MPI."""


def heavy_after(statements: str) -> list[str]:
    shown = "print(*sorted({'torch', 'torch._dynamo', 'mpi4py', 'numpy', 'pydantic'} & set(sys.modules)))"
    command = [sys.executable, "-c", f"import sys\n{statements}\n{shown}"]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=60, check=True)
    return result.stdout.splitlines()[-1].split()


def test_importing_is_light() -> None:
    assert heavy_after("\n".join(f"import sambasim.{module}" for module in LIGHT.split())) == ["pydantic"]
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
