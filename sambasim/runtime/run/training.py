"""The training loop: each step runs forward and backward on every replica, then the sync and the update.

`--on-nonfinite`: stop at a step whose loss is NaN or infinite, skip it (see `Replica`), or ignore it. Only the loss is
checked in each step. Parameters are checked before a checkpoint is written.
"""

import math
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter_ns
from typing import Annotated

from pydantic import Field, JsonValue, with_config

from sambasim.errors import NumericsError
from sambasim.ir.mesh import DATA_PARALLEL
from sambasim.options.fields import OnNonfinite
from sambasim.options.schedules import ArgumentOptions, LossScaleOptions
from sambasim.options.training import TrainingOptions
from sambasim.records import Count
from sambasim.records.metrics import EvaluationRecord, StepRecord
from sambasim.runtime.run.plan import Plan, Position
from sambasim.runtime.run.replica import ENDED, Replica, arguments_in
from sambasim.runtime.run.run_observer import RunObserver
from sambasim.runtime.transports.in_process import Hub, finished, run_together
from sambasim.runtime.watch.observer import StepObserver
from sambasim.units import numbered

MOST_NOTES = 5

MOST_IN_A_ROW = 20


@dataclass(eq=False)
class LossWatch:
    """Checks the losses of each step, on all ranks alike. `command` started the job on `ranks` ranks; `newest`: the
    name of the newest checkpoint; `goes_on`: whether `command` itself resumes from it."""

    choice: OnNonfinite
    observer: RunObserver
    command: Sequence[str]
    ranks: int
    newest: Callable[[], str | None]
    goes_on: bool
    _notes: int = 0
    _in_a_row: int = 0

    @property
    def is_skipping(self) -> bool:
        """Whether the last step was skipped. Then only the end of the run is saved: the parameters may be the cause."""
        return self._in_a_row > 0

    def check(self, step: StepRecord, losses: Sequence[float]) -> None:
        """Check the `losses` of all replicas in `step`. Raises NumericsError if the run must stop."""
        if math.isfinite(step.loss) or self.choice == "ignore":
            self._in_a_row = 0
            return
        self._in_a_row += 1
        if self.choice == "stop" or self._in_a_row > MOST_IN_A_ROW:
            skipped = f", as were the {MOST_IN_A_ROW} before it" if self.choice == "skip" else ""
            what = f"the loss of step {step.step} is not finite{skipped}: {_which(losses)}"
            raise self._error(what, step, "" if skipped else ", or --on-nonfinite skip to go on")
        self._notes += 1
        if self._notes <= MOST_NOTES:
            others = "; further ones are counted" if self._notes == MOST_NOTES else ""
            self.observer.noted(f"step {step.step} is skipped, its loss is not finite: {_which(losses)}{others}")

    def check_scale(self, scale: float, least: float, step: StepRecord) -> None:
        """Raises NumericsError if overflows have brought the loss scale below `least`."""
        if scale < least:
            what = f"the gradients of step {step.step} are not finite in float16, at the smallest loss scale, {least:g}"
            otherwise = ", or a smaller learning rate, or --dtype bf16"
            raise self._error(what, step, otherwise, " --set training.loss_scale.dynamic=false")

    def check_run(self, steps: int, skipped: int) -> None:
        """Check a finished run before its end is saved. Raises NumericsError if all its steps were skipped."""
        if steps and skipped == steps:
            why = f"in all {steps} steps the loss or the gradients were not finite, and they were skipped"
            raise self._error(f"nothing was trained: {why}")

    def check_parameters(self, name: str | None, position: Position) -> None:
        """Check before a checkpoint is written. Raises NumericsError if `name`, a non-finite parameter, is not None."""
        if name is not None and self.choice != "ignore":
            loss = "" if self.is_skipping else ", whose loss still was"
            what = f"the parameter {name} is not finite after step {position.step}{loss}"
            raise self._error(what, position, ", or --on-nonfinite ignore to go on")

    def _error(
        self, what: str, at: StepRecord | Position | None = None, otherwise: str = "", flags: str = ""
    ) -> NumericsError:
        """The error `at` a step, or at the end, with a command that resumes from the newest checkpoint, if there is
        one. `flags` are added to the command, and the text `otherwise` follows it. A `--resume` that is added overrides
        an earlier one."""
        epoch = at.epoch + 1 if isinstance(at, Position) else at and at.epoch  # a position counts from 0
        where = f"epoch {epoch}, step {at.step}" if at else "the end of the run"
        newest = self.newest()
        kept = f"; the last checkpoint is {newest}" if newest else ""
        resume = " --resume" if newest and not self.goes_on else ""
        launcher = f"mpirun -np {self.ranks} " if self.ranks > 1 else ""
        command = f"{launcher}{shlex.join(self.command)}{resume}{flags}"
        remedy = f"{command} --debug-numerics to see where it begins{otherwise}"
        return NumericsError(what, where=f"{where}; nothing of it was saved{kept}", remedy=remedy)


