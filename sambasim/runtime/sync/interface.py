"""What every way of syncing offers, and what it counts."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sambasim.collectives.slices import CUT_ELEMENTS, NORM_BLOCK_ELEMENTS, Slice, cut
from sambasim.ir.graph import SectionKind
from sambasim.ir.program import ParameterGroup, Program
from sambasim.runtime.arguments import Arguments


@dataclass(slots=True)
class BytesMoved:
    """Bytes that gradient sync moved, by kind, on this rank. Each transfer is counted once, where it arrives."""

    device_to_host: int = 0
    host_to_device: int = 0
    peer: int = 0
    network: int = 0


def granule_of(program: Program) -> int:
    """Where slices may be cut: a gradient norm's blocks must stay whole."""
    training = program.training
    normed = training is not None and any(s.kind is SectionKind.GRADNORM for s in training.sections)
    return NORM_BLOCK_ELEMENTS if normed else CUT_ELEMENTS


def slices_of(program: Program, world_size: int) -> Mapping[str, tuple[Slice, ...]]:
    """For each group, its slice for each replica."""
    granule = granule_of(program)
    return {group.name: cut(group.numel, world_size, granule) for group in program.groups}


class GradientSync(ABC):
    """One rank's part in REDUCE and GATHER. Sums are divided by the runtime argument `dp_scale_factor`."""

    def __init__(self, program: Program, arguments: Arguments) -> None:
        self.program = program
        self.divisor = int(arguments.get("dp_scale_factor", 1))
        self.bytes_moved = BytesMoved()

    @property
    @abstractmethod
    def title(self) -> str:
        """What a person calls this sync path."""

    @abstractmethod
    def owned(self, group: ParameterGroup) -> Slice:
        """The slice of `group` whose mean gradient this rank has after `reduce`, and which its optimizer updates."""

    @abstractmethod
    def reduce(self) -> None:
        """Collective. Reduce-scatter: in the device's gradients, the owned slices become means over the replicas."""

    @abstractmethod
    def gather(self, regions: Sequence[str] = ("parameter",)) -> None:
        """Collective. All-gather: in those regions of every group, all slices become those of their owners."""

    @abstractmethod
    def gather_norms(self, sums: Mapping[str, Sequence[float]]) -> list[float]:
        """Collective. The block sums of all groups and slices, in order, from those of the owned slices by group."""
