"""The Python API under mpirun, and `torchrun`: a script gives the bits of one process, and an error ends every rank."""

import json
import runpy
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from sambasim.cli.train import run_command
from sambasim.options.compile import compile_options
from tests.support.compiled import compile_from_options
from tests.support.deepspeed_configs import CONFIGS
from tests.support.mpi import run_job, run_mpi
from tests.support.whole import whole, whole_case

SCRIPT = """
import atexit, gc, json, os, sys
import torch
from torch import nn
import sambasim as ss

atexit.register(gc.freeze)  # else Python goes through all of torch and of the compiler as it ends
torch.manual_seed(3)
points = torch.randn(400, 2, generator=torch.Generator().manual_seed(0))
labels = (points.norm(dim=1) > 1.2).long()
model = nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 2))
pef = ss.compile(model, (points[:32], labels[:32]), loss="cross_entropy", name="net", data_parallel=True,
                 world_size=2, quiet=True)
found, seen = [], []
rank = int(os.environ.get("PMI_RANK", 0))

def watch(event):
    weights = event.weights()
    seen.append([event.kind, {name: one.double().sum().item() for name, one in weights.items()}])
    if event.kind == "step" and event.record.step == 4 and rank == int(os.environ.get("PMI_SIZE", 1)) - 1:
        event.stop("this rank has seen enough")

for options in ({}, {"lr": 1e-4}, {"reduce_on_rdu": len(sys.argv) > 1, "callback": watch, "callback_ranks": "all"}):
    run = ss.run(pef, (points, labels), replicas=2, steps=5, threads=1, quiet=True, **options)
    sums = {name: one.double().sum().item() for name, one in run.weights.items()}
    found.append([run.summary.state_sha256, run.summary.sync, run.losses, sums])
outputs = ss.predict(pef, points[:33], weights=run).outputs
found += [outputs[0].sum().item(), seen, run.summary.stopped_early]
with open(f"found{rank}.json", "w") as file:
    json.dump(found, file)
"""

RANK = "int(os.environ['PMI_RANK'])"
ONE_STEP = "if ss.run(pef, (points, labels), steps=1, threads=1, quiet=True)"


@pytest.mark.usefixtures("one_thread")
def test_a_script_has_the_bits_of_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["script.py"])
    runpy.run_path("script.py", run_name="__main__")
    of_one = json.loads((tmp_path / "found0.json").read_text())
    run_mpi(2, [sys.executable, "script.py", "device"], cwd=tmp_path, timeout=120).check()
    first, second = (json.loads((tmp_path / f"found{rank}.json").read_text()) for rank in range(2))
    assert first == second, "every rank has the results"
    assert [one[1] for one in of_one[:3]] == ["emulated"] * 3
    assert [one[1] for one in first[:3]] == ["host", "host", "device"]
    for alone_, spread in zip(of_one[:3], first[:3], strict=True):
        assert (alone_[0], alone_[2], alone_[3]) == (spread[0], spread[2], spread[3])
    assert of_one[3] == pytest.approx(first[3], rel=1e-6)
    assert of_one[4:] == first[4:]
    assert [kind for kind, _ in first[4]] == ["step"] * 4 + ["end"]
    assert first[4][-2][1] == first[4][-1][1] == first[2][3]
    assert first[5] == "the callback watch ended the run after step 4: this rank has seen enough"


WATCHED = """
import os, sys, torch
from torch import nn
import sambasim as ss

torch.manual_seed(3)
x = torch.randn(128, 2)
layers = [nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 2)]
pef = ss.compile(nn.Sequential(*layers), (x[:32], x[:32]), loss="mse", check=0, quiet=True, **eval(sys.argv[1]))
seen = []

def watch(event):
    if sys.argv[2] != "one" or os.environ["PMI_RANK"] == "0":
        seen.append(event.weights())

ranks = sys.argv[2].replace("one", "all")
run = ss.run(pef, (x, x), steps=2, threads=1, quiet=True, callback=watch, callback_ranks=ranks)
assert all(torch.equal(seen[-1][name], one) for name, one in run.weights.items())
sys.stdout.write(f"{len(seen)} times ")
"""


CUT = (
    {"tensor_parallel": "weight", "n_chips": 2},
    {"pipeline_stages": 2, "micro_batches": 2},
    {"data_parallel": True, "world_size": 2, "zero": 3},
)


@whole
@pytest.mark.parametrize("cut", CUT)
def test_all_ranks_read_the_weights_of_which_each_has_a_part(cut: dict[str, object], tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(WATCHED)
    command = [sys.executable, "script.py", repr(cut)]
    runs = {ranks: run_mpi(2, [*command, ranks], cwd=tmp_path) for ranks in ("all", "first", "one")}
    assert runs["all"].check().stdout.count("3 times") == 2
    assert 'callback_ranks="all", and call it on all of them' in runs["first"].stderr
    assert "event.weights() was called on rank 0 only" in runs["one"].stderr


LEFT = ", and rank 1 left the program"
TOO_MANY = f"(points[: 400 - 64 * {RANK}], labels[: 400 - 64 * {RANK}]), replicas"


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        whole_case("labels[:32])", "labels[:31])", "value 0 has 32, value 1 has 31"),
        whole_case("replicas=2", "replicas=3", "replicas is 3, and mpirun started 2"),
        whole_case("(points, labels), replicas", TOO_MANY, "400 samples to train, content"),
        ("found, seen = [], []", f"{ONE_STEP}: raise ValueError(os.getpid())", "ValueError"),
        ("found, seen = [], []", f"{ONE_STEP} and {RANK} == 1: sys.exit(7)", 7),
        whole_case("found, seen = [], []", f"if {RANK} == 1: sys.exit()", f"0 called sambasim.run{LEFT}"),
        whole_case("torch.manual_seed(3)", f"if {RANK} == 1: sys.exit()", f"0 called sambasim.compile{LEFT}"),
    ],
)
def test_an_error_or_an_exit_ends_every_rank(tmp_path: Path, before: str, after: str, expected: str | int) -> None:
    assert before in SCRIPT
    (tmp_path / "script.py").write_text(SCRIPT.replace(before, after))
    result = run_mpi(2, [sys.executable, "script.py"], cwd=tmp_path, timeout=120)
    assert result.returncode == expected if isinstance(expected, int) else expected in result.stderr
    assert result.returncode != 0


def test_a_run_started_by_torchrun_has_the_bits_of_its_emulation(tmp_path: Path) -> None:
    """Also with a DeepSpeed config, whose schedule changes the momentum of each replica."""
    file = tmp_path / "ds_config.json"
    file.write_text(CONFIGS["OneCycle"].replace("1000", "2"))
    source, flags = ["data.source=tests.support.deepspeed:samples"], {"data_parallel": True, "world_size": 2}
    options = compile_options(None, "tests.support.deepspeed:Net", source, {**flags, "deepspeed": file})
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
