"""Sync in phases: all of REDUCE, then GRADNORM, OPT and GATHER, once the backward has ended."""

import time
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from functools import cached_property

from torch import Tensor

from sambasim.ir.graph import SectionKind
from sambasim.ir.program import Program
from sambasim.records.trace import Track
from sambasim.runtime.arguments import Arguments
from sambasim.runtime.device import DeviceMemory
from sambasim.runtime.gradient_norm import block_sums, clip, total_norm
from sambasim.runtime.optimizers import Optimizers, SliceUpdate
from sambasim.runtime.sync.interface import GradientSync, StepSync, is_normed
from sambasim.runtime.trace.watched import Watched


class PhasedSync(GradientSync):
    """`memory` is the one whose gradients are complete and whose parameters are updated: this rank's replica.

    The mean gradient of what this rank owns of a group is there after `reduce`.
    """

    def __init__(self, program: Program, arguments: Arguments, optimizers: Optimizers, memory: DeviceMemory) -> None:
        super().__init__(program, arguments, optimizers)
        self.memory = memory
        self._normed = is_normed(program)

    @property
    def keeper(self) -> DeviceMemory:
        return self.memory

    @abstractmethod
    def reduce(self) -> None:
        """Collective. Reduce-scatter: in the device's gradients, the owned slices become means over the replicas."""

    @abstractmethod
    def gather(self) -> None:
        """Collective. All-gather: all slices of the parameters become those of their owners."""

    @abstractmethod
    def gather_norms(self, sums: Mapping[str, Sequence[float]]) -> list[float]:
        """Collective. The block sums of all groups and slices, in order, from those of the owned slices by group."""

    @abstractmethod
    def gather_losses(self, losses: Sequence[float], wish: int) -> tuple[Sequence[float], int]:
        """Collective. The losses of all replicas, in rank order, and the largest wish of a rank."""

    def wait_for_readers(self) -> None:
        """Nothing: what was read was read in the collectives of the last step."""

    def begin_step(self) -> None:
        """Nothing: the first phase begins when the backward has ended."""

    def section_done(self, count: int) -> None:
        """Nothing, likewise."""

    def finish_step(self, losses: Sequence[float], wish: int = 0) -> StepSync:
        watch = _Watch()
        with watch:
            self.reduce()
        self.kind_over(SectionKind.REDUCE)
        norm = self._clip(watch) if self._normed else None
        self.kind_over(SectionKind.GRADNORM)
        for name, gradient in self._owned_gradients.items():
            self._updates[name](gradient)
            self.kind_over(SectionKind.OPT)
        with watch:
            self.gather()
            everybody, wished = self.gather_losses(losses, wish)
        return StepSync(everybody, wished, norm, exposed_s=watch.elapsed_s)

    def watched(self) -> Sequence[Watched]:
        return [
            Watched(self, "gather", Track.COLLECTIVES, "GATHER"),
            Watched(self, "gather_norms", Track.COLLECTIVES, "norms of all"),
            Watched(self, "gather_losses", Track.COLLECTIVES, "losses of all"),
            *self.transfers(),
        ]

    def transfers(self) -> Sequence[Watched]:
        """What a trace shows within `reduce` and `gather`."""
        return ()

    @cached_property
    def _owned_gradients(self) -> Mapping[str, Tensor]:
        cuts = {group.name: slice(*self.owned(group)) for group in self.program.groups}
        return {group.name: self.memory.region(group, "gradient")[cuts[group.name]] for group in self.program.groups}

    def _clip(self, watch: "_Watch") -> float:
        """GRADNORM: the norm of all mean gradients; the owned ones are scaled down where it is too large."""
        owned = self._owned_gradients
        sums = {name: block_sums(gradient, (0, gradient.numel())) for name, gradient in owned.items()}
        with watch:
            everything = self.gather_norms(sums)
        norm = total_norm(everything)
        clip(list(owned.values()), norm, self.optimizers.first("max_grad_norm"))
        return norm

    @cached_property
    def _updates(self) -> Mapping[str, SliceUpdate]:
        return {group.name: self.optimizers.slice(group, *self.owned(group)) for group in self.program.groups}


class _Watch:
    """Adds up the seconds that its blocks take."""

    def __init__(self) -> None:
        self.elapsed_s = 0.0
        self._began_s = 0.0

    def __enter__(self) -> None:
        self._began_s = time.perf_counter()

    def __exit__(self, *exception: object) -> None:
        self.elapsed_s += time.perf_counter() - self._began_s
