"""Sync directly between devices for programs of few parameters, where waiting costs more than arithmetic.

Each replica adds up all slices itself, and updates parameters of its own: the bits are those of owners, because every
replica computes the same. So a step has one meeting instead of two, when all gradients are there. That all have read
them is asked for only when the next step is about to overwrite them, and by then it is long so.
"""

import time
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from sambasim.collectives.slices import Slice
from sambasim.collectives.tree import additions
from sambasim.ir.graph import SectionKind
from sambasim.ir.program import Member, ParameterGroup, Program
from sambasim.runtime.arguments import Arguments
from sambasim.runtime.device import DeviceMemory
from sambasim.runtime.gradient_norm import block_sums, clip, total_norm
from sambasim.runtime.kernels.tree_mean import Sum
from sambasim.runtime.optimizers import Optimizers, SliceUpdate
from sambasim.runtime.ranks import Communicator
from sambasim.runtime.sync.device_memories import Devices
from sambasim.runtime.sync.flags import Counter, NodeFlags
from sambasim.runtime.sync.interface import GradientSync, StepSync, is_normed, slices_of
from sambasim.runtime.sync.mean import TreeMean
from sambasim.runtime.trace.watched import Watched


class SmallDeviceSync(GradientSync):
    """Every replica reads its peers' device memory, and owns everything. For one node."""

    def __init__(
        self,
        program: Program,
        arguments: Arguments,
        optimizers: Optimizers,
        devices: Devices,
        communicator: Communicator,
    ) -> None:
        super().__init__(program, arguments, optimizers)
        self._memory = devices.by_rank[communicator.topology.rank]
        self._rank, self._world_size = communicator.rank, communicator.world_size
        self._normed = is_normed(program)
        self._flags = NodeFlags(communicator)
        self._steps = 0
        self._means: list[Tensor] = []
        self._reductions: list[Sum] = []
        self._updates: list[SliceUpdate] = []
        for group in program.groups:
            gradients = [memory.region(group, "gradient") for _, memory in sorted(devices.by_rank.items())]
            mean = torch.empty_like(gradients[0])
            self._means.append(mean)
            add_up = TreeMean(additions(len(gradients)), self.divisor, mean.dtype)
            self._reductions.append(add_up.of(gradients, mean, near=True))
            self._updates.append(optimizers.slice(group, 0, group.numel))
        self._peer_bytes = (len(devices.by_rank) - 1) * sum(mean.nbytes for mean in self._means)

    @property
    def title(self) -> str:
        return "device (peers' device memory)"

    def wait_for_readers(self) -> None:
        self._flags.wait(Counter.UPDATED, self._steps)

    def begin_step(self) -> None:
        self.wait_for_readers()

    def section_done(self, count: int) -> None:
        """Nothing: so few gradients are added up at once."""

    def finish_step(self, losses: Sequence[float], wish: int = 0) -> StepSync:
        began_s = time.perf_counter()
        place = self._steps % 2  # a rank may be one step ahead of who reads
        self._flags.put(place, losses[0], wish)
        self._flags.meet(Counter.PROGRESS, self._steps + 1)
        everybody, wished = self._flags.numbers(place)
        for reduce in self._reductions:
            reduce()
        self.kind_over(SectionKind.REDUCE)
        self._steps += 1
        self._flags.publish(Counter.UPDATED, self._steps)
        exposed_s = time.perf_counter() - began_s
        norm = self._clip() if self._normed else None
        self.kind_over(SectionKind.GRADNORM)
        for update, mean in zip(self._updates, self._means, strict=True):
            update(mean)
            self.kind_over(SectionKind.OPT)
        self.bytes_moved.peer += self._peer_bytes
        return StepSync(everybody, wished, norm, exposed_s)

    def reduce_alone(self) -> None:
        """Collective. REDUCE and nothing else, to be measured."""
        self.begin_step()
        self._flags.meet(Counter.PROGRESS, self._steps + 1)
        for reduce in self._reductions:
            reduce()
        self._steps += 1
        self._flags.publish(Counter.UPDATED, self._steps)

    def means(self, group: ParameterGroup) -> Iterator[tuple[int, Tensor]]:
        """After `reduce_alone`, the mean of `group`, whole, and the number of its first element."""
        yield 0, self._means[self.program.groups.index(group)]

    @property
    def keeper(self) -> DeviceMemory:
        return self._memory

    def owned(self, group: ParameterGroup) -> Slice:
        return (0, group.numel)

    def saved(self, group: ParameterGroup) -> Slice:
        return slices_of(self.program, self._world_size)[group.name][self._rank]

    def whole_state(self, group: ParameterGroup, member: Member, state: str) -> Tensor | None:
        own = self._memory.region(group, state)[member.start : member.start + member.numel]
        return own if self._rank == 0 else None

    def watched(self) -> Sequence[Watched]:
        return [self._flags.watched()]

    def _clip(self) -> float:
        norm = total_norm(block for mean in self._means for block in block_sums(mean, (0, mean.numel())))
        clip(self._means, norm, self.optimizers.first("max_grad_norm"))
        return norm
