"""torch.distributed in an app of one process: the app may bring it up itself, and it is up when it is needed."""

from pathlib import Path

from tests.support.mpi import SAMBASIM, run_job

APP = """\
import torch.distributed as dist
from sambasim.samba.utils.argparser import parse_app_args

parse_app_args()
assert not dist.is_initialized()
dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)
assert (dist.get_rank(), dist.get_world_size()) == (0, 1)
dist.destroy_process_group()
dist.barrier()
assert dist.is_initialized()
assert (dist.get_rank(), dist.get_world_size()) == (0, 1)
print(dist.get_backend())
"""


def test_an_app_of_one_process_makes_it_or_has_it_on_demand(tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text(APP)
    result = run_job([*SAMBASIM, "app.py", "run", "--pef", "net"], cwd=tmp_path, timeout=60).check()
    assert (result.stdout, result.stderr) == ("gloo\n", "")
