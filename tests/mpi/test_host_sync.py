"""The ways through the host: MPI and parameter servers have the bits of device sync, gloo comes close; all count."""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from sambasim.compiler.compile import compile_model
from sambasim.compiler.front import build_model, example_batch
from sambasim.ir.types import DTYPE_BYTES
from sambasim.pef import read
from sambasim.records.metrics import BytesRecord, SummaryRecord
from tests.support.examples import example_options
from tests.support.mpi import RANKS, ROOT, run_mpi
from tests.support.whole import whole_case

BODY = ROOT / "tests" / "mpi" / "bodies" / "host_sync.py"
STEPS = 4
SEVERAL = [whole_case(np) if np > 2 else np for np in RANKS if np > 1]


@dataclass(frozen=True, slots=True)
class Trained:
    """One PEF, trained by every way: the bytes of all its gradients; by way, what was said first, and the summaries."""

    gradient_bytes: int
    titles: Mapping[str, str]
    notices: Mapping[str, Sequence[str]]
    by_way: Mapping[str, SummaryRecord]


@pytest.fixture(scope="module")
def pefs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """One with BatchNorm, dropout and clipping, and one with several groups and without clipping."""
    folder = tmp_path_factory.mktemp("host_sync")
    chosen = {"digits": ("optimizer.max_grad_norm=0.05",), "char_gpt": ("optimizer.max_grad_norm=",)}
    paths = []
    for name, overrides in chosen.items():
        options = example_options(name, folder, *overrides)
        model = build_model(options)
        inputs, by_keyword = example_batch(model, options)
        paths.append(compile_model(model, inputs, options, by_keyword=by_keyword).path)
    return paths


@pytest.fixture(scope="module", params=SEVERAL)
def trained(request: pytest.FixtureRequest, pefs: list[Path]) -> list[Trained]:
    """Everything that a job of so many ranks trained."""
    argv = [sys.executable, str(BODY), str(STEPS), *map(str, pefs)]
    lines = run_mpi(request.param, argv, timeout=280).check().stdout.splitlines()
    runs = [json.loads(line) for line in lines if line.startswith("{")]
    return [
        Trained(
            sum(group.numel * DTYPE_BYTES[group.dtype] for group in read(path).program.groups),
            {run["way"]: run["sync"] for run in of_path},
            {run["way"]: run["notices"] for run in of_path},
            {run["way"]: SummaryRecord.model_validate(run["summary"]) for run in of_path},
        )
        for path in pefs
        for of_path in ([run for run in runs if run["pef"] == path.stem],)
    ]


def test_mpi_and_a_parameter_server_have_the_bits_of_device_sync(trained: list[Trained]) -> None:
    for one in trained:
        ways = ("emulated 0", "device", "mpi", "server", "mpi in many rounds", "server in many rounds")
        assert len({_outcome(one.by_way[way]) for way in ways}) == 1
        assert {one.by_way[way].exempt_from_exactness == [] for way in ways} == {True}


def test_ranks_that_only_serve_leave_the_bits_of_the_others(trained: list[Trained]) -> None:
    for one in trained:
        ranks = one.by_way["device"].world_size
        for servers in range(1, min(ranks, 3)):
            summary = one.by_way[f"servers {servers}"]
            assert _outcome(summary) == _outcome(one.by_way[f"emulated {servers}"])
            assert (summary.world_size, summary.parameter_servers) == (ranks - servers, servers)
        assert _outcome(one.by_way["servers 1"]) != _outcome(one.by_way["server"]), "another number of replicas"


def test_gloo_comes_close_and_says_that_it_is_exempt(trained: list[Trained]) -> None:
    for one in trained:
        gloo, exact = one.by_way["gloo"], one.by_way["mpi"]
        assert gloo.loss_last == pytest.approx(exact.loss_last, rel=1e-4)
        assert gloo.loss_last != gloo.loss_first
        assert [reason.startswith("gloo adds") for reason in gloo.exempt_from_exactness] == [True]


def test_a_summary_names_the_way(trained: list[Trained]) -> None:
    for one in trained:
        named = {way: (summary.sync, summary.host_sync) for way, summary in one.by_way.items()}
        assert named["device"] == ("device", None)
        assert named["mpi"] == ("host", "mpi")
        assert named["gloo"] == ("host", "gloo")
        assert named["server"] == named["servers 1"] == ("host", "parameter-server")
        assert one.titles["mpi"] == "host (device to host, MPI, host to device)"
        assert one.titles["gloo"] == "host (device to host, gloo, host to device)"
        assert one.titles["server"] == "host (parameter server: rank 0, which also works)"
        last = one.by_way["device"].world_size - 1
        assert one.titles["servers 1"] == f"host (parameter server: rank {last})"


def test_where_gradients_stay_in_the_process_a_notice_says_so(trained: list[Trained]) -> None:
    notice = "--host-sync has no effect: gradients do not leave this process"
    for one in trained:
        asked_in_vain = {way for way, notices in one.notices.items() if notice in notices}
        assert asked_in_vain == {way for way in one.by_way if way.startswith("emulated")}
        assert {one.by_way[way].host_sync for way in asked_in_vain} == {None}


def test_bytes_are_counted_as_the_table_in_the_readme_has_them(trained: list[Trained]) -> None:
    for one in trained:
        size, ranks = STEPS * one.gradient_bytes, one.by_way["device"].world_size
        assert one.by_way["mpi"].bytes == _bytes(size * (ranks + 1), size * ranks, size * 2 * (ranks - 1))
        assert one.by_way["gloo"].bytes == _bytes(size * ranks, size * ranks, size * 2 * (ranks - 1))
        assert one.by_way["server"].bytes == one.by_way["gloo"].bytes
        for servers in range(1, min(ranks, 3)):
            workers = ranks - servers
            assert one.by_way[f"servers {servers}"].bytes == _bytes(size * workers, size * workers, size * 2 * workers)
        for way in ("mpi", "server"):
            assert one.by_way[f"{way} in many rounds"].bytes == one.by_way[way].bytes


def _outcome(summary: SummaryRecord) -> tuple[object, ...]:
    evaluation = summary.evaluation
    assert evaluation is not None
    judged = (evaluation.samples, evaluation.loss, evaluation.accuracy)
    return summary.weights_sha256, summary.state_sha256, summary.loss_last, *judged


def _bytes(device_to_host: int, host_to_device: int, network: int) -> BytesRecord:
    return BytesRecord(device_to_host=device_to_host, host_to_device=host_to_device, peer=0, network=network)
