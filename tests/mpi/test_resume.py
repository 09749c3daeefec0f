"""A run that goes on from a checkpoint has the bits of one that was never interrupted."""

import json
import sys
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


@pytest.mark.parametrize("np", [np if np in (1, 2, 4) else whole_case(np) for np in RANKS])
def test_every_example_goes_on_with_its_bits(np: int, compiled: list[CompiledExample], tmp_path: Path) -> None:
    """In the midst of an epoch, with accumulation and a schedule; each way to sync, from what another has written."""
    argv = [sys.executable, str(BODY), str(tmp_path), *(str(one.path) for one in compiled)]
    result = run_mpi(np, argv, timeout=280).check()
    lines = [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]
    assert len(lines) == len(compiled) * (1 if np == 1 else 2), result.stdout
    assert [line["name"] for line in lines if line["whole"] != line["resumed"]] == []
    assert len({line["whole"][0] for line in lines}) == len(compiled), "they cannot all have been trained"
