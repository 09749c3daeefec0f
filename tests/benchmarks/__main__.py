"""`python -m tests.benchmarks [start] [compilation] …`: all figures, or those named; `versus --help`: two versions."""

import sys

from tests.benchmarks import parts, start, training, versus
from tests.benchmarks.measure import print_figures

FIGURES = {
    "start": start.start_figures,
    "compilation": start.compilation_figures,
    "arithmetic": parts.arithmetic_figures,
    "steps": training.step_figures,
    "session": training.session_figures,
    "memory": training.memory_figures,
    "sync": parts.sync_figures,
    "overhead": training.overhead_figures,
}


def main(arguments: list[str]) -> int:
    """Print each figure as soon as it is measured. Returns the exit code: 2 for an unknown name."""
    if arguments[:1] == ["versus"]:
        return versus.main(arguments[1:])
    if unknown := [name for name in arguments if name not in FIGURES]:
        print(f"there are no figures called {unknown[0]}; there are {', '.join(FIGURES)}", file=sys.stderr)
        return 2
    for name in arguments or FIGURES:
        for figure in FIGURES[name]():
            print_figures([figure])
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
