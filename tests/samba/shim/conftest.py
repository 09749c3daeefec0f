"""Scripts in processes with the `sambaflow` shim, by each way to start them."""

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeAlias

import pytest

from sambasim.cli.app import PATH_ENTRY
from tests.support.mpi import ROOT, Result, run_job, run_mpi
from tests.support.whole import whole_case

COMMANDS = {
    "app": [str(Path(sys.executable).parent / "sambasim"), "app"],
    "module": [sys.executable, "-m", "sambasim"],
    "env": [sys.executable],
}
"""By way in: what stands before SCRIPT.py."""

Run: TypeAlias = Callable[..., Result]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Writes a script, and runs it in its folder by one of the ways in."""

    def run_script(
        way: str, text: str, arguments: Sequence[str] = (), *, ranks: int = 0, path: Sequence[Path] = ()
    ) -> Result:
        (tmp_path / "script.py").write_text(text, encoding="utf-8")
        folders = [*([PATH_ENTRY] if way == "env" else []), ROOT, *path]
        env = {"PYTHONPATH": os.pathsep.join(map(str, folders))}
        command = [*COMMANDS[way], "script.py", *arguments]
        if ranks:
            return run_mpi(ranks, command, timeout=120, env=env, cwd=tmp_path)
        return run_job(command, timeout=120, env=env, cwd=tmp_path)

    return run_script


@pytest.fixture(params=["env", whole_case("app"), whole_case("module")])
def way(request: pytest.FixtureRequest) -> str:
    """Every way in."""
    return str(request.param)
