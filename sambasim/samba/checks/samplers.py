"""DP04, DP05, DP06 and DP09: what torch's DistributedSamplers say of how the data are divided among the replicas."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import wraps
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary, WeakSet

from torch import Tensor
from torch.utils.data.dataloader import _BaseDataLoaderIter
from torch.utils.data.distributed import DistributedSampler

from sambasim.ir.graph import SectionKind
from sambasim.samba.checks.findings import Finding
from sambasim.samba.checks.meeting import AS_MANY_BATCHES
from sambasim.samba.checks.place import app_line
from sambasim.samba.checks.telling import telling

_A_LOOK = 1
"""A pass that feeds no more steps than this is no epoch, but `next(iter(loader))` for a batch to warm up with."""

_THE_WHOLE = "give the sampler of every rank the whole data set, and no part of it: the sampler divides it"

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
    evaluated_after: int | None = None
    """How many optimizer steps there were when a forward alone used it: it evaluates. None if it trains."""


class Samplers:
    """The DistributedSamplers of this process, from `start` to `stop`.

    Only those that feed optimizer steps matter: it is right to evaluate in one order, or to go over the data before.
    """

    def __init__(self) -> None:
        self.shortened: Callable[[Iterator[Any]], Iterable[Any]] = iter
        """What is left of the indices of an epoch: all of them, unless a check on demand is to see a second one."""
        self._last: Pass | None = None
        """That which was drawn from last, of those that do not evaluate."""
        self._trained: Pass | None = None
        """That of the last optimizer step."""
        self._doubted: Pass | None = None
        """That of the last forward, which was one alone: a backward may follow."""
        self._doubted_batch: Sequence[int] = ()
        self._passes = self._steps = 0
        """Passes of which optimizer steps have used samples; and optimizer steps."""
        self._evaluating: WeakSet[Sampler] = WeakSet()
        self._yielded = self._fed_by_loader = False
        """Whether a DataLoader has yielded a batch since the last forward; and had, before that."""
        self._orders: WeakKeyDictionary[Sampler, set[tuple[int, int]]] = WeakKeyDictionary()
        self._made: WeakKeyDictionary[Sampler, str | None] = WeakKeyDictionary()
        self._originals: tuple[Callable[[Sampler], Iterator[Any]], Callable[..., None], Callable[..., Any]] | None = (
            None
        )

    def start(self) -> None:
        """Watch every sampler that is made or iterated, and every DataLoader that is, from now on."""
        iterate, make, next_of = DistributedSampler.__iter__, DistributedSampler.__init__, _BaseDataLoaderIter.__next__
        self._originals = iterate, make, next_of

        def iterated(sampler: Sampler) -> Iterator[Any]:
            indices, where = self.shortened(iterate(sampler)), app_line()
            return self._drawn(Pass(sampler, _division(sampler, self._made.get(sampler) or where), where), indices)

        @wraps(make)
        def made(sampler: Sampler, *arguments: Any, **keywords: Any) -> None:
            make(sampler, *arguments, **keywords)
            self._made[sampler] = app_line()

        def yielding(batches: "_BaseDataLoaderIter") -> Any:
            batch = next_of(batches)
            self._yielded = True
            return batch

        DistributedSampler.__iter__ = iterated  # type: ignore[method-assign]  # replaced on purpose: apps make samplers, not we
        DistributedSampler.__init__ = made  # type: ignore[method-assign, assignment]  # replaced on purpose, for any arguments
        _BaseDataLoaderIter.__next__ = yielding  # type: ignore[method-assign, assignment]  # replaced on purpose

    def stop(self) -> None:
        """Leave torch as it was."""
        if self._originals is not None:
            DistributedSampler.__iter__, DistributedSampler.__init__, _BaseDataLoaderIter.__next__ = self._originals  # type: ignore[method-assign]  # put back
            self._originals = None

    def note_run(self, kinds: Collection[SectionKind], batch: Mapping[str, Tensor]) -> None:
        """Sections of these kinds are about to use what was drawn last; `batch` is what a forward is given.

        A forward alone evaluates, and what it used is forgotten for what trains: a DataLoader with workers may have
        drawn the rest of its epoch before. If a backward of the same batch follows, or samples of the same pass are
        drawn behind the next optimizer step, it was training after all.
        """
        backward = SectionKind.BCKWD in kinds
        if SectionKind.FWD not in kinds:
            if backward and self._doubted is not None:
                self._train_on(self._doubted)
            return
        self._fed_by_loader, self._yielded = self._yielded, False
        if self._doubted is not None and not self._fed_by_loader and _addresses(batch) == self._doubted_batch:
            self._train_on(self._doubted)
        self._doubted = None
        if not backward and self._last is not None and not self._last.steps:
            self._doubted, self._doubted_batch, self._last = self._last, _addresses(batch), self._trained
            self._doubted.evaluated_after = self._steps
            self._evaluating.add(self._doubted.sampler)

    def note_step(self) -> None:
        """An optimizer step uses what was drawn last."""
        self._steps += 1
        self._trained = last = self._last
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
        """Whether the app has made a sampler that divides data, to train, and no step was fed by any, nor is fed by a
        DataLoader now: it may be warming up."""
        if self._fed_by_loader or self.has_fed:
            return False
        return any(one.num_replicas > 1 and one not in self._evaluating for one in self._made)

    @property
    def has_fed(self) -> bool:
        """Whether any sampler has fed an optimizer step."""
        return self._passes > 0

    def line(self) -> str | None:
        """Of the sampler that feeds optimizer steps now, whatever it divides."""
        return self._last.division.where if self._last is not None and self._last.steps else None

    def place(self) -> Place | None:
        """How far the optimizer steps have come in the data; None where `division` is."""
        return None if self._last is None or self.division() is None else Place(self._passes, self._last.steps)

    def _drawn(self, current: Pass, indices: Iterable[Any]) -> Iterator[Any]:
        for index in indices:
            if current.evaluated_after != self._steps:
                self._train_on(current)
            yield index

    def _train_on(self, current: Pass) -> None:
        if current.evaluated_after is not None:
            self._evaluating.discard(current.sampler)
            current.evaluated_after = None
        self._last, self._doubted = current, None


def _addresses(batch: Mapping[str, Tensor]) -> Sequence[int]:
    return [tensor.data_ptr() for tensor in batch.values()]


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
            uneven = division.length != known[0].length
            return Finding("DP05", what, division.where, _THE_WHOLE if uneven else remedy)
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
