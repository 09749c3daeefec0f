"""REDUCE over a shared window, and REDUCE, OPT and GATHER in one pass over memory.

    section done   a replica publishes how many sections it has run, and checks which groups all replicas have completed
    group done     the owner of a slice reads it from all replicas, in pieces that fit a core's cache: it adds them in
                   the order of the tree and divides; if the optimizer is fused, it updates the node's parameters and
                   its own states in the same piece
    pass done      the owner waits for the remaining groups

No replica waits for another before its own pass has ended.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, final

import torch
from torch import Tensor

from sambasim.collectives.slices import pieces
from sambasim.collectives.tree import around
from sambasim.ir.dataflow import readiness
from sambasim.ir.program import ParameterGroup
from sambasim.ir.types import DTYPE_BYTES
from sambasim.records.trace import Track
from sambasim.runtime.kernels.tree_mean import Sum
from sambasim.runtime.mean import CHUNK_ELEMENTS, TreeMean
from sambasim.runtime.observer import SpanArgs, StepObserver, span
from sambasim.runtime.optimizers import Optimizers, SliceUpdate, divides_exactly
from sambasim.runtime.transports.base import Overlapped
from sambasim.runtime.transports.flags import Counter
from sambasim.units import MIB

if TYPE_CHECKING:
    from sambasim.runtime.transports.window import Window

_NEAR_BYTES = MIB
"""Up to this many bytes of gradients, everything that a rank reads lies in the private caches of the cores (an estimate
for caches of 1 MiB)."""

_CACHED_ELEMENTS = 4 << 20
"""Longer slices come from memory, not from the shared cache; shorter pieces then leave cache for prefetching."""


@dataclass(frozen=True, slots=True)
class _Piece:
    """A piece of a slice: `add_up` computes its sum in `scratch`, `update` applies it."""

    add_up: Sum
    scratch: Tensor
    update: SliceUpdate


@dataclass(frozen=True, slots=True)
class _Work:
    """The work of this rank for one group: compute the mean of its slice, or update it piece by piece."""

    group: ParameterGroup
    ready_at: int
    reduce: Sum
    pieces: Sequence[_Piece]
    peer_bytes: int


@final
class WindowReduce(Overlapped):
    """Reduces `groups`; with `optimizers`, also updates them."""

    def __init__(self, window: "Window", groups: Sequence[ParameterGroup], optimizers: Optimizers | None) -> None:
        self._window = window
        self.observer: StepObserver | None = None
        self.replica = window.replica
        self._network = window.network
        self._flags = window.flags
        self._optimizers = optimizers
        steps = self._additions()
        dtypes = dict.fromkeys(group.dtype for group in groups)
        self._means = {name: TreeMean(steps, window.replicas, getattr(torch, name)) for name in dtypes}
        ready = readiness(window.program)
        ready_at = {name: one.reduce if optimizers is None else one.update for name, one in ready.items()}
        work = [self._work_of(group, ready_at[group.name]) for group in groups]
        self._all = sorted(work, key=lambda one: one.ready_at)
        self._incomplete: list[_Work] = []  # not yet complete on this node at the last check
        self._pending: list[_Work] = []
        self._updating_s = self._updated_in_pass_s = self._in_pass_s = 0.0

    def begin_step(self) -> None:
        self._pending = self._all[::-1]
        self._incomplete = self._pending.copy()
        self._updating_s = self._updated_in_pass_s = self._in_pass_s = 0.0
        self._network.begin_step([one.group for one in self._all])

    def section_done(self, count: int) -> None:
        window = self._window
        self._flags.publish(Counter.PROGRESS, window.progress(count))
        began_s = time.perf_counter()
        while self._incomplete and self._is_complete(self._incomplete[-1], count):
            self._network.send(self._incomplete.pop().group)
        while len(self._pending) > len(self._incomplete) and self._network.has_received():
            self._finish(self._pending.pop())
        self._in_pass_s += time.perf_counter() - began_s

    def begin(self, *operands: object) -> None:
        self._updated_in_pass_s = self._updating_s
        self._flags.publish(Counter.PROGRESS, self._window.progress(self._window.pass_length))
        while self._incomplete:
            self._flags.wait(Counter.PROGRESS, self._window.progress(self._incomplete[-1].ready_at))
            self._network.send(self._incomplete.pop().group)

    def finish(self) -> object:
        while self._pending:
            self._network.receive()
            self._finish(self._pending.pop())
        if self._optimizers is None:
            self._window.wait_for_passes()  # from here on, parameters may be changed
        else:
            self._window.spread()
        return None

    @property
    def hidden_s(self) -> float:
        return self._in_pass_s - self._updated_in_pass_s

    @property
    def update_s(self) -> float:
        return self._updating_s - self._updated_in_pass_s

    def _is_complete(self, work: _Work, count: int) -> bool:
        """Whether all replicas of the node have completed the group, if this one has run `count` sections."""
        at = work.ready_at
        return at <= count and self._flags.reached(Counter.PROGRESS, self._window.progress(at))

    def _args(self, work: _Work) -> SpanArgs:
        network_bytes = sum(operand.nbytes for operand in self._network.operands(work.group).values())
        return {"group": work.group.name, "peer_bytes": work.peer_bytes, "network_bytes": network_bytes}

    def _finish(self, work: _Work) -> None:
        if self._window.observer is None:
            self._reduce(work)
        else:
            self.observer = self._window.observer
            (self._observed_reduce if self._optimizers is None else self._observed_update)(work)
        self._network.done(work.group)
        self._window.bytes_moved.peer += work.peer_bytes

    @span(Track.COLLECTIVES, "REDUCE", _args)
    def _observed_reduce(self, work: _Work) -> None:
        self._reduce(work)

    @span(Track.COLLECTIVES, "REDUCE, OPT", _args)
    def _observed_update(self, work: _Work) -> None:
        self._reduce(work)

    def _reduce(self, work: _Work) -> None:
        if self._optimizers is None:
            work.reduce()
            return
        clock, updating_s = time.perf_counter, 0.0
        for piece in work.pieces:
            piece.add_up()
            began_s = clock()
            piece.update(piece.scratch)
            updating_s += clock() - began_s
        self._updating_s += updating_s

    def _work_of(self, group: ParameterGroup, ready_at: int) -> _Work:
        window, mean = self._window, self._means[group.dtype]
        start, stop = window.owned(group)
        gradients = {rank: memory.region(group, "gradient")[start:stop] for rank, memory in window.by_rank.items()}
        gathered = {**gradients, **self._network.operands(group)}
        operands = [gathered[rank] for rank in sorted(gathered)]  # in the order of the tree
        near = window.program.gradient_bytes <= _NEAR_BYTES
        done = []
        if self._optimizers is not None:
            # If the update divides its gradient, a pass over the sum is saved.
            divisor = window.replicas if divides_exactly(group.dtype) else 1
            add_up = mean.of if divisor == 1 else mean.total_of
            limit = CHUNK_ELEMENTS if stop - start <= _CACHED_ELEMENTS else CHUNK_ELEMENTS // 2
            for a, b in pieces(start, stop, limit):
                part, scratch = slice(a - start, b - start), mean.scratch[: b - a]
                update = self._optimizers.slice(group, a, b, divisor)
                done.append(_Piece(add_up([operand[part] for operand in operands], scratch, near), scratch, update))
        return _Work(
            group,
            ready_at,
            mean.of(operands, gradients[window.rank], near),
            done,
            (len(window.by_rank) - 1) * (stop - start) * DTYPE_BYTES[group.dtype],
        )

    def _additions(self) -> list[tuple[int, int]]:
        """The additions of this rank, as positions among its operands."""
        ranks = sorted({*self._window.by_rank, *self._network.sources})
        position = {rank: index for index, rank in enumerate(ranks)}
        topology = self._window.communicator.topology
        left = around(topology.node_of, topology.node_index)
        return [(position[into], position[source]) for into, source in left]
