"""torch.distributed comes up over MPI, without environment or fixed port."""

import sys

import pytest

from tests.support.mpi import ROOT, run_mpi
from tests.support.whole import whole_case

BODY = ROOT / "tests" / "mpi" / "bodies" / "torch_group.py"


@pytest.mark.parametrize(
    ("np", "env", "sums"),
    [whole_case(1, {}, [1, 0]), (2, {}, [11, 1]), whole_case(3, {"MPIR_CVAR_NOLOCAL": "1"}, [111, 3])],
    ids=["alone", "one node", "three nodes"],
)
def test_ranks_share_a_process_group(np: int, env: dict[str, str], sums: list[int]) -> None:
    result = run_mpi(np, [sys.executable, str(BODY)], env=env, timeout=90).check()
    assert result.stdout == f"{[str(([sums, sums], False))]}\n"


def test_an_interface_that_is_not_there_is_told() -> None:
    body = (
        "from sambasim.errors import MachineError\n"
        "from sambasim.runtime.communicator import connect\n"
        "from sambasim.runtime.torch_process_group import bring_up\n"
        "c = connect(['body'])\n"
        "try:\n"
        "    bring_up(c, timeout_s=5)\n"
        "except MachineError as error:\n"
        "    print(error)\n"
    )
    env = {"GLOO_SOCKET_IFNAME": "no-such-interface"}
    result = run_mpi(1, [sys.executable, "-c", body], env=env, timeout=90).check()
    assert "torch.distributed cannot connect the ranks: " in result.stdout
    assert "where: rank 0 on host" in result.stdout
    assert "GLOO_SOCKET_IFNAME=eth0 mpirun" in result.stdout
