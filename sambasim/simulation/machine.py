"""What was measured on this machine, for predictions of steps on it: see `runtime/measure/`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from itertools import pairwise
from typing import Any, TypeVar, cast


@dataclass(frozen=True, slots=True)
class PassTimes:
    """One pass of a whole replica. `seconds`: by name of a node, to the next one; `adding_s`: what adding to gradients
    takes longer; `batch_s`: reading and placing a batch; `heap_bytes`: what steps allocate and do not give back."""

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
    """Measured while `ranks` ranks computed at the same time, with as many threads as in `sambasim run`. `..._bytes`:
    memory of a rank that has opened its data, its own and what all share. `passes`: the fewest samples first.
    `update_s`, `host_update_s`: sync and update of all parameters, by device and by host. The others: a message."""

    ranks: int
    private_bytes: int
    shared_bytes: int
    passes: tuple[PassTimes, ...]
    update_s: float
    host_update_s: float
    latency_s: float
    link_bytes_per_s: float


@dataclass(frozen=True, slots=True)
class Machine:
    """Copies and float32 products on one thread; `other_cores`: used by other programs meanwhile. `rates`: for 1, 2, …
    ranks with a core each; then, if there may be more, for one more and the most, with one number of samples."""

    cores: int
    memory_bytes: int
    copy_bytes_per_s: float
    gemm_flops_per_s: float
    other_cores: float
    rates: tuple[Rates, ...]

    def rates_at(self, ranks: int) -> Rates:
        """For so many ranks. More than cores have the rates of as many as there are cores: see `crowd`."""
        alone = [rates for rates in self.rates if rates.ranks <= self.cores]
        return alone[min(ranks, len(alone)) - 1]

    def crowd(self, ranks: int) -> float:
        """How many times as long operators take if `ranks` share the cores, on the line between measured numbers."""
        if ranks <= self.cores:
            return 1.0
        known = [(self.cores, 1.0)]
        for rates in self.rates:
            if rates.ranks > self.cores:
                (crowded,) = rates.passes
                alone = between(self.rates_at(rates.ranks).passes, crowded.samples)
                known.append((rates.ranks, max(crowded.pass_s * self.cores / (alone.pass_s * rates.ranks), 1.0)))
        lost = known[-1][1]
        for (low, low_lost), (high, high_lost) in pairwise(known):
            if low <= ranks <= high:
                lost = low_lost + (high_lost - low_lost) * (ranks - low) / (high - low)
        return ranks / self.cores * lost


def between(passes: Sequence[PassTimes], samples: int) -> PassTimes:
    """A pass of `samples`, on the line between two of `passes`, which ascend; outside, in proportion."""
    if samples <= passes[0].samples or len(passes) == 1:
        return replace(passes[0], samples=samples)
    for low, high in pairwise(passes):
        if samples <= high.samples:
            return mixed(low, high, (samples - low.samples) / (high.samples - low.samples))
    last = passes[-1]
    none = replace(last, samples=0, seconds=dict.fromkeys(last.seconds, 0.0), batch_s=0.0, heap_bytes=0)
    return mixed(none, last, samples / last.samples)


_T = TypeVar("_T")


def mixed(low: _T, high: _T, part: float) -> _T:
    """All numbers of `low`, moved by `part` of the way to those of `high`, or beyond."""
    a, b = cast(Any, low), cast(Any, high)
    found: Any = low
    if isinstance(low, int | float):
        found = a + (b - a) * part
        found = round(found) if isinstance(low, int) else found
    elif isinstance(low, tuple):
        found = tuple(mixed(*pair, part) for pair in zip(a, b, strict=True))
    elif isinstance(low, Mapping):
        found = {key: mixed(value, b.get(key, value), part) for key, value in a.items()}
    elif is_dataclass(low):
        names = [field.name for field in fields(a)]
        found = replace(a, **{name: mixed(getattr(a, name), getattr(b, name), part) for name in names})
    return cast(_T, found)
