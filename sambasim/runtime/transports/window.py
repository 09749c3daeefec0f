"""Device sync, `--reduce-on-rdu`: the replicas of a node read each other's device memory, a shared memory window.

`Window`: parameters exist once per node. Between nodes, slices are sent by TCP: see `network`. Once all replicas have
completed a group, the owner of a slice reads it from all of them, in pieces that fit a core's cache, adds them in the
order of the tree and divides. Without clipping, it updates parameters and its own states in the same pieces.

`SmallWindow`, for small programs on one node, where waiting costs more than arithmetic: every replica sums all slices
itself and updates its own parameters, with the same bits. A step has one barrier instead of two."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple, final

import torch
from torch import Tensor

from sambasim.collectives import around
from sambasim.ir.dataflow import pass_and_update
from sambasim.ir.program import Member, ParameterGroup, Program
from sambasim.ir.types import DTYPE_BYTES, SymbolKind, pieces
from sambasim.records.trace import Track
from sambasim.runtime.machine.communicator import Communicator
from sambasim.runtime.machine.node_memory import Range
from sambasim.runtime.transports.communication import Communication, Fusions, GradientSync, Shared, Simple
from sambasim.runtime.transports.messages import MessageGroup, collect, gather_losses
from sambasim.runtime.transports.network import Network
from sambasim.runtime.transports.shared_flags import Counter, NodeFlags
from sambasim.runtime.values.mean import CHUNK_ELEMENTS, Sum, Wire, parts_of, square_sums, tree_mean
from sambasim.runtime.values.memory import SHARED_KINDS, DeviceMemory, slices_of
from sambasim.runtime.values.optimizers import Optimizers
from sambasim.runtime.values.slices import SliceUpdate, divides_exactly
from sambasim.runtime.watch.observer import SpanArgs, span
from sambasim.units import KIB, MIB

_TITLE = "device (peers' device memory)"
_UNCLIPPED = ("comm.reduce_scatter", "opt", "comm.all_gather")
_CLIPPED = ("comm.reduce_scatter", "opt.square_sums", "comm.all_reduce", "opt.total_norm", "opt", "comm.all_gather")

SMALL_BYTES = 64 * KIB
"""Up to this many bytes of gradients, every replica reduces all of them: `SmallWindow`."""

_NEAR_BYTES = MIB
"""Up to this many bytes of gradients, all that a rank reads lies in the cores' own caches (an estimate for 1 MiB)."""

_CACHED_ELEMENTS = 4 << 20
"""Longer slices come from memory, not from the shared cache; shorter pieces then leave cache for prefetching."""


def is_small(program: Program, communicator: Communicator) -> bool:
    """Whether every replica reduces and updates everything itself (`SmallWindow`)."""
    return communicator.node_count == 1 and program.gradient_bytes <= SMALL_BYTES


def allocate_devices(program: Program, communicator: Communicator) -> Mapping[int, DeviceMemory]:
    """Collective. The device memories of the node, by rank, in one shared window. Parameters are in that of the first
    rank only; where gradients are small, each rank updates its own. Raises MachineError if shared memory is short."""
    used = None if is_small(program, communicator) else _used_ranges(program, communicator)
    window = communicator.allocate_shared(program.device_bytes, used)
    shared = None if used is None else window.parts[0]
    parts = zip(communicator.local_ranks, window.parts, strict=True)
    return {rank: DeviceMemory(program, storage, shared) for rank, storage in parts}


