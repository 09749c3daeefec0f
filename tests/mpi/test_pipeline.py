"""`--pipeline-stages`: the bits of one rank that accumulates over the micro-batches, by every schedule and way."""

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


def compiled(example: str, folder: Path, batch_size: int = BATCH, *cut: str) -> Path:
    options = example_options(example, folder, *EXAMPLES[example], *cut)
    training = options.training.model_copy(update={"batch_size": batch_size})
    return compile_from_options(options.model_copy(update={"training": training})).path


def in_stages(example: str, folder: Path, *cut: str, stages: int = 2, schedule: str = "1f1b") -> Path:
    pipeline = (f"compile.pipeline_stages={stages}", f"compile.micro_batches={MICRO_BATCHES}")
    return compiled(example, folder, BATCH, *pipeline, f'compile.schedule="{schedule}"', *cut)


@pytest.fixture(scope="module")
def pefs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Each example whole, and by each schedule."""
    found = {}
    for name in EXAMPLES:
        found[name] = compiled(name, tmp_path_factory.mktemp(name), BATCH // MICRO_BATCHES)
        for schedule in SCHEDULES:
            found[f"{name} {schedule}"] = in_stages(name, tmp_path_factory.mktemp("pp"), schedule=schedule)
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


MESHES = {
    "pp 2 × tp 2": (2, ("compile.n_chips=2", 'compile.tensor_parallel="weight"')),
    "pp 2": (2, ()),
    "pp 4": (4, ()),
}


@pytest.fixture(scope="module")
def meshes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {
        name: in_stages("char_gpt", tmp_path_factory.mktemp("mesh"), "optimizer.max_grad_norm=0.5", *cut, stages=stages)
        for name, (stages, cut) in MESHES.items()
    }


def check_ways(ranks: int, path: Path, replicas: int, env: dict[str, str]) -> None:
    ways: dict[str, dict[str, Any]] = {"device": {"reduce_on_rdu": True}, "host": {}, "played": {"emulate": replicas}}
    runs: list[Run] = [run_of(way, path, steps=2, accumulation=2, evaluate=True, **how) for way, how in ways.items()]
    found = train(ranks, runs, env=env)
    assert found["device"].outcome == found["host"].outcome == found["played"].outcome
    assert found["device"].summary.mesh == found["played"].summary.mesh
    assert found["device"].summary.world_size == replicas


@pytest.mark.parametrize(
    ("mesh", "replicas", "env"),
    [
        ("pp 2", 2, {}),
        ("pp 2 × tp 2", 1, {}),
        ("pp 4", 1, {}),
        whole_case("pp 2", 2, TWO_NODES),
        whole_case("pp 2", 2, EACH_ALONE),
        whole_case("pp 2 × tp 2", 2, {}),
    ],
)
def test_device_host_and_one_process_have_the_same_bits(
    mesh: str, replicas: int, env: dict[str, str], meshes: dict[str, Path]
) -> None:
    stages, cut = MESHES[mesh]
    check_ways(replicas * stages * (2 if cut else 1), meshes[mesh], replicas, env)


def test_a_checkpoint_of_stages_is_resumed_and_saved_weights_are_whole(pefs: dict[str, Path], tmp_path: Path) -> None:
    """By two ranks and by one process: both go on where four steps would be."""
    path = pefs["resnet 1f1b"]
    folder = {"dir": str(tmp_path / "saved")}
    through, alone = tmp_path / "stages.safetensors", tmp_path / "alone.safetensors"
    whole = train(2, [run_of("all", path, steps=4, save=str(through))])["all"]
    train(2, [run_of("half", path, steps=2, checkpoint=folder)])
    shutil.copytree(tmp_path / "saved", tmp_path / "again")
    resumed = train(2, [run_of("rest", path, steps=4, checkpoint=folder | {"resume": "newest"})])["rest"]
    other = folder | {"dir": str(tmp_path / "again"), "resume": "newest"}
    played = train(1, [run_of("played", path, steps=4, checkpoint=other)])["played"]
    assert whole.outcome[:2] == resumed.outcome[:2] == played.outcome[:2]
    train(1, [run_of("alone", pefs["resnet"], steps=4, accumulation=MICRO_BATCHES, save=str(alone))])
    expected, found = load_file(alone), load_file(through)
    assert expected.keys() == found.keys()
    assert all(expected[name].equal(found[name]) for name in expected)


@pytest.mark.parametrize(
    ("ranks", "flags", "said"),
    [
        (3, (), "3 were started, and a replica of this PEF has 2 ranks (pp 2)"),
        (2, ("--engine", "inductor"), "--engine inductor cannot compile a pass that communicates"),
    ],
)
def test_a_job_that_does_not_fit_the_stages_is_refused(
    ranks: int, flags: tuple[str, ...], said: str, pefs: dict[str, Path]
) -> None:
    argv = [sys.executable, "-m", "sambasim", "run", "--pef", str(pefs["resnet 1f1b"]), "--steps", "1", *flags]
    result = run_mpi(ranks, argv, timeout=120)
    assert result.returncode == 2
    assert said in result.stderr
    assert "try:" in result.stderr
