"""`python -m tests.benchmarks [start] [compilation] …`: all figures, or those of the named files."""

import sys
from importlib import import_module

from tests.benchmarks.measure import print_figures

FILES = ("start", "compilation", "arithmetic", "steps", "session", "memory", "sync", "overhead")


def main() -> None:
    """Print each figure as soon as it is there. Exits with 2 for a name that is no file of figures."""
    chosen = sys.argv[1:] or FILES
    unknown = [name for name in chosen if name not in FILES]
    if unknown:
        sys.exit(f"there are no figures called {unknown[0]}; there are {', '.join(FILES)}")
    for name in chosen:
        for figure in import_module(f"tests.benchmarks.{name}").figures():
            print_figures([figure])


if __name__ == "__main__":
    main()
