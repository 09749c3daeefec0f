"""What a comparison found: the one document of `sambasim compare --json`, and what its text is made of.

`verdict` answers in one line. A is what was named first, B what was named second.
"""

from typing import Literal

from pydantic import BaseModel, ConfigDict

from sambasim.records.digests import What


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Fact(_Record):
    """Something that A and B say otherwise; "-" is nothing."""

    name: str
    a: str
    b: str


class DigestApart(_Record):
    """A tensor whose digests differ, in `replicas`; the numbers are those of the first of them.

    Digests have no values: `norms_apart` is the relative difference of the norms, None where one of them is not finite.
    """

    step: int
    replicas: tuple[int, ...]
    micro_step: int | None
    section: int | None
    section_title: str | None
    what: What
    name: str
    norm_a: float | None
    norm_b: float | None
    norms_apart: float | None
    not_finite_a: int
    not_finite_b: int
    begins: bool


class LossApart(_Record):
    """The loss at one step; None where it is not finite."""

    step: int
    a: float | None
    b: float | None
    relative: float | None


class RunsCompared(_Record):
    """Two recordings. `first` is the first tensor that differs, in the order in which a step computes them; all
    `alike_before` digests before it are alike, the last of them `last_alike`. `then` are the next ones that differ.

    not_comparable: what makes bits differ by right, the weightiest first
    asked_otherwise: what else the runs were told to do otherwise
    differing_by_step: how many digests differ, for the first steps in which any do
    only_in_a, only_in_b: tensors of common steps that the other has not recorded
    """

    kind: Literal["runs"] = "runs"
    a: str
    b: str
    alike: bool
    verdict: str
    not_comparable: tuple[Fact, ...]
    asked_otherwise: tuple[Fact, ...]
    steps: int
    replicas: tuple[int, ...]
    digests: int
    first: DigestApart | None
    alike_before: int
    last_alike: str | None
    then: tuple[DigestApart, ...]
    differing_by_step: dict[int, int]
    losses: tuple[LossApart, ...]
    only_in_a: int
    only_in_b: int
    notes: tuple[str, ...]


class TensorApart(_Record):
    """A tensor that differs. `differing` counts elements of other bits, `of` all of them.

    largest_absolute, largest_relative: over elements that are finite in both; relative to the larger of the two
    largest_ulps: how many numbers of the type lie between, at most, one more; None for integers and float64
    not_finite_apart: elements of other bits that are infinite or not a number in one of them or both
    """

    name: str
    why: Literal["only in A", "only in B", "type", "values"]
    type_a: str | None
    type_b: str | None
    differing: int = 0
    of: int = 0
    largest_absolute: float | None = None
    largest_relative: float | None = None
    largest_ulps: int | None = None
    not_finite_apart: int = 0


class TensorsCompared(_Record):
    """Two sets of tensors by name: weights, or checkpoints. `apart` is in the order of A, then of B."""

    kind: Literal["weights", "checkpoints"]
    a: str
    b: str
    alike: bool
    verdict: str
    tensors: int
    facts: tuple[Fact, ...] = ()
    apart: tuple[TensorApart, ...]


class PefsCompared(_Record):
    """Two PEFs. `symbols` and `graphs` are sentences; of each graph, the first operator that differs."""

    kind: Literal["pefs"] = "pefs"
    a: str
    b: str
    alike: bool
    verdict: str
    options: tuple[Fact, ...]
    symbols: tuple[str, ...]
    graphs: tuple[str, ...]
    tensors: int
    weights: tuple[TensorApart, ...]


class MetricsCompared(_Record):
    """Two files of metrics: losses by step, and what the summaries say. Times are not compared."""

    kind: Literal["metrics"] = "metrics"
    a: str
    b: str
    alike: bool
    verdict: str
    not_comparable: tuple[Fact, ...]
    steps: int
    first: str | None
    losses: tuple[LossApart, ...]
    results: tuple[Fact, ...]
    notes: tuple[str, ...]


Compared = RunsCompared | TensorsCompared | PefsCompared | MetricsCompared
