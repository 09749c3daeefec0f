"""`sambasim bench` under mpirun: what it measures at any number of ranks, and that wrong results end it."""

import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from sambasim.hardware.spec import LinkSpec, load_cluster
from sambasim.records.metrics import CollectivesRecord
from sambasim.units import KIB
from tests.support.mpi import RANKS, SAMBASIM, Result, is_open_mpi, run_mpi
from tests.support.whole import whole, whole_case

COMMAND = [*SAMBASIM, "bench", "collectives"]
FAULT = str(Path(__file__).parent / "bodies" / "bench_fault.py")
SMALL = ["--max-bytes", "16 KiB", "--runs", "2"]

HOW = {
    "device": ("mean", "bits"),
    "host-mpi": ("mean", "bits"),
    "host-gloo": ("mean", "rounding"),
    "host-parameter-server": ("mean", "bits"),
    "mpi": ("sum", "rounding"),
    "mpi-in-place": ("sum", "rounding"),
    "gloo": ("sum", "rounding"),
}
"""For each path, what it leaves on every rank, and how that is compared."""


def record_of(result: Result) -> CollectivesRecord:
    (line,) = result.check().stdout.splitlines()
    return CollectivesRecord.model_validate_json(line)


def with_fault(name: str, *arguments: str) -> Result:
    return run_mpi(2, [sys.executable, FAULT, name, "bench", "collectives", *SMALL, *arguments])


@pytest.mark.parametrize("ranks", [ranks if ranks == 2 else whole_case(ranks) for ranks in RANKS if ranks > 1])
def test_every_path_is_measured_and_right_at_each_size(ranks: int) -> None:
    """At two ranks, also that a size which shared memory cannot hold is left out."""
    two, flags = ranks == 2, ("--max-bytes", "64 KiB", "--json")
    result = with_fault("little_shared_memory", *flags) if two else run_mpi(ranks, [*COMMAND, *SMALL, "--json"])
    record = record_of(result)
    assert result.stderr == ""
    assert (record.world_size, record.node_of) == (ranks, (0,) * ranks)
    left_out = [(one.size_bytes, one.reason.partition(" need ")[0]) for one in record.left_out]
    assert left_out == [(64 * KIB, "the replicas of this node")] * two
    assert [size.size_bytes for size in record.sizes] == [4 * KIB, 16 * KIB]
    for size in record.sizes:
        assert size.runs == 2
        assert size.copy_bytes == size.size_bytes * (ranks + 1) // (2 * ranks * 4) * 4 * ranks
        assert {path.path: (path.result, path.checked) for path in size.paths} == HOW
        for path in size.paths:
            assert 0 < path.least_s <= path.measured_s
            assert path.algorithm_bytes_per_s == pytest.approx(size.size_bytes / path.measured_s)
            assert path.bus_bytes_per_s == pytest.approx(path.algorithm_bytes_per_s * 2 * (ranks - 1) / ranks)
            assert path.to_copy_bound == pytest.approx(path.measured_s / size.copy_bound_s)


@whole
@pytest.mark.skipif(is_open_mpi(), reason="Open MPI cannot divide one host into nodes, as MPICH does by NUM_CLIQUES")
def test_several_nodes_are_measured_and_priced_apart() -> None:
    command = [*COMMAND, *SMALL, "--paths", "device,host-mpi", "--json"]
    assert len(set(record_of(run_mpi(4, command, env={"MPIR_CVAR_NUM_CLIQUES": "2"})).node_of)) == 2


@whole
@pytest.mark.skipif(is_open_mpi(), reason="Open MPI cannot divide one host into nodes, as MPICH does by NUM_CLIQUES")
def test_the_link_between_hosts_is_measured_as_a_cluster(tmp_path: Path) -> None:
    file, apart = tmp_path / "hosts.toml", {"MPIR_CVAR_NUM_CLIQUES": "2"}
    printed = run_mpi(2, [*SAMBASIM, "bench", "sync", "--hosts", str(file), "--json"], env=apart).check().stdout
    link = LinkSpec.model_validate_json(printed)
    assert load_cluster(str(file)).network_link == link
    assert 1e-6 < link.latency_s < 0.1
    assert 1e7 < link.bandwidth_bytes_per_s < 1e12
    assert 0 <= link.processor_s_per_byte < 1e-7


@whole
def test_ranks_of_one_host_have_no_link_between_hosts() -> None:
    result = run_mpi(2, [*SAMBASIM, "bench", "sync"])
    assert result.returncode == 2
    assert "one rank on each of several, and this job has 2 ranks on 1 host" in result.stderr


@pytest.mark.parametrize(
    ("fault", "path", "exit_code"),
    [
        ("mpi_multiplies_by_size", "mpi", 2),
        whole_case("mpi_multiplies_by_size", "mpi-in-place", 2),
        ("small_device_does_nothing", "device", 70),
        whole_case("device_does_nothing", "device", 70),
        whole_case("host_adds_one_replica_twice_by_gloo", "host-gloo", 70),
    ],
)
def test_a_wrong_result_is_an_error(fault: str, path: str, exit_code: int) -> None:
    size = ("--max-bytes", "256 KiB") if fault == "device_does_nothing" else ()  # smaller ones take another path
    result = with_fault(fault, "--paths", path, *size)
    assert result.returncode == exit_code
    assert f"{path} gave a wrong result: " in result.stderr
    assert result.stdout == ""


def test_people_get_a_table_with_its_definitions_a_plot_and_what_shared_memory_cannot_hold(tmp_path: Path) -> None:
    plot = tmp_path / "sync.svg"
    flags = ("--max-bytes", "64 KiB", "--paths", "device", "--plot", str(plot))
    result = with_fault("little_shared_memory", *flags).check()
    assert "4.0 KiB: 2 runs of device and of a copy" in result.stderr
    said = (
        "2 ranks on 1 node, 1 thread a rank",
        "mean, equal bits",
        "bus bandwidth = algorithm bandwidth × 2 (n - 1) / n",
    )
    assert [words for words in said if words not in result.stdout] == []
    assert "left out: 64.0 KiB: the replicas of this node need" in result.stdout
    assert "left out: 16.0 KiB" not in result.stdout
    assert "device" in ElementTree.parse(plot).getroot().itertext()


@whole
def test_what_memory_cannot_hold_is_left_out_and_said_before_anything_is_measured() -> None:
    result = with_fault("little_memory", "--max-bytes", "1 TiB", "--paths", "host-mpi,gloo")
    first, second, *_ = result.check().stderr.splitlines()
    assert first == "sizes up to 64.0 KiB, because larger ones do not fit into memory …"
    assert second.startswith("4.0 KiB: ")
    assert "left out: 1.0 TiB: the memory for the buffers of this node's ranks is 6.0 TiB" in result.stdout
