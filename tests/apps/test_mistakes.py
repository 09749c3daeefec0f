"""Mistakes of data parallel apps that the hardware does not report: here each is reported, and most runs go on. The app
has the oldest names of SambaFlow, and what old apps use of torch."""

import json
import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.support.mpi import SAMBASIM, Result, run_job, run_mpi
from tests.support.whole import whole, whole_case

APP = """\
import atexit, gc, sys
atexit.register(gc.freeze)  # else Python goes through all of torch and of the compiler as it ends
import torch
from sambaflow import samba
from sambaflow.samba import utils
from sambaflow.samba.utils.argparser import parse_app_args
from sambaflow.samba.utils.pef_utils import get_pefmeta
from torch.autograd import Variable
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

args = parse_app_args(sys.argv[1:], common_parser_fn=lambda parser: parser.add_argument("--width", type=int, default=1))
rank, replicas = utils.get_rank(), utils.get_world_size()
utils.set_seed({seed})
model = torch.nn.Sequential(torch.nn.DataParallel(torch.nn.Linear(6, args.width)), torch.nn.Flatten(0))
samba.from_torch_(model)
optimizer = samba.optim.SGD(model.parameters(), lr=0.1)
inputs = [samba.randn(4, 6, name="x", batch_dim=0)]
if args.command == "compile":
    samba.session.compile(model, inputs, optimizer, "net", config_dict={config}, pef_metadata=get_pefmeta(args, model))
    sys.exit()
utils.trace_graph(args, model, inputs, optimizer)
data = TensorDataset(Variable(torch.randn(25, 6, generator=torch.Generator().manual_seed(1))){type})
sampler = {sampler}
loader = samba.SambaLoader(DataLoader(data, batch_size=4, sampler=sampler, drop_last={drop_last}), ["x"])
for epoch in range(2):
    {epoch}
    for batch in {batches}:
        samba.session.run(batch, model.output_tensors, {{"lr": {rate}}}, {passed})
{fetch}
if {saves}:
    torch.save(model.state_dict(), "weights.pt")
with open("log.txt", "a") as log, open(f"log_{{rank}}.txt", "w") as own:
    print("trained", rank, file=log)
    print("trained", rank, file=own)
print("trained", rank)
"""
RIGHT = {
    "seed": "7",
    "config": "vars(args)",
    "type": "",
    "sampler": "DistributedSampler(data, replicas, rank)",
    "drop_last": "True",
    "epoch": "sampler.set_epoch(epoch)",
    "batches": "loader",
    "rate": "0.1 / (epoch + 1)",
    "passed": "data_parallel=args.data_parallel, reduce_on_rdu=args.reduce_on_rdu",
    "fetch": "model.cpu()",
    "saves": "rank == 0",
}
RUN = "samba.session.run("
SAMPLER = "sampler = "
LINES = {words: APP[: APP.index(words)].count("\n") + 1 for words in (RUN, SAMPLER, "for batch in", "torch.save(")}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("app")
    (where / "app.py").write_text(APP.format(**RIGHT))
    argv = [*SAMBASIM, "app.py", "compile", "--data-parallel", "-ws", "2", "--pef-name", "net"]
    lines = run_job(argv, cwd=where, timeout=120).check().stderr.splitlines()
    assert [line for line in lines if not line.endswith(" …")] == [], "progress, and no warning"
    return where


def _run(folder: Path, *flags: str, **mistakes: str) -> Result:
    """The app on two ranks, with `mistakes` in place of what is right. The flag --check is that of sambasim."""
    (folder / "app.py").write_text(APP.format(**{**RIGHT, **mistakes}))
    check = ("--check", "--json") if "--check" in flags else ()
    command = [*SAMBASIM, *check, "app.py", "run", "--pef", "net", "--data-parallel"]
    return run_mpi(2, [*command, *(flag for flag in flags if flag != "--check")], cwd=folder, timeout=120)


def _line(words: str) -> str:
    return f"app.py:{LINES[words]}: {words}"


