"""PEFs of every released version are still taken: loaded, checked whole, and run."""

import json
from pathlib import Path

import pytest

from sambasim import pef
from sambasim.pef.manifest import FORMAT_VERSION
from tests.faults.command import sambasim
from tests.pef.write_released import RELEASED, RUN, TRAINED

FOLDERS = sorted(path for path in RELEASED.iterdir() if path.is_dir())
PEFS = [path for folder in FOLDERS for path in sorted(folder.glob("*.pef"))]
WIDE, NARROW = 1e-3, 5e-2
"""How far a loss may be from the one that was written, on another processor: in float32, in bf16."""

EVERY_ONE = pytest.mark.parametrize("path", PEFS, ids=lambda path: f"{path.parent.name}-{path.stem}")


def test_there_are_some_of_every_minor_version_of_this_major_one() -> None:
    major, minor = FORMAT_VERSION
    assert [folder.name for folder in FOLDERS if folder.name.startswith(f"{major}.")] == [
        f"{major}.{number}" for number in range(minor + 1)
    ]
    assert all(len(list(folder.glob("*.pef"))) >= 5 for folder in FOLDERS)


@EVERY_ONE
def test_it_is_loaded_and_whole(path: Path) -> None:
    assert pef.peek(path).version == path.parent.name
    assert pef.check(path).digest == pef.peek(path).digest
    assert set(pef.map_weights(path)) <= set(pef.read(path).program.symbols)
    assert path.stat().st_size < 200_000


@EVERY_ONE
def test_it_runs(path: Path, tmp_path: Path) -> None:
    flags = RUN if path.stem in TRAINED else ("--inference", "--data", "synthetic", "--json")
    outcome = sambasim(["run", "--pef", str(path), "--trust", *flags], tmp_path)
    assert outcome.exit_code == 0, outcome.stderr
    summary = json.loads(outcome.stdout)
    if path.stem in TRAINED:
        written = json.loads((path.parent / "runs.json").read_text())[path.stem]
        assert summary["loss_last"] == pytest.approx(written, rel=NARROW if path.stem == "narrow" else WIDE)
