"""The training loop: forward and backward on every replica, then REDUCE, GRADNORM, OPT and GATHER, once a step."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sambasim.collectives.slices import Slice
from sambasim.errors import InternalError
from sambasim.ir.graph import SectionKind
from sambasim.ir.program import Program
from sambasim.options.training import TrainingOptions
from sambasim.records.metrics import StepRecord
from sambasim.runtime.arguments import Arguments, of_optimizer
from sambasim.runtime.gradient_norm import block_sums, clip, total_norm
from sambasim.runtime.optimizers import apply_optimizer
from sambasim.runtime.plan import Plan
from sambasim.runtime.replica import Replica
from sambasim.runtime.schedules import factor
from sambasim.runtime.sync.interface import GradientSync

MeanOfLosses = Callable[[Sequence[float]], float]


@dataclass(slots=True)
class Totals:
    """What a training loop adds up."""

    training_s: float = 0.0
    sync_s: float = 0.0
    steps: int = 0
    loss_first: float = float("nan")
    loss_last: float = float("nan")
    first_nonfinite_step: int | None = None


class Trainer:
    """Trains the replicas that this process plays: one, or all of them in an emulation.

    The optimizer runs on the first one's memory, on the slices that the sync says are owned. `mean_loss` makes one
    number of the losses of this process's replicas and of those of other ranks.
    """

    def __init__(
        self,
        program: Program,
        replicas: Sequence[Replica],
        sync: GradientSync,
        plan: Plan,
        training: TrainingOptions,
        arguments: Arguments,
        mean_loss: MeanOfLosses,
    ) -> None:
        if program.training is None:
            raise InternalError("training a program without a training step")
        self._program = program
        self._replicas = replicas
        self._sync = sync
        self._plan = plan
        self._training = training
        self._hyperparameters = {one.name: of_optimizer(arguments, one.name) for one in program.optimizers}
        self._normed = any(section.kind is SectionKind.GRADNORM for section in program.training.sections)
        self._mean_loss = mean_loss
        self._memory = replicas[0].memory
        self._owned: list[tuple[str, Slice]] = [(group.name, sync.owned(group)) for group in program.groups]
        self._groups = {group.name: group for group in program.groups}
        self.totals = Totals()

    def begin_epoch(self, epoch: int) -> None:
        """Deal the samples of `epoch` out to the replicas."""
        for replica in self._replicas:
            replica.shard.begin_epoch(epoch)

    def step(self, epoch: int) -> StepRecord:
        """One optimizer step on the next batches of every replica."""
        number = self.totals.steps
        began_s = time.perf_counter()
        micro_steps = self._plan.accumulation_steps
        losses = [replica.differentiate(number, micro_steps) for replica in self._replicas]
        sync_began_s = time.perf_counter()
        self._sync.reduce()
        sync_s = time.perf_counter() - sync_began_s
        norm = None
        if self._normed:
            norm, norm_sync_s = self._clip()
            sync_s += norm_sync_s
        rate = factor(self._training.schedule, number, self._plan.steps)
        self._update(number + 1, rate)
        sync_began_s = time.perf_counter()
        self._sync.gather()
        sync_s += time.perf_counter() - sync_began_s
        loss = self._mean_loss(losses)
        step_s = time.perf_counter() - began_s
        self._count(loss, step_s, sync_s)
        return StepRecord(
            step=number + 1,
            epoch=epoch + 1,
            loss=loss,
            lr=self._first("lr") * rate,
            step_s=step_s,
            sync_s=sync_s,
            samples_per_s=self._plan.samples_per_step / step_s,
            grad_norm=norm,
        )

    def _count(self, loss: float, step_s: float, sync_s: float) -> None:
        totals = self.totals
        totals.steps += 1
        totals.training_s += step_s
        totals.sync_s += sync_s
        totals.loss_last = loss
        if totals.steps == 1:
            totals.loss_first = loss
        if totals.first_nonfinite_step is None and not math.isfinite(loss):
            totals.first_nonfinite_step = totals.steps

    def _clip(self) -> tuple[float, float]:
        """GRADNORM: the norm of all mean gradients; the owned ones are scaled down where it is too large. Also the
        seconds that the exchange of block sums took."""
        gradients = {name: self._memory.region(self._groups[name], "gradient") for name, _ in self._owned}
        sums = {name: block_sums(gradients[name], owned) for name, owned in self._owned}
        began_s = time.perf_counter()
        everything = self._sync.gather_norms(sums)
        exchange_s = time.perf_counter() - began_s
        norm = total_norm(everything)
        clip([gradients[name][a:b] for name, (a, b) in self._owned], norm, self._first("max_grad_norm"))
        return norm, exchange_s

    def _first(self, name: str) -> float:
        """A hyperparameter of the first optimizer."""
        return float(self._hyperparameters[self._program.optimizers[0].name][name])

    def _update(self, step: int, rate: float) -> None:
        """OPT: update the owned slice of every group. `rate` multiplies the learning rates."""
        for name, (start, stop) in self._owned:
            group = self._groups[name]
            optimizer = self._program.optimizers[group.optimizer]
            apply_optimizer(
                optimizer.kind,
                self._memory.region(group, "parameter")[start:stop],
                self._memory.region(group, "gradient")[start:stop],
                {state: self._memory.region(group, state)[start:stop] for state in optimizer.states},
                step,
                {**self._hyperparameters[optimizer.name], "lr": self._hyperparameters[optimizer.name]["lr"] * rate},
            )
