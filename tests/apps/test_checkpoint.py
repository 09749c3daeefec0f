"""A checkpoint that one rank alone saves holds the whole state of the optimizer, whichever way gradients are synced."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.support.mpi import SAMBASIM, run_job, run_mpi
from tests.support.whole import is_whole, whole

APP = """\
import sys
import torch
from sambaflow import samba
from sambaflow.samba import utils
from sambaflow.samba.utils.argparser import parse_app_args

args = parse_app_args(argv=sys.argv[1:], run_parser_fn=lambda parser: parser.add_argument("--resume"))
rank = utils.get_rank()
utils.set_seed(1)
model = torch.nn.Sequential(torch.nn.Linear(6, 256), torch.nn.Tanh(), torch.nn.Linear(256, 256))
samba.from_torch_model_(model)
optimizer = samba.optim.AdamW(model.parameters(), lr=0.01)
inputs = [samba.randn(4, 6, name="x", batch_dim=0)]
if args.command == "compile":
    samba.session.compile(model, inputs, optimizer, name="net", config_dict=vars(args))
else:
    done = 0
    if args.resume:
        checkpoint = torch.load(args.resume)
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        done = checkpoint["done"]
    utils.trace_graph(model, inputs, optimizer, pef=args.pef)
    for step in range(done, 4):
        torch.manual_seed(10 * step + rank)
        batch = samba.randn(4, 6, name="x", batch_dim=0)
        samba.session.run(
            [batch], section_types=["FWD"] if step % 2 else None,
            data_parallel=args.data_parallel, reduce_on_rdu=args.reduce_on_rdu,
        )
        if step % 2:
            samba.session.run(
                section_types=["BCKWD", "OPT"], data_parallel=args.data_parallel, reduce_on_rdu=args.reduce_on_rdu
            )
        if rank == 0:
            samba.session.to_cpu(model)
            kept = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "done": step + 1}
            torch.save(kept, f"after_{step + 1}.pt")
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("app")
    (where / "app.py").write_text(APP)
    run_job([*SAMBASIM, "app.py", "compile", "--data-parallel", "--pef-name", "net"], cwd=where, timeout=120).check()
    return where


def _run(folder: Path, *flags: str) -> dict[int, dict[str, Tensor]]:
    """What was saved after each step, as flat tensors by name."""
    run_mpi(2, [*SAMBASIM, "app.py", "run", "--pef", "net", "--data-parallel", *flags], cwd=folder, timeout=120).check()
    kept = {}
    for step in (2, 4):
        checkpoint = torch.load(folder / f"after_{step}.pt")
        states = checkpoint["optimizer"]["state"]
        kept[step] = dict(checkpoint["model"]) | {
            f"{number} {name}": value for number, state in states.items() for name, value in state.items()
        }
    return kept


def _assert_equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


@whole
def test_either_sync_saves_the_same_and_goes_on_from_it(folder: Path) -> None:
    host = _run(folder)
    assert all(tensor.any() for tensor in host[4].values())
    resumed = ["--resume", "after_2.pt", "--reduce-on-rdu"]
    for flags in [resumed, *([["--reduce-on-rdu"], resumed[:2]] if is_whole() else [])]:
        _assert_equal(_run(folder, *flags)[4], host[4])
