"""`--tensor-parallel batch`: the bits of data parallel replicas with the batch of a chip, by every way to run it."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sambasim.compiler.compile import Stopwatch, assemble, capture_model
from sambasim.compiler.front import build_model, example_batch
from sambasim.data.sources import open_source
from sambasim.options.run import RunOptions
from sambasim.runtime.checkpoint.choose import restore
from sambasim.runtime.checkpoint.content import Checkpoint
from sambasim.runtime.checkpoint.content import check as check_checkpoint
from sambasim.runtime.machine.communicator import single_rank
from sambasim.runtime.run.replica import input_specs
from sambasim.runtime.run.run_observer import RunObserver
from sambasim.runtime.run.setup import set_up
from sambasim.runtime.run.team import assemble as assemble_team
from tests.faults.command import sambasim
from tests.mpi.bodies.train import Run
from tests.mpi.training import EACH_ALONE, TWO_NODES, Trained, run_of, train, train_here
from tests.support.examples import example_options
from tests.support.mpi import run_mpi
from tests.support.whole import whole, whole_case

CHIPS, OF_A_CHIP, STAGES, MICRO_BATCHES = 2, 4, 2, 2
EXAMPLES = {
    "char_gpt": ("optimizer.max_grad_norm=0.5", "compile.dtype=bf16"),
    "resnet": ("optimizer.name=adamw", "optimizer.momentum=", "optimizer.nesterov=", "optimizer.lr=0.003"),
}
BATCH = (f"parallel.n_chips={CHIPS}", 'parallel.tensor_parallel="batch"')
IN_STAGES = (f"parallel.pipeline_stages={STAGES}", f"parallel.micro_batches={MICRO_BATCHES}")

VARIANTS: dict[str, tuple[tuple[str, ...], int]] = {
    "plain": ((), OF_A_CHIP),
    "chips": (BATCH, CHIPS * OF_A_CHIP),
    "one": (BATCH, CHIPS * OF_A_CHIP),
    "stages alone": (IN_STAGES, OF_A_CHIP * MICRO_BATCHES),
    "stages": ((*BATCH, *IN_STAGES), CHIPS * OF_A_CHIP * MICRO_BATCHES),
}
"""By name: the options, and the batch of a replica. Only `one` is not data parallel."""


@pytest.fixture(scope="module")
def pefs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Each example by each variant, captured once."""
    found = {}
    for name, overrides in EXAMPLES.items():
        options = example_options(name, Path(), *overrides)
        model = build_model(options)
        inputs, by_keyword, _ = example_batch(model, options)
        watch = Stopwatch(lambda phase: None)
        built = capture_model(model, inputs, options, by_keyword=by_keyword, watch=watch)
        for variant in VARIANTS if name == "resnet" else ("plain", "chips"):
            cut, batch_size = VARIANTS[variant]
            folder, several = tmp_path_factory.mktemp(f"{name}_{variant}"), variant != "one"
            asked = example_options(name, folder, *overrides, *cut, data_parallel=several, batch_size=batch_size)
            assert asked.micro_batch_size == OF_A_CHIP
            found[f"{name} {variant}"] = assemble(built, model, asked, watch).path
    return found


HOW: dict[str, Any] = {"steps": 2, "evaluate": True}


def runs_of(name: str, pefs: dict[str, Path], replicas: int) -> list[Run]:
    """Plain replicas, and chips by the device, through the host, and in one process; with accumulation."""
    ways: dict[str, dict[str, Any]] = {"device": {"reduce_on_rdu": True}, "host": {}, "played": {"emulate": replicas}}
    chips = [run_of(way, pefs[f"{name} chips"], accumulation=2, **HOW, **given) for way, given in ways.items()]
    return [run_of("plain", pefs[f"{name} plain"], accumulation=2, **HOW), *chips]


