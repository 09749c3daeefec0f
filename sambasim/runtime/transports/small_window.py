"""Device sync for small programs, where waiting costs more than arithmetic.

Every replica sums all slices itself and updates its own parameters, with the same bits as if each slice had an owner.
So a step has one barrier instead of two: when all gradients are complete.
"""

import time
from collections.abc import Sequence
from functools import partial
from typing import final

import torch
from torch import Tensor

from sambasim.ir.program import ParameterGroup
from sambasim.runtime.machine.communicator import Communicator
from sambasim.runtime.transports.communication import Communication, Finishing, Fusion, GradientSync, Shared
from sambasim.runtime.transports.messages import MessageGroup
from sambasim.runtime.transports.shared_flags import Counter, NodeFlags
from sambasim.runtime.transports.window import DEVICE_TITLE, REDUCE_AND_UPDATE, Devices
from sambasim.runtime.values.mean import SquareSums, parts_of, total_norm, tree_mean
from sambasim.runtime.values.optimizers import Optimizers

_CLIPPED = ("comm.reduce_scatter", "opt.square_sums", "comm.all_reduce", "opt.total_norm", "opt", "comm.all_gather")


@final
class SmallWindow(GradientSync):
    """Every replica reads the device memory of all others and owns all parameters. For one node."""

    title = DEVICE_TITLE

    def __init__(self, devices: Devices, communicator: Communicator) -> None:
        memory, size = devices.by_rank[communicator.rank], communicator.world_size
        super().__init__(memory, MessageGroup(communicator), replicated=True)
        self.flags = NodeFlags(communicator)
        self.observed.append(self.flags)
        self.steps = 0
        self._has_met = False  # in this step
        self.means: dict[str, Tensor] = {}
        self.reductions = []
        for group in memory.program.groups:
            gradients = [memory.region(group, "gradient") for _, memory in sorted(devices.by_rank.items())]
            mean = self.means[group.name] = torch.empty_like(gradients[0])
            self.reductions.append(tree_mean(gradients, mean, size, near=True))
        self.peer_bytes = (size - 1) * sum(mean.nbytes for mean in self.means.values())

    def fusions(self) -> Sequence[Fusion]:
        return [Fusion(REDUCE_AND_UPDATE, partial(_Step, self)), Fusion(_CLIPPED, partial(_Step, self, clips=True))]

    def reduce_scatter(self, groups: Sequence[ParameterGroup]) -> Communication:
        return Finishing(self._reduce_in_place)

    def offer(self, losses: Sequence[float], request: int) -> None:
        super().offer(losses, request)
        self.flags.put(self.steps % 2, losses[0], request)  # a reader may be one step behind

    def end_of_step(self) -> Communication[Shared]:
        return Finishing(self.take_shared)

    def wait_for_readers(self) -> None:
        self.flags.wait(Counter.UPDATED, self.steps)

    def reduce(self) -> None:
        """Collective. Compute all means into `means`. Afterwards other ranks may still read this rank's gradients."""
        self.flags.meet(Counter.PROGRESS, self.steps + 1)
        for add_up in self.reductions:
            add_up()
        self._end_meeting()
        self.bytes_moved.peer += self.peer_bytes

    def take_shared(self) -> Shared:
        """Collective. What all ranks offered in this step, after a barrier if `reduce` has not been called."""
        if not self._has_met:
            self.flags.meet(Counter.PROGRESS, self.steps + 1)
            self._end_meeting()
        self._has_met = False
        return Shared(*self.flags.numbers((self.steps - 1) % 2))

    def _end_meeting(self) -> None:
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
        blocks = sum(member.blocks for group in groups for member in group.members)
        self._square_sums = SquareSums([(member.block, part) for member, _, part in parts], blocks)
        self._updates = [optimizers.slice(group, 0, group.numel, means[group.name]) for group in groups]

    def finish(self) -> object:
        self._window.reduce()
        began_s = time.perf_counter()
        norm = None
        if self._clips:
            norm = total_norm(self._square_sums()) / self._optimizers.loss_scale
            self._optimizers.clip(norm)
        for update in self._updates:
            update()
        self.update_s = time.perf_counter() - began_s
        return norm
