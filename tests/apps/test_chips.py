"""Replicas of several chips: whole tensors at the app, near those of one chip (`weight`), and with the bits of one
replica for each chip (`batch`)."""

import re
import shlex
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from sambasim.errors import OptionError
from sambasim.pef import read
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
    folder = tmp_path_factory.mktemp("chips")
    for way in ("weight", "batch"):
        chips.compiled(way, REPLICAS, folder, tensor_parallel=way, n_chips=CHIPS)
    chips.compiled("plain", REPLICAS, folder)
    chips.compiled("of_chip", REPLICAS * CHIPS, folder)
    session.reset()
    body = [sys.executable, "-m", "tests.apps.chips", str(folder)]
    names = [way + sync for way in ("weight", "batch") for sync in SYNCS]
    assert run_mpi(REPLICAS, [*body, "plain", *names], timeout=170).check().stderr == ""
    run_mpi(REPLICAS * CHIPS, [*body, "of_chip"], timeout=120).check()
    return folder


def of(folder: Path, name: str, rank: int) -> Found:
    trained: Found = torch.load(folder / f"{name}.{rank}.pt")
    return trained


assert_equal = partial(torch.testing.assert_close, rtol=0, atol=0)


@whole
@pytest.mark.parametrize("way", ["weight", "batch"])
def test_either_sync_has_the_same_bits_on_all_replicas(way: str, folder: Path) -> None:
    for rank in range(REPLICAS):
        for sync in SYNCS[1:]:
            assert_equal(of(folder, way, rank), of(folder, way + sync, rank))
    assert_equal(of(folder, way, 0)["states"], of(folder, way, 1)["states"])


@whole
def test_weights_over_chips_are_near_those_of_one_chip(folder: Path) -> None:
    """Also what dropout drops, at both rates, and what BatchNorm has seen."""
    program = read(folder / "weight" / "weight.pef").program
    cut = {name for name, symbol in program.symbols.items() if symbol.cuts}
    assert {"net__first__weight", "net__norm__running_mean", "net__second__weight__sgd0__momentum"} <= cut
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


def test_several_chips_are_needed_to_split_a_batch(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="needs several chips"):
        chips.compiled("net", REPLICAS, tmp_path, tensor_parallel="batch")


FOLDER = ROOT / "configs" / "parallelism"
SMALLER = ("--set", "model.args.width=32", "--set", "model.args.layers=4")
NAMES = sorted(path.stem for path in FOLDER.glob("*.toml"))


@pytest.mark.parametrize("name", [name if name == "pipeline" else whole_case(name) for name in NAMES])
def test_its_commands_train(name: str, tmp_path: Path) -> None:
    text = (FOLDER / f"{name}.toml").read_text(encoding="utf-8")
    compile_command, run_command = re.findall(r"^#   (.+)$", text, re.MULTILINE)
    _, *words = shlex.split(compile_command)
    words[words.index("--config") + 1] = str(FOLDER / f"{name}.toml")
    sambasim([*words, *SMALLER], tmp_path).check()
    launcher, _, arguments = run_command.rpartition("sambasim ")
    ranks = int(launcher.split()[2]) if launcher else 1
    command = [*SAMBASIM, *shlex.split(arguments), "--steps", "2", "--no-evaluate"]
    trained = run_mpi(ranks, command, timeout=120, cwd=tmp_path).check()
    assert "2 steps in" in trained.stdout
    assert trained.stderr == ""
