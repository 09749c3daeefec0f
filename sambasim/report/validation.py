"""The output of `sambasim validate`: predictions beside published measurements."""

from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict
from rich.console import Group
from rich.table import Table
from rich.text import Text

from sambasim.report.output import add_row, plain_table
from sambasim.simulation.validation import Held, mean_error, mean_host_error

_UNITS = {"device_s": "s", "samples_per_s": "samples/s", "tokens_per_s": "tokens/s"}


class RowRecord(BaseModel):
    """One published row and its prediction. `error` is a fraction of the published value."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    device: str
    tiles: int | None
    level: str
    figure: str
    published: float
    predicted: float
    error: float
    published_host_s: float | None
    predicted_host_s: float | None
    published_sections: int | None
    predicted_sections: int
    source: str


class ValidationRecord(BaseModel):
    """What `sambasim validate --json` prints."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    rows: tuple[RowRecord, ...]
    mean_error: float
    mean_host_error: float | None


def validation_json(held: Sequence[Held]) -> str:
    """One JSON line."""
    rows = tuple(
        RowRecord(
            name=one.row.name,
            device=one.row.device,
            tiles=one.row.tiles,
            level=one.row.level,
            figure=one.row.figure,
            published=one.row.value,
            predicted=one.predicted,
            error=one.error,
            published_host_s=one.row.host_s,
            predicted_host_s=one.host_s,
            published_sections=one.row.sections,
            predicted_sections=one.sections,
            source=one.row.source,
        )
        for one in held
    )
    return ValidationRecord(
        rows=rows, mean_error=mean_error(held), mean_host_error=mean_host_error(held)
    ).model_dump_json()


def validation_table(held: Sequence[Held]) -> Group:
    """The table for a terminal, with the mean error."""
    columns = ["published", "predicted", "error", "host published", "predicted", "sections published", "predicted"]
    table: Table = plain_table("published and predicted", ["row", "device", "level"], columns)
    for one in held:
        row = one.row
        tiles = f"{row.device}, {row.tiles} tiles" if row.tiles else row.device
        place = f"{row.replicas} x {tiles}" if row.replicas > 1 else tiles
        unit = _UNITS[row.figure]
        host = (
            "" if row.host_s is None else f"{row.host_s:.3g} s",
            "" if one.host_s is None else f"{one.host_s:.3g} s",
        )
        sections = ("" if row.sections is None else str(row.sections), str(one.sections))
        add_row(
            table,
            *(row.name, place, row.level),
            *(f"{row.value:.4g} {unit}", f"{one.predicted:.4g} {unit}", f"{one.error:+.1%}"),
            *(*host, *sections),
        )
    host_error = mean_host_error(held)
    notes = [f"mean absolute error {mean_error(held):.1%}"]
    if host_error is not None:
        notes.append(f"mean absolute error of host time {host_error:.1%}; device seconds exclude host time")
    notes += ["sources:", *(f"  {source}" for source in dict.fromkeys(one.row.source for one in held))]
    notes.append("no publication measured gradient sync alone, so its predictions are not validated")
    return Group(table, Text("\n".join(notes)))
