"""`python -m tests.published.left_out`: errors of the rows of each width of GPT-2, with three calibrated numbers fitted
to the rows of the other widths. It takes three minutes."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import product

from sambasim.cli.simulate import _captured
from sambasim.hardware.budget import budget_of, load_calibration
from sambasim.hardware.spec import load_device
from sambasim.ir.program import Program
from sambasim.published.rows import Row, published_rows
from sambasim.simulation.step import predict_step

COLUMNS, EFFICIENCIES, LOADS_S = (64, 80, 96), (0.72, 0.76, 0.80), (1.8e-3, 2.3e-3, 2.8e-3)


def error_of(row: Row, program: Program, columns: int, efficiency: float, load_s: float) -> float:
    device, calibration = load_device(row.device), load_calibration()
    budget = budget_of(device, calibration, row.tiles)
    rate = budget.memory_bytes_per_s / calibration.ddr_efficiency.value * efficiency
    budget = replace(budget, columns_per_unit=columns, memory_bytes_per_s=rate, load_s=load_s)
    return predict_step(program, budget, row.level, calibration).device_s / row.value - 1


def _mean(errors: Sequence[float]) -> float:
    return sum(map(abs, errors)) / len(errors)


def main() -> None:
    rows = [row for row in published_rows() if row.mapped_by == "compiler"]
    captured: dict[str, Program] = {}
    programs = [captured.setdefault(str(row.args), captured.get(str(row.args)) or _captured(row)) for row in rows]
    errors = {
        chosen: [error_of(row, program, *chosen) for row, program in zip(rows, programs, strict=True)]
        for chosen in product(COLUMNS, EFFICIENCIES, LOADS_S)
    }
    found: dict[str, list[float]] = {}
    for width in sorted({row.args["width"] for row in rows}):
        kept = [number for number, row in enumerate(rows) if row.args["width"] != width]
        best = min(errors, key=lambda chosen: _mean([errors[chosen][number] for number in kept]))
        for number, row in enumerate(rows):
            if number not in kept:
                found.setdefault(row.level, []).append(errors[best][number])
                print(f"{row.name}, {row.level}: {errors[best][number]:+.1%} with {best}")
    for level, of_level in sorted(found.items()):
        print(f"{level}: {_mean(of_level):.1%} in the mean, {max(map(abs, of_level)):.1%} at worst")
    every = [error for of_level in found.values() for error in of_level]
    print(f"all: {_mean(every):.1%} in the mean, {max(map(abs, every)):.1%} at worst")


if __name__ == "__main__":
    main()
