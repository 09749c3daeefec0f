"""The schemas of the files that a run writes, and their readers: `metrics` (also of bench), `digests`, and `trace`.
`runtime` writes them, `report` reads them."""

from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from sambasim.errors import OptionError

Count = Annotated[int, Field(ge=0, lt=2**63)]


class Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


def unreadable(path: Path, error: OSError | UnicodeDecodeError, remedy: str) -> OptionError:
    reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
    return OptionError(f"{path} cannot be read: {reason}", remedy=remedy)
