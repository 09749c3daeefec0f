"""The output of `sambasim validate`: published measurements beside their predictions, and the errors."""

from collections.abc import Iterable, Mapping, Sequence
from statistics import mean

from pydantic import Field
from rich.console import Group
from rich.text import Text

from sambasim.hardware.budget import load_calibration
from sambasim.published.rows import Row
from sambasim.records import Record
from sambasim.report.tables import text_table
from sambasim.simulation.alone import MODEL_KINDS, RankAlone


class RowRecord(Record):
    """One published row and its prediction. `error` is a fraction of the published value."""

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
    published_units_share: float | None
    predicted_units_share: float
    source: str
    replicas: int = Field(exclude=True)

    @property
    def host_error(self) -> float | None:
        """The relative error of the host time; None if it was not published."""
        if self.published_host_s is None or self.predicted_host_s is None:
            return None
        return self.predicted_host_s / self.published_host_s - 1


class ErrorRecord(Record):
    """Errors as fractions of the published values, of the rows of one level or of host times."""

    mean: float
    worst: float

    @classmethod
    def of(cls, errors: Iterable[float]) -> "ErrorRecord":
        sizes = list(map(abs, errors))
        return cls(mean=mean(sizes), worst=max(sizes))

    def __str__(self) -> str:
        return f"{self.mean:.1%} in the mean, {self.worst:.1%} at worst"


class ValidationRecord(Record):
    """What `sambasim validate --json` prints. Mean errors are of absolute values. `left_out` is the error of each level
    on rows of a width that was not used for calibration."""

    rows: tuple[RowRecord, ...]
    mean_error: float
    mean_host_error: float | None
    fitted: Mapping[str, ErrorRecord]
    left_out: Mapping[str, ErrorRecord]


def row_record(row: Row, predicted: float, step: RankAlone) -> RowRecord:
    """`row` beside its prediction: `predicted`, in the unit of the row's figure, and `step`, of one replica."""
    model = [section for section in step.sections if section.kind in MODEL_KINDS]
    return RowRecord(
        **{name: getattr(row, name) for name in ("name", "device", "tiles", "level", "figure", "source", "replicas")},
        published=row.value,
        predicted=predicted,
        error=predicted / row.value - 1,
        published_host_s=row.host_s,
        predicted_host_s=None if row.host_s is None else step.host_s,
        published_sections=row.sections,
        predicted_sections=len(model),
        published_units_share=row.units_share,
        predicted_units_share=max(section.price.units for section in model) / step.budget.units,
    )


def validation(rows: Sequence[RowRecord]) -> ValidationRecord:
    errors: dict[str, list[float]] = {}
    for row in rows:
        errors.setdefault(row.level, []).append(row.error)
        if row.host_error is not None:
            errors.setdefault("host", []).append(row.host_error)
        if row.published_sections is not None:
            errors.setdefault("sections", []).append(row.predicted_sections / row.published_sections - 1)
    fitted = {name: ErrorRecord.of(of_name) for name, of_name in errors.items()}
    left_out = load_calibration().fit.left_out.items()
    return ValidationRecord(
        rows=tuple(rows),
        mean_error=mean(abs(row.error) for row in rows),
        mean_host_error=fitted["host"].mean if "host" in fitted else None,
        fitted=fitted,
        left_out={name: ErrorRecord(mean=fit.mean_error, worst=fit.worst_error) for name, fit in left_out},
    )


_UNITS = {"device_s": "s", "samples_per_s": "samples/s", "tokens_per_s": "tokens/s"}
_FIGURES = ("published", "predicted", "error", "host", "predicted", "sections", "predicted", "most units", "predicted")


def validation_table(record: ValidationRecord) -> Group:
    table = text_table("published and predicted", ("row", "device", "level"), _FIGURES, map(_cells, record.rows))
    notes = ["errors of these rows, on which the model is calibrated (device seconds are without host time):"]
    notes += [f"  {name:9}{error}" for name, error in record.fitted.items()]
    notes.append("errors of rows of a width that was not used for calibration, each width in turn:")
    notes += [f"  {name:9}{error}" for name, error in record.left_out.items()]
    notes += ["sources:", *(f"  {source}" for source in dict.fromkeys(row.source for row in record.rows))]
    notes.append("no publication measured gradient sync alone, so its predictions are not validated")
    return Group(table, Text("\n".join(notes)))


def _cells(row: RowRecord) -> Sequence[str]:
    tiles = f"{row.device}, {row.tiles} tiles" if row.tiles else row.device
    place = f"{row.replicas} x {tiles}" if row.replicas > 1 else tiles
    figures = (f"{figure:.4g} {_UNITS[row.figure]}" for figure in (row.published, row.predicted))
    host = ("" if time_s is None else f"{time_s:.3g} s" for time_s in (row.published_host_s, row.predicted_host_s))
    sections = ("" if row.published_sections is None else str(row.published_sections), str(row.predicted_sections))
    shares = row.published_units_share, row.predicted_units_share
    units = ("" if row.published_units_share is None else f"{share:.0%}" for share in shares)
    return row.name, place, row.level, *figures, f"{row.error:+.1%}", *host, *sections, *units
