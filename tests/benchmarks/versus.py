"""Two checkouts of sambasim, measured in turns: which figures are worse in this one than in the other.

    python -m tests.benchmarks versus --python OTHER/.venv/bin/python --checkout OTHER --only steps,sync

Each runs its own `python -m tests.benchmarks`. What both have measured is compared, without the peers.
"""

import argparse
import json
import statistics
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.benchmarks.figures import FIGURES
from tests.support.installation import THIS, Installation

LIMIT = 1.03


def measured(candidate: Installation, name: str) -> Mapping[str, float]:
    """What the figures called `name` are of the version in `candidate`."""
    command = ("-m", "tests.benchmarks", name)
    printed = candidate.call(*command, folder=candidate.checkout, program="python").splitlines()
    records = [json.loads(line) for line in printed if line.startswith("{")]
    return {f"{one['name']}: {one['subject']}, {one['unit']}": one[one["subject"]] for one in records}


def table(other: Mapping[str, Sequence[float]], this: Mapping[str, Sequence[float]]) -> tuple[list[str], int]:
    """A line for each figure: the medians over all turns, then the median of the ratios within a turn, because the
    machine's speed drifts, and half the distance of their quartiles. And how many ratios are above LIMIT."""
    lines, worse = [f"{'figure':<60} {'other':>10} {'this':>10} {'ratio':>6} {'noise':>6}"], 0
    for name in (name for name in other if name in this):
        medians = f"{statistics.median(other[name]):>10.4g} {statistics.median(this[name]):>10.4g}"
        ratios = [new / old for new, old in zip(this[name], other[name], strict=True)]
        ratio = statistics.median(ratios)
        low, _, high = statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else (0.0, 0.0, 0.0)
        worse += ratio > LIMIT
        lines.append(f"{name:<60} {medians} {ratio:>6.3f} {(high - low) / 2:>6.1%}{'  WORSE' * (ratio > LIMIT)}")
    return lines, worse


def main(arguments: Sequence[str]) -> int:
    """Returns the exit code: 1 if a figure is worse by more than LIMIT."""
    name, raw = "python -m tests.benchmarks versus", argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog=name, description=__doc__, formatter_class=raw)
    parser.add_argument("--python", type=Path, required=True, help="Python of the other installation.")
    parser.add_argument("--checkout", type=Path, required=True, help="Its sources.")
    parser.add_argument("--rounds", type=int, default=5, help="How often each figure is measured. Default: 5.")
    usual = ",".join(name for name in FIGURES if name not in ("plan", "hosts"))
    parser.add_argument("--only", default=usual, help=f"Names of figures, with commas. Default: {usual}.")
    args = parser.parse_args(arguments)
    candidates = Installation(args.python.absolute(), args.checkout.absolute()), THIS
    figures: list[dict[str, list[float]]] = [defaultdict(list), defaultdict(list)]
    pairs = list(zip(candidates, figures, strict=True))
    for number in range(args.rounds):
        for name in args.only.split(","):
            print(f"round {number + 1}: {name}", file=sys.stderr, flush=True)
            # What ran before has an effect, so each is first in every second round.
            for candidate, found in pairs if number % 2 == 0 else pairs[::-1]:
                for figure, value in measured(candidate, name).items():
                    found[figure].append(value)
    lines, worse = table(*figures)
    print("\n".join([*lines, f"{worse} of {len(lines) - 1} figures are worse by more than {LIMIT - 1:.0%}"]))
    return 1 if worse else 0
