"""`sambasim tilestat`: what each tile of a replica does in a step, in the columns of `sntilestat`.

    %idle          the host works, and the tile waits for it
    %exec          a section runs
    %pload+%aload  between two sections: program load, argument load, and the idle time between them. They are one
                   calibrated number, which nothing that was published takes apart
    %chkpt         not modelled: a step of a training run has none
    %quiesce       not modelled

The tiles of a replica run one section together; the model does not tell them apart.
"""

from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict
from rich.console import RenderableType
from rich.text import Text

from sambasim.report.tables import add_row, plain_table
from sambasim.simulation.prediction import Prediction
from sambasim.units import format_seconds

UNKNOWN = (
    "%pload+%aload: program load, argument load and idle time between two sections, which nobody has published apart",
    "%chkpt and %quiesce are not modelled; the tiles of a replica run one section together, and are not told apart",
)


class TileRecord(BaseModel):
    """One tile. Shares of the predicted step, whose sum is 1; None for what is not known."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    tile: str
    predicted_idle_share: float
    predicted_exec_share: float
    predicted_pload_aload_share: float
    predicted_pload_share: None = None
    predicted_aload_share: None = None
    predicted_chkpt_share: None = None
    predicted_quiesce_share: None = None


class TilestatRecord(BaseModel):
    """What `sambasim tilestat --json` prints."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: str = "predicted"
    name: str
    device: str
    predicted_s: float
    tiles: tuple[TileRecord, ...]
    unknown: tuple[str, ...] = UNKNOWN


def tilestat(facts: Prediction) -> TilestatRecord:
    """The tiles of one replica; one row for all of a device of which nobody has published how many it has."""
    step = facts.alone
    launch_s = sum(step.runs(section) * section.price.launch_s for section in step.sections)
    tiles = facts.tiles or facts.device.tiles
    names = [f"TILE_{tile}" for tile in range(tiles)] if tiles else ["all"]
    rows = (
        TileRecord(
            tile=name,
            predicted_idle_share=step.host_s / step.predicted_s,
            predicted_exec_share=(step.device_s - launch_s) / step.predicted_s,
            predicted_pload_aload_share=launch_s / step.predicted_s,
        )
        for name in names
    )
    return TilestatRecord(
        name=facts.program.name, device=step.budget.where, predicted_s=step.predicted_s, tiles=tuple(rows)
    )


def tilestat_view(record: TilestatRecord) -> Sequence[RenderableType]:
    """For a terminal."""
    heading = f"{record.name} on {record.device}, a step of {format_seconds(record.predicted_s)}: predicted"
    table = plain_table(heading, ["tile"], ["%idle", "%exec", "%pload+%aload"])
    for one in record.tiles:
        shares = (one.predicted_idle_share, one.predicted_exec_share, one.predicted_pload_aload_share)
        add_row(table, one.tile, *(f"{100 * share:.1f}" for share in shares))
    return [table, Text("\n".join(record.unknown))]
