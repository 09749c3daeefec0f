"""A run that goes on from a checkpoint has the bits of one that was never interrupted."""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from tests.support.examples import VARIANTS, CompiledExample, compile_examples
from tests.support.mpi import RANKS, ROOT, run_mpi
from tests.support.whole import is_whole, whole_case

BODY = ROOT / "tests" / "mpi" / "bodies" / "resume.py"


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> list[CompiledExample]:
    """Every example with every optimizer, with and without clipping; in part, every example with one of the six."""
    everything = list(compile_examples(tmp_path_factory.mktemp("examples")))
    return everything if is_whole() else everything[:: VARIANTS + 1]


def check_resumed(np: int, paths: Sequence[Path], folder: Path, env: Mapping[str, str] | None = None) -> None:
    """Each PEF ends alike, whether its run was interrupted or not, and no two PEFs do."""
    result = run_mpi(np, [sys.executable, str(BODY), str(folder), *map(str, paths)], timeout=280, env=env).check()
    lines = [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]
    assert len(lines) == len(paths) * (1 if np == 1 else 2), result.stdout
    assert [line["name"] for line in lines if line["whole"] != line["resumed"]] == []
    assert len({line["whole"][0] for line in lines}) == len(paths), "they cannot all have been trained"


@pytest.mark.parametrize("np", [np if np in (1, 2, 4) else whole_case(np) for np in RANKS])
def test_every_example_goes_on_with_its_bits(np: int, compiled: list[CompiledExample], tmp_path: Path) -> None:
    """In the midst of an epoch, with accumulation and a schedule; each way to sync, from what another has written."""
    check_resumed(np, [one.path for one in compiled], tmp_path)
