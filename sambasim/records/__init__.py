"""The schemas of the files that a run writes, and their readers. `runtime` writes them, `report` reads them."""

from pydantic import BaseModel, ConfigDict


class Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)
