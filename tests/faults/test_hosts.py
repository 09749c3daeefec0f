"""Runs over two hosts: equal bits, and what differs between them is an error before anything is computed."""

import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

import sambasim
from tests.faults.command import sambasim as typed
from tests.faults.fault import Compiled, put
from tests.support.hosts import Hosts, two_hosts, why_no_hosts
from tests.support.mpi import SAMBASIM, Result
from tests.support.whole import is_whole, whole

_CODE = """
import torch, os
class Late(torch.utils.data.TensorDataset):
    def __getitem__(self, index):
        self.seen = getattr(self, "seen", 0) + 1
        if self.seen > 40 and os.uname().nodename == "hB" and os.path.exists("action"):
            os.system(open("action").read())
        return super().__getitem__(index)
def samples():
    count = int(os.environ.get("SAMPLES", 64))
    rows = torch.full((count, 8), float(open("value").read()))
    return Late(rows, torch.arange(count) % 3)
"""
_RUN = "run --pef pair --data net.py:samples --threads 1 --sync-timeout 3"
_SHORT, _ENDLESS = "--steps 8 --json", "--epochs 100000"
_KILL_HOST = """
own=$(readlink /proc/self/ns/net)
for process in /proc/[0-9]*; do
    [ "$(readlink $process/ns/net)" = "$own" ] && [ ${process#/proc/} != $$ ] && kill -9 ${process#/proc/}
done
"""
_WITHOUT_THREADS, _OTHER_FOLDER = (
    "set -- $(echo $@ | sed 's/--threads 1//')",
    "saved is another folder on hB than on hA",
)
_MOUNTED = 'exec unshare --mount sh -ec \'{}; exec "$@"\' rank "$@"'

_WHY_NOT = why_no_hosts() if is_whole() else None
pytestmark = [whole, pytest.mark.skipif(_WHY_NOT is not None, reason=_WHY_NOT or "")]


@pytest.fixture
def folder(tmp_path: Path, compiled: Compiled) -> Path:
    put(tmp_path, compiled, "pair")
    (tmp_path / "net.py").write_text(_CODE)
    (tmp_path / "value").write_text("1")
    (tmp_path / "other").write_text("2")
    return tmp_path


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    with two_hosts(tmp_path) as hosts:
        yield hosts


def run(hosts: Hosts, folder: Path, flags: str, first: str = "true", where: str = "hB") -> Result:
    """A run whose rank on the host called `where` begins with the shell command `first`."""
    script = f'if [ $(hostname) = {where} ]; then {first}; fi; exec "$@"'
    return hosts.run_mpi(["sh", "-c", script, "rank", *SAMBASIM, *shlex.split(f"{_RUN} {flags}")], folder)


def test_two_hosts_have_the_bits_of_one_process_and_print_no_warning(hosts: Hosts, folder: Path) -> None:
    for flags in (_SHORT, f"{_SHORT} --host-sync gloo", f"{_SHORT} --reduce-on-rdu"):
        result = run(hosts, folder, flags)
        assert result.stderr == ""
        alone = typed(f"{_RUN} {_SHORT} --emulate-replicas 2", folder).summary
        assert (result.summary.state_sha256, result.summary.data) == (alone.state_sha256, alone.data)


@pytest.mark.parametrize("where", ["hA", "hB"])
def test_another_version_is_named(where: str, hosts: Hosts, folder: Path) -> None:
    copy = folder / "other-version" / "sambasim"
    shutil.copytree(Path(sambasim.__file__).parent, copy, ignore=shutil.ignore_patterns("__pycache__"))
    (copy / "more.py").write_text("")
    result = run(hosts, folder, _SHORT, f"export PYTHONPATH={copy.parent}", where)
    refused(result, "error[launch] (every rank): sambasim: 0.", " for rank 0 on hA, but 0.")


@pytest.mark.parametrize(
    ("first", "flags", "what"),
    [
        (_WITHOUT_THREADS, "", "threads: --threads 1 for rank 0 on hA, but OMP_NUM_THREADS=1 for rank 1 on hB"),
        ("set -- $@ --reduce-on-rdu", "", "--reduce-on-rdu: False for rank 0 on hA, but True for rank 1 on hB"),
        (_MOUNTED.format("mount --bind other value"), "", "net.py:samples with 64 samples to train, content "),
        ("export SAMPLES=72", "", "net.py:samples with 72 samples to train, content "),
        (_MOUNTED.format("mount -t tmpfs tmpfs saved"), "--checkpoint-dir saved", _OTHER_FOLDER),
        (_MOUNTED.format("mount -t tmpfs tmpfs saved"), "--record-digests saved", _OTHER_FOLDER),
    ],
)  # fmt: skip
def test_what_differs_between_hosts_is_named(first: str, flags: str, what: str, hosts: Hosts, folder: Path) -> None:
    (folder / "saved").mkdir()
    refused(run(hosts, folder, f"{_SHORT} {flags}", first), what)


def test_other_vector_instructions_are_told(hosts: Hosts, folder: Path) -> None:
    (told,) = run(hosts, folder, _SHORT, "export ATEN_CPU_CAPABILITY=default").summary.exempt_from_exactness
    assert re.fullmatch(r"ranks on CPUs of 2 kinds, whose kernels differ: .* DEFAULT .*", told)


def test_a_run_is_not_resumed_exactly_with_other_data(hosts: Hosts, folder: Path) -> None:
    run(hosts, folder, f"{_SHORT} --checkpoint-dir saved").check()
    (folder / "value").write_text("2")
    resumed = "--json --steps 12 --checkpoint-dir saved --resume"
    refused(run(hosts, folder, f"{resumed} --exact"), "--exact: the run would not", "identity of the data = content ")
    notices = run(hosts, folder, resumed).summary.notices
    assert any("changed since the checkpoint: identity of the data" in notice for notice in notices)


@pytest.mark.parametrize(
    ("action", "what"), [("ip link set eth0 down", "rank"), (_KILL_HOST, "")], ids=["link down", "host killed"]
)
def test_a_job_ends_that_loses_a_host(action: str, what: str, hosts: Hosts, folder: Path) -> None:
    (folder / "action").write_text(action)
    result = run(hosts, folder, _ENDLESS)
    assert result.returncode != 0
    assert what in result.stderr


def refused(result: Result, *messages: str) -> None:
    assert result.returncode == 2, result.stderr
    assert result.stderr.count("error[") == 1
    for words in messages:
        assert words in result.stderr
