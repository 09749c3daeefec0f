"""The steps of a run: how many, and on which samples of each epoch."""

from dataclasses import dataclass

from pydantic import with_config

from sambasim.errors import DataError
from sambasim.options.training import TrainingOptions
from sambasim.records import Count


@with_config(extra="forbid", strict=True)
@dataclass(slots=True, unsafe_hash=True)  # a frozen one is made slowly, and each step makes one
class Position:
    """The progress of a run: `step` optimizer steps, and the first `used` samples in the order of `epoch`, from 0."""

    step: Count = 0
    epoch: Count = 0
    used: Count = 0


BEGINNING = Position()


@dataclass(frozen=True, slots=True)
class Plan:
    """The steps of a run; `first_ends` is the last step of its first epoch and `steps` the last of all, also in a
    resumed run. An epoch of a stream may end before; without a length, `samples` is 0. `left_out` counts the samples
    of a whole epoch that no replica uses; `beyond` is the end that the options set, if `start` is past it."""

    world_size: int
    batch_size: int
    accumulation_steps: int
    samples: int
    steps_per_epoch: int
    first_ends: int
    steps: int
    left_out: int
    start: Position = BEGINNING
    beyond: str | None = None
    by_steps: bool = False

    @property
    def global_batch_size(self) -> int:
        """Samples of one micro-step over all replicas."""
        return self.batch_size * self.world_size

    @property
    def samples_per_step(self) -> int:
        """Samples of one optimizer step over all replicas."""
        return self.global_batch_size * self.accumulation_steps

    @property
    def epochs(self) -> int:
        """The number of epochs that have begun when the run ends."""
        if self.steps <= self.start.step and not self.start.used:
            return self.start.epoch
        after_first = max(self.steps - self.first_ends, 0)
        return self.start.epoch + 1 + -(-after_first // self.steps_per_epoch)

    def end_of(self, epoch: int) -> int:
        return self.first_ends + (epoch - self.start.epoch) * self.steps_per_epoch

    def ends_before(self, epoch: int, step: int) -> bool:
        """Whether the run has no `epoch` after `step`."""
        return epoch >= self.epochs and not (self.by_steps and step < self.steps)

    def length(self, epoch: int) -> int:
        """The steps of `epoch` in this run."""
        return self.first_ends - self.start.step if epoch == self.start.epoch else self.steps_per_epoch

    def position(self, step: int, epoch: int, begun: int | None = None) -> Position:
        """The position after `step`, which belongs to `epoch`, which has `begun` after so many steps."""
        is_first = epoch == self.start.epoch
        before = self.start.step if is_first else self.end_of(epoch - 1) if begun is None else begun
        return Position(step, epoch, (self.start.used if is_first else 0) + (step - before) * self.samples_per_step)


def plan(samples: int, world_size: int, training: TrainingOptions, start: Position = BEGINNING) -> Plan:
    """The plan of a run on `samples`, from `start` on. Raises DataError if they are too few for one step."""
    needed = training.batch_size * training.accumulation_steps * world_size
    steps_per_epoch = samples // needed
    if samples == 0:
        if training.steps is None:
            raise DataError("the data is a stream without a length", remedy="--steps N, or a __len__ of its class")
        steps_per_epoch = max(training.steps - start.step, 0) + 1
    elif steps_per_epoch == 0:
        most = samples // (training.batch_size * world_size)
        raise DataError(
            f"the training data has {samples} samples, but one step takes {needed}: batch {training.batch_size} × "
            f"{training.accumulation_steps} accumulation steps × {world_size} replicas",
            remedy=(f"--grad-accumulation-steps {most} at most; or " if most else "")
            + "use more data, fewer replicas, or compile for a smaller --batch-size",
        )
    first_ends = start.step + ((samples - start.used) // needed if samples else steps_per_epoch)
    epochs_left = (training.epochs or 1) - start.epoch
    by_epochs = first_ends + (epochs_left - 1) * steps_per_epoch if epochs_left > 0 else start.step
    return Plan(
        world_size=world_size,
        batch_size=training.batch_size,
        accumulation_steps=training.accumulation_steps,
        samples=samples,
        steps_per_epoch=steps_per_epoch,
        first_ends=first_ends,
        steps=max(training.steps or by_epochs, start.step),
        left_out=samples - steps_per_epoch * needed if samples else 0,
        start=start,
        beyond=_beyond(training, start),
        by_steps=training.steps is not None,
    )


def _beyond(training: TrainingOptions, start: Position) -> str | None:
    if training.steps:
        return f"--steps {training.steps}" if start.step > training.steps else None
    epochs = training.epochs or 1
    return f"--epochs {epochs}" if start.epoch + (start.used > 0) > epochs else None
