"""The training loop: forward and backward on every replica, and their sync, once a step."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sambasim.errors import InternalError
from sambasim.ir.program import Program
from sambasim.options.training import TrainingOptions
from sambasim.runtime.listener import Step
from sambasim.runtime.optimizers import Optimizers
from sambasim.runtime.plan import Plan
from sambasim.runtime.replica import Replica
from sambasim.runtime.schedules import factor
from sambasim.runtime.sync.interface import StepSync, Synced


@dataclass(slots=True)
class Totals:
    """What a training loop adds up. `model_s` is of forward and backward, until the sync that is waited for; `steps`
    counts those that were skipped too.

    Of a run that was resumed, the seconds and `loss_last` are of this process, and all else of the whole run.
    """

    training_s: float = 0.0
    model_s: float = 0.0
    sync_s: float = 0.0
    hidden_sync_s: float = 0.0
    steps: int = 0
    samples: int = 0
    skipped_steps: int = 0
    loss_first: float = float("nan")
    loss_last: float = float("nan")
    first_nonfinite_step: int | None = None


def _nothing() -> int:
    return 0


class Trainer:
    """Trains the replicas that this process plays: one, or all of them in an emulation.

    `optimizers` is what `sync` updates parameters with; its step begins here, and counts applied steps alone. `wish`
    says what this rank wishes of the run: the largest wish of a rank is known to all after each step.
    """

    def __init__(
        self,
        program: Program,
        replicas: Sequence[Replica],
        sync: Synced,
        plan: Plan,
        training: TrainingOptions,
        optimizers: Optimizers,
        wish: Callable[[], int] = _nothing,
    ) -> None:
        if program.training is None:
            raise InternalError("training a program without a training step")
        self._program = program
        self._replicas = replicas
        self._sync = sync
        self._plan = plan
        self._training = training
        self._optimizers = optimizers
        self._wish = wish
        self.totals = Totals(steps=plan.start.step)
        self.wished = 0
        self.losses: Sequence[float] = ()
        """Of all replicas, in the last step."""

    def begin_epoch(self, epoch: int) -> None:
        """Deal the samples of `epoch` out to the replicas; of the one in which the run starts, those that are left."""
        start = self._plan.start
        for replica in self._replicas:
            replica.shard.begin_epoch(epoch, self.totals.steps, start.used if epoch == start.epoch else 0)

    def step(self, epoch: int) -> Step:
        """One optimizer step on the next batches of every replica. What ranks wish of the run is in `wished` then."""
        number = self.totals.steps
        began_s = time.perf_counter()
        rate = factor(self._training.schedule, number, self._plan.steps)
        self._optimizers.begin(number - self.totals.skipped_steps + 1, rate)
        self._sync.begin_step()
        micro_steps = self._plan.accumulation_steps
        losses = [replica.differentiate(number, micro_steps, self._sync.section_done) for replica in self._replicas]
        self.totals.model_s += time.perf_counter() - began_s
        sync = self._sync.finish_step(losses, self._wish())
        self.wished, self.losses = sync.wish, sync.losses
        loss = sum(sync.losses) / len(sync.losses)
        step_s = time.perf_counter() - began_s
        self._count(loss, step_s, sync)
        return Step(
            step=number + 1,
            epoch=epoch + 1,
            loss=loss,
            lr=self._optimizers.first("lr") * rate,
            step_s=step_s,
            sync_s=sync.exposed_s,
            hidden_sync_s=sync.hidden_s,
            samples_per_s=self._plan.samples_per_step / step_s,
            grad_norm=sync.norm,
        )

    def _count(self, loss: float, step_s: float, sync: StepSync) -> None:
        totals = self.totals
        totals.steps += 1
        totals.skipped_steps += not sync.applied
        totals.training_s += step_s
        totals.sync_s += sync.exposed_s
        totals.hidden_sync_s += sync.hidden_s
        totals.samples += self._plan.samples_per_step
        totals.loss_last = loss
        if totals.steps == 1:
            totals.loss_first = loss
        if totals.first_nonfinite_step is None and not math.isfinite(loss):
            totals.first_nonfinite_step = totals.steps