@pytest.fixture(scope="module")
def right(folder: Path) -> Tensor:
    """The weight that the app without mistakes saves; it has no finding."""
    result = _run(folder, "--reduce-on-rdu").check()
    assert sorted(result.stdout.splitlines()) == ["trained 0", "trained 1"]
    assert result.stderr == ""
    weight: Tensor = torch.load(folder / "weights.pt")["0.module.weight"]
    return weight


EACH = 'torch.save(model.state_dict(), f"weights_{rank}.pt")'
"""In place of `saves`: each replica writes its own weights."""


def _weights(folder: Path) -> list[Tensor]:
    """The weight of each replica, after a run that saved `EACH`."""
    return [torch.load(folder / f"weights_{rank}.pt")["0.module.weight"] for rank in (0, 1)]


def test_replicas_without_sync_train_each_alone(folder: Path) -> None:
    result = _run(folder, passed="", saves=EACH).check()
    assert "notice: DP01: 2 replicas train independently" in result.stderr
    assert result.stderr.count("notice: ") == 1, "weights that differ are no second finding"
    first, second = _weights(folder)
    assert not torch.equal(first, second)


ALONE, HOST, DEVICE = "trains without the others", "syncs through the host", "syncs on the device"


@pytest.mark.parametrize(
    ("passed", "first", "second"),
    [
        ("rank == 0", HOST, ALONE),
        whole_case("rank == 1", ALONE, HOST),
        whole_case("True, reduce_on_rdu=rank == 1", HOST, DEVICE),
    ],
)
def test_replicas_that_sync_in_different_ways_are_an_error(folder: Path, passed: str, first: str, second: str) -> None:
    result = _run(folder, passed=f"data_parallel={passed}")
    assert result.returncode != 0
    assert result.elapsed_s < 60, "no rank waits until the time limit of a sync"
    assert f"DP01: replica 0 {first}, and replica 1 {second}\n" in result.stderr
    assert _line(RUN) in result.stderr
    assert result.stdout == ""


@pytest.mark.parametrize("flags", [whole_case(()), ("--reduce-on-rdu",)], ids=["host", "device"])
def test_replicas_with_different_weights_continue_from_replica_0(
    folder: Path, right: Tensor, flags: tuple[str, ...]
) -> None:
    assert "notice: DP03" in _run(folder, *flags, seed=f"{RIGHT['seed']} + rank", saves=EACH).check().stderr
    first, second = _weights(folder)
    assert torch.equal(first, second)
    assert torch.equal(first, right), "as if all replicas had started so"


UNEVEN = {"sampler": "list(range(4 * rank, 4 * rank + 4))", "epoch": "if epoch and rank: break"}
"""Rank 0 takes two steps, and rank 1 one."""


@whole
def test_a_replica_that_waits_for_one_that_has_ended_is_reported(folder: Path) -> None:
    words = "DP09: replica 0 takes step 2, and replica 1 came to its end after 1 step"
    run = _run(folder, **UNEVEN)
    assert run.returncode != 0
    assert f"): {words}\n" in run.stderr
    assert run.stderr.count("DP09") == 1
    check = _run(folder, "--check", **UNEVEN)
    assert _line(RUN) in _findings(check)["DP09"]
    assert f"DP09: {_findings(check)['DP09']}".startswith(words)


@pytest.mark.parametrize("flags", [whole_case(()), ("--reduce-on-rdu",)], ids=["host", "device"])
@pytest.mark.parametrize("longer", [0, whole_case(1)])
def test_a_replica_that_waits_without_comparison_is_reported(folder: Path, longer: int, flags: tuple[str, ...]) -> None:
    """One replica takes 5 steps, and the other waits in the sixth."""
    run = _run(folder, *flags, batches=f"list(loader)[: 3 if rank == {longer} or not epoch else 2]")
    assert run.returncode == 2
    words = f"DP09: replica {1 - longer} came to its end after 5 steps, and replica {longer} waits for it in step 6"
    assert f"(rank {1 - longer} on " in run.stderr
    assert words in run.stderr
    assert f"\n  where: {folder}" in run.stderr
    assert _line(RUN) in run.stderr
    assert "session.run with OPT on every rank" in run.stderr
    assert run.stderr.count("DP09") == 1


