"""DP04, DP05, DP06 and DP09: what torch's DistributedSamplers say of how the data are divided among the replicas."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import wraps
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

from torch.utils.data.distributed import DistributedSampler

from sambasim.samba.checks.findings import Finding
from sambasim.samba.checks.meeting import AS_MANY_BATCHES
from sambasim.samba.checks.place import app_line
from sambasim.samba.checks.telling import telling

_A_LOOK = 1
"""A pass that feeds no more steps than this is no epoch, but `next(iter(loader))` for a batch to warm up with."""

Sampler: TypeAlias = "DistributedSampler[Any]"


@dataclass(frozen=True, slots=True)
class Division:
    """How a sampler divides a data set of `length` samples, in one epoch."""

    num_replicas: int
    rank: int
    length: int
    order: tuple[int, int] | None
    """Seed and epoch; None for the data set's own order."""
    drop_last: bool
    where: str | None = field(default=None, compare=False)
    """The line of the app that made the sampler, or, if it was made before anybody looked, that goes over it."""


@dataclass(frozen=True, slots=True)
class Place:
    """Optimizer step number `step` of the pass number `epoch` over the data; both count from 1."""

    epoch: int
    step: int


@dataclass(slots=True)
class Pass:
    """One iteration of a sampler, and how many optimizer steps have used samples of it."""

    sampler: Sampler
    division: Division
    where: str | None
    steps: int = 0


class Samplers:
    """The DistributedSamplers of this process, from `start` to `stop`.

    Only those that feed optimizer steps matter: it is right to evaluate in one order, or to go over the data before.
    """

    def __init__(self) -> None:
        self.shortened: Callable[[Iterator[Any]], Iterable[Any]] = iter
        """What is left of the indices of an epoch: all of them, unless a check on demand is to see a second one."""
        self._last: Pass | None = None
        self._passes = 0
        """Those of which optimizer steps have used samples."""
        self._orders: WeakKeyDictionary[Sampler, set[tuple[int, int]]] = WeakKeyDictionary()
        self._made: WeakKeyDictionary[Sampler, str | None] = WeakKeyDictionary()
        self._originals: tuple[Callable[[Sampler], Iterator[Any]], Callable[..., None]] | None = None

    def start(self) -> None:
        """Watch every sampler that is made or iterated from now on."""
        self._originals = iterate, make = DistributedSampler.__iter__, DistributedSampler.__init__

        def iterated(sampler: Sampler) -> Iterator[Any]:
            indices, where = self.shortened(iterate(sampler)), app_line()
            return self._drawn(Pass(sampler, _division(sampler, self._made.get(sampler) or where), where), indices)

        @wraps(make)
        def made(sampler: Sampler, *arguments: Any, **keywords: Any) -> None:
            make(sampler, *arguments, **keywords)
            self._made[sampler] = app_line()

        DistributedSampler.__iter__ = iterated  # type: ignore[method-assign]  # apps make these samplers, and not we
        DistributedSampler.__init__ = made  # type: ignore[method-assign, assignment]  # as above; it takes any arguments

    def stop(self) -> None:
        """Leave torch as it was."""
        if self._originals is not None:
            DistributedSampler.__iter__, DistributedSampler.__init__ = self._originals  # type: ignore[method-assign]  # as above
            self._originals = None

    def note_step(self) -> None:
        """An optimizer step uses what was drawn last."""
        last = self._last
        if last is None:
            return
        last.steps += 1
        self._passes += last.steps == 1
        order = last.division.order
        if order is None or last.steps > _A_LOOK + 1:
            return
        orders = self._orders.setdefault(last.sampler, set())
        if last.steps > _A_LOOK:
            orders.add(order)
        elif order in orders:
            what = f"the sampler shuffles again as before, for its epoch is still {order[1]}"
            telling.tell(Finding("DP06", what, last.where, "sampler.set_epoch(epoch) before each epoch"))

    def division(self) -> Division | None:
        """By which the optimizer steps are fed now; None if they are fed by no such sampler, or by one that divides
        nothing."""
        if self._last is None or not self._last.steps or self._last.division.num_replicas == 1:
            return None
        return self._last.division

    def is_waiting(self) -> bool:
        """Whether the app has made a sampler that divides data, and no step was fed by any: it may be warming up."""
        return not self._passes and any(sampler.num_replicas > 1 for sampler in self._made)

    def line(self) -> str | None:
        """Of the sampler that feeds optimizer steps now, whatever it divides."""
        return self._last.division.where if self._last is not None and self._last.steps else None

    def place(self) -> Place | None:
        """How far the optimizer steps have come in the data; None where `division` is."""
        return None if self._last is None or self.division() is None else Place(self._passes, self._last.steps)

    def _drawn(self, current: Pass, indices: Iterable[Any]) -> Iterator[Any]:
        for index in indices:
            self._last = current
            yield index


