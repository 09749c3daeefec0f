"""The configs of `configs/parallelism`: each by the two commands of its comment, with fewer steps."""

import re
import shlex
from pathlib import Path

import pytest

from tests.faults.command import sambasim
from tests.support.mpi import ROOT, SAMBASIM, run_mpi
from tests.support.whole import whole_case

FOLDER = ROOT / "configs" / "parallelism"
SMALLER = ("--set", "model.args.width=32", "--set", "model.args.layers=4")


NAMES = ("batch", "pipeline", "recompute", "tensor", "three_axes", "zero")


def test_each_config_is_tested() -> None:
    assert sorted(path.stem for path in FOLDER.glob("*.toml")) == list(NAMES)


@pytest.mark.parametrize("name", [one if one == "pipeline" else whole_case(one) for one in NAMES])
def test_its_commands_train(name: str, tmp_path: Path) -> None:
    text = (FOLDER / f"{name}.toml").read_text(encoding="utf-8")
    compile_command, run_command = re.findall(r"^#   (.+)$", text, re.MULTILINE)
    _, *words = shlex.split(compile_command)
    words[words.index("--config") + 1] = str(FOLDER / f"{name}.toml")
    compiled = sambasim([*words, *SMALLER], tmp_path)
    assert compiled.exit_code == 0, compiled.stderr
    launcher, _, arguments = run_command.rpartition("sambasim ")
    ranks = int(launcher.split()[2]) if launcher else 1
    command = [*SAMBASIM, *shlex.split(arguments), "--steps", "2", "--no-evaluate"]
    trained = run_mpi(ranks, command, timeout=120, cwd=tmp_path).check()
    assert "2 steps in" in trained.stdout
    assert trained.stderr == ""
