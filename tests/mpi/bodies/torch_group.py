"""torch.distributed over the communicator: brought up, used by the ranks, taken down, and up again."""

import os
import sys

import torch
import torch.distributed as dist

from sambasim.runtime.communicator import connect
from sambasim.runtime.torch_process_group import bring_up, take_down

communicator = connect(sys.argv)
rank, world_size = communicator.rank, communicator.world_size
sums = []
for _ in range(2):
    bring_up(communicator, timeout_s=30)
    assert (dist.get_rank(), dist.get_world_size(), dist.get_backend()) == (rank, world_size, "gloo")
    values = torch.tensor([10**rank, rank], dtype=torch.int64)
    dist.all_reduce(values)
    sums.append(values.tolist())
    group = dist.new_group([world_size - 1])
    dist.barrier()
    take_down()
    assert not dist.is_initialized()
take_down()
seen = communicator.gather_object((sums, "MASTER_PORT" in os.environ))
if seen is not None:
    print(sorted(set(map(str, seen))))
