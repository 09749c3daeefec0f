"""`--pipeline-stages`: the bits of one rank that accumulates over the micro-batches, by every schedule and way."""

import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.mpi.bodies.train import Run
from tests.mpi.captures import EXAMPLES, MICRO_BATCHES, compiled, in_stages
from tests.mpi.training import EACH_ALONE, TWO_NODES, run_of, train, train_here
from tests.support.mpi import run_mpi
from tests.support.whole import whole_case

SCHEDULES = ("gpipe", "1f1b", "interleaved-1f1b", "zb-h1")
RUNS = [*(("char_gpt", one) for one in SCHEDULES), ("resnet", "1f1b")]
RECOMPUTED = {"char_gpt sections": "1f1b", "char_gpt full": "interleaved-1f1b", "resnet full": "zb-h1"}
"""By example and `--recompute`: the schedule."""


@pytest.fixture(scope="module")
def pefs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Each example whole and in two stages, the first by each schedule."""
    found = {name: compiled(name, tmp_path_factory.mktemp(name)) for name in EXAMPLES}
    for name, schedule in RUNS:
        found[f"{name} {schedule}"] = in_stages(name, tmp_path_factory.mktemp("pp"), schedule=schedule)
    for name, schedule in RECOMPUTED.items():
        example, between = name.split()
        cut = f'parallel.recompute="{between}"'
        found[name] = in_stages(example, tmp_path_factory.mktemp("pp"), cut, schedule=schedule)
    return found


@pytest.mark.parametrize("ranks", [whole_case(1), 2])
def test_a_pipeline_has_the_bits_of_accumulation(ranks: int, pefs: dict[str, Path]) -> None:
    names = [*(f"{name} {schedule}" for name, schedule in RUNS), *RECOMPUTED]
    how: dict[str, Any] = {"steps": 2, "evaluate": True}
    alone = [run_of(name, pefs[name], accumulation=2 * MICRO_BATCHES, emulate=1, **how) for name in EXAMPLES]
    found = train(ranks, [*alone, *(run_of(name, pefs[name], accumulation=2, **how) for name in names)])
    whole = {name: found.pop(name) for name in EXAMPLES}
    for name, trained in found.items():
        assert trained.summary.mesh == {"dp": 1, "pp": 2}
        local = (" (local 0)", " (local 1)") if ranks == 2 else ("", "")
        places = [f"rank {rank}{one}: dp 0, pp {rank} on node 0 RDU {rank}" for rank, one in enumerate(local)]
        assert {"mesh dp 1 × pp 2, 2 ranks", *places} <= set(trained.notices)
        assert trained.summary.waited_s.keys() == {"pp"}
        assert trained.outcome == whole[name.split()[0]].outcome, name


MESHES = {
    "pp 2 × tp 2": (4, ("parallel.n_chips=2", 'parallel.tensor_parallel="weight"', "parallel.pipeline_stages=2")),
    "pp 2": (2, ("parallel.pipeline_stages=2",)),
    "pp 4": (4, ("parallel.pipeline_stages=4",)),
}
"""By name: the ranks of a replica, and the options."""


@pytest.fixture(scope="module")
def meshes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    clipped = "optimizer.max_grad_norm=0.5"
    return {
        name: in_stages("char_gpt", tmp_path_factory.mktemp("mesh"), clipped, *cut) for name, (_, cut) in MESHES.items()
    }


@pytest.mark.parametrize(
    ("ranks", "names", "env"),
    [
        whole_case(4, tuple(MESHES), {}),  # test_meshes has other models on these meshes
        whole_case(4, tuple(MESHES), TWO_NODES),
        whole_case(4, tuple(MESHES), EACH_ALONE),
        whole_case(8, ("pp 2 × tp 2",), {}),
    ],
)
def test_device_host_and_one_process_have_the_same_bits(
    ranks: int, names: tuple[str, ...], env: dict[str, str], meshes: dict[str, Path]
) -> None:
    replicas = {name: ranks // MESHES[name][0] for name in names}
    runs: list[Run] = []
    for name in names:
        ways: dict[str, Any] = {"device": {"reduce_on_rdu": True}, "host": {}, "played": {"emulate": replicas[name]}}
        runs += [run_of(f"{name} {way}", meshes[name], steps=2, accumulation=2, **how) for way, how in ways.items()]
    found = train(ranks, runs, env=env)
    for name in names:
        device, host, played = (found[f"{name} {way}"] for way in ("device", "host", "played"))
        assert device.outcome == host.outcome == played.outcome
        assert device.summary.mesh == played.summary.mesh
        assert device.summary.world_size == replicas[name]


def test_a_checkpoint_of_stages_is_resumed_and_saved_weights_are_whole(pefs: dict[str, Path], tmp_path: Path) -> None:
    """By two ranks, by one process, and by one rank without stages: all go on where four steps would be."""
    path = pefs["resnet 1f1b"]
    saves = {"dir": str(tmp_path / "saved"), "every": "2", "keep": 2}
    through, alone = tmp_path / "stages.safetensors", tmp_path / "alone.safetensors"
    resumes = {"resume": str(tmp_path / "saved" / "step-0000000002"), "exact": True}
    all_steps = run_of("all", path, steps=4, checkpoint=saves, save=str(through))
    of_ranks = train(2, [all_steps, run_of("rest", path, steps=4, checkpoint=resumes)])
    accumulated: dict[str, Any] = {"steps": 4, "accumulation": MICRO_BATCHES}
    of_one = train_here(
        [
            run_of("played", path, steps=4, checkpoint=resumes),
            run_of("alone", pefs["resnet"], save=str(alone), **accumulated),
            run_of("without stages", pefs["resnet"], checkpoint=resumes, **accumulated),
        ]
    )
    resumed = (of_ranks["rest"], of_one["played"], of_one["without stages"])
    assert {one.outcome[:2] for one in resumed} == {of_ranks["all"].outcome[:2]}
    expected, found = load_file(alone), load_file(through)
    assert expected.keys() == found.keys()
    assert all(expected[name].equal(found[name]) for name in expected)


@pytest.mark.parametrize(
    ("ranks", "flags", "said"),
    [
        (3, (), "3 ranks were started, and a replica of this PEF has 2 (pp 2)"),
        (2, ("--engine", "inductor"), "--engine inductor cannot compile a pass that communicates"),
        (2, ("--debug-numerics",), "--debug-numerics cannot watch a pipeline yet"),
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
