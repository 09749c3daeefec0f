"""`torchrun` starts a run as mpirun does: the first of its processes becomes mpirun."""

import json
import sys
from pathlib import Path

from click.testing import CliRunner

from sambasim.cli.run import run_command
from sambasim.options.compile import options_and_notes
from tests.support.compiled import compile_from_options
from tests.support.mpi import run_job

ONE_CYCLE = {
    "train_batch_size": 16,
    "gradient_accumulation_steps": 2,
    "optimizer": {"type": "Adam", "params": {}},
    "scheduler": {
        "type": "OneCycle",
        "params": {"cycle_min_lr": 0.01, "cycle_max_lr": 0.1, "cycle_first_step_size": 2},
    },
}


def test_a_run_started_by_torchrun_has_the_bits_of_its_emulation(tmp_path: Path) -> None:
    """Also with a DeepSpeed config, whose schedule changes the momentum of each replica."""
    file = tmp_path / "ds_config.json"
    file.write_text(json.dumps(ONE_CYCLE))
    source, flags = ["data.source=tests.support.deepspeed:samples"], {"data_parallel": True, "world_size": 2}
    options = options_and_notes(None, "tests.support.deepspeed:Net", source, {**flags, "deepspeed": file}).options
    pef = compile_from_options(options.model_copy(update={"output_folder": tmp_path})).path
    run = ["--pef", str(pef), "--deepspeed", str(file), "--steps", "5", "--threads", "1", "--json"]
    launch = [str(Path(sys.executable).parent / "torchrun"), "--standalone", "--nproc-per-node", "2"]
    done = run_job([*launch, "-m", "sambasim", "run", *run], timeout=120).check()
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("{")]
    emulated = CliRunner().invoke(run_command, [*run, "--emulate-replicas", "2"])
    summaries = [json.loads(line), json.loads(emulated.stdout)]
    assert [one["world_size"] for one in summaries] == [2, 2]
    assert [one["emulated"] for one in summaries] == [False, True]
    assert summaries[0]["state_sha256"] == summaries[1]["state_sha256"]
