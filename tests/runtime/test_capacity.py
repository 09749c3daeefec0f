"""Device memory and shared memory that do not fit are rejected, with the bytes needed and available."""

from dataclasses import replace
from pathlib import Path

import pytest

from sambasim.errors import MachineError
from sambasim.hardware.host import available_bytes
from sambasim.hardware.spec import load_device
from sambasim.ir.program import Program
from sambasim.pef import PefDocument
from sambasim.runtime.machine.communicator import single_rank
from sambasim.runtime.machine.node_memory import Demand, check_demands, check_start
from sambasim.runtime.machine.resources import check_device, check_node_memory
from sambasim.units import GIB, MIB
from tests.pef.samples import sample_program


def _document(program: Program, device_bytes: int, arch: str) -> PefDocument:
    return PefDocument(replace(program, device_bytes=device_bytes), compile_options={"arch": arch})


def test_a_pef_for_a_larger_device_is_refused_with_both_figures() -> None:
    program = sample_program()
    capacity = load_device("sn10").ddr_capacity_bytes
    check_device(_document(program, capacity, "sn10"))
    with pytest.raises(MachineError) as error:
        check_device(_document(program, 2 << 40, "sn10"))
    assert error.value.what == "one replica of this PEF needs 2.0 TiB of device memory, but a SN10 has 1.5 TiB"


def test_more_memory_than_the_machine_has_is_refused() -> None:
    text = r"the device memory of this node's replicas is .*, and the machine has .* of memory available"
    with pytest.raises(MachineError, match=text) as error:
        check_node_memory(single_rank("c"), 1 << 60)
    assert error.value.where == "host c"


def test_available_memory_is_that_of_the_system_or_of_its_control_group(tmp_path: Path) -> None:
    def write(file: str, text: str) -> None:
        path = tmp_path / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="ascii")

    assert available_bytes(tmp_path) is None
    write("proc/meminfo", "MemTotal:  9 kB\nMemFree: 3 kB\nMemAvailable:      1048576 kB\nHugePages_Total: 0\n")
    assert available_bytes(tmp_path) == GIB
    write("proc/self/cgroup", "4:memory:/old\n0::/jobs/one\n")
    write("sys/fs/cgroup/jobs/one/memory.max", "max\n")
    write("sys/fs/cgroup/jobs/one/memory.current", "5000\n")
    assert available_bytes(tmp_path) == GIB
    write("sys/fs/cgroup/jobs/one/memory.max", "9000\n")
    assert available_bytes(tmp_path) == 4000
    write("sys/fs/cgroup/jobs/one/memory.stat", "anon 4000\ninactive_file 1000\n")
    assert available_bytes(tmp_path) == 5000
    write("sys/fs/cgroup/jobs/memory.max", "7000\n")
    write("sys/fs/cgroup/jobs/memory.current", "6000\n")
    assert available_bytes(tmp_path) == 1000


def demand(node: int, needed: int, free: int | None) -> Demand:
    return Demand(node, f"host-{node}", needed, free)


def test_the_ranks_of_a_node_are_added_up() -> None:
    fits = [demand(0, 3 * GIB, 6 * GIB), demand(0, 3 * GIB, 6 * GIB), demand(1, 3 * GIB, 4 * GIB)]
    check_demands(fits)
    with pytest.raises(MachineError) as error:
        check_demands([*fits, demand(1, 2 * GIB, 4 * GIB)])
    assert error.value.what == (
        "the replicas of this node need 5.0 GiB of shared memory, and /dev/shm has 4.0 GiB free"
    )
    assert error.value.where == "host host-1"
    assert error.value.remedy is not None
    assert error.value.remedy.startswith("make /dev/shm larger (docker: --shm-size; ")


def test_mpi_needs_some_to_start_several_ranks() -> None:
    check_start(1, "here", 0)
    check_start(2, "here", None)
    check_start(2, "here", 22 * MIB)
    with pytest.raises(MachineError) as error:
        check_start(2, "here", 22 * MIB - 1)
    assert error.value.what.startswith("MPI needs about 22.0 MiB of shared memory to start 2 ranks on one node, and ")
    assert error.value.where == "host here"
