"""`python -m tests.benchmarks [start] [steps] …`: all figures, or those named; `versus --help`: two versions."""

import sys
import tempfile
from pathlib import Path

from tests.benchmarks import versus
from tests.benchmarks.figures import FIGURES


def main(arguments: list[str]) -> int:
    """Print each figure as soon as it is measured. Returns the exit code: 2 for an unknown name."""
    if arguments[:1] == ["versus"]:
        return versus.main(arguments[1:])
    if unknown := [name for name in arguments if name not in FIGURES]:
        print(f"there are no figures called {unknown[0]}; there are {', '.join(FIGURES)}", file=sys.stderr)
        return 2
    for name in arguments or FIGURES:
        with tempfile.TemporaryDirectory() as folder:
            for figure in FIGURES[name](Path(folder)):
                print(figure, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
