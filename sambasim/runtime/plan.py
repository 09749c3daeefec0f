"""How a run goes through its data, worked out before the first step.

Each replica gets equally many samples and uses them in whole steps. So an epoch leaves out what does not divide evenly:
samples over the replicas, a last partial batch, and an incomplete last accumulation.
"""

from dataclasses import dataclass

from sambasim.errors import DataError
from sambasim.options.training import TrainingOptions


@dataclass(frozen=True, slots=True)
class Plan:
    """How a run goes through its data. `left_out` counts the samples that an epoch does not use, over all replicas."""

    world_size: int
    batch_size: int
    accumulation_steps: int
    samples: int
    steps_per_epoch: int
    steps: int
    left_out: int

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
        """Epochs that are begun."""
        return -(-self.steps // self.steps_per_epoch)


def plan(samples: int, world_size: int, training: TrainingOptions) -> Plan:
    """How a run of `training` goes through `samples`. Raises DataError if they do not make one step."""
    micro_steps = samples // world_size // training.batch_size
    steps_per_epoch = micro_steps // training.accumulation_steps
    if steps_per_epoch == 0:
        needed = training.batch_size * training.accumulation_steps * world_size
        raise DataError(
            f"the training data has {samples} samples, but one step takes {needed}: batch {training.batch_size} × "
            f"{training.accumulation_steps} accumulation steps × {world_size} replicas",
            remedy="use more data, fewer replicas, or compile for a smaller --batch-size",
        )
    used = steps_per_epoch * training.accumulation_steps * training.batch_size * world_size
    return Plan(
        world_size=world_size,
        batch_size=training.batch_size,
        accumulation_steps=training.accumulation_steps,
        samples=samples,
        steps_per_epoch=steps_per_epoch,
        steps=training.steps or (training.epochs or 1) * steps_per_epoch,
        left_out=samples - used,
    )
