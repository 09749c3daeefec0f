"""DP04, DP05, DP06, DP09, AP03: what replicas are fed, from torch's DistributedSampler and from the batches."""

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import wraps
from itertools import chain, combinations
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.utils.data.distributed import DistributedSampler

from sambasim.data.identity import identity_of
from sambasim.ir.graph import Node, SectionKind
from sambasim.ir.program import Program
from sambasim.runtime.values.memory import tensor_sha256
from sambasim.samba.process import Finding, app_line, report

EVEN_BATCHES = "as many batches on every rank: DistributedSampler(dataset, …), and DataLoader(…, drop_last=True)"
"""Remedy for DP09."""

_SHARD = "DataLoader(dataset, sampler=DistributedSampler(dataset, num_replicas=…, rank=…), …) without shuffle="
_WHOLE = "give the sampler of every rank the whole data set: the sampler divides it"
_WARM_UP_STEPS = 1
"""A pass that feeds no more steps is no epoch, but `next(iter(loader))` for a warm-up."""
_CHANCE = 8
"""Replicas that draw at random with replacement share a few samples by chance: up to so many for each further one."""

Sampler: TypeAlias = "DistributedSampler[Any]"
Place: TypeAlias = tuple[int, int]  # epoch, and optimizer step of it; both count from 1


@dataclass(frozen=True, slots=True)
class Division:
    """How a sampler divides a data set of `length` samples, with the identity `data`, in one epoch.

    order: seed and epoch; None without shuffle
    where: the line of the app that made the sampler or, if that was before `Samplers.start`, iterates it"""

    num_replicas: int
    rank: int
    length: int
    order: tuple[int, int] | None
    drop_last: bool
    data: str = ""
    where: str | None = field(default=None, compare=False)


@dataclass(slots=True)
class Iteration:
    """One iteration of a sampler, and how many optimizer steps have used its samples.

    evaluated_after: the number of optimizer steps when a forward alone used it; None if it trains"""

    sampler: Sampler
    division: Division
    where: str | None
    steps: int = 0
    evaluated_after: int | None = None


class Samplers:
    """The DistributedSamplers that feed optimizer steps. Those of an evaluation are ignored: it may use any order."""

    def __init__(self) -> None:
        self.shorten: Callable[[Iterator[Any]], Iterable[Any]] = iter  # the indices of an epoch, during a check
        self.passes = 0  # over a sampler, that have fed an optimizer step
        self._last: Iteration | None = None  # the latest, unless it is an evaluation
        self._trained: Iteration | None = None  # the one that the last optimizer step used
        self._undecided: Iteration | None = None  # used by a forward so far: training only if a backward follows
        self._undecided_batch: Sequence[Tensor] = ()  # its batch, kept alive so that no other batch gets its addresses
        self._steps = 0  # of optimizers
        self._orders: WeakKeyDictionary[Sampler, set[tuple[int, int]]] = WeakKeyDictionary()  # that have trained
        self._made: WeakKeyDictionary[Sampler, tuple[str | None, str]] = WeakKeyDictionary()  # where, on which data

    def start(self) -> None:
        """Watch samplers that are made or iterated from now on. Called once in a process."""
        iterate, make = DistributedSampler.__iter__, DistributedSampler.__init__

        def iterated(sampler: Sampler) -> Iterator[Any]:
            where, order = app_line(), (sampler.seed, sampler.epoch) if sampler.shuffle else None
            length = len(sampler.dataset)  # type: ignore[arg-type]  # this sampler needs a length; not every Dataset has one
            at, data = self._made.get(sampler, (where, ""))
            division = Division(sampler.num_replicas, sampler.rank, length, order, sampler.drop_last, data, at or where)
            return self._drawn(Iteration(sampler, division, where), self.shorten(iterate(sampler)))

        @wraps(make)
        def made(sampler: Sampler, *arguments: Any, **keywords: Any) -> None:
            make(sampler, *arguments, **keywords)
            self._made[sampler] = app_line(), identity_of(sampler.dataset)

        DistributedSampler.__iter__ = iterated  # type: ignore[method-assign]  # replaced on purpose: apps make samplers, not we
        DistributedSampler.__init__ = made  # type: ignore[method-assign, assignment]  # replaced on purpose, for any arguments

    def note_run(self, kinds: Collection[SectionKind], batch: Mapping[str, Tensor]) -> None:
        """Sections of `kinds` are about to run on `batch`, which was drawn last.

        A forward alone is an evaluation, and its iteration is set aside, because workers of a DataLoader may have drawn
        all samples. It trains after all if a backward of the same batch follows, or if it goes on after the next step.
        """
        backward = SectionKind.BCKWD in kinds
        if SectionKind.FWD not in kinds:
            if backward and self._undecided is not None:
                self._train_on(self._undecided)
            return
        tensors = list(batch.values())
        addresses, before = ([tensor.data_ptr() for tensor in listed] for listed in (tensors, self._undecided_batch))
        if self._undecided is not None and addresses == before:
            self._train_on(self._undecided)
        self._undecided, self._undecided_batch = None, ()
        if not backward and self._last is not None and not self._last.steps:
            self._undecided, self._undecided_batch, self._last = self._last, tensors, self._trained
            self._undecided.evaluated_after = self._steps

    def note_step(self, *, trains: bool = True) -> None:
        """An optimizer step uses what was drawn last, or what predicts a shard does. Reports DP06 if it `trains`."""
        self._steps += 1
        self._trained = last = self._last
        if last is None:
            return
        last.steps += 1
        self.passes += last.steps == 1
        order = last.division.order
        if order is None or not trains or last.steps > _WARM_UP_STEPS + 1:
            return
        orders = self._orders.setdefault(last.sampler, set())
        if last.steps > _WARM_UP_STEPS:
            orders.add(order)
        elif order in orders:
            what = f"the sampler shuffles in the same order again, because its epoch is still {order[1]}"
            report(Finding("DP06", what, last.where, "sampler.set_epoch(epoch) before each epoch"))

    def feeding(self) -> tuple[Division | None, Place | None, str | None]:
        """How the sampler that feeds optimizer steps now divides the data, how far training is in it, and its line;
        without the first two if it does not divide."""
        if (last := self._last) is None or not last.steps:
            return None, None, None
        division, place = last.division, (self.passes, last.steps)
        return (division, place, division.where) if division.num_replicas > 1 else (None, None, division.where)

    def _drawn(self, current: Iteration, indices: Iterable[Any]) -> Iterator[Any]:
        for index in indices:
            if current.evaluated_after != self._steps:
                self._train_on(current)
            yield index

    def _train_on(self, current: Iteration) -> None:
        current.evaluated_after = None
        self._last, self._undecided = current, None


