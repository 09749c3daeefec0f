"""Train every PEF named on the command line by the runtime, and by torch's DistributedDataParallel from plain PyTorch.

Both start from the PEF's weights, deal the same samples out, draw the same random numbers, and update by the same
kernel. Rank 0 leaves three files for each PEF in FOLDER: NAME.before.safetensors, with the parameters to begin with, by
symbol; NAME.ours.safetensors and NAME.ddp.safetensors, with the parameters and buffers that it ends with.

Its arguments are FOLDER STEPS PEF...
"""

import sys
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from sambasim.options.run import RunOptions
from sambasim.pef import map_weights
from sambasim.runtime.job import TrainingJob
from sambasim.runtime.machine import process
from sambasim.runtime.machine.communicator import Communicator
from sambasim.runtime.machine.mpi import connect
from sambasim.runtime.run.run_observer import RunObservers
from sambasim.runtime.run.setup import set_up
from sambasim.runtime.values.memory import fitting, read_tensors
from tests.support.eager import CONSTANT_RATE, EagerReplica


def main() -> None:
    folder, steps, paths = Path(sys.argv[1]), int(sys.argv[2]), [Path(name) for name in sys.argv[3:]]
    communicator = connect(sys.argv)
    for path in paths:
        saved = folder / f"{path.stem}.safetensors"
        training = {"steps": steps, "schedule": dict(CONSTANT_RATE)}
        overrides = {"training": training, "evaluation": {"enabled": False}}
        options = RunOptions(pef=str(path), threads=1, reduce_on_rdu=True, save=saved, overrides=overrides)
        TrainingJob(set_up(path, options, communicator), RunObservers([])).run()
        torch.set_num_threads(1)
        process.bring_up(communicator)
        replica = _train_by_ddp(path, options, steps, communicator)
        process.take_down()
        if communicator.rank == 0:
            parameters = {member.parameter for group in replica.program.groups for member in group.members}
            weights = {name: tensor for name, tensor in map_weights(path).items() if name in parameters}
            _leave(folder / f"{path.stem}.before.safetensors", weights)
            _leave(
                folder / f"{path.stem}.ours.safetensors", fitting(read_tensors(saved, ""), replica.program, "saved")[0]
            )
            _leave(folder / f"{path.stem}.ddp.safetensors", replica.state())
    communicator.close()


def _train_by_ddp(path: Path, options: RunOptions, steps: int, communicator: Communicator) -> EagerReplica:
    """The replica of this rank after training. DDP must be gone before the process group is: it would take the group
    down with it, and that can wait for ever for a thread of the group."""
    replica = EagerReplica(path, options, rank=communicator.rank, world_size=communicator.world_size)
    # Buffers are per replica in the runtime; DDP would replace everybody's by those of rank 0 before each forward.
    model = DistributedDataParallel(replica.module, broadcast_buffers=False)
    optimizer = replica.optimizer()
    for step in range(steps):
        replica.differentiate(step, through=model)
        optimizer.step()
    return replica


def _leave(path: Path, tensors: Mapping[str, Tensor]) -> None:
    save_file({name: tensor.detach().clone() for name, tensor in tensors.items()}, path)