def test_each_notice_is_printed_once_with_its_line_and_again_in_the_summary(folder: Path) -> None:
    result = _run(
        folder, "--reduce-on-rdu", passed="data_parallel=True", fetch="pass", saves="True", rate="0.1 * (rank + 1)",
        sampler="DistributedSampler(data, replicas, rank, seed=rank)",
        epoch='optimizer.param_groups[0]["weight_decay"] = 0.1 * epoch',
    ).check()  # fmt: skip
    at_once, at_end = result.stderr.split("summary: 7 findings; sambasim app --check checks every step\n")
    notes = dict(note.split(": ", 1) for note in at_once.split("notice: ")[1:])
    assert sorted(notes) == ["AP05", "AP06", "DP02", "DP05", "DP06", "DP07"]
    assert sorted(result.stdout.splitlines()) == ["trained 0", "trained 1"]
    assert all("\n  try:   " in note for note in notes.values())
    summary = dict(block.split(": ", 1) for block in re.split("^  (?=[AD]P)", at_end, flags=re.MULTILINE)[1:])
    notes["DP08"] = summary.pop("DP08")  # which is found at the end alone
    assert summary.keys() == notes.keys() - {"DP08"}
    for code, short in summary.items():
        what, place = short.rstrip().removesuffix(")").rsplit(" (", 1)
        assert notes[code].startswith(f"{what}\n  where: {place}: ")
    for code, words, line in (
        ("AP05", "the app has changed weight_decay of an optimizer from 0 to 0.1, and the device", RUN),
        ("AP06", "the app reads the weights on the host, and the device has trained for 6 steps", "torch.save("),
        ("DP02", "--reduce-on-rdu is on the command line, but not passed to session.run", RUN),
        ("DP05", "the samplers of replicas 0 and 1 differ in their seed, 0 and 1: samples are", SAMPLER),
        ("DP06", "the sampler shuffles in the same order again, because its epoch is still 0", "for batch in"),
        ("DP07", "before step 1 replica 1 trains with lr 0.2, and replica 0 with 0.1", RUN),
        ("DP08", f"ranks 0, 1 write the same file, {folder}/weights.pt", "torch.save("),
    ):
        assert notes[code].startswith(words)
        assert _line(line) in notes[code]


def _findings(result: Result) -> dict[str, str]:
    (line,) = result.stdout.splitlines()
    record = json.loads(line)
    assert (record["script"], record["replicas"], record["error"]) == ("app.py", 2, None)
    assert all(finding["remedy"] for finding in record["findings"])
    return {finding["code"]: f"{finding['what']} {finding['where']}" for finding in record["findings"]}


@whole
def test_a_check_finds_all_mistakes_at_once(folder: Path) -> None:
    result = _run(
        folder, "--check", "--reduce-on-rdu", seed="rank", passed="", type=".double()", epoch="pass",
        sampler="DistributedSampler(data, replicas, 0)",
    )  # fmt: skip
    assert result.returncode == 1
    found = _findings(result)
    assert sorted(found) == ["AP03", "DP01", "DP03", "DP04", "DP06"]
    assert found["AP03"].startswith("x is float64: an RDU computes in bf16")
    assert all(_line(RUN) in found[code] for code in ("AP03", "DP01", "DP03"))
    assert _line(SAMPLER) in found["DP04"]
    assert _line("for batch in") in found["DP06"]
    assert sorted(result.stderr.splitlines()) == ["trained 0", "trained 1"], "the output of the app, and no notices"


@whole
def test_a_check_that_cannot_continue_says_why(folder: Path) -> None:
    result = _run(folder, "--check", passed="data_paralel=True")
    record = json.loads(result.stdout)
    assert (result.returncode, record["findings"], record["error"]["code"]) == (2, [], "keyword")
    assert record["error"]["remedy"] == "did you mean data_parallel=?"
    assert result.stderr.startswith("error[keyword]")
