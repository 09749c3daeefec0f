"""Measure this machine for `sambasim plan --here`: the operators of a model, the update, messages and memory.

For 1, 2, … ranks, up to the number of cores, one job of that many ranks runs real passes of a replica, all at the same
time, as `sambasim run` would (`measure/passes.py`): operators are timed where they run, with the caches and the memory
bandwidth that other ranks leave them.
"""

import json
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from time import perf_counter

import torch

from sambasim.errors import MachineError
from sambasim.hardware.host import available_bytes
from sambasim.runtime.machine.launcher import mpirun_here
from sambasim.runtime.machine.resources import cores_of_this_process
from sambasim.runtime.measure import passes
from sambasim.runtime.measure.passes import ERROR, RATES, WORK, Work
from sambasim.simulation.machine import Machine, PassTimes, Rates
from sambasim.units import MIB, counted

_TIMEOUT_S = 600.0
_CPU_TIMES = Path("/proc/stat")
_GEMM_SIZE, _COPY_BYTES = 1024, 64 * MIB


def measure_machine(
    work_for: Callable[[int], Work], ranks: int, on_phase: Callable[[str], None] = lambda phase: None
) -> Machine:
    """Measure for up to `ranks` ranks. `work_for` gives what a job of so many ranks runs; only one program is run if
    they are more than cores. Raises MachineError with what a job said if it fails."""
    cores = len(cores_of_this_process())
    rates, load = [], []
    crowded = {cores + 1, ranks} if ranks > cores else ()
    for count in (*range(1, min(ranks, cores) + 1), *sorted(crowded)):
        work = work_for(count)
        on_phase(f"measure passes of {counted(count, 'rank')} at once, on {counted(cores, 'core')}")
        others = OtherLoad()
        rates.append(_job(work, count))
        load.append(others.cores())
    on_phase("measure memory and products")
    copy_bytes_per_s, gemm_flops_per_s = _copy_bytes_per_s(), _gemm_flops_per_s()
    return Machine(cores, available_bytes() or 0, copy_bytes_per_s, gemm_flops_per_s, max(load), tuple(rates))


class OtherLoad:
    """How many cores other programs have used since it was created, children that this process waited for aside."""

    def __init__(self) -> None:
        self._began = self._now()

    def cores(self) -> float:
        (now_s, busy_s, own_s), (began_s, were_busy_s, own_before_s) = self._now(), self._began
        return max(busy_s - were_busy_s - (own_s - own_before_s), 0.0) / max(now_s - began_s, 1e-9)

    @staticmethod
    def _now() -> tuple[float, float, float]:
        user, nice, system, _, _, irq, soft_irq, steal = map(int, _CPU_TIMES.read_text().split()[1:9])
        times = os.times()
        own_s = times.user + times.system + times.children_user + times.children_system
        return times.elapsed, (user + nice + system + irq + soft_irq + steal) / os.sysconf("SC_CLK_TCK"), own_s


def _job(work: Work, ranks: int) -> Rates:
    launcher = [] if ranks == 1 else [str(mpirun_here()), "-np", str(ranks)]
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / WORK).write_bytes(pickle.dumps(work))
        command = [*launcher, sys.executable, "-m", passes.__name__, folder]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
        except subprocess.TimeoutExpired:
            what = f"the measurement with {ranks} ranks did not end within {_TIMEOUT_S:.0f} s"
            raise MachineError(what, remedy="fewer --ranks, or a smaller --global-batch") from None
        if done.returncode:
            error, lines = Path(folder) / ERROR, done.stderr.strip().splitlines()
            said = error.read_text() if error.exists() else lines[-1] if lines else f"exit code {done.returncode}"
            raise MachineError(
                f"the model does not run on this machine, with {counted(ranks, 'rank')}: {said}",
                remedy="a smaller --global-batch; sambasim compile and sambasim run say more",
            )
        rates = json.loads((Path(folder) / RATES).read_text())
    return Rates(**{**rates, "passes": tuple(PassTimes(**times) for times in rates["passes"])})


def _copy_bytes_per_s() -> float:
    source, target = torch.ones(_COPY_BYTES // 4), torch.ones(_COPY_BYTES // 4)
    return 2 * _COPY_BYTES / _least_s(lambda: target.copy_(source))


def _gemm_flops_per_s() -> float:
    a = torch.ones(_GEMM_SIZE, _GEMM_SIZE)
    return 2.0 * _GEMM_SIZE**3 / _least_s(lambda: torch.mm(a, a))


def _least_s(action: Callable[[], object], runs: int = 9) -> float:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    times_s = []
    for _ in range(runs):
        began_s = perf_counter()
        action()
        times_s.append(perf_counter() - began_s)
    torch.set_num_threads(threads)
    return min(times_s)