def different_epochs(places: Sequence[Place | None], where: str | None) -> Finding | None:
    """DP09 for replicas that take the same step in different epochs."""
    known = [place for place in places if place is not None]
    rank = next((rank for rank, place in enumerate(known) if place != known[0]), None)
    if len(known) < len(places) or rank is None:
        return None
    first, other = (f"step {step} of epoch {epoch}" for epoch, step in (known[0], known[rank]))
    what = f"the epochs of replicas differ in length: replica 0 takes {first}, and replica {rank} {other}"
    return Finding("DP09", what, where, EVEN_BATCHES)


def wrong_division(divisions: Sequence[Division | None], *, compares_epochs: bool = True) -> Finding | None:
    """DP04 or DP05 where a sampler feeds each replica, with the line of a wrong one."""
    known = [division for division in divisions if division is not None]
    if len(known) < len(divisions):
        return None
    if not compares_epochs:
        known = [replace(each, order=each.order and (each.order[0], 0)) for each in known]
    first = known[0]
    for rank, division in enumerate(known):
        if division.num_replicas != len(known):
            among = f"among {division.num_replicas} replicas, and there are {len(known)}"
            what = f"the sampler of replica {rank} divides the data {among}"
            return Finding("DP05", what, division.where, _remedy(first))
    for rank, division in enumerate(known):
        if division in known[:rank]:
            ranks = f"replicas {known.index(division)} and {rank}"
            what = f"{ranks} get the same samples: both samplers have rank {division.rank}"
            return Finding("DP04", what, division.where, _remedy(first))
    for rank, division in enumerate(known):
        if difference := _difference(first, division):
            what = f"the samplers of replicas 0 and {rank} differ in {difference}: samples are skipped or repeated"
            return Finding("DP05", what, division.where, _remedy(first) if division.data == first.data else _WHOLE)
    return None


def _remedy(first: Division) -> str:
    """The call that makes the sampler of replica 0, for every replica."""
    call = "DistributedSampler(dataset, num_replicas=dist.get_world_size(), rank=dist.get_rank()"
    call += ", drop_last=True" if first.drop_last else ""
    if first.order is None:
        return f"{call}, shuffle=False) on every rank"
    return f"{call}, seed={first.order[0]}), and set_epoch(epoch) with the same epoch on every rank"


def _difference(*two: Division) -> str | None:
    """The first argument in which the two samplers differ."""
    facts: dict[str, list[Any]] = {
        "the length of their data, {} and {}": [each.length for each in two],
        "their data, {} and {}": [each.data for each in two],
        "shuffle=": [each.order is not None for each in two],
        "drop_last=": [each.drop_last for each in two],
        "their seed, {} and {}": [each.order and each.order[0] for each in two],
        "their epoch, {} and {}": [each.order and each.order[1] for each in two],
    }
    return next((words.format(*values) for words, values in facts.items() if values[0] != values[1]), None)


