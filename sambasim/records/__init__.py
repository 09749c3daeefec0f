"""The schemas of the files that a run writes, and their readers: `metrics` (also of bench), `digests`, and `trace`.
`runtime` writes them, `report` reads them."""

import math
from collections.abc import Callable
from typing import Annotated, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from sambasim.errors import ArtifactError
from sambasim.files import Misfit, parse_json

T = TypeVar("T")

Count = Annotated[int, Field(ge=0, lt=2**63)]

Figure = Annotated[float, Field(ge=0, allow_inf_nan=False)]
"""A time, a rate or a share."""

Loss = Annotated[float, BeforeValidator(lambda loss: math.nan if loss is None else loss)]
"""JSON has no NaN and no infinity: it has null instead."""


class Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)


class RunFacts(Record):
    """What decides the bits of a run, beside its options. `world_size` counts replicas; `data` is its identity."""

    kind: str
    pef_digest: str
    world_size: Count
    emulated: bool
    engine: str
    threads: Count
    torch: str
    data: str = ""
    seed: Count
    exempt_from_exactness: list[str]


def parsed(text: str, parse: Callable[[bytes], T], flag: str, where: str, what: str = "a line") -> T:
    """What `parse`, of pydantic, makes of JSON that `sambasim run` with `flag` has written. Raises ArtifactError."""
    try:
        return parse_json(text.encode(), parse)
    except Misfit as error:
        what = f"{what} is not what sambasim run {flag} writes: {error}"
        raise ArtifactError(what, where=where, remedy=f"what sambasim run {flag} wrote, of this version") from error