def _used_ranges(program: Program, communicator: Communicator) -> Sequence[Range]:
    """The used byte ranges of this rank's part: own slices of states, parameters only on the node's first rank."""
    shared = SHARED_KINDS if communicator.local_rank > 0 else ()
    unused = {SymbolKind.OPTIMIZER_STATE, SymbolKind.REDUCE_BUFFER, *shared}  # operands have memory of their own
    touched = [
        (symbol.offset, symbol.offset + symbol.type.size_bytes)
        for symbol in program.symbols.values()
        if symbol.offset is not None and symbol.kind not in unused
    ]
    slices = slices_of(program, communicator.world_size)
    for group in program.groups:
        start, stop = slices[group.name][communicator.rank]
        for state in program.optimizers[group.optimizer].states:
            begin, size = group.regions[state], DTYPE_BYTES[group.region_type(state).dtype]
            touched.append((begin + start * size, begin + stop * size))
    return touched


@final
class Window(GradientSync):
    """The owner of a slice reads it from the device memory of the other ranks of the node."""

    title = _TITLE

    def __init__(self, by_rank: Mapping[int, DeviceMemory], communicator: Communicator, wire: Wire) -> None:
        super().__init__(by_rank[communicator.rank], MessageGroup(communicator), wire)
        self.communicator, self.by_rank = communicator, by_rank
        self._uncollapsed = _used_ranges(self.program, communicator)
        self.flags = NodeFlags(communicator, self.program.exchanged)
        self.network = Network(communicator, by_rank, self.slices, self.bytes_moved, wire)
        self.observed += [self.flags, self.network]
        if self.network.sources:
            self.title = _TITLE.replace(")", "; between nodes TCP)")
        self._exchange = gather_losses(communicator, range(communicator.world_size), self.program.exchanged)
        self._losses_of_all: Callable[[], Shared] | None = None
        sections = pass_and_update(self.program.training)[0] if self.program.training else ()
        self.steps, self.pass_length = 0, (sections[-1].stop if sections else 0) + 1

    def fusions(self) -> Fusions:
        if self.program.count is not None:  # known after the pass: an update cannot overlap with it
            return {}
        return {_UNCLIPPED: partial(self.reduce_scatter, self.program.groups)}

    def reduce_scatter(self, groups: Sequence[ParameterGroup], optimizers: Optimizers | None = None) -> "WindowReduce":
        self.observed.append(reduce := WindowReduce(self, groups, optimizers))
        return reduce

    def all_gather(self, groups: Sequence[ParameterGroup]) -> Communication:
        return Simple(partial(self.spread, groups))  # on one node nothing moves, because its ranks share the parameters

    def wait_for_readers(self) -> None:
        if used := self._uncollapsed:  # huge pages, which take seconds to make, do not delay the start of a run
            self._uncollapsed = ()
            self.communicator.at_close(self.memory.collapsing(used))

    def offer(self, losses: Sequence[float], request: int) -> None:
        super().offer(losses, request)
        if self.network.sources:
            self._losses_of_all = self._exchange(losses, request)

    def end_of_step(self) -> Shared:
        self.steps += 1
        if self._losses_of_all is None:
            self.flags.put(self.steps % 2, *self.offered)  # a reader may be one step behind
        elif self.communicator.local_size > 1:  # else a rank waits when it reads a parameter
            self.settle()
        self.flags.publish(Counter.UPDATED, self.steps)
        return self._meet()

    @span(Track.COLLECTIVES, "GATHER")
    def _meet(self) -> Shared:
        """Wait until all ranks have updated their slices, and exchange losses and requests."""
        shared = None if self._losses_of_all is None else self._losses_of_all()
        self.flags.wait(Counter.UPDATED, self.steps)
        return shared or Shared(*self.flags.numbers(self.steps % 2))

    def settle(self) -> None:
        if self.network.sources:
            self.network.wait_for(self.program.groups)

    def progress(self, count: int) -> int:
        """After `count` nodes of a pass. An exchange between a pass and its update counts as a step of all ranks."""
        return self.steps * self.pass_length + count

    def wait_for_updates(self) -> None:
        self.settle()
        self.communicator.node_barrier()

    def spread(self, groups: Sequence[ParameterGroup]) -> None:
        """Begin to send updated slices from their owners to all other nodes."""
        for group in groups if self.network.sources else ():
            self.network.gather(group)

    def meet(self) -> None:
        self.settle()
        self.steps += 1
        self.flags.meet(Counter.UPDATED, self.steps)

    def means(self, group: ParameterGroup) -> Iterator[tuple[int, Tensor]]:
        """After a step without an optimizer, parts of the mean of `group`, by the index of their first element."""
        for owner, (start, stop) in enumerate(self.slices[group.name]):
            yield start, self.by_rank[self.network.holder(owner)].region(group, "gradient")[start:stop]

    def _whole(self, group: ParameterGroup, member: Member, region: str) -> Tensor | None:
        readable = {rank: memory.region(group, region) for rank, memory in self.by_rank.items()}
        return collect(self.communicator, readable, self.slices[group.name], member)


