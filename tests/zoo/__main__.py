"""`python -m tests.zoo`: see the package."""

import argparse
import json
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

from tests.zoo import ENTRIES
from tests.zoo.play import Verdict, play

TIMEOUT_S = 300


def main(arguments: Sequence[str]) -> int:
    """Returns the exit code: 1 if an entry does not do what the list says."""
    parser = argparse.ArgumentParser(prog="python -m tests.zoo", description=__doc__)
    parser.add_argument("names", nargs="*", help="Entries; default: all.")
    parser.add_argument("--package", help="Only those of this package: transformers, torchvision, timm, own.")
    parser.add_argument("--vision", default=sys.executable, help="Python with torchvision and timm. Default: this one.")
    parser.add_argument("--jobs", type=int, default=2, help="How many at a time. Default: 2.")
    parser.add_argument("--alone", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.alone:
        with tempfile.TemporaryDirectory() as folder:
            print(json.dumps(asdict(play(ENTRIES[args.names[0]], Path(folder)))))
        return 0
    chosen = [one for one in ENTRIES.values() if not args.names or one.name in args.names]
    chosen = [one for one in chosen if args.package in (None, one.package)]
    outcomes: Counter[str] = Counter()
    unexpected = 0
    with ThreadPoolExecutor(args.jobs) as pool:
        pythons = [args.vision if one.package in ("torchvision", "timm") else sys.executable for one in chosen]
        for entry, verdict in zip(chosen, pool.map(_alone, [one.name for one in chosen], pythons), strict=True):
            outcomes[verdict.outcome] += 1
            is_expected = verdict.outcome == entry.expected
            unexpected += not is_expected
            detail = "" if is_expected else "  " + verdict.detail.replace("\n", " | ")[:600]
            print(f"{entry.package:<14} {entry.name:<32} {verdict.outcome}{detail}", flush=True)
    print(", ".join(f"{count} {outcome}" for outcome, count in outcomes.most_common()))
    return 1 if unexpected else 0


def _alone(name: str, python: str) -> Verdict:
    """Plays an entry in a process of its own."""
    argv = [python, "-m", "tests.zoo", "--alone", name]
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return Verdict("failed", f"it took more than {TIMEOUT_S} s")
    lines = done.stdout.splitlines()
    if done.returncode or not lines:
        return Verdict("failed", done.stderr[-800:])
    return Verdict(**json.loads(lines[-1]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
