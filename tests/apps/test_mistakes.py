"""Mistakes of data parallel apps that pass in silence on the hardware: each is caught, its corrected twin is clean."""

import sys
from pathlib import Path

import pytest

from tests.support.mpi import Result, run_job, run_mpi

APP = """\
import sys
import torch
from sambaflow import samba
from sambaflow.samba import utils
from sambaflow.samba.utils.argparser import parse_app_args

args = parse_app_args(argv=sys.argv[1:])
rank = utils.get_rank()
utils.set_seed({seed})
model = torch.nn.Sequential(torch.nn.Linear(6, 1))
samba.from_torch_model_(model)
optimizer = samba.optim.SGD(model.parameters(), lr=0.1)
torch.manual_seed({data_seed})
batches = [samba.randn(4, 6, name="x", batch_dim=0) for _ in range(3)]
if args.command == "compile":
    samba.session.compile(model, batches[:1], optimizer, name="net", config_dict=vars(args))
else:
    utils.trace_graph(model, batches[:1], optimizer, pef=args.pef)
    for batch in batches:
        samba.session.run([batch], model.output_tensors, {passed})
    print("trained", rank)
"""
RIGHT = {
    "seed": "7",
    "data_seed": "rank",
    "passed": "data_parallel=args.data_parallel, reduce_on_rdu=args.reduce_on_rdu",
}
RUN_LINE = APP[: APP.index("samba.session.run(")].count("\n") + 1


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the corrected app was compiled."""
    where = tmp_path_factory.mktemp("app")
    (where / "app.py").write_text(APP.format(**RIGHT))
    argv = [sys.executable, "-m", "sambasim", "app.py", "compile", "--data-parallel", "-ws", "2", "--pef-name", "net"]
    run_job(argv, cwd=where, timeout=120).check()
    return where


def _run(folder: Path, *flags: str, **mistakes: str) -> Result:
    (folder / "app.py").write_text(APP.format(**{**RIGHT, **mistakes}))
    argv = [sys.executable, "-m", "sambasim", "app.py", "run", "--pef", "net", "--data-parallel", *flags]
    return run_mpi(2, argv, cwd=folder, timeout=120)


def test_the_corrected_app_is_clean(folder: Path) -> None:
    result = _run(folder, "--reduce-on-rdu").check()
    assert sorted(result.stdout.splitlines()) == ["trained 0", "trained 1"]
    assert result.stderr == ""


@pytest.mark.parametrize(
    ("mistakes", "words"),
    [
        ({"passed": ""}, "DP01: 2 replicas train apart: the PEF is data parallel, but session.run is not told"),
        ({"seed": "rank"}, "DP03: replica 1 starts from other weights than replica 0: sequential__0__weight differs"),
        ({"data_seed": "7"}, "DP04: replicas 0 and 1 are fed the same samples, again in step 2"),
    ],
    ids=["DP01", "DP03", "DP04"],
)
def test_a_mistake_is_caught_with_its_line(folder: Path, mistakes: dict[str, str], words: str) -> None:
    result = _run(folder, **mistakes)
    assert result.returncode == 2
    assert f"error[data-parallel] (every rank): {words}" in result.stderr
    assert f"app.py:{RUN_LINE}: samba.session.run(" in result.stderr
    assert "  try:   " in result.stderr
    assert "trained" not in result.stdout


def test_a_flag_that_is_not_passed_on_is_noticed(folder: Path) -> None:
    result = _run(folder, "--reduce-on-rdu", passed="data_parallel=True").check()
    assert result.stderr.startswith("note: DP02: --reduce-on-rdu was typed, but session.run is not told")
    assert result.stderr.count("DP02") == 1
