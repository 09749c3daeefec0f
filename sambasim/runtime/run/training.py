"""The training loop: each step runs forward and backward on every replica, then the sync and the update."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter_ns

from sambasim.ir.mesh import DATA_PARALLEL
from sambasim.options.training import TrainingOptions
from sambasim.runtime.run.nonfinite import LossScale
from sambasim.runtime.run.plan import Plan, cycled_momentum, learning_rate_factor
from sambasim.runtime.run.replica import Replica
from sambasim.runtime.run.run_observer import Step
from sambasim.runtime.transports.in_process import Hub, finished, run_together
from sambasim.runtime.watch.observer import StepObserver


@dataclass(slots=True)
class Totals:
    """Totals of a training loop; `steps` includes skipped ones, `model_s` forward and backward without `waited_s`, by
    mesh axis. `loss_scale` is that of the next step, in float16. In a resumed run, the seconds and `loss_last` cover
    this process, everything else the whole run."""

    training_s: float = 0.0
    model_s: float = 0.0
    sync_s: float = 0.0
    hidden_sync_s: float = 0.0
    waited_s: dict[str, float] = field(default_factory=dict)
    steps: int = 0
    samples: int = 0
    skipped_steps: int = 0
    loss_first: float = float("nan")
    loss_last: float = float("nan")
    first_nonfinite_step: int | None = None
    loss_scale: LossScale | None = None


class Trainer:
    """Trains the replicas of this process: one, all of an emulation, or none on a parameter server. `hub` connects
    them; `request`: what this rank asks of the run."""

    def __init__(
        self,
        replicas: Sequence[Replica],
        plan: Plan,
        training: TrainingOptions,
        hub: Hub | None = None,
        request: Callable[[], int] = lambda: 0,
    ) -> None:
        self._replicas = replicas
        self._hub = hub
        self._plan = plan
        self._samples = plan.samples_per_step
        self._training = training
        self._counts_updates = training.schedule.counts_updates
        self._optimizers = replicas[0].optimizers
        self._request = request
        self.observer: StepObserver | None = None
        self.totals = Totals(steps=plan.start.step)
        self._loss_dtype = replicas[0].loss_dtype
        if self._optimizers.scales_loss:
            self.totals.loss_scale = LossScale.first(training.loss_scale, self._loss_dtype)
        self.requested = 0
        self.losses: Sequence[float] = ()
        """Of all replicas, in the last step."""

    def observe(self, observer: StepObserver | None) -> None:
        self.observer = observer
        for replica in self._replicas:
            replica.observe(observer)

    def begin_epoch(self, epoch: int) -> None:
        """Distribute the samples of `epoch` over the replicas: the remaining ones, in the epoch where a run resumes."""
        start = self._plan.start
        for replica in self._replicas:
            if replica.works:
                replica.shard.begin_epoch(epoch, self.totals.steps, start.used if epoch == start.epoch else 0)

    def step(self, epoch: int) -> Step:
        """Run one optimizer step on the next batches of every replica, and set `requested` and `losses`."""
        number, observer = self.totals.steps, self.observer
        if observer is not None:
            observer.step_begins(number)
        began_ns = perf_counter_ns()
        schedule, updates = self._training.schedule, number - self.totals.skipped_steps
        rate = learning_rate_factor(schedule, updates if self._counts_updates else number, self._plan.steps)
        if (momentum := cycled_momentum(schedule, updates)) is not None:
            for replica in self._replicas:
                replica.optimizers.change(0, {"beta1": momentum})
        scale = self.totals.loss_scale
        used = 1.0 if scale is None else scale.value
        update = updates + 1
        steps = [replica.step(number, update, rate, used, self._request) for replica in self._replicas]
        done = [finished(steps[0])] if len(steps) == 1 else run_together(steps, self._hub)
        updated = done[0]
        if observer is not None:
            observer.step_ends(number, updated.norm)
        step_s = (perf_counter_ns() - began_ns) / 1e9
        self.requested, self.losses = updated.request, updated.losses
        loss = sum(updated.losses) / len(updated.losses)
        self.totals.model_s += (done[-1].began_ns - began_ns) / 1e9
        # The replicas of one process communicate one after another.
        exposed_s, hidden_s, waited_s = updated.exposed_s, updated.hidden_s, updated.waited_s
        for other in done[1:]:
            exposed_s += other.exposed_s
            hidden_s += other.hidden_s
            if other.waited_s:
                axes = {**waited_s, **other.waited_s}
                waited_s = {axis: waited_s.get(axis, 0.0) + other.waited_s.get(axis, 0.0) for axis in axes}
        if waited_s:
            waited_s = dict(waited_s)
            self.totals.model_s -= sum(waited_s.values())
            exposed_s += waited_s.pop(DATA_PARALLEL, 0.0)  # of ZeRO 2 and 3
        self._count(loss, step_s, exposed_s, hidden_s, waited_s, applied=updated.applied)
        if scale is not None and math.isfinite(loss):  # a loss that is not finite says nothing of the scale
            scale.update(self._training.loss_scale, self._loss_dtype, overflowed=not updated.applied)
        return Step(
            step=number + 1,
            epoch=epoch + 1,
            loss=loss,
            lr=self._optimizers.first("lr") * rate,
            step_s=step_s,
            sync_s=exposed_s,
            hidden_sync_s=hidden_s,
            waited_s=waited_s,
            samples_per_s=self._samples / step_s,
            grad_norm=updated.norm,
            loss_scale=None if scale is None else used,
        )

    def _count(
        self,
        loss: float,
        step_s: float,
        exposed_s: float,
        hidden_s: float,
        waited_s: Mapping[str, float],
        *,
        applied: bool,
    ) -> None:
        totals = self.totals
        totals.steps += 1
        totals.skipped_steps += not applied
        totals.training_s += step_s
        totals.sync_s += exposed_s
        totals.hidden_sync_s += hidden_s
        if waited_s:
            for axis, seconds in waited_s.items():
                totals.waited_s[axis] = totals.waited_s.get(axis, 0.0) + seconds
        totals.samples += self._samples
        totals.loss_last = loss
        if totals.steps == 1:
            totals.loss_first = loss
        if totals.first_nonfinite_step is None and not math.isfinite(loss):
            totals.first_nonfinite_step = totals.steps
