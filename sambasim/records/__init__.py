"""The schemas of the files that a run writes, and their readers: `metrics` (also of bench), `digests`, and `trace`.
`runtime` writes them, `report` reads them."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Count = Annotated[int, Field(ge=0, lt=2**63)]


Figure = Annotated[float, Field(ge=0, allow_inf_nan=False)]
"""A time, a rate or a share."""


class Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)
