"""Replicas of several chips: whole tensors at the app, with the bits of an emulation of the mesh (`weight`) and of one
replica for each chip (`batch`)."""

import re
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sambasim.errors import OptionError
from sambasim.ir.graph import Graph
from sambasim.ir.mesh import mesh_of
from sambasim.pef import map_weights, read
from sambasim.runtime.engine.executor import Executor
from sambasim.runtime.engine.update import Update
from sambasim.runtime.machine.communicator import single_rank
from sambasim.runtime.transports.connect import Way, open_ranks
from sambasim.runtime.transports.in_process import run_together
from sambasim.runtime.values.memory import DeviceMemory, joined, place_inputs, place_weights
from sambasim.runtime.values.optimizers import Optimizers
from sambasim.samba.device import with_rates
from sambasim.samba.session import session
from tests.apps import chips
from tests.faults.command import sambasim
from tests.support.mpi import ROOT, SAMBASIM, run_mpi
from tests.support.whole import whole, whole_case

Found = Mapping[str, Any]
REPLICAS, CHIPS = 2, 2
SYNCS = ("", ":rdu", ":sliced")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The PEFs, and what was trained with them."""
    folder = tmp_path_factory.mktemp("chips")
    for way in ("weight", "batch"):
        chips.compiled(way, REPLICAS, folder, tensor_parallel=way, n_chips=CHIPS)
    chips.compiled("plain", REPLICAS, folder)
    chips.compiled("of_chip", REPLICAS * CHIPS, folder)
    session.reset()
    body = [sys.executable, "-m", "tests.apps.chips", str(folder)]
    two = run_mpi(
        REPLICAS, [*body, "plain", *(way + sync for way in ("weight", "batch") for sync in SYNCS)], timeout=170
    ).check()
    assert two.stderr == ""
    run_mpi(REPLICAS * CHIPS, [*body, "of_chip"], timeout=120).check()
    return folder


def of(folder: Path, name: str, rank: int) -> Found:
    found: Found = torch.load(folder / f"{name}.{rank}.pt")
    return found


def assert_equal(one: Any, other: Any) -> None:
    torch.testing.assert_close(one, other, rtol=0, atol=0)


@whole
@pytest.mark.parametrize("way", ["weight", "batch"])
def test_either_sync_has_the_same_bits_on_all_replicas(way: str, folder: Path) -> None:
    for rank in range(REPLICAS):
        for sync in SYNCS[1:]:
            assert_equal(of(folder, way, rank), of(folder, way + sync, rank))
    assert_equal(of(folder, way, 0)["states"], of(folder, way, 1)["states"])


@whole
def test_weights_over_chips_have_the_bits_of_an_emulation(folder: Path) -> None:
    emulated = emulate(folder / "weight" / "weight.pef")
    program = read(folder / "weight" / "weight.pef").program
    cut = {name for name, symbol in program.symbols.items() if symbol.cuts}
    assert {"net__first__weight", "net__norm__running_mean", "net__second__weight__sgd0__momentum"} <= cut
    for name, tensor in of(folder, "weight", 0)["weights"].items():
        assert torch.equal(tensor, emulated[f"net__{name.replace('.', '__')}"]), name


@whole
def test_weights_over_chips_are_near_those_of_one_chip(folder: Path) -> None:
    """Also what dropout drops, at both rates, and what BatchNorm has seen."""
    for rank in range(REPLICAS):
        torch.testing.assert_close(of(folder, "weight", rank), of(folder, "plain", rank), rtol=1e-5, atol=1e-6)


@whole
def test_a_batch_over_chips_has_the_bits_of_a_replica_for_each_chip(folder: Path) -> None:
    of_chips = [of(folder, "of_chip", rank) for rank in range(REPLICAS * CHIPS)]
    for rank in range(REPLICAS):
        found, parts = of(folder, "batch", rank), of_chips[CHIPS * rank : CHIPS * (rank + 1)]
        for number, (loss, logits) in enumerate(found["outputs"]):
            assert torch.equal(loss, sum(one["outputs"][number][0] for one in parts) / CHIPS)
            assert torch.equal(logits, torch.cat([one["outputs"][number][1] for one in parts]))
        for number, gradient in enumerate(found["gradients"]):
            assert torch.equal(gradient, sum(one["gradients"][number] for one in parts) / CHIPS)
        assert_equal(found["weights"], parts[0]["weights"])
        assert_equal(found["states"], parts[0]["states"])


def emulate(path: Path) -> Mapping[str, Tensor]:
    """What all ranks in one process, with one memory each, make of the weights of the PEF, by symbol."""
    program, alone, weights = read(path).program, single_rank("here", "no MPI"), map_weights(path)
    assert program.training is not None
    assert program.loss is not None
    mesh = mesh_of(program.mesh, REPLICAS * CHIPS)
    ranks = range(mesh.world_size)

    def fill(memory: DeviceMemory, rank: int) -> None:
        place_weights(memory, weights, mesh.coordinates(rank))

    transports = open_ranks(program, alone, Way.IN_PROCESS, fill, ranks, mesh)
    arguments = {one.name: one.default for one in program.runtime_arguments}

    def bound(graph: Graph) -> list[Executor]:
        return [Executor(graph, program, one.memory.tensor, transport=one) for one in transports]

    executors = bound(program.training)
    updates = [
        Update(executor, transport, Optimizers(program, transport.sync.memory, arguments))
        for executor, transport in zip(executors, transports, strict=True)
    ]
    for step, numbers in enumerate(chips.STEPS):
        if step == 2:
            executors = bound(with_rates(program.training, {"p": chips.CHANGED_RATE}))
        for update in updates:
            update.begin_step(step + 1, 1.0)
        for number in numbers:
            torch.manual_seed(number)
            for transport in transports:
                batch = chips.batch_of(number, transport.replica, REPLICAS)
                place_inputs(transport.memory, {str(one.sn_name): one.torch() for one in batch})
            adds, tangent = number > numbers[0], torch.tensor(1 / len(numbers))
            run_together([one.run(tangent, accumulate=adds) for one in executors], transports[0].hub)
        run_together([update.run([0.0]) for update in updates], transports[0].hub)
    first = [transport.memory for transport in transports[:CHIPS]]
    found = {}
    for name, symbol in program.symbols.items():
        if symbol.torch_names:
            parts = [memory.tensor(name) for memory in first]
            found[name] = joined(parts, symbol.cuts[0]) if symbol.cuts else parts[0]
    return found


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"tensor_parallel": "batch", "n_chips": 3}, "does not divide the batch of 8 samples"),
        ({"tensor_parallel": "batch"}, "needs several chips"),
        ({"tensor_parallel": "weight", "n_chips": 7}, "no tensor of net can be cut over 7 ranks"),
        (
            {"tensor_parallel": "batch", "n_chips": 2, "data_parallel": False, "world_size": 1, "inference": True},
            "does not go with inference",
        ),
    ],
)
def test_chips_that_do_not_fit_are_refused(config: Mapping[str, object], words: str, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=words):
        chips.compiled("net", REPLICAS, tmp_path, **config)


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
