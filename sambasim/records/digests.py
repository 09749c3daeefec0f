"""What `sambasim run --record-digests FOLDER` leaves behind, and `sambasim compare` reads.

    run.json          what decides the bits of the run; written by rank 0 before the first step
    replica-R.jsonl   a line for each recorded step of replica R, and one before them, of what it began with

A line is written whole or not at all, so a run that dies leaves the steps that it has done. JSON has no number that is
not finite: a norm that is none is null, and the count beside it says how many elements are to blame.
"""

from typing import Literal, NamedTuple

from pydantic import BaseModel, ConfigDict

RUN_FILE = "run.json"
REPLICA_FILES = "replica-*.jsonl"


def replica_file(replica: int) -> str:
    """The name of the file of one replica."""
    return f"replica-{replica}.jsonl"


What = Literal["parameter", "buffer", "state", "input", "value", "loss", "gradient"]
"""What a tensor is to the step: a parameter or an optimizer state after the update, an input of a micro-step, a value
that leaves its section, the loss, a gradient as far as it is added up, a buffer as its section has changed it."""


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ValueDigest(NamedTuple):
    """One tensor at one moment. In a line of JSON, a list in this order.

    micro_step, section: where in the step, both from 0; None after the update, and before the first step
    digest: of its dtype, its shape and its bytes (BLAKE2b, 8 bytes, in hexadecimal)
    norm: the square root of the sum of squares, in float64; None if it is not finite
    not_finite: how many elements are infinite or not a number
    """

    what: What
    name: str
    micro_step: int | None
    section: int | None
    digest: str
    norm: float | None
    not_finite: int = 0


class StepDigests(_Record):
    """A recorded step, which counts from 1; or what a replica begins with, as the step before the first recorded one.

    `loss` is the mean over replicas; None where it is not finite, and before the first step.
    """

    step: int
    begins: bool = False
    loss: float | None = None
    values: tuple[ValueDigest, ...]


class SectionName(NamedTuple):
    """A section of the training step: its number, its kind and its name."""

    number: int
    kind: str
    name: str


class RecordedRun(_Record):
    """The content of run.json: all that decides the bits of a run, and what was recorded of it.

    `options` are those of the run as they hold, by dotted name, and `exempt_from_exactness` says what has bits of its
    own. `last_step` is the last one that is to be recorded. `sees` says which values are: with an engine that compiles
    sections together, those within such a unit are not seen.
    """

    kind: Literal["digests"] = "digests"
    by: str
    pef: str
    pef_digest: str
    threads: int
    engine: str
    torch: str
    cpu: str
    exempt_from_exactness: tuple[str, ...]
    world_size: int
    emulated: bool
    sync: str
    seed: int
    options: dict[str, bool | int | float | str | None]
    steps: int
    first_step: int
    last_step: int
    sections: tuple[SectionName, ...]
    sees: Literal["values that leave their section", "values that leave their unit of compiled sections"]
