"""What every way of syncing offers, and what it counts."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor

from sambasim.collectives.slices import CUT_ELEMENTS, NORM_BLOCK_ELEMENTS, Slice, cut
from sambasim.ir.graph import SectionKind
from sambasim.ir.program import Member, ParameterGroup, Program
from sambasim.runtime.arguments import Arguments
from sambasim.runtime.device import DeviceMemory
from sambasim.runtime.optimizers import Optimizers
from sambasim.runtime.trace.watched import Watched


@dataclass(slots=True)
class BytesMoved:
    """Bytes that gradient sync moved, by kind, on this rank. Each transfer is counted once, where it arrives."""

    device_to_host: int = 0
    host_to_device: int = 0
    peer: int = 0
    network: int = 0


class StepSync(NamedTuple):
    """What came of one step's sync.

    losses: of all replicas, in rank order
    wish: the largest of what the ranks wished
    norm: of the mean gradients before they were clipped; None for a program that does not clip
    exposed_s: seconds in sync after this replica's own backward had ended, waiting for others included
    hidden_s: seconds in sync before that, in the middle of the backward
    applied: whether parameters were updated; else the step was skipped
    """

    losses: Sequence[float]
    wish: int
    norm: float | None
    exposed_s: float
    hidden_s: float = 0.0
    applied: bool = True


def is_normed(program: Program) -> bool:
    """Whether the program clips its gradients by their norm."""
    training = program.training
    return training is not None and any(section.kind is SectionKind.GRADNORM for section in training.sections)


def slices_of(program: Program, world_size: int) -> Mapping[str, tuple[Slice, ...]]:
    """For each group, its slice for each replica. Where a norm is taken, its blocks stay whole."""
    granule = NORM_BLOCK_ELEMENTS if is_normed(program) else CUT_ELEMENTS
    return {group.name: cut(group.numel, world_size, granule) for group in program.groups}


class Synced(Protocol):
    """What a trainer does with a sync: these three in each step, as `GradientSync` says."""

    def begin_step(self) -> None:
        """A step begins that will be finished."""

    def section_done(self, count: int) -> None:
        """This replica has run `count` sections of the step's last pass."""

    def finish_step(self, losses: Sequence[float], wish: int = 0) -> StepSync:
        """Collective. The step's gradients are complete here; on return, parameters are those of the next step."""


def _unheard(kind: SectionKind) -> None:
    """Nobody times sections."""


class GradientSync(ABC):
    """One rank's part in REDUCE, GRADNORM, OPT and GATHER: what lies between the backward and the next forward.

    Every step is `begin_step`, the backward with a `section_done` for each of its sections, and `finish_step`. Sums are
    divided by the runtime argument `dp_scale_factor`.
    """

    def __init__(self, program: Program, arguments: Arguments, optimizers: Optimizers) -> None:
        self.program = program
        self.divisor = int(arguments.get("dp_scale_factor", 1))
        self.optimizers = optimizers
        self.bytes_moved = BytesMoved()
        self.kind_over: Callable[[SectionKind], None] = _unheard
        """Told of each section of the update that is over, where it is a pass over memory of its own."""

    @property
    @abstractmethod
    def title(self) -> str:
        """What a person calls this sync path."""

    @abstractmethod
    def wait_for_readers(self) -> None:
        """On return, peers have read this process's gradients of the last step: they may be overwritten."""

    @abstractmethod
    def begin_step(self) -> None:
        """A step begins that will be finished, and for which `optimizers` has begun too; gradients may be overwritten.
        Its last pass through the sections is still to come, if something of the sync is to go on beside it."""

    @abstractmethod
    def section_done(self, count: int) -> None:
        """This replica has run `count` sections of its last pass; what they complete may be synced from now on."""

    @abstractmethod
    def finish_step(self, losses: Sequence[float], wish: int = 0) -> StepSync:
        """Collective. Gradients are complete here, and `losses` are those of this process's replicas; on return, the
        parameters of every replica are those of the next step.

        wish: a number that this rank tells all others, who learn of the largest
        """

    @property
    @abstractmethod
    def keeper(self) -> DeviceMemory:
        """Where the parameters and the state of the optimizer lie that this rank keeps up to date."""

    @abstractmethod
    def owned(self, group: ParameterGroup) -> Slice:
        """The part of `group` whose parameters and optimizer state this rank updates, in `keeper`."""

    def saved(self, group: ParameterGroup) -> Slice:
        """The part of `group` that this rank saves: all ranks together save everything once."""
        return self.owned(group)

    @abstractmethod
    def whole_state(self, group: ParameterGroup, member: Member, state: str) -> Tensor | None:
        """Collective. On rank 0, `state` of one parameter, of which each rank may have kept a slice; flat, and read
        at once. None on other ranks."""

    @abstractmethod
    def watched(self) -> Sequence[Watched]:
        """What a trace shows of a step's sync, beside what `kind_over` is told."""
