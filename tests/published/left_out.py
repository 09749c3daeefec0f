"""`python -m tests.published.left_out`: errors of the rows of each width of GPT-2, with three calibrated numbers fitted
to the rows of the other widths; and of GPT-13B, with the efficiency of units fitted to GPT-2. It takes four minutes.

UNet2d is the only row with convolutions, so nothing is left to which their efficiency could be fitted."""

from collections import defaultdict
from itertools import product
from statistics import mean

from sambasim.commands.question import capture_row
from sambasim.hardware.budget import budget_of, load_calibration
from sambasim.hardware.spec import load_device
from sambasim.ir.program import Program
from sambasim.published import Row, published_rows
from sambasim.simulation.alone import price_ranks

FITTED = {"columns_per_unit": (64, 80, 96), "ddr_efficiency": (0.72, 0.76, 0.80), "load_s": (1.8e-3, 2.3e-3, 2.8e-3)}
UNIT_EFFICIENCIES = (0.26, 0.28, 0.30, 0.32, 0.34, 0.36)


def error_of(row: Row, program: Program, **fitted: float) -> float:
    """`fitted` replaces calibrated numbers."""
    calibration = load_calibration()
    changed = {name: getattr(calibration, name).model_copy(update={"value": value}) for name, value in fitted.items()}
    calibration = calibration.model_copy(update=changed)
    budget = budget_of(load_device(row.device), row.tiles, row.mapped_by, calibration)
    step = price_ranks(program, budget, level=row.level)[0]
    return row.figure_of(step.device_s, step.predicted_s) / row.value - 1


def main() -> None:
    rows = [row for row in published_rows() if row.mapped_by == "compiler"]
    captured: dict[str, Program] = {}
    pairs = [(row, captured.setdefault(str(row.args), captured.get(str(row.args)) or capture_row(row))) for row in rows]
    errors = {
        chosen: [error_of(row, program, **dict(zip(FITTED, chosen, strict=True))) for row, program in pairs]
        for chosen in product(*FITTED.values())
    }
    by_level: defaultdict[str, list[float]] = defaultdict(list)
    for width in sorted({row.args["width"] for row in rows}):
        kept = [number for number, row in enumerate(rows) if row.args["width"] != width]
        best = min(errors, key=lambda chosen: mean(abs(errors[chosen][number]) for number in kept))
        for number, row in enumerate(rows):
            if number not in kept:
                by_level[row.level].append(errors[best][number])
                print(f"{row.name}, {row.level}: {errors[best][number]:+.1%} with {best}")
    for level, of_level in sorted(by_level.items()):
        print(f"{level}: {mean(map(abs, of_level)):.1%} in the mean, {max(map(abs, of_level)):.1%} at worst")
    of_o3 = [pair for pair in pairs if pair[0].level == "o3"]
    unit_errors = {
        value: mean(abs(error_of(*pair, unit_efficiency=value)) for pair in of_o3) for value in UNIT_EFFICIENCIES
    }
    efficiency = min(unit_errors, key=unit_errors.__getitem__)
    large = next(row for row in published_rows() if row.mapped_by == "vendor" and row.model == "gpt2")
    error = error_of(large, capture_row(large), unit_efficiency=efficiency)
    print(f"{large.name}: {error:+.1%} with {efficiency}")


if __name__ == "__main__":
    main()