def _which(losses: Sequence[float]) -> str:
    """Which of `losses` are not finite: `nan on replica 1 of 4; inf on replicas 0 and 3 of 4`."""
    replicas: dict[str, list[int]] = {}
    for replica, loss in enumerate(losses):
        if not math.isfinite(loss):
            replicas.setdefault(str(loss), []).append(replica)
    if len(losses) == 1:
        return next(iter(replicas))
    named = ((value, numbered("replica", numbers)) for value, numbers in replicas.items())
    return "; ".join(f"{value} on {which} of {len(losses)}" for value, which in named)


_LARGEST = {"float16": 2.0**15}  # the largest power of two of a dtype, where it is small


@with_config(extra="forbid", strict=True)
@dataclass(slots=True)
class LossScale:
    """The scale `value` of the next step, on all ranks the same. `good_steps`: since the last overflow or change;
    `tolerated`: overflows that do not halve the scale yet."""

    value: Annotated[float, Field(gt=0)]
    good_steps: Count
    tolerated: Count

    @classmethod
    def first(cls, options: LossScaleOptions, dtype: str) -> "LossScale":
        """`dtype`: of the loss, which must hold the scale."""
        return cls(min(options.start, _LARGEST.get(dtype, options.start)), 0, options.hysteresis - 1)

    def update(self, options: LossScaleOptions, dtype: str, *, overflowed: bool) -> None:
        """After a step. The value may fall below the minimum: then the run must end."""
        if not options.dynamic:
            return
        if not overflowed:
            self.good_steps += 1
            if options.consecutive:
                self.tolerated = options.hysteresis - 1
            if self.good_steps == options.window:
                self.value = min(2 * self.value, _LARGEST.get(dtype, 2 * self.value))
                self.good_steps, self.tolerated = 0, options.hysteresis - 1
            return
        self.good_steps = 0
        if self.tolerated:
            self.tolerated -= 1
        else:
            self.value /= 2


@with_config(extra="forbid", strict=True, ser_json_inf_nan="strings")
@dataclass(slots=True)
class Progress:
    """Of the whole run, resumed or not. `samples` are those of all replicas; `loss_scale` is that of the next step, in
    float16. `best`: the best evaluation; `not_better`: how many since then; `evaluated_after`: the step of the last;
    `streams`: the states of a stream, by replica, see `Dealt`.
    """

    samples: Count = 0
    loss_first: Annotated[float | None, Field(strict=False)] = None  # not strict: NaN and infinities are strings
    first_nonfinite_step: Count | None = None
    skipped_steps: Count = 0
    loss_scale: LossScale | None = None
    best: EvaluationRecord | None = None
    not_better: Count = 0
    evaluated_after: Count = 0
    streams: list[dict[str, JsonValue]] = field(default_factory=list)


@dataclass(slots=True)
class Totals:
    """Totals of a training loop; `steps` includes skipped ones. In a resumed run, the seconds and `loss_last` cover
    this process."""

    progress: Progress
    training_s: float = 0.0
    model_s: float = 0.0
    sync_s: float = 0.0
    hidden_sync_s: float = 0.0
    waited_s: dict[str, float] = field(default_factory=dict)
    steps: int = 0
    loss_last: float = float("nan")

    @property
    def updates(self) -> int:
        return self.steps - self.progress.skipped_steps


