"""`--pipeline-stages`: the bits of one rank that accumulates over the micro-batches, by every schedule and every way."""

import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from sambasim.compiler.front import compile_from_options
from tests.mpi.training import EACH_ALONE, TWO_NODES, Run, Trained, run_of, train
from tests.support.examples import example_options
from tests.support.mpi import run_mpi
from tests.support.whole import whole_case

BATCH, MICRO_BATCHES = 16, 4
EXAMPLES = {
    "char_gpt": ("optimizer.name=adamw",),
    "resnet": ("optimizer.name=adamw", "optimizer.momentum=", "optimizer.nesterov=", "optimizer.lr=0.003"),
}
SCHEDULES = ("gpipe", "1f1b", "interleaved-1f1b", "zb-h1")


def compiled(example: str, folder: Path, *, stages: int = 2, schedule: str = "1f1b", chips: int = 1) -> Path:
    cut = [f"compile.pipeline_stages={stages}", f"compile.micro_batches={MICRO_BATCHES}", f'compile.schedule="{schedule}"']
    cut += [f"compile.n_chips={chips}", 'compile.tensor_parallel="weight"'] if chips > 1 else []
    overrides = (*EXAMPLES[example], f"training.batch_size={BATCH}", *cut)
    return compile_from_options(example_options(example, folder, *overrides)).path


def compiled_whole(example: str, folder: Path) -> Path:
    overrides = (*EXAMPLES[example], f"training.batch_size={BATCH // MICRO_BATCHES}")
    return compile_from_options(example_options(example, folder, *overrides)).path


@pytest.fixture(scope="module")
def pefs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Each example whole, and by each schedule."""
    found = {}
    for name in EXAMPLES:
        found[name] = compiled_whole(name, tmp_path_factory.mktemp(name))
        for schedule in SCHEDULES:
            found[f"{name} {schedule}"] = compiled(name, tmp_path_factory.mktemp("pp"), schedule=schedule)
    return found


@pytest.fixture(scope="module")
def whole(pefs: dict[str, Path]) -> dict[str, Trained]:
    runs = [
        run_of(f"{name} {accumulation}", pefs[name], steps=3, accumulation=accumulation * MICRO_BATCHES, evaluate=True)
        for name in EXAMPLES
        for accumulation in (1, 2)
    ]
    return train(1, runs)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_pipeline_has_the_bits_of_accumulation(
    schedule: str, pefs: dict[str, Path], whole: dict[str, Trained]
) -> None:
    runs = [
        run_of(f"{name} {accumulation}", pefs[f"{name} {schedule}"], steps=3, accumulation=accumulation, evaluate=True)
        for name in EXAMPLES
        for accumulation in (1, 2)
    ]
    ranks, played = train(2, runs), train(1, runs)
    for name, expected in whole.items():
        assert ranks[name].summary.mesh == {"dp": 1, "pp": 2}
        assert ranks[name].outcome == played[name].outcome == expected.outcome
