"""What the command line of this process said, and the communicator that connects it to the other ranks of its job.

There is one context a process, because there is one command line and one MPI. `utils.argparser` fills it, and the
session reads it.
"""

import atexit
import os
import sys
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch.distributed as dist

from sambasim.errors import LaunchError
from sambasim.runtime.communicator import connect
from sambasim.runtime.output import print_whole_lines
from sambasim.runtime.ranks import Communicator
from sambasim.runtime.torch_process_group import bring_up, bring_up_on_demand, take_down
from sambasim.samba.checks import job
from sambasim.samba.shim import ending

if TYPE_CHECKING:
    from sambasim.samba.utils.next_run import NextRun

STARTED_IN = os.getcwd()
"""Where the app was started: it may go elsewhere."""


@dataclass(slots=True)
class Context:
    """`command` is compile, run, …; `arguments` the whole of what `parse_app_args` returned. Both are None before it
    was called; `alone` says that the command runs in one process. `communicator` is None until somebody needed one.
    `next_run` is there where a shell's command line compiles."""

    command: str | None = None
    arguments: Namespace | None = None
    communicator: Communicator | None = None
    alone: bool = False
    next_run: "NextRun | None" = None

    @property
    def trains(self) -> bool:
        """Whether the app may be about to train. Measured and tested is by whole steps, too, on the same data
        everywhere, and nothing is wrong with that."""
        return self.command in (None, "run")


_OF_THIS_PROCESS = Context()


def current() -> Context:
    """The context of this process."""
    return _OF_THIS_PROCESS


def communicator() -> Communicator:
    """The communicator of this process. The first call is collective, and starts MPI; later calls return the same.

    Raises LaunchError or MachineError as `sambasim.runtime.communicator.connect` does.
    """
    context = current()
    if context.communicator is None:
        context.communicator = connect(typed_command())
        if context.communicator.world_size > 1:
            ending.install()  # an app that was started by plain `python` has nobody else around it
            print_whole_lines()
        job.begin(context.communicator)
    return context.communicator


def typed_command(original: Sequence[str] = tuple(sys.orig_argv)) -> list[str]:
    """What was typed to start this process, without mpirun: `["python", "app.py", "run", …]`. Remedies repeat it.

    original: the whole argument vector of the process, interpreter and its flags included
    """
    interpreter, *rest = original
    if rest and Path(rest[0]).name == "sambasim":  # the installed command, which the shell starts by its interpreter
        return ["sambasim", *rest[1:]]
    return [interpreter, *rest]


def enter(arguments: Namespace, *, connected: bool, alone: bool = False) -> None:
    """Make `arguments` those of this process; collective if `connected` is true.

    arguments: with a `command`, and with a `world_size` where `connected` is true: the least number of replicas that
        was asked for on the way in, the number that mpirun started on the way out
    connected: whether the ranks of the job must find each other, and `torch.distributed` be up, before this returns
    alone: whether `torch.distributed` is to come up, for this process alone, when the app first needs it

    Raises LaunchError if fewer ranks were started than were asked for, or if the app has started `torch.distributed`
    itself with another number of ranks than the job has; and what `communicator` raises.
    """
    context = current()
    context.command, context.arguments = arguments.command, arguments
    context.alone = alone
    if alone:
        bring_up_on_demand(lambda: communicator() if current().alone else None)
    if not connected:
        return
    world = communicator()
    _check_replicas(world.world_size, arguments.world_size)
    if not dist.is_initialized():
        bring_up(world)
        atexit.register(take_down)
    _check_process_group(world)
    arguments.world_size = world.world_size


def _check_replicas(started: int, wanted: int) -> None:
    if started < wanted:
        replicas = "1 was started" if started == 1 else f"{started} were started"
        raise LaunchError(
            f"-ws {wanted} asks for at least {wanted} replicas, and {replicas}",
            remedy=f"mpirun -np {wanted} before the same command, or a smaller -ws",
        )


def _check_process_group(world: Communicator) -> None:
    """`init_process_group` is not the app's to call: the library does it, as soon as it has read --data-parallel."""
    if (dist.get_rank(), dist.get_world_size()) != (world.rank, world.world_size):
        raise LaunchError(
            f"torch.distributed says rank {dist.get_rank()} of {dist.get_world_size()}, "
            f"and MPI says rank {world.rank} of {world.world_size}: the app has started torch.distributed by itself",
            remedy="leave init_process_group out of the app: parse_app_args calls it when --data-parallel is given",
        )
