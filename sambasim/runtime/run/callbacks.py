"""Functions of the user that hear of a run, may read its weights, and may end it."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Literal, TypeAlias, get_args

from torch import Tensor

from sambasim.data.user_code import generators_kept, guarded
from sambasim.errors import CallbackError
from sambasim.records.metrics import Line, SummaryRecord
from sambasim.runtime.machine.communicator import Communicator
from sambasim.runtime.machine.process import Stream, derive, repeatable, seed_everything
from sambasim.runtime.run.run_observer import RunObserver, Start
from sambasim.runtime.watch.status_file import Activity
from sambasim.units import numbered

Callback: TypeAlias = Callable[["Event"], object]
Kind: TypeAlias = Literal["step", "evaluation", "checkpoint", "end"]
_KINDS = get_args(Kind)


class Event:
    """What a callback is given, valid until it returns. `record`: what a metrics file holds of it."""

    def __init__(self, record: Line, read: Callable[[], Mapping[str, Tensor]]) -> None:
        self.kind: Kind = "end" if record.kind == "summary" else record.kind
        self.record, self._read = record, read
        self.reason: str | None = None

    def weights(self) -> Mapping[str, Tensor]:
        """Copies of parameters and buffers, by their names in the model's `state_dict`. Collective where all ranks run
        the callback. Raises CallbackError where rank 0 runs it and has only a part of them."""
        return self._read()

    def stop(self, why: str = "") -> None:
        """End the run after this event, as if it had been planned so: evaluated, saved and summarised."""
        self.reason = why


def checked(callback: object) -> Callback:
    """`callback`, if a call with an event runs it. Raises CallbackError."""
    runs_later = inspect.iscoroutinefunction(callback) or inspect.isgeneratorfunction(callback)
    if callable(callback) and not isinstance(callback, type) and not runs_later:
        return callback
    raise CallbackError(f"a callback is {callback!r}", remedy="a plain function of one event: def watch(event): …")


class Callbacks(RunObserver):
    """Calls `callbacks` at each event, on rank 0 or on all ranks, and then asks all ranks whether the run ends. A call
    has random numbers of its own, and leaves those of the run and torch's settings as they were."""

    def __init__(
        self, callbacks: Sequence[Callback], communicator: Communicator, activity: Activity, *, everywhere: bool
    ) -> None:
        self._callbacks = callbacks if everywhere or communicator.rank == 0 else ()
        self._communicator, self._activity, self._everywhere = communicator, activity, everywhere

    def started(self, start: Start) -> None:
        self._start = start

    def recorded(self, record: Line) -> None:
        own, step = None, record.steps if isinstance(record, SummaryRecord) else record.step
        for number, callback in enumerate(self._callbacks):
            who, event = getattr(callback, "__qualname__", type(callback).__name__), Event(record, self._weights)
            self._activity.takes_long(f"calling the callback {who}")
            with generators_kept(), repeatable(self._start.threads):
                place = number * len(_KINDS) + _KINDS.index(event.kind)
                seed_everything(derive(self._start.seed, self._communicator.rank, step, place, Stream.CALLBACK))
                guarded(partial(callback, event), f"the callback {who}", CallbackError)
            event._read = _over
            if own is None and event.reason is not None:
                own = f"the callback {who} ended the run after step {step}{event.reason and f': {event.reason}'}"
        reasons = self._agreed(own)
        self._activity.does("going on after callbacks")
        if step < self._start.plan.steps and (reason := next(filter(None, reasons), None)):
            self._start.stop(reason)

    def _weights(self) -> Mapping[str, Tensor]:
        if self._everywhere:
            self._agreed(None, reads=True)
        return self._start.weights(self._everywhere)

    def _agreed(self, reason: str | None, *, reads: bool = False) -> Sequence[str | None]:
        """Collective. What all ranks say. Raises CallbackError if only some of them are in `Event.weights`."""
        self._activity.waits("waiting for callbacks of peers")
        told = self._communicator.all_gather_object((reads, reason))
        if len(reading := [rank for rank, (reads, _) in enumerate(told) if reads]) % len(told):
            what = f"event.weights() was called on {numbered('rank', reading)} only"
            raise CallbackError(what, remedy="call it on all ranks alike: they read the weights together")
        return [reason for _, reason in told]


def _over() -> Mapping[str, Tensor]:
    raise CallbackError("the event is over: its weights can be read in the callback alone", remedy="keep what it reads")
