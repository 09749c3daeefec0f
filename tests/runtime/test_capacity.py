"""Device memory that does not fit is refused with the number needed and the number there."""

from dataclasses import replace

import pytest

from sambasim.errors import MachineError
from sambasim.hardware.spec import load_device
from sambasim.ir.program import Program
from sambasim.pef import PefDocument
from sambasim.runtime.capacity import available_bytes, check_device, check_memory
from sambasim.runtime.shared_memory import Demand
from sambasim.units import GIB
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


def test_what_a_pef_does_not_say_is_not_refused() -> None:
    check_device(PefDocument(replace(sample_program(), device_bytes=1 << 45)))


def test_the_replicas_of_a_node_are_added_up() -> None:
    fits = [Demand(0, "a", 3 * GIB, 6 * GIB), Demand(0, "a", 3 * GIB, 6 * GIB), Demand(1, "b", GIB, None)]
    check_memory(fits)
    with pytest.raises(MachineError) as error:
        check_memory([*fits, Demand(2, "c", 5 * GIB, 4 * GIB)])
    assert error.value.what == (
        "the device memory of this node's replicas is 5.0 GiB, and the machine has 4.0 GiB of memory available"
    )
    assert error.value.where == "host c"


def test_available_memory_is_read_in_bytes() -> None:
    assert available_bytes("MemTotal:  9 kB\nMemFree: 3 kB\nMemAvailable:      1048576 kB\n") == GIB
    assert available_bytes("") is None
