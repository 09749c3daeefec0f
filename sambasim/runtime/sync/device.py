"""Sync directly between devices: `--reduce-on-rdu`.

Device memory is a window that all ranks of the node share, so a replica reads its peers' gradients where they lie: no
staging copy, and no host buffer. Parameters lie in it once for the whole node.

    section done   a replica publishes how many sections it has run, and looks for groups that all have completed
    group done     the owner of a slice reads it from all replicas, in pieces that fit a core's cache: adds them in the
                   order of the tree, divides, and in the same piece updates its state and the node's parameters
    step done      all replicas have published that their slices are updated

So REDUCE, OPT and GATHER are one pass over memory. With clipping they are two, because the norm of everything comes
between. A replica that is slower finds its slices waiting; one that is quicker does not stop for it before its own
backward has ended.

Between nodes the slices travel by MPI, as `sync.network` says.
"""

import time
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from sambasim.collectives.hierarchy import around
from sambasim.collectives.slices import Slice
from sambasim.collectives.tree import Addition
from sambasim.ir.program import Member, ParameterGroup, Program
from sambasim.ir.types import DTYPE_BYTES
from sambasim.records.trace import Track
from sambasim.runtime.arguments import Arguments
from sambasim.runtime.device import DeviceMemory
from sambasim.runtime.gradient_norm import coefficient, total_norm
from sambasim.runtime.optimizers import Optimizers, divides_exactly
from sambasim.runtime.ranks import Communicator
from sambasim.runtime.sync.collect import collect
from sambasim.runtime.sync.device_memories import Devices
from sambasim.runtime.sync.flags import Counter, NodeFlags
from sambasim.runtime.sync.group_work import GroupWork
from sambasim.runtime.sync.interface import GradientSync, StepSync, is_normed, slices_of
from sambasim.runtime.sync.mean import TreeMean
from sambasim.runtime.sync.network import Network
from sambasim.runtime.sync.numbers import gather_losses, gather_norms
from sambasim.runtime.sync.readiness import readiness, section_count
from sambasim.runtime.trace.watched import Args, Watched
from sambasim.units import MIB

_NEAR_BYTES = MIB
"""Of so many bytes of gradients a rank finds all that it reads in its core's own cache or its peers' (estimate, for
caches of 1 MiB): of every replica it reads a slice, as much as one replica has."""


