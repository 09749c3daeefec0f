"""`python -m tests.published.left_out`: errors of the rows of each width of GPT-2, with three calibrated numbers fitted
to the rows of the other widths; and of GPT-13B, with the efficiency of units fitted to GPT-2. It takes four minutes.

UNet2d is the only row with convolutions, so nothing is left to which their efficiency could be fitted."""

from collections.abc import Mapping, Sequence
from itertools import product
from statistics import mean

from sambasim.commands.devices import capture_row
from sambasim.hardware.budget import budget_of, load_calibration
from sambasim.hardware.spec import load_device
from sambasim.ir.program import Program
from sambasim.published.rows import Row, published_rows
from sambasim.simulation.ranks import price_ranks

COLUMNS, DDR_EFFICIENCIES, LOADS_S = (64, 80, 96), (0.72, 0.76, 0.80), (1.8e-3, 2.3e-3, 2.8e-3)
UNIT_EFFICIENCIES = (0.26, 0.28, 0.30, 0.32, 0.34, 0.36)


def error_of(row: Row, program: Program, **fitted: float) -> float:
    """`fitted` replaces calibrated numbers."""
    calibration = load_calibration()
    changed = {name: getattr(calibration, name).model_copy(update={"value": value}) for name, value in fitted.items()}
    calibration = calibration.model_copy(update=changed)
    budget = budget_of(load_device(row.device), row.tiles, row.mapped_by, calibration)
    step = price_ranks(program, budget, level=row.level)[0].alone
    return row.figure_of(step.device_s, step.predicted_s) / row.value - 1


def main() -> None:
    compiled = [row for row in published_rows() if row.mapped_by == "compiler"]
    captured: dict[str, Program] = {}
    programs = [captured.setdefault(str(row.args), captured.get(str(row.args)) or capture_row(row)) for row in compiled]
    found = _by_width(compiled, programs)
    for level, errors in sorted(found.items()):
        print(f"{level}: {mean(map(abs, errors)):.1%} in the mean, {max(map(abs, errors)):.1%} at worst")
    _of_an_application(compiled, programs)


def _by_width(rows: Sequence[Row], programs: Sequence[Program]) -> Mapping[str, list[float]]:
    """Errors by level."""
    names = "columns_per_unit", "ddr_efficiency", "load_s"
    errors = {
        chosen: [
            error_of(row, program, **dict(zip(names, chosen, strict=True)))
            for row, program in zip(rows, programs, strict=True)
        ]
        for chosen in product(COLUMNS, DDR_EFFICIENCIES, LOADS_S)
    }
    found: dict[str, list[float]] = {}
    for width in sorted({row.args["width"] for row in rows}):
        kept = [number for number, row in enumerate(rows) if row.args["width"] != width]
        best = min(errors, key=lambda chosen: mean(abs(errors[chosen][number]) for number in kept))
        for number, row in enumerate(rows):
            if number not in kept:
                found.setdefault(row.level, []).append(errors[best][number])
                print(f"{row.name}, {row.level}: {errors[best][number]:+.1%} with {best}")
    return found


def _of_an_application(rows: Sequence[Row], programs: Sequence[Program]) -> None:
    of_o3 = [pair for pair in zip(rows, programs, strict=True) if pair[0].level == "o3"]
    best = min(
        UNIT_EFFICIENCIES,
        key=lambda value: mean(abs(error_of(row, program, unit_efficiency=value)) for row, program in of_o3),
    )
    large = next(row for row in published_rows() if row.mapped_by == "vendor" and row.model == "gpt2")
    print(f"{large.name}: {error_of(large, capture_row(large), unit_efficiency=best):+.1%} with {best}")


if __name__ == "__main__":
    main()
