"""torch.distributed in an app of one process: up when it is needed, unless the app brings it up itself."""

from pathlib import Path

import pytest

from tests.support.mpi import SAMBASIM, run_job
from tests.support.whole import whole_case

APP = """\
import torch.distributed as dist
from sambasim.samba.utils.argparser import parse_app_args

parse_app_args()
assert not dist.is_initialized()
{call}
assert dist.is_initialized()
assert (dist.get_rank(), dist.get_world_size()) == (0, 1)
print(dist.get_backend())
"""
OWN = "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)"


@pytest.mark.parametrize("call", [whole_case("assert dist.get_rank() == 0"), "dist.barrier()", OWN])
def test_an_app_of_one_process_has_it_on_demand_or_makes_it(tmp_path: Path, call: str) -> None:
    (tmp_path / "app.py").write_text(APP.format(call=call))
    result = run_job([*SAMBASIM, "app.py", "run", "--pef", "net"], cwd=tmp_path, timeout=60).check()
    assert (result.stdout, result.stderr) == ("gloo\n", "")