class Trainer:
    """Trains the replicas of this process: one, all of an emulation, or none on a parameter server. `hub` connects
    them; `request`: what this rank asks of the run; `agree`: the largest of what all ranks give, for a PEF of several
    graphs."""

    def __init__(
        self,
        replicas: Sequence[Replica],
        plan: Plan,
        training: TrainingOptions,
        hub: Hub | None = None,
        request: Callable[[], int] = lambda: 0,
        arguments: Mapping[str, ArgumentOptions] | None = None,
        agree: Callable[[int], int] | None = None,
    ) -> None:
        self._replicas, self._hub, self._plan, self._training = replicas, hub, plan, training
        self._samples, self._counts_updates = plan.samples_per_step, training.schedule.counts_updates
        self._has_schedule = training.schedule.name != "constant" or training.schedule.warmup_steps > 0
        self._optimizers, self._loss_dtype = replicas[0].optimizers, replicas[0].loss_dtype
        self._request, self._agree = request, agree
        self._arguments = [pair for replica in replicas for pair in arguments_in(replica.memory, arguments or {})]
        self._observer: StepObserver | None = None
        self.totals = Totals(Progress(), steps=plan.start.step)
        if self._optimizers.scales_loss:
            self.totals.progress.loss_scale = LossScale.first(training.loss_scale, self._loss_dtype)
        self.requested = 0
        self.ended = False
        """Whether the epoch has ended, because there is no whole step left of a stream."""
        self.losses: Sequence[float] = ()  # of all replicas, in the last step

    def observe(self, observer: StepObserver | None) -> None:
        self._observer = observer
        for replica in self._replicas:
            replica.observe(observer)

    def settle(self) -> None:
        """Wait for all parameters of the last step."""
        for replica in self._replicas:
            replica.transport.sync.settle()

    def begin_epoch(self, epoch: int) -> None:
        """Distribute the samples of `epoch` over the replicas: the remaining ones, in the epoch where a run resumes."""
        start = self._plan.start
        for replica in self._replicas:
            if replica.shard is not None:
                used, streams = start.used if epoch == start.epoch else 0, self.totals.progress.streams
                replica.shard.begin_epoch(epoch, self.totals.steps, used, streams)
        self.ended = False

    def set_arguments(self, epoch: int) -> None:
        """Give the graphs what they take of the progress of the run. Skipped steps count for the latter only."""
        progress = self.totals.steps / max(self._plan.steps, 1)
        for tensor, argument in self._arguments:
            tensor.fill_(argument.at(self.totals.updates, epoch, progress))

    def step(self, epoch: int) -> StepRecord:
        """Run one optimizer step on the next batches of every replica, and set `requested` and `losses`."""
        totals, observer, schedule = self.totals, self._observer, self._training.schedule
        progress = totals.progress
        number, updates = totals.steps, totals.updates
        if observer is not None:
            observer.step_begins(number)
        began_ns = perf_counter_ns()
        rate = 1.0
        if self._has_schedule:
            rate = schedule.factor(updates if self._counts_updates else number, self._plan.steps)
            if (momentum := schedule.beta1(updates)) is not None:
                for replica in self._replicas:
                    replica.optimizers.cycle(momentum)
        if self._arguments:
            self.set_arguments(epoch)
        if self._agree is not None:
            graph = self._agree(max(replica.read_ahead() for replica in self._replicas))
            for replica in self._replicas:
                replica.use_graph(graph)
        scale = progress.loss_scale
        used = 1.0 if scale is None else scale.value
        steps = [replica.step(number, updates + 1, rate, used, self._request) for replica in self._replicas]
        done = [finished(steps[0])] if len(steps) == 1 else run_together(steps, self._hub)
        updated = done[0]
        if observer is not None:
            observer.step_ends(number, updated.norm)
        step_s = (perf_counter_ns() - began_ns) / 1e9
        self.requested, self.losses = updated.request % ENDED, updated.losses
        self.ended = updated.request >= ENDED
        loss = sum(updated.losses) / len(updated.losses)
        totals.model_s += (done[-1].began_ns - began_ns) / 1e9
        # The replicas of one process communicate one after another.
        exposed_s = hidden_s = 0.0
        waited_s: dict[str, float] = {}  # dict[str, float]() takes 2 µs
        for one in done:
            exposed_s += one.exposed_s
            hidden_s += one.hidden_s
            if one.waited_s:
                for axis, seconds in one.waited_s.items():
                    totals.model_s -= seconds
                    waited_s[axis] = waited_s.get(axis, 0.0) + seconds
        if waited_s:
            exposed_s += waited_s.pop(DATA_PARALLEL, 0.0)  # of ZeRO 2 and 3
            for axis, seconds in waited_s.items():
                totals.waited_s[axis] = totals.waited_s.get(axis, 0.0) + seconds
        totals.steps += 1
        progress.skipped_steps += not updated.applied
        totals.training_s += step_s
        totals.sync_s += exposed_s
        totals.hidden_sync_s += hidden_s
        progress.samples += self._samples
        totals.loss_last = loss
        if progress.loss_first is None:
            progress.loss_first = loss
        if progress.first_nonfinite_step is None and not math.isfinite(loss):
            progress.first_nonfinite_step = totals.steps
        if scale is not None and math.isfinite(loss):  # a loss that is not finite says nothing of the scale
            scale.update(self._training.loss_scale, self._loss_dtype, overflowed=not updated.applied)
        return StepRecord(
            step=number + 1,
            epoch=epoch + 1,
            loss=loss,
            logged=updated.logged,
            lr=self._optimizers.first("lr") * rate,
            step_s=step_s,
            sync_s=exposed_s,
            hidden_sync_s=hidden_s,
            waited_s=waited_s,
            samples_per_s=self._samples / step_s,
            grad_norm=updated.norm,
            loss_scale=None if scale is None else used,
        )