def different_epochs(places: Sequence[Place | None], where: str | None) -> Finding | None:
    """DP09, of replicas that are about to take the same step, and not the same one of an epoch."""
    known = [place for place in places if place is not None]
    rank = next((rank for rank, place in enumerate(known) if place != known[0]), None)
    if len(known) < len(places) or rank is None:
        return None
    one, other = known[0], known[rank]
    return Finding(
        "DP09",
        f"the epochs of replicas differ in length: replica 0 takes step {one.step} of epoch {one.epoch}, and replica "
        f"{rank} step {other.step} of epoch {other.epoch}",
        where,
        AS_MANY_BATCHES,
    )


def of_one_epoch(divisions: Sequence[Division | None]) -> Sequence[Division | None]:
    """The same divisions, as if all replicas were in the first epoch."""
    return [
        None if one is None else replace(one, order=None if one.order is None else (one.order[0], 0))
        for one in divisions
    ]


def wrong_division(divisions: Sequence[Division | None]) -> Finding | None:
    """DP04 or DP05, where each replica is fed by a sampler. It is told of the line of one that is wrong."""
    known = [division for division in divisions if division is not None]
    if len(known) < len(divisions):
        return None
    world_size, remedy = len(known), _remedy(known[0])
    for rank, division in enumerate(known):
        if division.num_replicas != world_size:
            what = f"the sampler of replica {rank} divides the data among {division.num_replicas} replicas, "
            return Finding("DP05", f"{what}and there are {world_size}", division.where, remedy)
    for rank, division in enumerate(known):
        if division in known[:rank]:
            what = f"replicas {known.index(division)} and {rank} are fed the same samples: both samplers have rank "
            return Finding("DP04", f"{what}{division.rank}", division.where, remedy)
    for rank, division in enumerate(known):
        apart = _difference(known[0], division)
        if apart is not None:
            what = f"the samplers of replicas 0 and {rank} differ in {apart}: samples are skipped, and seen twice"
            return Finding("DP05", what, division.where, remedy)
    return None


def _remedy(first: Division) -> str:
    """The sampler of replica 0, as every replica is to have it."""
    own = "DistributedSampler(dataset, num_replicas=dist.get_world_size(), rank=dist.get_rank()"
    own += ", drop_last=True" if first.drop_last else ""
    if first.order is None:
        return f"{own}, shuffle=False) on every rank"
    return f"{own}, seed={first.order[0]}), and set_epoch(epoch) with the same epoch on every rank"


def _difference(one: Division, other: Division) -> str | None:
    if one.length != other.length:
        return f"the length of their data, {one.length} and {other.length}"
    if (one.order is None) != (other.order is None):
        return "shuffle="
    if one.drop_last != other.drop_last:
        return "drop_last="
    for word, index in (("seed", 0), ("epoch", 1)):
        if one.order and other.order and one.order[index] != other.order[index]:
            return f"their {word}, {one.order[index]} and {other.order[index]}"
    return None


def _division(sampler: Sampler, where: str | None) -> Division:
    return Division(
        sampler.num_replicas,
        sampler.rank,
        len(sampler.dataset),  # type: ignore[arg-type]  # a Dataset need not have a length; this sampler needs it
        (sampler.seed, sampler.epoch) if sampler.shuffle else None,
        sampler.drop_last,
        where,
    )
