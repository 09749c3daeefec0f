"""`python -m tests.benchmarks versus --help`."""

import sys

from tests.benchmarks import versus

if sys.argv[1:2] != ["versus"]:
    sys.exit("usage: python -m tests.benchmarks versus --python PYTHON --checkout FOLDER")
sys.exit(versus.main(sys.argv[2:]))
