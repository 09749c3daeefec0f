"""`--tensor-parallel weight`: the same bits by every way to run a mesh, and nearly those of the whole model."""

import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.mpi.bodies.train import Run
from tests.mpi.training import EACH_ALONE, TWO_NODES, Trained, run_of, train, train_here
from tests.support.compiled import compile_from_options
from tests.support.examples import example_options
from tests.support.mpi import run_mpi
from tests.support.whole import is_whole, whole, whole_case

EXAMPLES = {
    "char_gpt": ("optimizer.max_grad_norm=0.5",),
    "digits": ("optimizer.name=adamw", "optimizer.momentum=", "optimizer.nesterov=", "optimizer.lr=0.003"),
}
STEPS = 20


@pytest.fixture(scope="module")
def pefs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Each example as a whole, and cut over two chips."""
    found = {}
    for name, overrides in EXAMPLES.items():
        for chips in (1, 2):
            cut = (f"parallel.n_chips={chips}", 'parallel.tensor_parallel="weight"') if chips > 1 else ()
            folder = tmp_path_factory.mktemp(f"{name}_{chips}")
            found[f"{name} {chips}"] = compile_from_options(example_options(name, folder, *overrides, *cut)).path
    return found


MESHED = tuple(EXAMPLES) if is_whole() else ("char_gpt",)


def runs_at(pefs: dict[str, Path], replicas: int) -> list[Run]:
    """By the device, through the host, and in one process; with accumulation and evaluation."""
    ways: dict[str, dict[str, Any]] = {"device": {"reduce_on_rdu": True}, "host": {}, "played": {"emulate": replicas}}
    return [
        run_of(f"{name} {way}", pefs[f"{name} 2"], steps=2, accumulation=2, evaluate=True, **how)
        for name in MESHED
        for way, how in ways.items()
    ]


@pytest.mark.parametrize(
    ("ranks", "env"),
    [(4, {}), whole_case(2, {}), whole_case(4, TWO_NODES), whole_case(4, EACH_ALONE), whole_case(6, {})],
)
def test_device_host_and_one_process_have_the_same_bits(ranks: int, env: dict[str, str], pefs: dict[str, Path]) -> None:
    found = train(ranks, runs_at(pefs, ranks // 2), env=env)
    for name in MESHED:
        device, host, played = (found[f"{name} {way}"] for way in ("device", "host", "played"))
        assert device.outcome == host.outcome == played.outcome
        assert device.summary.mesh == played.summary.mesh == {"dp": ranks // 2, "tp": 2}
        assert device.summary.world_size == ranks // 2


@whole
def test_a_model_without_data_parallelism_communicates_too(tmp_path: Path) -> None:
    cut = ("parallel.n_chips=2", 'parallel.tensor_parallel="weight"')
    path = compile_from_options(example_options("digits", tmp_path, *cut, data_parallel=False)).path
    found = train(2, [run_of("ranks", path, steps=2), run_of("played", path, steps=2, emulate=1)])
    assert found["ranks"].outcome == found["played"].outcome


@pytest.fixture(scope="module")
def alone(pefs: dict[str, Path]) -> dict[str, Trained]:
    return train_here([run_of(name, path, steps=STEPS, evaluate=True) for name, path in pefs.items()])


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_cut_model_trains_as_the_whole_one(name: str, alone: dict[str, Trained]) -> None:
    whole, cut = (alone[f"{name} {chips}"].summary for chips in (1, 2))
    assert (whole.mesh, cut.mesh) == ({"dp": 1}, {"dp": 1, "tp": 2})
    assert cut.loss_first == pytest.approx(whole.loss_first, rel=1e-5)
    assert cut.loss_last == pytest.approx(whole.loss_last, rel=1e-4)
    assert whole.evaluation is not None
    assert cut.evaluation is not None
    assert cut.evaluation.loss == pytest.approx(whole.evaluation.loss, rel=1e-2)


@whole
def test_a_plan_by_name_that_gathers_trains_as_the_whole_model(alone: dict[str, Trained], tmp_path: Path) -> None:
    plan = 'parallel.tensor_plan={ tokens = "colwise", "blocks.*.mlp.2" = "colwise" }'
    cut = ("parallel.n_chips=2", 'parallel.tensor_parallel="weight"', plan)
    compiled = compile_from_options(example_options("char_gpt", tmp_path, *EXAMPLES["char_gpt"], *cut))
    assert any(notice.startswith("gathered along tp, ") for notice in compiled.notices)
    ways: dict[str, dict[str, Any]] = {"device": {"reduce_on_rdu": True}, "host": {}, "played": {"emulate": 1}}
    runs = [run_of(way, compiled.path, steps=STEPS, evaluate=True, **how) for way, how in ways.items()]
    found = train(2, runs)
    assert found["device"].outcome == found["host"].outcome == found["played"].outcome
    whole, summary = alone["char_gpt 1"].summary, found["device"].summary
    assert summary.loss_first == pytest.approx(whole.loss_first, rel=1e-5)
    assert summary.loss_last == pytest.approx(whole.loss_last, rel=1e-4)


@whole
def test_a_checkpoint_of_parts_is_resumed_and_saved_weights_are_whole(pefs: dict[str, Path], tmp_path: Path) -> None:
    """By two ranks and by one process: both go on where four steps would be."""
    path = pefs["digits 2"]
    folder = {"dir": str(tmp_path / "saved")}
    through = tmp_path / "whole.safetensors"
    whole = train(2, [run_of("all", path, steps=4, save=str(through))])["all"]
    train(2, [run_of("half", path, steps=2, checkpoint=folder)])
    shutil.copytree(tmp_path / "saved", tmp_path / "again")
    resumed = train(2, [run_of("rest", path, steps=4, checkpoint=folder | {"resume": "newest"})])["rest"]
    other = folder | {"dir": str(tmp_path / "again"), "resume": "newest"}
    played = train(1, [run_of("played", path, steps=4, checkpoint=other)])["played"]
    assert whole.outcome[:2] == resumed.outcome[:2] == played.outcome[:2]
    weights = load_file(through)
    assert weights["features.0.weight"].shape == (32, 1, 3, 3)


@pytest.mark.parametrize(
    ("ranks", "flags", "said"),
    [
        # tests/faults/test_meshes.py and test_pipeline.py have these two, too.
        whole_case(3, (), "3 ranks were started, and a replica of this PEF has 2 (tp 2)"),
        whole_case(2, ("--engine", "inductor"), "--engine inductor cannot compile a pass that communicates"),
        (2, ("--host-sync", "gloo"), "--host-sync gloo syncs replicas of one rank"),
        (2, ("--emulate-replicas", "2"), "--emulate-replicas 2 plays all replicas in one process"),
    ],
)
def test_a_job_that_does_not_fit_the_mesh_is_refused(
    ranks: int, flags: tuple[str, ...], said: str, pefs: dict[str, Path]
) -> None:
    argv = [sys.executable, "-m", "sambasim", "run", "--pef", str(pefs["digits 2"]), "--steps", "1", *flags]
    result = run_mpi(ranks, argv, timeout=120)
    assert result.returncode == 2
    assert said in result.stderr
    assert "try:" in result.stderr
