"""Connecting the ranks of an app: `communicator` and `enter`, which initializes `torch.distributed` too."""

import atexit
from argparse import Namespace

import torch.distributed as dist

from sambasim.errors import LaunchError
from sambasim.runtime.machine.communicator import Communicator
from sambasim.runtime.machine.mpi import connect
from sambasim.runtime.machine.pytorch import bring_up, bring_up_on_demand, take_down
from sambasim.runtime.run.run_observer import print_whole_lines
from sambasim.samba import ending
from sambasim.samba.checks import job
from sambasim.samba.process import current, typed_command


def communicator() -> Communicator:
    """The communicator of this process. The first call is collective, starts MPI, and raises as `connect` does."""
    context = current()
    if context.communicator is None:
        context.communicator = connect(typed_command())
        if context.communicator.world_size > 1:
            ending.install()  # for apps that were started by plain `python`
            print_whole_lines()
        job.begin(context.communicator, ending.leave)
    return context.communicator


ending.join = communicator


def enter(arguments: Namespace, *, connected: bool, alone: bool, sets_world_size: bool) -> None:
    """Makes `arguments` those of this process; collective if `connected` is true.

    connected: whether to connect the ranks and initialize `torch.distributed`
    alone: whether to initialize `torch.distributed` for this process alone when the app first uses it
    sets_world_size: whether `arguments.world_size` is the least number of replicas, which becomes the number of ranks;
        otherwise it is the app's own

    Raises LaunchError if there are fewer ranks than replicas, or if the app has initialized `torch.distributed` itself
    with another number of ranks; and what `communicator` raises.
    """
    context = current()
    context.command, context.arguments = arguments.command, arguments
    context.alone = alone
    if alone:
        bring_up_on_demand(lambda: communicator() if current().alone else None)
    if not connected:
        return
    world = communicator()
    if sets_world_size:
        started, wanted = world.world_size, arguments.world_size
        if started < wanted:
            replicas = "1 was started" if started == 1 else f"{started} were started"
            what = f"-ws {wanted} asks for at least {wanted} replicas, and {replicas}"
            raise LaunchError(what, remedy=f"mpirun -np {wanted} before the same command, or a smaller -ws")
        arguments.world_size = started
    if not dist.is_initialized():
        bring_up(world)
        atexit.register(take_down)
    if (dist.get_rank(), dist.get_world_size()) != (world.rank, world.world_size):
        raise LaunchError(
            f"torch.distributed says rank {dist.get_rank()} of {dist.get_world_size()}, "
            f"and MPI says rank {world.rank} of {world.world_size}: the app has started torch.distributed by itself",
            remedy="leave init_process_group out of the app: parse_app_args calls it when --data-parallel is given",
        )
