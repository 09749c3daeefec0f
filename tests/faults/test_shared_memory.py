"""Without enough shared memory, a run ends before training, and the error says how much is needed and available."""

import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from sambasim.units import MIB
from tests.faults.command import sambasim
from tests.faults.fault import TRAIN, assert_contains, check_message, net
from tests.support.mpi import ROOT, SAMBASIM, Result, can_play_hosts, mpirun, run_job, run_mpi
from tests.support.whole import whole, whole_case

_RUN = ["run", "--pef", "net", "--reduce-on-rdu", "--metrics", "m.jsonl"]
_LIMITED = [sys.executable, str(ROOT / "tests" / "mpi" / "bodies" / "limited.py")]
_FIGURE = r"(\d+\.\d) (B|KiB|MiB|GiB)"
_BYTES = {"B": 1, "KiB": 1024, "MiB": MIB, "GiB": 1024 * MIB}

privileged = pytest.mark.skipif(not can_play_hosts(), reason="it takes the privilege to mount another /dev/shm")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a PEF of 8 million parameters, which needs some 100 MiB a replica."""
    folder = tmp_path_factory.mktemp("large")
    init = "self.linear = nn.Linear(8, 1024 * 1024)\nself.out = nn.Linear(1024, 3)"
    forward = "return self.out(self.linear(x).view(4, 1024, 1024).mean(1))"
    (folder / "net.py").write_text(net(forward, init=init))
    sambasim(f"{TRAIN} --data-parallel", folder).check()
    return folder


def _with_shared_memory(size_bytes: int, command: Sequence[str]) -> list[str]:
    mount = f'mount -t tmpfs -o size={size_bytes} tmpfs /dev/shm && exec "$@"'
    return ["unshare", "--mount", "sh", "-c", mount, "sh", *command]


def _figures(text: str) -> list[float]:
    return [float(number) * _BYTES[unit] for number, unit in re.findall(_FIGURE, text)]


def _check(result: Result, says: str) -> list[float]:
    return _figures(check_message(result, says).splitlines()[0])


@privileged
def test_too_little_shared_memory_ends_the_run_before_training(folder: Path) -> None:
    job = [mpirun(), "-np", "2", *SAMBASIM, *_RUN]
    result = run_job(_with_shared_memory(64 * MIB, job), cwd=folder)
    says = "error[machine] (every rank): the replicas of this node need ... /dev/shm has ... --shm-size"
    needed, there = _check(result, says)
    assert needed > 110 * MIB  # two gradients, parameters and states; no operand arrives on one node
    assert 0 < there <= 64 * MIB
    assert not (folder / "m.jsonl").exists()
    run_job(_with_shared_memory(int(needed * 1.5), [*job, "--steps", "1"]), cwd=folder).check()
    (folder / "m.jsonl").unlink()


@whole
@privileged
def test_groups_of_a_mesh_that_allocate_at_the_same_time_are_counted_together(tmp_path: Path) -> None:
    """Two groups along dp, and two along tp, each of which would fit alone."""
    init = "self.up = nn.Linear(8, 1 << 18)\nself.down = nn.Linear(1 << 18, 24)\nself.out = nn.Linear(24, 3)"
    forward = "return self.out(self.down(self.up(x).relu()))"
    (tmp_path / "net.py").write_text(net(forward, init=init))
    mesh = ["--data-parallel", "--tensor-parallel", "weight", "--n-chips", "2"]
    run_job([*SAMBASIM, *shlex.split(TRAIN), *mesh], cwd=tmp_path).check()
    job = [mpirun(), "-np", "4", *SAMBASIM, *_RUN, "--steps", "1"]
    result = run_job(_with_shared_memory(112 * MIB, job), cwd=tmp_path)
    needed, there = _check(result, "error[machine] (every rank): the replicas of this node need ... /dev/shm has ")
    assert needed / 2 < there < needed


@privileged
@pytest.mark.parametrize("size_bytes", [16 * MIB, whole_case(MIB)])
def test_too_little_for_mpi_itself_ends_the_run_before_mpi_starts(folder: Path, size_bytes: int) -> None:
    """At some sizes, MPICH itself dies of a signal without a message."""
    result = run_job(_with_shared_memory(size_bytes, [mpirun(), "-np", "2", *SAMBASIM, *_RUN]), cwd=folder)
    says = "error[machine] ... MPI needs about 22.0 MiB of shared memory to start 2 ranks ... /dev/shm has "
    needed, there = _check(result, says)
    assert needed > there <= size_bytes


LIMITS = {
    "space 0": "rank 0 cannot map: Cannot allocate memory: its address space has ... left (ulimit -v)",
    "space 1": "rank 1 cannot map: Cannot allocate memory: its address space has ... left (ulimit -v)",
    "files 0": "rank 0 cannot map: File too large: a file may have 1.0 MiB (ulimit -f)",
    "mpi": "MPI cannot create a shared window of 512.0 MiB for the replicas of this node: ... /dev/shm has ",
}


@pytest.mark.parametrize("limit", ["space 1", "mpi", whole_case("space 0"), whole_case("files 0")])
def test_a_window_that_cannot_be_allocated_is_an_error_on_every_rank(limit: str) -> None:
    """Without the check, MPIs raise an error, hang, or die at the first access."""
    result = run_mpi(2, [*_LIMITED, *limit.split()]).check()
    messages = result.stdout.strip().split("\n\n")
    assert len(messages) == 2, result.stdout
    for message in messages:
        assert_contains(message, LIMITS[limit])
        needed, there = _figures(message.splitlines()[0])
        assert needed == 512 * MIB
        assert limit == "mpi" or there < needed
    assert len(set(messages)) == 1


@privileged
def test_pages_that_are_never_touched_need_no_memory() -> None:
    """Except on Open MPI, which makes no window larger than what is free."""
    result = run_job(_with_shared_memory(64 * MIB, [mpirun(), "-np", "2", *_LIMITED, "untouched"])).check()
    if "refused" in result.stdout:
        assert "Open MPI" in result.stdout
    else:
        assert "written and read" in result.stdout
