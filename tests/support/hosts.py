"""Two hosts on one machine, joined by a cable: each with a network, a name, mounts and a /dev/shm of its own, without
DNS. mpirun starts ranks there through `nsenter`, without a daemon."""

import functools
import shutil
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.support.mpi import ROOT, Result, is_open_mpi, mpirun, run_job

NAMES = ("hA", "hB")
_NAMESPACES = ("--net", "--uts", "--mount", "--ipc")
_BEGIN = """
hostname {name}
mount -t tmpfs tmpfs /dev/shm
mount -t sysfs sysfs /sys
mount --bind {hosts} /etc/hosts
ip link set lo up
echo begun
exec sleep infinity
"""


@functools.cache
def why_no_hosts() -> str | None:
    """Why this machine cannot play two hosts with networks; None if it can."""
    if missing := [name for name in ("unshare", "nsenter", "ip") if shutil.which(name) is None]:
        return f"there is no {missing[0]}"
    if subprocess.run(["unshare", *_NAMESPACES, "true"], capture_output=True, check=False).returncode != 0:
        return "it takes the privilege to make namespaces of network, name, mounts and IPC"
    return "mpirun of Open MPI needs a daemon on each host" if is_open_mpi() else None


@dataclass(frozen=True, slots=True)
class Hosts:
    """`processes`: one that keeps the namespaces of each host; `agent`: what mpirun calls in place of ssh."""

    processes: Sequence["subprocess.Popen[str]"]
    agent: Path

    def inside(self, host: int, *command: str) -> list[str]:
        return ["nsenter", "-t", str(self.processes[host].pid), *_NAMESPACES, *command]

    def run_mpi(self, argv: Sequence[str], cwd: Path, timeout: float = 90.0) -> Result:
        """`mpirun -np 2 ARGV` on the first host, one rank on each."""
        # The kernel is one for both: UCX must not look for memory that they share.
        env = {"UCX_NET_DEVICES": "eth0", "UCX_TLS": "tcp,self", "FI_TCP_IFACE": "eth0", "GLOO_SOCKET_IFNAME": "eth0"}
        agent = ["-launcher", "ssh", "-launcher-exec", str(self.agent), "-iface", "eth0"]
        command = [mpirun(), *agent, "-hosts", ",".join(NAMES), "-ppn", "1", "-np", "2", *argv]
        inside = self.inside(0, "env", "-C", str(cwd), *command)
        return run_job(inside, cwd=cwd, env={**env, "PYTHONPATH": str(ROOT)}, timeout=timeout, is_fresh=True)


@contextmanager
def two_hosts(folder: Path) -> Iterator[Hosts]:
    """Two hosts, which end with the block. `folder`: for files of theirs."""
    names, agent = folder / "hosts", folder / "agent"
    addresses = [f"10.77.0.{number}" for number in (1, 2)]
    lines = ["127.0.0.1 localhost", *(f"{address} {name}" for address, name in zip(addresses, NAMES, strict=True))]
    names.write_text("\n".join(lines) + "\n")
    processes = []
    try:
        for name in NAMES:
            script = _BEGIN.format(name=name, hosts=names)
            command = ["unshare", *_NAMESPACES, "sh", "-ec", script]
            processes.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        for process in processes:
            if process.stdout is None or process.stdout.readline() != "begun\n":
                raise OSError("a host cannot be made")
        hosts = Hosts(processes, agent)
        first, second = (str(process.pid) for process in processes)
        ends = ("eth0", "netns", first, "type", "veth", "peer", "name", "eth0", "netns", second)
        subprocess.run(["ip", "link", "add", *ends], check=True)
        for host, address in enumerate(addresses):
            for words in (("addr", "add", f"{address}/24", "dev", "eth0"), ("link", "set", "eth0", "up")):
                subprocess.run(hosts.inside(host, "ip", *words), check=True)
        cases = "\n".join(f"{name}) pid={one.pid};;" for name, one in zip(NAMES, processes, strict=True))
        enter = f'exec nsenter -t $pid {" ".join(_NAMESPACES)} sh -c "$*"'
        skip = 'while [ "${1#-}" != "$1" ]; do shift; done'
        agent.write_text(f"#!/bin/sh\n{skip}\nhost=$1\nshift\ncase $host in\n{cases}\nesac\n{enter}\n")
        agent.chmod(0o755)
        yield hosts
    finally:
        for process in processes:
            process.send_signal(signal.SIGKILL)
            process.communicate()
