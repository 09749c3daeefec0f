"""The ways through the host: MPI and parameter servers have the bits of device sync, gloo comes close; bytes count."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from sambasim.ir.program import Program
from sambasim.ir.types import DTYPE_BYTES
from sambasim.pef import read
from sambasim.records.metrics import BytesMoved
from tests.mpi.bodies.train import Run
from tests.mpi.training import EXACT, WAYS, Trained, of_pef, runs_of, train
from tests.support.examples import CompiledExample
from tests.support.mpi import RANKS
from tests.support.whole import whole_case

STEPS, SMALL_ROUND_ELEMENTS = 4, 1024
PEFS = {
    ("digits", "adamw", True), ("char_gpt", "adamw", False), ("logistic_regression", "sgd", True),
    ("lstm_classifier", "adam", False),
}  # fmt: skip
"""By example, optimizer, and whether gradients are clipped: one with BatchNorm and dropout; one with several groups;
and two of few parameters, which devices sync by another fusion."""

ByPef: TypeAlias = Mapping[Path, Mapping[str, Trained]]
"""By PEF and by way: what a job came to."""


@pytest.fixture(scope="module")
def programs(examples: list[CompiledExample]) -> Mapping[Path, Program]:
    chosen = [one for one in examples if (one.example, one.optimizer, one.clipped) in PEFS]
    return {one.path: read(one.path).program for one in chosen}


@pytest.fixture(scope="module", params=[whole_case(np) if np > 2 else np for np in RANKS if np > 1])
def trained(request: pytest.FixtureRequest, programs: Mapping[Path, Program]) -> ByPef:
    found = train(request.param, [run for path in programs for run in _runs(path, request.param)])
    return {path: of_pef(found, path) for path in programs}


def _runs(path: Path, ranks: int) -> list[Run]:
    """An emulation plays as many replicas as the run with as many dedicated servers has; gloo is of no use to it."""
    dedicated = range(1, min(ranks, 3))
    ways: dict[str, Mapping[str, Any]] = {name: how for name, how in WAYS.items() if name != "servers"}
    ways |= {f"servers {n}": {**WAYS["servers"], "parameter_servers": n} for n in dedicated}
    ways |= {f"emulated {n}": {"host_sync": "gloo", "emulate": ranks - n} for n in (0, *dedicated)}
    ways |= {f"{way} in many rounds": {**WAYS[way], "round_elements": SMALL_ROUND_ELEMENTS} for way in EXACT[1:]}
    return runs_of(path.stem, path, ways, steps=STEPS, accumulation=2, evaluate=True)


def test_mpi_and_servers_have_the_bits_of_device_sync(trained: ByPef) -> None:
    for one in trained.values():
        ways = ("emulated 0", *EXACT, *(f"{way} in many rounds" for way in EXACT[1:]))
        assert len({one[way].outcome for way in ways}) == 1
        assert {one[way].summary.exempt_from_exactness == [] for way in ways} == {True}
        ranks = one["device"].summary.world_size
        for servers in range(1, min(ranks, 3)):
            found = one[f"servers {servers}"]
            assert found.outcome == one[f"emulated {servers}"].outcome
            assert (found.summary.world_size, found.summary.parameter_servers) == (ranks - servers, servers)
        assert one["servers 1"].outcome != one["server"].outcome, "another number of replicas"


def test_gloo_comes_close_and_says_that_it_is_exempt(trained: ByPef) -> None:
    for one in trained.values():
        gloo, exact = one["gloo"].summary, one["mpi"].summary
        assert gloo.loss_last == pytest.approx(exact.loss_last, rel=1e-4)
        assert gloo.loss_last != gloo.loss_first
        assert [reason.startswith("gloo adds") for reason in gloo.exempt_from_exactness] == [True]


def test_a_run_names_its_way_and_says_where_gradients_stay_in_the_process(trained: ByPef) -> None:
    reasons = ("gradients do not leave this process", "there is one replica, so there are no gradients to sync")
    notices = {f"--host-sync has no effect: {reason}" for reason in reasons}
    for one in trained.values():
        last = one["device"].summary.world_size - 1
        of_host = {
            "mpi": ("mpi", "host (device to host, MPI, host to device)"),
            "gloo": ("gloo", "host (device to host, gloo, host to device)"),
            "server": ("parameter-server", "host (parameter server: rank 0, which also works)"),
            "servers 1": ("parameter-server", f"host (parameter server: rank {last})"),
        }
        assert {way: (one[way].summary.host_sync, one[way].sync) for way in of_host} == of_host
        assert {one[way].summary.sync for way in of_host} == {"host"}
        assert (one["device"].summary.sync, one["device"].summary.host_sync) == ("device", None)
        for way, run in one.items():
            assert bool(notices & set(run.notices)) == way.startswith("emulated")
            assert not way.startswith("emulated") or run.summary.host_sync is None


def test_bytes_are_counted_as_the_documents_say(trained: ByPef, programs: Mapping[Path, Program]) -> None:
    for path, one in trained.items():
        moved = {way: run.summary.bytes for way, run in one.items()}
        gradient_bytes = sum(group.numel * DTYPE_BYTES[group.dtype] for group in programs[path].groups)
        size, ranks = STEPS * gradient_bytes, one["device"].summary.world_size
        assert moved["mpi"] == _bytes(size * (ranks + 1), size * ranks, size * 2 * (ranks - 1))
        assert moved["gloo"] == moved["server"] == _bytes(size * ranks, size * ranks, size * 2 * (ranks - 1))
        for servers in range(1, min(ranks, 3)):
            workers = ranks - servers
            assert moved[f"servers {servers}"] == _bytes(size * workers, size * workers, size * 2 * workers)
        for way in ("mpi", "server"):
            assert moved[f"{way} in many rounds"] == moved[way]


def _bytes(device_to_host: int, host_to_device: int, network: int) -> BytesMoved:
    return BytesMoved(device_to_host=device_to_host, host_to_device=host_to_device, peer=0, network=network)
