"""The observer interface of a step: for the status file, traces, digests, numerics and section times;
and the clock of sections."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from time import perf_counter_ns
from typing import TYPE_CHECKING, Concatenate, ParamSpec, Protocol, TypeAlias, TypeVar

from sambasim.ir.graph import Section
from sambasim.records.trace import Track

if TYPE_CHECKING:
    from sambasim.runtime.engine.instructions import Instruction


SpanArgs: TypeAlias = Mapping[str, int | float | str]
P = ParamSpec("P")
R = TypeVar("R")


class StepObserver:
    """Override the methods of interest. `replica` is the number of a replica, or the rank of a process without one.
    Times are those of `perf_counter_ns`."""

    detailed: bool = True
    """Whether it uses the spans of all tracks and their arguments, the times at which sections begin, and the sections
    of the update. If not, it may get only spans of `COLLECTIVES` and the sections of passes."""

    def bind(self, replica: int, instruction: "Instruction") -> Callable[..., object]:
        """The function that every pass calls for `instruction`; called once, before the first pass."""
        return instruction.function

    def step_begins(self, step: int) -> None:
        """Step `step` begins; it counts from 0."""

    def batch_begins(self, replica: int, micro_step: int) -> None:
        """The replica reads the batch of `micro_step`, which counts from 0, and places it in device memory."""

    def pass_begins(self, replica: int, micro_step: int) -> None:
        """The batch is in device memory; the sections run next."""

    def sections_end(self, replica: int, sections: Sequence[Section], began_ns: int) -> None:
        """`sections` have run: one, or several that were compiled or fused together."""

    def pass_ends(self, replica: int, loss: float) -> None:
        """All sections of the pass have run; the gradients are in device memory."""

    def span_begins(self, replica: int, track: Track, name: str) -> None:
        """An operation begins that may take long: reading data, a copy, communication."""

    def span_ends(self, replica: int, track: Track, name: str, began_ns: int, args: SpanArgs) -> None:
        """That operation has ended."""

    def step_ends(self, step: int, norm: float | None) -> None:
        """The step has ended. `norm` is that of the gradients before clipping; None if the program does not clip."""


def forward_events(events: Iterable[str], target: object, members: Sequence[object]) -> None:
    """Make each of the methods `events` of `target` call the same method of all `members`, in order."""

    def forwarding(methods: Sequence[Callable[..., None]]) -> Callable[..., None]:
        def event(*arguments: object) -> None:
            for method in methods:
                method(*arguments)

        return event

    for name in events:
        setattr(target, name, forwarding([getattr(member, name) for member in members]))


class Observers(StepObserver):
    """Calls several observers in order."""

    def __init__(self, members: Sequence[StepObserver]) -> None:
        self._members = tuple(members)
        self.detailed = any(member.detailed for member in members)
        forward_events(
            (name for name in vars(StepObserver) if name.endswith(("_begins", "_end", "_ends"))), self, members
        )

    def bind(self, replica: int, instruction: "Instruction") -> Callable[..., object]:
        for member in self._members:
            instruction = replace(instruction, function=member.bind(replica, instruction))
        return instruction.function


class StepRecorder(StepObserver, ABC):
    """An observer that is active only in the steps `steps` of a run, which count from 0."""

    steps: range

    @abstractmethod
    def begin(self, step: int) -> None:
        """Collective. Called before step `step`, one of `steps`."""

    @abstractmethod
    def end(self, step: int, epoch: int, loss: float) -> None:
        """Collective. Called after the step, with its mean loss."""


def together(observers: Sequence[StepObserver]) -> StepObserver | None:
    """All of `observers` as one; None if there are none."""
    return observers[0] if len(observers) == 1 else Observers(observers) if observers else None


class Observed(Protocol):
    """An object whose methods report spans: to its observer, under its rank."""

    @property
    def observer(self) -> StepObserver | None: ...

    @property
    def rank(self) -> int: ...


S = TypeVar("S", bound=Observed)


def span(
    track: Track, name: str, args_of: Callable[..., SpanArgs] | None = None
) -> Callable[[Callable[Concatenate[S, P], R]], Callable[Concatenate[S, P], R]]:
    """Decorator: report each call of a method as a span. `args_of` takes the method's arguments, returns the span's."""

    always = track is Track.COLLECTIVES  # also for observers that want no details

    def decorate(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
        def call(self: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
            observer = self.observer
            if observer is None or not (always or observer.detailed):
                return method(self, *args, **kwargs)
            observer.span_begins(self.rank, track, name)
            began_ns = perf_counter_ns()
            result = method(self, *args, **kwargs)
            span_args = args_of(self, *args, **kwargs) if args_of is not None and observer.detailed else {}
            observer.span_ends(self.rank, track, name, began_ns, span_args)
            return result

        return call

    return decorate


@dataclass(frozen=True, slots=True)
class SectionTime:
    sections: tuple[Section, ...]
    elapsed_s: float


class SectionClock(StepObserver):
    """Times the sections of each pass. Call `begin`, then `sections_end` for each, then `end`. Of several ranks that
    take turns, the time since the last call belongs to the sections that end."""

    def __init__(self) -> None:
        self.passes: list[list[SectionTime]] = []
        self._sections: Sequence[Section] = ()
        self._times: list[SectionTime] = []
        self._ended = 0
        self._ranks = 1
        self._last_ns = 0

    def begin(self, sections: Sequence[Section], ranks: int = 1) -> None:
        self._sections, self._times, self._ended, self._ranks = sections, [], 0, ranks
        self._last_ns = perf_counter_ns()

    def sections_end(self, replica: int, sections: Sequence[Section], began_ns: int) -> None:
        before_ns, self._last_ns = self._last_ns, perf_counter_ns()
        if self._ranks > 1:
            began_ns = before_ns
            for number, one in enumerate(self._times):
                if one.sections[0] == sections[0]:  # of another rank
                    elapsed_s = one.elapsed_s + (self._last_ns - began_ns) / 1e9
                    self._times[number] = SectionTime(one.sections, elapsed_s)
                    return
        self._times.append(SectionTime(tuple(sections), (self._last_ns - began_ns) / 1e9))
        self._ended += len(sections)

    def end(self) -> None:
        """The pass has ended. Sections that were not reported share the time since the last one."""
        if self._ended < len(self._sections):
            now_ns = perf_counter_ns()
            self._times.append(SectionTime(tuple(self._sections[self._ended :]), (now_ns - self._last_ns) / 1e9))
        self.passes.append(self._times)
        self._times = []
