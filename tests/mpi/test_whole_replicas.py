"""`run --one-process-per-replica`: each process runs all ranks of a replica, with the bits of every other launch. With
AdamW, clipping and accumulation."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.mpi.bodies.train import Run
from tests.mpi.test_meshes import MICRO_BATCHES, MODELS, Mesh, compiled
from tests.mpi.training import EACH_ALONE, TWO_NODES, Trained, run_of, train
from tests.support.mpi import SAMBASIM, run_mpi
from tests.support.whole import whole, whole_case

WHOLE: Mapping[str, Any] = {"one_process_per_replica": True}
PAIR = Mesh(2, 1, 2)
SIZES = ((2, 1), (1, 2), (2, 2))
"""Of the axes pp and tp."""


def how(mesh: Mesh, steps: int = 2) -> dict[str, Any]:
    return {"steps": steps, "accumulation": 2 * (1 if mesh.pp > 1 else MICRO_BATCHES)}


def runs_of(name: str, path: Path, mesh: Mesh) -> Sequence[Run]:
    given = how(mesh)
    return [
        run_of(f"{name} emulated", path, **given, emulate=mesh.dp),
        run_of(f"{name} host", path, **given, **WHOLE),
        run_of(f"{name} device", path, **given, **WHOLE, reduce_on_rdu=True),
    ]


def check(found: Mapping[str, Trained]) -> None:
    for name, trained in found.items():
        mesh, _, way = name.rpartition(" ")
        assert trained.outcome == found[f"{mesh} emulated"].outcome, name
        assert (trained.summary.emulated, trained.summary.sync) == (way == "emulated", way)


def meshes_of(processes: int) -> Sequence[Mesh]:
    """Without those that fill more than the 8 RDUs of a node."""
    return [mesh for mesh in (Mesh(processes, *sizes) for sizes in SIZES) if mesh.ranks <= 8]


@pytest.mark.parametrize(
    "levels", [whole_case((3, 0, 1)), whole_case((0, 1, 2)), whole_case((1, 2, 3)), whole_case((2, 3, 0))]
)
def test_each_mesh_has_the_bits_of_an_emulation(levels: Sequence[int], tmp_path: Path) -> None:
    """`levels`: of ZeRO, for each mesh."""
    runs: list[Run] = []
    for mesh, zero in zip(meshes_of(2), levels, strict=True):
        path = compiled("gpt", tmp_path / str(mesh), mesh, f"parallel.zero={zero}")
        runs += runs_of(str(mesh), path, mesh)
    check(train(2, runs))


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of two replicas, each cut over two ranks."""
    return compiled("bert", tmp_path_factory.mktemp("pair"), PAIR)


def test_a_mesh_has_the_bits_of_an_emulation(pair: Path) -> None:
    check(train(2, runs_of(str(PAIR), pair, PAIR)))


@pytest.mark.parametrize(("processes", "env"), [whole_case(3, {}), whole_case(2, EACH_ALONE), whole_case(4, TWO_NODES)])
@pytest.mark.parametrize("model", MODELS)
def test_other_models_on_other_nodes(model: str, processes: int, env: dict[str, str], tmp_path: Path) -> None:
    """With dropout, BatchNorm, and a loss over some places."""
    runs: list[Run] = []
    for mesh in meshes_of(processes):
        runs += runs_of(str(mesh), compiled(model, tmp_path / str(mesh), mesh), mesh)
    check(train(processes, runs, env=env))


@whole
def test_a_checkpoint_of_one_launch_goes_on_by_the_others(tmp_path: Path) -> None:
    """With the bits of an uninterrupted emulation, also its evaluation and its saved weights."""
    mesh, trace = Mesh(2, 2, 1), tmp_path / "trace.json"
    path, half, rest = compiled("many_words", tmp_path, mesh), how(mesh), {**how(mesh, 4), "evaluate": True}
    saved = {name: str(tmp_path / name) for name in ("emulated", "whole")}
    after = {name: {"resume": f"{folder}/step-0000000002"} for name, folder in saved.items()}
    weights = [tmp_path / f"{name}.safetensors" for name in ("all", "rest")]
    found = train(
        2,
        [
            run_of("all", path, **rest, emulate=2, save=str(weights[0])),
            run_of("first emulated", path, **half, emulate=2, checkpoint={"dir": saved["emulated"]}),
            run_of("first", path, **half, **WHOLE, checkpoint={"dir": saved["whole"]}, trace=str(trace)),
            run_of("rest", path, **rest, **WHOLE, checkpoint=after["emulated"], save=str(weights[1])),
        ],
    )
    by_rank = train(4, [run_of("rest", path, **rest, checkpoint=after["whole"], reduce_on_rdu=True)])["rest"]
    assert found["all"].outcome == found["rest"].outcome == by_rank.outcome
    events = json.loads(trace.read_text())["traceEvents"]
    titles = sorted(event["args"]["name"].partition(" as ")[0] for event in events if event["name"] == "process_name")
    assert titles == [f"rank {2 * dp + pp} (dp {dp}, pp {pp})" for dp in range(2) for pp in range(2)]
    whole, resumed = map(load_file, weights)
    assert whole.keys() == resumed.keys()
    assert all(whole[name].equal(resumed[name]) for name in whole)


@pytest.mark.parametrize(
    ("flags", "said", "remedy"),
    [
        whole_case(
            (),
            "at least 2 replicas of 2 ranks (-ws 2), and 1 replica was started",
            "; or for 2 replicas: mpirun -np 2 ",
        ),
        (("--host-sync", "gloo"), "--host-sync gloo syncs replicas of one rank", "leave out --host-sync"),
    ],
)
def test_what_does_not_fit_is_refused(flags: Sequence[str], said: str, remedy: str, pair: Path) -> None:
    whole = ["--one-process-per-replica"] * bool(flags)
    result = run_mpi(2, [*SAMBASIM, "run", "--pef", str(pair), "--steps", "1", *whole, *flags], timeout=120)
    assert result.returncode == 2
    assert said in result.stderr
    assert remedy in result.stderr