def check(found: dict[str, Trained], ranks: int) -> None:
    plain = found["plain"]
    assert (plain.summary.world_size, plain.summary.chips) == (ranks, 1)
    for way in found.keys() - {"plain"}:
        summary = found[way].summary
        assert found[way].outcome == plain.outcome, way
        assert (summary.world_size, summary.chips, summary.mesh) == (ranks // CHIPS, CHIPS, {"dp": ranks})
        assert (summary.batch_size, summary.global_batch_size) == (CHIPS * OF_A_CHIP, ranks * OF_A_CHIP)


def test_two_chips_have_the_bits_of_two_replicas(pefs: dict[str, Path], tmp_path: Path) -> None:
    """With BatchNorm; also a program for one replica, and a run that is resumed."""
    saved = {"dir": str(tmp_path / "saved")}
    runs = [
        *runs_of("resnet", pefs, 1),
        run_of("one", pefs["resnet one"], accumulation=2, **HOW),
        run_of("half", pefs["resnet chips"], steps=1, accumulation=2, checkpoint=saved),
        run_of("resumed", pefs["resnet chips"], accumulation=2, checkpoint=saved | {"resume": "newest"}, **HOW),
    ]
    found = train(2, runs)
    del found["half"]
    check(found, 2)
    assert any("per chip; those of the first chip" in notice for notice in found["device"].notices)


def restored(pef: Path, checkpoint: Checkpoint) -> list[Tensor]:
    """By rank along dp: the running mean of two replicas of `pef` after `checkpoint` was restored."""
    options = RunOptions.model_validate({"pef": str(pef), "threads": 1, "emulate_replicas": 2})
    setup = set_up(pef, options, single_rank("here"))
    source = open_source(setup.resolved.data, tuple(input_specs(setup.program)))
    team = assemble_team(setup, [source] * len(setup.ranks), RunObserver())
    restore(setup, team, checkpoint)
    holders = [one for one in team.replicas if MEAN in one.memory.program.symbols]
    return [one.memory.tensor(MEAN).clone() for one in sorted(holders, key=lambda one: one.replica)]


MEAN = "resnet__bn__running_mean"


def test_a_checkpoint_of_chips_goes_on_without_them_and_back(pefs: dict[str, Path], tmp_path: Path) -> None:
    """A replica goes on with the buffers of its first chip, and its chips with those of the replica. Steps count
    replicas, not chips."""
    chips, alone = pefs["resnet chips"], pefs["resnet stages alone"]
    folders = {name: {"dir": str(tmp_path / name)} for name in ("chips", "alone")}
    resumed = {"resume": str(tmp_path / "chips" / "step-0000000001")}
    how: dict[str, Any] = {"emulate": 2, "accumulation": 1}
    found = train_here(
        [
            run_of("chips", chips, steps=1, checkpoint=folders["chips"], **how),
            run_of("alone", alone, steps=2, checkpoint=folders["alone"] | resumed, **how),
        ]
    )
    line = "changed since the checkpoint: replicas = 2 (checkpoint: 2 of 2 chips)"
    assert line in found["alone"].notices
    assert found["alone"].summary.samples == 2 * found["chips"].summary.samples
    of_chips = check_checkpoint(tmp_path / "chips" / "step-0000000001")
    means = {name: one for name, one in of_chips.tensors() if name.endswith(MEAN)}
    of_replica = [[means[f"replica {one}/{chip}{MEAN}"] for chip in ("", "chip 1/")] for one in range(2)]
    assert not of_replica[0][0].equal(of_replica[0][1])
    for pef, expected in ((chips, [*of_replica[0], *of_replica[1]]), (alone, [one[0] for one in of_replica])):
        assert all(map(torch.equal, restored(pef, of_chips), expected))
    of_alone = check_checkpoint(tmp_path / "alone" / "step-0000000002")
    of_replica = [[one] * 2 for name, one in of_alone.tensors() if name.endswith(MEAN)]
    assert all(map(torch.equal, restored(chips, of_alone), [*of_replica[0], *of_replica[1]]))


@pytest.mark.parametrize(
    ("ranks", "env"), [(4, {}), whole_case(4, TWO_NODES), whole_case(4, EACH_ALONE), whole_case(6, {})]
)
def test_replicas_of_chips_have_the_bits_of_more_replicas(
    ranks: int, env: dict[str, str], pefs: dict[str, Path]
) -> None:
    """With clipping, in bf16."""
    check(train(ranks, runs_of("char_gpt", pefs, ranks // CHIPS), env=env), ranks)


@whole
def test_pipelines_on_chips_have_the_bits_of_accumulation(pefs: dict[str, Path]) -> None:
    accumulating = run_of("accumulating", pefs["resnet plain"], accumulation=MICRO_BATCHES, emulate=CHIPS, **HOW)
    found = train(CHIPS * STAGES, [accumulating, run_of("stages", pefs["resnet stages"], reduce_on_rdu=True, **HOW)])
    assert found["stages"].summary.mesh == {"dp": CHIPS, "pp": STAGES}
    assert found["stages"].outcome == found["accumulating"].outcome


@pytest.mark.parametrize(
    ("ranks", "pef", "flags", "said"),
    [
        (3, "chips", (), ("3 ranks were started, and a replica of this PEF has 2 (dp 2)", "mpirun -np 2 ")),
        whole_case(
            *(4, "one", (), ("this PEF has no REDUCE and GATHER sections between replicas", "--data-parallel -ws 2"))
        ),  # tests/faults/test_meshes.py has it, too
        (
            *(2, "chips", ("--one-process-per-replica",)),
            ("a replica of the PEF resnet has 2 chips that share its batch (dp 2)", "mpirun -np 4 "),
        ),
        (2, "one", ("--host-sync", "gloo"), ("a replica of the PEF resnet has 2 (dp 2)", "leave out --host-sync")),
    ],
)
def test_a_job_that_does_not_fit_the_chips_is_refused(
    ranks: int, pef: str, flags: tuple[str, ...], said: tuple[str, str], pefs: dict[str, Path]
) -> None:
    argv = [sys.executable, "-m", "sambasim", "run", "--pef", str(pefs[f"resnet {pef}"]), "--steps", "1", *flags]
    result = run_mpi(ranks, argv, timeout=120)
    assert result.returncode == 2
    assert all(words in result.stderr for words in said)


def test_reports_count_replicas_and_chips(pefs: dict[str, Path], tmp_path: Path) -> None:
    path = str(pefs["char_gpt chips"])
    ran = sambasim(["run", "--pef", path, "--steps", "1", "--predict"], tmp_path)
    assert "batch 8 × 1 replica of 2 chips = global batch 8; " in ran.stdout
    assert "simulated: 2 ranks on node 0, RDUs 0-1 of " in ran.stdout
    assert "predicted for SN30" in ran.stdout
    inspected = sambasim(["inspect", path], tmp_path).stdout
    assert "2, each with 4 of 8 samples" in inspected
    assert "8 for each replica" in inspected
