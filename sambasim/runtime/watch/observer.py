"""The observer interface of a step: for status file, traces, digests, numerics, section times. A clock of sections."""

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from time import perf_counter_ns
from typing import Any, TypeAlias, TypeVar

from sambasim.ir.graph import Node, Section
from sambasim.records.trace import Track

SpanArgs: TypeAlias = Mapping[str, int | float | str]
Function: TypeAlias = Callable[..., object]


class StepObserver:
    """Override the methods of interest. `replica` is the number of a replica, or the rank of a process without one.
    Times are those of `perf_counter_ns`."""

    detailed: bool = True
    """Whether it uses the spans of all tracks and their arguments, the times at which sections begin, and the sections
    of the update. If not, it may get only spans of `COLLECTIVES` and the sections of passes."""

    def bind(self, replica: int, node: Node, function: Function) -> Function:
        """What every pass calls for `node` in place of `function`; called once, before the first pass."""
        return function

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
    for name in events:
        setattr(target, name, partial(_call_all, [getattr(member, name) for member in members]))


def _call_all(methods: Sequence[Callable[..., None]], *arguments: object) -> None:
    for method in methods:
        method(*arguments)


class Observers(StepObserver):
    """Calls several observers in order."""

    def __init__(self, members: Sequence[StepObserver]) -> None:
        self._members = tuple(members)
        self.detailed = any(member.detailed for member in members)
        events = (name for name in vars(StepObserver) if name.endswith(("_begins", "_end", "_ends")))
        forward_events(events, self, members)

    def bind(self, replica: int, node: Node, function: Function) -> Function:
        for member in self._members:
            function = member.bind(replica, node, function)
        return function


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


M = TypeVar("M", bound=Function)
_Span: TypeAlias = tuple[Track, str, Callable[..., SpanArgs] | None, bool | None]


def span(
    track: Track, name: str, args_of: Callable[..., SpanArgs] | None = None, detailed: bool | None = None
) -> Callable[[M], M]:
    """Decorator: `report_spans` makes each call of the method a span, with what `args_of` makes of its arguments,
    only for observers that want details if `detailed`, or only for the others. By default, all observers get those of
    communication, and others those that want details."""
    if track is not Track.COLLECTIVES:
        detailed = True

    def mark(method: M) -> M:
        vars(method)["span"] = track, name, args_of, detailed
        return method

    return mark


def report_spans(target: object, observer: StepObserver | None, rank: int) -> None:
    """From now on, the methods of `target` that `span` marks report their calls to `observer` alone, under `rank`."""
    for name in dir(type(target)):
        method = getattr(type(target), name)
        marked: _Span | None = getattr(method, "span", None)
        if marked is not None:
            vars(target).pop(name, None)
            if observer is not None and marked[3] in (None, observer.detailed):
                vars(target)[name] = _reporting(method, marked, target, observer, rank)


def _reporting(method: Function, marked: _Span, target: object, observer: StepObserver, rank: int) -> Function:
    track, name, args_of, _ = marked
    args_of = args_of if observer.detailed else None

    def call(*args: Any, **kwargs: Any) -> object:
        observer.span_begins(rank, track, name)
        began_ns = perf_counter_ns()
        try:
            return method(target, *args, **kwargs)
        finally:
            observer.span_ends(rank, track, name, began_ns, args_of(target, *args, **kwargs) if args_of else {})

    return call


class SectionClock(StepObserver):
    """Times the sections of each pass: `begin`, `sections_end` for each, `end`. Of ranks that take turns, the time
    since the last call belongs to the sections that end."""

    def __init__(self) -> None:
        self.passes: list[Mapping[tuple[Section, ...], float]] = []
        """The seconds of each pass, by the sections that ran together."""
        self.begin(())

    def begin(self, sections: Sequence[Section], ranks: int = 1) -> None:
        self._sections, self._ranks, self._last_ns = tuple(sections), ranks, perf_counter_ns()
        self._seconds: dict[tuple[Section, ...], float] = defaultdict(float)

    def sections_end(self, replica: int, sections: Sequence[Section], began_ns: int) -> None:
        before_ns, self._last_ns = self._last_ns, perf_counter_ns()
        self._seconds[tuple(sections)] += (self._last_ns - (before_ns if self._ranks > 1 else began_ns)) / 1e9

    def end(self) -> None:
        """The pass has ended. Sections that were not reported share the time since the last one."""
        if left := self._sections[sum(map(len, self._seconds)) :]:
            self._seconds[left] += (perf_counter_ns() - self._last_ns) / 1e9
        self.passes.append(self._seconds)
        self.begin(())  # what runs until the next one belongs to no pass
