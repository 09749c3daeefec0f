"""The communicator, at several numbers of ranks and of nodes, on data that depends on the rank."""

import re
import sys
import time
import uuid
from pathlib import Path

import pytest

from sambasim.errors import PeerError
from sambasim.runtime.machine.launcher import FORWARDING_S
from tests.faults.fault import assert_contains
from tests.mpi.training import EACH_ALONE, TWO_NODES
from tests.support.mpi import RANKS, ROOT, Result, body_command, can_play_hosts, is_open_mpi, library, run_job, run_mpi
from tests.support.whole import whole, whole_case

BODY = ROOT / "tests" / "mpi" / "bodies" / "talk.py"
TALK = body_command("talk")


@pytest.mark.parametrize(
    ("np", "env", "nodes"),
    [
        *((np, {}, (0,) * np) if np == 3 else whole_case(np, {}, (0,) * np) for np in RANKS),
        whole_case(4, TWO_NODES, (0, 1, 0, 1)),
        whole_case(3, EACH_ALONE, (0, 1, 2)),
    ],
)
def test_ranks_talk(np: int, env: dict[str, str], nodes: tuple[int, ...]) -> None:
    if env and is_open_mpi():
        pytest.skip("only MPICH makes nodes of one host")
    assert run_mpi(np, TALK, env=env).check().stdout == f"passed {np} of {np}; nodes {nodes}\n"


@whole
@pytest.mark.skipif(not can_play_hosts(), reason="it takes the privilege to change the host name of a process")
def test_ranks_of_two_hosts_talk() -> None:
    result = run_mpi(4, TALK, hosts=2).check()
    assert result.stdout == "passed 4 of 4; nodes (0, 0, 1, 1)\n"


def test_one_rank_needs_no_mpi_library() -> None:
    result = run_job(TALK, env={"MPI4PY_LIBMPI": "/nonexistent/libmpi.so"}).check()
    assert result.stdout == "passed 1 of 1; nodes (0,)\n"


def refused(result: Result, *messages: str) -> None:
    assert result.returncode != 0
    for words in messages:
        assert words in result.stderr


def test_several_ranks_without_an_mpi_library_are_refused() -> None:
    result = run_mpi(2, TALK, env={"MPI4PY_LIBMPI": "/nonexistent/libmpi.so"})
    refused(result, "mpi4py finds no MPI library", "python -m pip install mpich")


def test_a_launcher_of_another_mpi_is_refused() -> None:
    """A rank of two by its environment, and alone by its MPI: what the wrong mpirun makes of it."""
    result = run_job(TALK, env={"PMI_SIZE": "2", "PMI_RANK": "1"})
    sees = f"{library()} sees 1: mpi4py is linked to another MPI than the launcher's"
    refused(result, "mpirun of MPICH or its relatives started 2 ranks, but", sees, f"-np 2 {BODY}")
    assert "suspicious MPI execution environment" not in result.stderr


@pytest.mark.skipif(is_open_mpi(), reason="about MPICH")
def test_mpich_under_open_mpis_launcher_is_refused_before_it_starts() -> None:
    result = run_job(TALK, env={"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0"})
    refused(result, "mpirun of Open MPI started 2 ranks, but MPICH", "cannot be started by it")


_BY_GLOO = """
import os, sys, time
from dataclasses import replace
from sambasim.cli.shared import kept_imports
from sambasim.errors import SambasimError
with kept_imports():
    import torch, torch.distributed as dist
    from sambasim.runtime.machine import process
    from sambasim.runtime.machine.mpi import connect
c = connect(["body"])
"""

_CANNOT_CONNECT = """
def refused(communicator=c, **environ):
    os.environ.update(environ)
    try:
        process.bring_up(communicator, timeout_s=5)
        error = "no error"
    except SambasimError as refusal:
        error = f"{type(refusal).__name__}: {refusal}"
    for name in environ:
        del os.environ[name]
    if everybody := c.gather_object(error):
        print("\\n\\n".join(everybody), end="\\n\\n", flush=True)

refused(GLOO_SOCKET_IFNAME="no-such-interface")
if c.rank == 1:
    store = dist.TCPStore
    dist.TCPStore = lambda *args, **options: time.sleep(0.3) or store(*args, **options)  # after rank 0 has failed
refused(GLOO_DEVICE_TRANSPORT="pigeon")
process.outside_address = lambda name: ("no-such-host.invalid", "")
refused(replace(c, host_name=f"host-{c.rank}"))
"""

_PEER_GONE = f"""
process.bring_up(c, timeout_s=30)
if c.rank == 1:
    sys.exit(process.take_down())
try:
    with process.gloo_errors():
        dist.all_reduce(torch.ones(9))
except SambasimError as error:
    print(f"{{type(error).__name__}}: {{error}}", flush=True)
    # As a run does: gloo's threads may still run, and mpirun may drop what it has not forwarded when a job aborts.
    time.sleep({FORWARDING_S})
    c.abort(error.exit_code)
"""

_INTERFACE = "GLOO_SOCKET_IFNAME is no-such-interface, and ... where: rank 0 on host ... GLOO_SOCKET_IFNAME=eth0 mpirun"
_TRANSPORT = "try:   unset GLOO_DEVICE_TRANSPORT, which is pigeon; or name the network interface"
_HOST = "no connection to rank 0: ... where: rank 0 on host host-0, store at no-such-host.invalid:"


def test_what_gloo_cannot_use_is_named_on_every_rank() -> None:
    result = run_mpi(2, [sys.executable, "-c", _BY_GLOO + _CANNOT_CONNECT], timeout=90).check()
    *errors, _ = result.stdout.split("\n\n")
    says = (_INTERFACE, _INTERFACE, f"makeDeviceForInterface(): unsupported ... {_TRANSPORT}", _TRANSPORT, _HOST, _HOST)
    for error, said in zip(errors, says, strict=True):
        assert_contains(error, f"MachineError: torch.distributed cannot connect the ranks: ... {said}")
    assert "socket.cpp" not in result.stderr, "torch's own attempts"


def test_a_collective_fails_with_a_remedy_if_a_rank_is_gone() -> None:
    result = run_mpi(2, [sys.executable, "-c", _BY_GLOO + _PEER_GONE], timeout=90)
    assert result.returncode == PeerError.exit_code
    assert re.match(r"PeerError: a collective of torch.distributed failed: .*(Connection|closed)", result.stdout)
    assert "/gloo/" not in result.stdout
    assert "try:   read what the other ranks printed last" in result.stdout


# `run_mpi` fails a test whose job leaves a process or shared memory behind.


@whole
def test_a_job_that_leaves_shared_memory_or_a_process_behind_fails_and_the_process_is_ended() -> None:
    name = f"sambasim-test-{uuid.uuid4().hex}"
    try:
        with pytest.raises(pytest.fail.Exception, match=f"left shared memory behind.*{name}"):
            run_job([sys.executable, "-c", f"open('/dev/shm/{name}', 'w').close()"])
    finally:
        Path("/dev/shm", name).unlink()
    body = "import subprocess; subprocess.Popen(['sleep', '60'], stdout=-3, stderr=-3, start_new_session=True)"
    with pytest.raises(pytest.fail.Exception, match=r"left processes behind: \[\d+\]") as failure:
        run_job([sys.executable, "-c", body])
    pid = int(str(failure.value).split("[")[1].rstrip("]"))
    until = time.monotonic() + 5
    while Path(f"/proc/{pid}").exists() and time.monotonic() < until:
        time.sleep(0.01)
    assert not Path(f"/proc/{pid}").exists()
