"""What was measured on this machine, for predictions of steps on it: see `runtime/measure/machine.py`."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PassTimes:
    """One pass of a whole replica with `samples`. `seconds`: by name of a node of the graph, to the next one;
    `adding_s`: by how much a pass that adds to gradients takes longer; `batch_s`: reading a batch and placing it;
    `heap_bytes`: of the allocations that some steps have made and not given back, without device memory."""

    samples: int
    seconds: Mapping[str, float]
    adding_s: float
    batch_s: float
    heap_bytes: int

    @property
    def pass_s(self) -> float:
        return sum(self.seconds.values())


@dataclass(frozen=True, slots=True)
class Rates:
    """Measured while `ranks` ranks computed at the same time, with as many `threads` each as `sambasim run` gives them.

    `private_bytes`, `shared_bytes`: the memory of a rank that has connected and opened its data, its own and what all
    ranks share. `passes`: for some numbers of samples, the fewest first. `update_s`, `host_update_s`: the sync and
    update of all parameters of a replica, by device and by host sync. `latency_s`, `link_bytes_per_s`: a message from
    one rank to another."""

    ranks: int
    threads: int
    private_bytes: int
    shared_bytes: int
    passes: tuple[PassTimes, ...]
    update_s: float
    host_update_s: float
    latency_s: float
    link_bytes_per_s: float


@dataclass(frozen=True, slots=True)
class Machine:
    """`copy_bytes_per_s`: read and written by a copy on one thread; `gemm_flops_per_s`: of float32, on one thread.
    `rates`: for 1, 2, … ranks, as far as each has a core of its own."""

    cores: int
    memory_bytes: int
    copy_bytes_per_s: float
    gemm_flops_per_s: float
    rates: tuple[Rates, ...]

    def rates_at(self, ranks: int) -> Rates:
        """For so many ranks; more than cores share those of as many as there are cores."""
        return self.rates[min(ranks, len(self.rates)) - 1]
