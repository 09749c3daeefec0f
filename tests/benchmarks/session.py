"""What `session.run` of an app costs beside the runtime under it, in a whole step of the LeNet-like example."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.benchmarks.measure import Figure

_BODY = Path(__file__).parent / "bodies" / "session.py"
_TIMEOUT_S = 300


def figures() -> Iterator[Figure]:
    """One figure: a step at batch 32, one replica, one thread."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "sambasim", str(_BODY), folder]
        environ = {**os.environ, "OMP_NUM_THREADS": "1"}
        result = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    if result.returncode:
        raise RuntimeError(result.stderr)
    medians = json.loads(result.stdout.splitlines()[-1])
    yield Figure("step of lenet, batch 32", "session.run", "the runtime", "ratio at most 1.05", medians)