class _Work(NamedTuple):
    """Of this rank for one group: compute the mean of its slice, or update it in `pieces`, each a sum and an update."""

    group: ParameterGroup
    ready_at: int
    reduce: Sum
    pieces: Sequence[tuple[Sum, SliceUpdate]]
    peer_bytes: int


@final
class WindowReduce(Communication):
    """Reduces `groups`; with `optimizers`, also updates them, which divides float32 gradients: no mean is stored. It
    overlaps with the last pass of a step: gradients are sent or reduced as soon as they are complete."""

    def __init__(self, window: Window, groups: Sequence[ParameterGroup], optimizers: Optimizers | None) -> None:
        self._window, self._flags, self._optimizers = window, window.flags, optimizers
        self._network = window.network if window.network.sources else None
        ranks = sorted({*window.by_rank, *window.network.sources})
        position = {rank: index for index, rank in enumerate(ranks)}  # among the operands
        pairs = around(window.communicator.node_of, window.communicator.node_index)
        self._steps = tuple((position[into], position[source]) for into, source in pairs)
        self._scratch = {of: torch.empty(CHUNK_ELEMENTS, dtype=getattr(torch, of)) for of in {g.dtype for g in groups}}
        ready = window.network.ready.items()
        ready_at = {name: at.reduce if optimizers is None else at.update for name, at in ready}
        self._all = sorted((self._work_of(g, ready_at[g.name]) for g in groups), key=lambda work: work.ready_at)
        self._first_reader = window.network.first_reader
        self._last_read_first = sorted(groups, key=lambda group: self._first_reader[group.name], reverse=True)
        self._awaited: list[ParameterGroup] = []  # a stack: groups whose parameters this pass has not read yet
        self._incomplete: list[_Work] = []  # a stack: not yet complete on this node at the last check
        self._pending: list[_Work] = []  # complete, and not reduced
        self._updating_s = self._updated_in_pass_s = self._in_pass_s = 0.0
        self.waited_in_pass_s = 0.0
        """Seconds that the pass waited for parameters of the last step."""

    def _work_of(self, group: ParameterGroup, ready_at: int) -> _Work:
        window, replicas = self._window, self._window.replicas
        start, stop = window.updated(group)
        gradients = {rank: memory.region(group, "gradient")[start:stop] for rank, memory in window.by_rank.items()}
        operands = [each for _, each in sorted({**gradients, **window.network.operands[group.name]}.items())]
        near = window.program.gradient_bytes <= _NEAR_BYTES
        mean = partial(tree_mean, near=near, steps=self._steps, wire=window.wire)
        updates = []
        if self._optimizers is not None:
            # If the update divides its gradient, a pass over the sum is saved.
            divisor = replicas if divides_exactly(group.dtype) else 1
            limit = CHUNK_ELEMENTS if stop - start <= _CACHED_ELEMENTS else CHUNK_ELEMENTS // 2
            for a, b in pieces(start, stop, limit):
                part, scratch = slice(a - start, b - start), self._scratch[group.dtype][: b - a]
                add = mean([operand[part] for operand in operands], scratch, replicas // divisor)
                updates.append((add, self._optimizers.slice(group, a, b, scratch, divisor)))
        peer_bytes = (len(window.by_rank) - 1) * (stop - start) * DTYPE_BYTES[group.dtype]
        return _Work(group, ready_at, mean(operands, gradients[window.replica], replicas), updates, peer_bytes)

    def begin_step(self) -> None:
        """A step begins: gradients are about to be overwritten."""
        self._incomplete = self._all[::-1]
        self._updating_s = self._updated_in_pass_s = self._in_pass_s = self.waited_in_pass_s = 0.0
        if self._network is not None:
            self._network.begin_step(self._last_read_first)
            self._awaited = self._last_read_first.copy()

    def nodes_begin(self, stop: int) -> None:
        """Nodes up to `stop` run next: wait for the parameters that they read."""
        began_s, read = time.perf_counter(), list[ParameterGroup]()
        while self._awaited and self._first_reader[self._awaited[-1].name] < stop:
            read.append(self._awaited.pop())
        if read and self._network is not None:
            self._network.wait_for(read)
            self.waited_in_pass_s += time.perf_counter() - began_s

    def nodes_done(self, count: int) -> None:
        """This rank has run `count` nodes of the pass."""
        began_s, incomplete = time.perf_counter(), self._incomplete
        self._flags.publish(Counter.PROGRESS, self._window.progress(count))
        while incomplete and (at := incomplete[-1].ready_at) <= count:
            if not self._flags.reached(Counter.PROGRESS, self._window.progress(at)):
                break  # other replicas of the node have not completed the group
            self._send(incomplete.pop())
        while work := self._next():
            self._complete(work)
        self._in_pass_s += time.perf_counter() - began_s

    def begin(self, *operands: object) -> None:
        self._updated_in_pass_s = self._updating_s
        before = self._window.progress(0)
        self._flags.publish(Counter.PROGRESS, before + self._window.pass_length)
        while self._incomplete:
            self._flags.wait(Counter.PROGRESS, before + self._incomplete[-1].ready_at)
            self._send(self._incomplete.pop())

    def finish(self) -> None:
        while self._pending:
            if self._network is not None:
                self._network.receive_one([work.group for work in self._pending])
            if work := self._next():
                self._complete(work)
        if self._optimizers is None:
            # The update comes next, and changes parameters: no rank may still read them in its pass.
            self._flags.wait(Counter.PROGRESS, self._window.progress(self._window.pass_length))
        else:
            self.update_s = self._updating_s - self._updated_in_pass_s

    @property
    def hidden_s(self) -> float:
        """Seconds of communication during the pass, in this step."""
        return self._in_pass_s - self._updated_in_pass_s

    def _next(self) -> _Work | None:
        """Of those whose operands are here, the first whose parameters are read; it is pending no more."""
        if self._network is None:  # all wait for nothing, and a sort would take longer than a small group's sum
            return self._pending.pop(0) if self._pending else None
        here = [work for work in self._pending if self._network.has_received(work.group)]
        first = min(here, key=lambda work: self._first_reader[work.group.name], default=None)
        if first is not None:
            self._pending.remove(first)
        return first

    def _send(self, work: _Work) -> None:
        self._pending.append(work)
        if self._network is not None:
            self._network.send(work.group)

    def _complete(self, work: _Work) -> None:
        (self._reduce if self._optimizers is None else self._reduce_and_update)(work)
        if self._network is not None:
            self._network.reduced(work.group)
            if self._optimizers is not None:
                self._network.gather(work.group)
        self._window.bytes_moved.peer += work.peer_bytes

    def _bytes(self, work: _Work) -> SpanArgs:
        name, incoming = work.group.name, self._window.network.incoming_bytes
        return {"group": name, "peer_bytes": work.peer_bytes, "network_bytes": incoming[name]}

    @span(Track.COLLECTIVES, "REDUCE", _bytes)
    def _reduce(self, work: _Work) -> None:
        work.reduce()

    @span(Track.COLLECTIVES, "REDUCE, OPT", _bytes)
    def _reduce_and_update(self, work: _Work) -> None:
        for add_up, update in work.pieces:
            add_up()
            began_s = time.perf_counter()
            update()
            self._updating_s += time.perf_counter() - began_s


@final
class SmallWindow(GradientSync):
    """Every replica reads the device memory of all others and owns all parameters. For one node."""

    title = _TITLE

    def __init__(self, by_rank: Mapping[int, DeviceMemory], communicator: Communicator, wire: Wire) -> None:
        memory, size = by_rank[communicator.rank], communicator.world_size
        super().__init__(memory, MessageGroup(communicator), wire, replicated=True)
        self.flags = NodeFlags(communicator, self.program.exchanged)
        self.observed.append(self.flags)
        self.steps = 0
        self._has_met = False  # in this step
        self.means: dict[str, Tensor] = {}
        self.reductions = []
        for group in memory.program.groups:
            gradients = [memory.region(group, "gradient") for _, memory in sorted(by_rank.items())]
            mean = self.means[group.name] = torch.empty_like(gradients[0])
            self.reductions.append(tree_mean(gradients, mean, size, near=True, wire=wire))
        self.peer_bytes = (size - 1) * sum(mean.nbytes for mean in self.means.values())

    def fusions(self) -> Fusions:
        return {_UNCLIPPED: partial(_Step, self), _CLIPPED: partial(_Step, self, clips=True)}

    def reduce_scatter(self, groups: Sequence[ParameterGroup]) -> Communication:
        return Simple(self._reduce_in_place)

    def offer(self, losses: Sequence[float], request: int) -> None:
        self.offered = losses, request
        self.flags.put(self.steps % 2, losses, request)  # a reader may be one step behind

    def wait_for_readers(self) -> None:
        self.flags.wait(Counter.UPDATED, self.steps)

    def reduce(self) -> None:
        """Collective. Compute all means into `means`. Afterwards other ranks may still read this rank's gradients."""
        self._meet(self.reductions)
        self.bytes_moved.peer += self.peer_bytes

    def end_of_step(self) -> Shared:
        """After a barrier if `reduce` has not been called."""
        if not self._has_met:
            self._meet(())
        self._has_met = False
        return Shared(*self.flags.numbers((self.steps - 1) % 2))

    def _meet(self, reductions: Sequence[Sum]) -> None:
        self.flags.meet(Counter.PROGRESS, self.steps + 1)
        for add_up in reductions:
            add_up()
        self._has_met = True
        self.steps += 1
        self.flags.publish(Counter.UPDATED, self.steps)

    def _reduce_in_place(self) -> None:
        """REDUCE by itself: the means replace this rank's gradients, once all have read them."""
        self.reduce()
        self.wait_for_readers()
        for group in self.program.groups:
            self.memory.region(group, "gradient").copy_(self.means[group.name])


@final
class _Step(Communication):
    """REDUCE, GRADNORM if the program clips, OPT and GATHER of all groups."""

    def __init__(self, window: SmallWindow, optimizers: Optimizers, *, clips: bool = False) -> None:
        self._window, self._optimizers, self._clips = window, optimizers, clips
        groups, means = window.program.groups, window.means
        parts = [part for group in groups for part in parts_of(group, means[group.name], (0, group.numel))]
        self._square_sums = square_sums(parts, sum(member.blocks for group in groups for member in group.members))
        self._updates = [optimizers.slice(group, 0, group.numel, means[group.name]) for group in groups]

    def finish(self) -> float | None:
        self._window.reduce()
        began_s = time.perf_counter()
        norm = self._optimizers.clip(self._square_sums()) if self._clips else None
        for update in self._updates:
            update()
        self.update_s = time.perf_counter() - began_s
        return norm