def digests(batch: Mapping[str, Tensor]) -> tuple[str, ...]:
    """One digest for each tensor of a batch; none for a warm-up batch."""
    return () if _is_constant(batch) else tuple(map(tensor_sha256, batch.values()))


def sample_digests(batch: Mapping[str, Tensor]) -> tuple[str, ...]:
    """One digest for each sample of a batch, over all tensors; none for a warm-up batch."""
    if _is_constant(batch):
        return ()
    rows = zip(*(tensor.detach().unbind() for tensor in batch.values()), strict=True)
    return tuple("".join(tensor_sha256(part.contiguous()) for part in row) for row in rows)


def _is_constant(batch: Mapping[str, Tensor]) -> bool:
    """Whether all elements of each tensor are equal, as in a warm-up batch. False if all tensors have one element."""
    tensors = [tensor.detach().flatten() for tensor in batch.values()]
    return any(len(tensor) > 1 for tensor in tensors) and all(bool((tensor == tensor[:1]).all()) for tensor in tensors)


def equal_batches(
    batches: Sequence[tuple[str, ...]], times: Counter[tuple[int, int]], step: int, where: str | None
) -> Finding | None:
    """DP04 once two replicas got equal batches twice; once may be chance. `batches` holds digests by rank; `times`
    counts equal batches of two replicas, in all steps."""
    pairs = [(a, b) for a, b in combinations(range(len(batches)), 2) if batches[a] == batches[b]]
    times.update(pairs)
    for first, second in pairs:
        if times[first, second] > 1:
            what = f"replicas {first} and {second} get the same samples, again in step {step}"
            return Finding("DP04", what, where, _SHARD)
    return None


def shared_samples(replicas: Sequence[Sequence[tuple[str, ...]]], where: str | None) -> Finding | None:
    """DP05: several replicas got the same samples. `replicas` are the digests of samples by rank and step. Only the
    first epoch counts, because later ones may give a sample to another replica: up to where some replica sees a sample
    again, without the step before, which may be padded with samples of other replicas."""
    owners: dict[str, set[int]] = defaultdict(set)
    steps = min(len(fed) for fed in replicas)
    for fed in replicas:
        seen: set[str] = set()
        for step, batch in enumerate(fed[:steps]):
            if seen.intersection(batch):
                steps = max(step - 1, 0)
                break
            seen.update(batch)
    for rank, fed in enumerate(replicas):
        for sample in chain.from_iterable(fed[:steps]):
            owners[sample].add(rank)
    shared = sum(len(ranks) > 1 for ranks in owners.values())
    if shared <= _CHANCE * (len(replicas) - 1):
        return None
    what = f"{shared} of the {len(owners)} samples of the first {steps} steps go to several replicas"
    return Finding("DP05", what, where, _SHARD)


_PICKING = {"embedding", "_embedding_bag", "index", "index_select", "gather", "one_hot"}
_RESHAPING = {"view", "reshape", "expand", "unsqueeze", "squeeze", "slice", "select", "transpose", "t", "_to_copy"}
"""ATen operators that read row numbers, and operators that only change the shape or type of their input."""


def lossy(program: Program, batch: Mapping[str, Tensor], where: str | None) -> Iterator[Finding]:
    """AP03 for each input whose values an RDU would change: it stores labels as int16 and floats as bf16."""
    indices, limits = _row_numbers(program), torch.iinfo(torch.int16)
    for name, tensor in batch.items():
        if tensor.dtype is torch.float64:
            what = f"{name} is float64: an RDU computes in bf16, and keeps 8 of its 53 bits"
            yield Finding("AP03", what, where, f"{name}.float() in the dataset, so that all machines get these numbers")
        elif not tensor.is_floating_point() and tensor.numel() and name not in indices:
            least, most = map(int, tensor.aminmax())
            if least < limits.min or most > limits.max:
                value = most if most > limits.max else least
                what = f"{name} has {value}: an RDU stores labels as int16, up to {limits.max}"
                yield Finding("AP03", what, where, f"at most {limits.max + 1} classes, or two labels in place of one")


def _row_numbers(program: Program) -> set[str]:
    """Inputs that select rows, such as the tokens of an embedding: they are no labels."""
    graph = program.leading
    counted = {result for node in graph.nodes if _name(node) == "arange" for result in node.results}
    indices: set[str] = set()
    for node in reversed(graph.nodes):
        name, read = _name(node), set(node.reads)
        one_hot = name == "eq" and not counted.isdisjoint(read)  # torch.export writes one_hot as a comparison
        reshaped = name in _RESHAPING and not indices.isdisjoint(node.results)
        if name in _PICKING or one_hot or reshaped:
            indices |= read
    return indices


def _name(node: Node) -> str:
    return node.operator.split(".")[1]  # `embedding` of `aten.embedding.default`
