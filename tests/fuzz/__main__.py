"""`python -m tests.fuzz SUBJECT`: many mutants, and what came of them. The exit code is 1 if there are findings."""

import argparse
import sys
import tempfile
from pathlib import Path

from tests.fuzz.campaign import campaign
from tests.fuzz.subjects import SUBJECTS


def main() -> int:
    """Runs one campaign and prints its tally."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("subject", choices=sorted(SUBJECTS))
    parser.add_argument("--count", type=int, default=1000, help="how many mutants")
    parser.add_argument("--first", type=int, default=0, help="the number of the first one")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--minutes", type=float, default=60, help="stop after so long")
    parser.add_argument("--folder", type=Path, help="where samples and findings are kept; default: a new one")
    given = parser.parse_args()
    folder = (given.folder or Path(tempfile.mkdtemp(prefix="sambasim-fuzz-"))).resolve()
    numbers = range(given.first, given.first + given.count)
    tally = campaign(SUBJECTS[given.subject], folder, given.seed, numbers, given.workers, given.minutes)
    print(f"{tally.mutants} mutants, {tally.sound} of them taken as sound; {len(tally.findings)} findings, in {folder}")
    for name, count in sorted(tally.mutations.items()):
        print(f"  {count:6} {name}")
    for finding in tally.findings[:50]:
        last = str(finding["finding"]).strip().splitlines()[-1][:200]
        print(f"  mutant {finding['number']}, {finding['mutation']}, {finding.get('way')}: {last}")
    return 1 if tally.findings else 0


if __name__ == "__main__":
    sys.exit(main())
