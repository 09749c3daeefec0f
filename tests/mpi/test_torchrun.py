"""`torchrun` starts a run as mpirun does: the first of its processes becomes mpirun."""

import json
import subprocess
import sys
from pathlib import Path

from click.testing import CliRunner

from sambasim.cli.run import run_command
from sambasim.compiler.front import compile_from_options
from tests.support.examples import example_options


def test_a_run_started_by_torchrun_has_the_bits_of_its_emulation(tmp_path: Path) -> None:
    pef = compile_from_options(example_options("logistic_regression", tmp_path, data_parallel=True)).path
    run = ["--pef", str(pef), "--steps", "3", "--no-evaluate", "--threads", "1", "--json"]
    launch = [str(Path(sys.executable).parent / "torchrun"), "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*launch, "-m", "sambasim", "run", *run], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("{")]
    emulated = CliRunner().invoke(run_command, [*run, "--emulate-replicas", "2"])
    summaries = [json.loads(line), json.loads(emulated.stdout)]
    assert [one["world_size"] for one in summaries] == [2, 2]
    assert [one["emulated"] for one in summaries] == [False, True]
    assert summaries[0]["state_sha256"] == summaries[1]["state_sha256"]