class DeviceSync(GradientSync):
    """Owners read their peers' device memory."""

    def __init__(
        self,
        program: Program,
        arguments: Arguments,
        optimizers: Optimizers,
        devices: Devices,
        communicator: Communicator,
    ) -> None:
        super().__init__(program, arguments, optimizers)
        self._communicator = communicator
        self._topology = communicator.topology
        self._has_other_nodes = self._topology.node_count > 1
        self._rank = self._topology.rank
        self._memories = devices.by_rank
        self._slices = slices_of(program, self._topology.world_size)
        self._normed = is_normed(program)
        self._flags = NodeFlags(communicator)
        self._network = Network(program, devices.by_rank, self._slices, communicator, self.bytes_moved)
        self._steps = 0
        self._pass_length = section_count(program) + 1
        self._ready_at = {
            name: ready.reduce if self._normed else ready.update for name, ready in readiness(program).items()
        }
        self._groups = sorted(program.groups, key=lambda group: self._ready_at[group.name])
        steps = self._additions()
        self._means = {
            group.dtype: TreeMean(steps, self.divisor, getattr(torch, group.dtype)) for group in program.groups
        }
        self._work = {group.name: self._work_of(group) for group in self._groups}
        owned = {group.name: self._slices[group.name][self._rank] for group in program.groups}
        self._peer_bytes = {
            group.name: (len(self._memories) - 1) * (stop - start) * DTYPE_BYTES[group.dtype]
            for group in program.groups
            for start, stop in (owned[group.name],)
        }
        self._incomplete: list[ParameterGroup] = []  # on this node, as far as was looked
        self._pending: list[ParameterGroup] = []
        self._updating_s = 0.0
        self._hidden_s = 0.0

    @property
    def title(self) -> str:
        return "device (peers' device memory)"

    def wait_for_readers(self) -> None:
        """Nothing: a step ends when all have read everything."""

    def begin_step(self) -> None:
        self._pending = list(reversed(self._groups))
        self._incomplete = self._pending.copy()
        self._updating_s = self._hidden_s = 0.0
        self._network.begin_step(self._groups)

    def section_done(self, count: int) -> None:
        self._flags.publish(Counter.PROGRESS, self._progress(count))
        began_s = time.perf_counter()
        while self._incomplete and self._is_complete(self._incomplete[-1], count):
            self._network.send(self._incomplete.pop())
        while len(self._pending) > len(self._incomplete) and self._network.has_received():
            self._finish(self._pending.pop())
        self._hidden_s += time.perf_counter() - began_s

    def finish_step(self, losses: Sequence[float], wish: int = 0) -> StepSync:
        hidden_s = self._hidden_s - self._updating_s
        began_s, updating_s = time.perf_counter(), self._updating_s
        self._end_pass()
        while self._pending:
            self._network.receive()
            self._finish(self._pending.pop())
        norm = self._clip_and_update() if self._normed else None
        if self._has_other_nodes:
            self._wait_for_node()
            self._network.exchange("parameter")
        everybody, wished = self._meet(losses, wish)
        exposed_s = time.perf_counter() - began_s - (self._updating_s - updating_s)
        return StepSync(everybody, wished, norm, exposed_s, hidden_s)

    def reduce_alone(self) -> None:
        """Collective. REDUCE and nothing else, to be measured: on return, every mean can be read on this node, in the
        gradient of the slice's owner, or of the rank that received it from another node."""
        self.begin_step()
        self._end_pass()
        while self._pending:
            self._network.receive()
            group = self._pending.pop()
            self._work[group.name].reduce()
            self._network.done(group)
        if self._has_other_nodes:
            self._network.exchange("gradient")
        self._steps += 1
        self._flags.meet(Counter.UPDATED, self._steps)

    def means(self, group: ParameterGroup) -> Iterator[tuple[int, Tensor]]:
        """After `reduce_alone`, the mean of `group` as this rank reads it: its parts, each with the number of its first
        element."""
        for owner, (start, stop) in enumerate(self._slices[group.name]):
            yield start, self._memories[self._network.holder(owner)].region(group, "gradient")[start:stop]

    @property
    def keeper(self) -> DeviceMemory:
        return self._memories[self._rank]

    def owned(self, group: ParameterGroup) -> Slice:
        return self._slices[group.name][self._rank]

    def whole_state(self, group: ParameterGroup, member: Member, state: str) -> Tensor | None:
        readable = {rank: memory.region(group, state) for rank, memory in self._memories.items()}
        return collect(self._communicator, readable, self._slices[group.name], member)

    def watched(self) -> Sequence[Watched]:
        work = [watched for name, one in self._work.items() for watched in one.watched(name)]
        return [
            Watched(self, "_finish", Track.COLLECTIVES, "REDUCE" if self._normed else "REDUCE, OPT", self._read),
            Watched(self, "_meet", Track.COLLECTIVES, "GATHER"),
            *(work if self._normed else ()),
            self._flags.watched(),
            *self._network.watched(),
        ]

    def _read(self, result: None, group: ParameterGroup) -> Args:
        """What is to say of a group that is finished."""
        network_bytes = sum(operand.nbytes for operand in self._network.operands(group).values())
        return {"group": group.name, "peer_bytes": self._peer_bytes[group.name], "network_bytes": network_bytes}

    def _work_of(self, group: ParameterGroup) -> GroupWork:
        # With clipping, the norm is that of the means, so they are divided before.
        update_divides = not self._normed and divides_exactly(group.dtype)
        divisor = self.divisor if update_divides else 1
        return GroupWork(
            self._slices[group.name][self._rank],
            self._rank,
            {rank: memory.region(group, "gradient") for rank, memory in self._memories.items()},
            self._network.operands(group),
            self._means[group.dtype],
            lambda start, stop: self.optimizers.slice(group, start, stop, divisor),
            update_divides,
            self.program.gradient_bytes <= _NEAR_BYTES,
        )

    def _additions(self) -> list[Addition]:
        """Those that are left to this rank, as positions among the operands it has."""
        ranks = sorted({*self._memories, *self._network.sources})
        position = {rank: index for index, rank in enumerate(ranks)}
        left = around(self._topology.node_of, self._topology.node_index)
        return [(position[into], position[source]) for into, source in left]

    def _progress(self, count: int) -> int:
        return self._steps * self._pass_length + count

    def _is_complete(self, group: ParameterGroup, count: int) -> bool:
        """Whether all replicas of the node have completed `group`; this one has run `count` sections."""
        ready_at = self._ready_at[group.name]
        return ready_at <= count and self._flags.reached(Counter.PROGRESS, self._progress(ready_at))

    def _end_pass(self) -> None:
        """This replica's pass has ended; on return, all replicas of the node have completed all groups."""
        self._flags.publish(Counter.PROGRESS, self._progress(self._pass_length))
        while self._incomplete:
            self._flags.wait(Counter.PROGRESS, self._progress(self._ready_at[self._incomplete[-1].name]))
            self._network.send(self._incomplete.pop())

    def _wait_for_node(self) -> None:
        """Until all replicas of the node have ended their pass, and read no parameter any more."""
        self._flags.wait(Counter.PROGRESS, self._progress(self._pass_length))

    def _finish(self, group: ParameterGroup) -> None:
        work = self._work[group.name]
        if self._normed:
            work.reduce()
        else:
            self._updating_s += work.reduce_and_update()
        self._network.done(group)
        self.bytes_moved.peer += self._peer_bytes[group.name]

    def _clip_and_update(self) -> float:
        sums = {group.name: self._work[group.name].block_sums() for group in self.program.groups}
        norm = total_norm(gather_norms(self.program, self._slices, self._communicator, sums))
        scale = coefficient(norm, self.optimizers.first("max_grad_norm"))
        self._wait_for_node()
        began_s = time.perf_counter()
        for group in self.program.groups:
            self._work[group.name].update(scale)
        self._updating_s += time.perf_counter() - began_s
        return norm

    def _meet(self, losses: Sequence[float], wish: int) -> tuple[Sequence[float], int]:
        """Until all replicas have updated their slices. Losses and wishes come the same way: on a node by the flags."""
        self._steps += 1
        if self._has_other_nodes:
            self._flags.publish(Counter.UPDATED, self._steps)
            everybody = gather_losses(self._communicator, losses, wish, range(self._topology.world_size))
            self._flags.wait(Counter.UPDATED, self._steps)  # nobody is waited for: all have been in the exchange
            return everybody
        place = self._steps % 2  # a rank may be one step ahead of who reads
        self._flags.put(place, losses[0], wish)
        self._flags.meet(Counter.UPDATED, self._steps)
        return self._flags.numbers(place)
