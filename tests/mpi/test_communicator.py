"""The communicator, at several numbers of ranks and of nodes, on data that depends on the rank."""

import os
import re
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from sambasim.errors import PeerError
from sambasim.runtime.watch.supervisor import FORWARDING_S
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


CONNECT = "from sambasim.runtime.machine.mpi import connect\nc = connect(['body'])\n"


def test_shared_memory_that_is_not_there_is_refused_on_every_rank() -> None:
    """More than any machine has: the check must come before the memory is touched."""
    body = CONNECT + (
        "from sambasim.errors import MachineError\n"
        "try:\n"
        "    c.allocate_shared((1 << 50) if c.rank == 1 else 4096)\n"
        "    words = 'allocated'\n"
        "except MachineError as error:\n"
        "    words = str(error)\n"
        "found = c.gather_object(words)\n"
        "print('\\n'.join(set(found)) if found else '', end='')\n"
    )
    result = run_mpi(2, [sys.executable, "-c", body]).check()
    needed = "1088.0 TiB" if is_open_mpi() else "1024.0 TiB"
    assert f"the replicas of this node need {needed} of shared memory, and /dev/shm has" in result.stdout
    assert result.stdout.count("the replicas of this node") == 1, "both ranks say the same"
    assert f"where: host {os.uname().nodename}" in result.stdout
    assert "--shm-size" in result.stdout


def test_shared_memory_is_unlinked_while_the_job_runs() -> None:
    """Nothing can be left behind by a kill, because no name is there any more once the window is made."""
    body = CONNECT + (
        "from sambasim.runtime.machine import node_memory\n"
        "window = c.allocate_shared(1 << 20)\n"
        "c.barrier()\n"
        "names = c.gather_object(sorted(map(str, node_memory.mapped_names())))\n"
        "print(names if names else '', end='')\n"
    )
    assert run_mpi(2, [sys.executable, "-c", body]).check().stdout == "([], [])"


_BRING_UP = """\
import sys
from collections.abc import Mapping
from dataclasses import replace
from sambasim.cli.shared import kept_imports
from sambasim.errors import SambasimError
with kept_imports():
    import torch, torch.distributed as dist
    from sambasim.runtime.machine import process as group
    from sambasim.runtime.machine.mpi import connect
c = connect(["body"])
try:
    {body}
except SambasimError as error:
    print(f"{{type(error).__name__}}: {{error}}")
"""


@pytest.mark.parametrize(
    ("env", "words"),
    [
        (
            {"GLOO_SOCKET_IFNAME": "no-such-interface"},
            (
                "torch.distributed cannot connect the ranks: GLOO_SOCKET_IFNAME is no-such-interface, and ",
                "where: rank 0 on host",
                "GLOO_SOCKET_IFNAME=eth0 mpirun",
            ),
        ),
        (
            {"GLOO_DEVICE_TRANSPORT": "pigeon"},
            (
                "cannot connect the ranks: makeDeviceForInterface(): unsupported gloo device",
                "try:   unset GLOO_DEVICE_TRANSPORT, which is pigeon; or name the network interface",
            ),
        ),
    ],
)
def test_what_gloo_cannot_use_is_named(env: Mapping[str, str], words: Sequence[str]) -> None:
    body = _BRING_UP.format(body="group.bring_up(c, timeout_s=5)")
    result = run_mpi(1, [sys.executable, "-c", body], env=env, timeout=90).check()
    assert [text for text in words if text not in result.stdout] == []


def test_a_host_that_cannot_be_reached_is_an_error_on_every_rank() -> None:
    body = (
        "group._outside_address = lambda name: 'no-such-host.invalid'\n"
        "    group.bring_up(replace(c, host_name=f'host-{c.rank}'), timeout_s=5)"
    )
    result = run_mpi(2, [sys.executable, "-c", _BRING_UP.format(body=body)], timeout=90).check()
    assert result.stderr == "", "none of torch's own attempts"
    assert result.stdout.count("cannot connect the ranks: no connection to rank 0: ") == 2
    assert "store at no-such-host.invalid:" in result.stdout


def test_a_collective_fails_with_a_remedy_if_a_rank_is_gone() -> None:
    body = (
        "group.bring_up(c, timeout_s=30)\n"
        "    if c.rank == 1: sys.exit(group.take_down())\n"
        "    with group.gloo_errors(): dist.all_reduce(torch.ones(9))"
    )
    # As a run does: gloo's threads may still run, and mpirun may drop what it has not forwarded when a job aborts.
    leave = f"\n    import time; sys.stdout.flush(); time.sleep({FORWARDING_S})\n    c.abort(error.exit_code)\n"
    result = run_mpi(2, [sys.executable, "-c", _BRING_UP.format(body=body) + leave], timeout=90)
    assert result.returncode == PeerError.exit_code
    assert re.match(r"PeerError: a collective of torch.distributed failed: .*(Connection|closed)", result.stdout)
    assert "/gloo/" not in result.stdout
    assert "try:   read what the other ranks printed last" in result.stdout


FREES = """
import numpy as np
from sambasim.runtime.machine.mpi import connect
from sambasim.runtime.machine.node_memory import freeing, private_pages

def resident_bytes():
    return 4096 * int(open("/proc/self/statm").read().split()[1])

communicator = connect(["sambasim", "run"])
memory = np.frombuffer(private_pages(1 << 21), dtype=np.uint8)
free = freeing([memory[4096:900_000]])
for count in (1_000, 100_000):
    before = resident_bytes()
    for _ in range(count):
        free()
if communicator.rank == 0:
    print(resident_bytes() - before, flush=True)
communicator.finish()
"""


def test_freeing_pages_again_and_again_takes_no_memory() -> None:
    printed = run_mpi(2, [sys.executable, "-c", FREES], timeout=60).check().stdout
    assert int(printed) < 4 << 20


# `run_mpi` fails a test whose job leaves a process or shared memory behind.


@whole
def test_shared_memory_left_behind_fails_the_test() -> None:
    name = f"sambasim-test-{uuid.uuid4().hex}"
    try:
        with pytest.raises(pytest.fail.Exception, match=f"left shared memory behind.*{name}"):
            run_job([sys.executable, "-c", f"open('/dev/shm/{name}', 'w').close()"])
    finally:
        Path("/dev/shm", name).unlink()


@whole
def test_a_process_left_behind_fails_the_test_and_is_ended() -> None:
    body = (
        "import subprocess, sys\n"
        "child = subprocess.Popen(['sleep', '60'], stdout=-3, stderr=-3, start_new_session=True)\n"
        "print(child.pid)\n"
    )
    with pytest.raises(pytest.fail.Exception, match=r"left processes behind: \[\d+\]") as failure:
        run_job([sys.executable, "-c", body])
    pid = int(str(failure.value).split("[")[1].rstrip("]"))
    until = time.monotonic() + 5
    while Path(f"/proc/{pid}").exists() and time.monotonic() < until:
        time.sleep(0.01)
    assert not Path(f"/proc/{pid}").exists()
