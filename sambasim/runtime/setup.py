"""What is known of a training run before anything is allocated: what it trains, as whom, and how it was asked to."""

from dataclasses import dataclass
from pathlib import Path

import torch

from sambasim.errors import InternalError
from sambasim.hardware.placement import Inventory, Placement, inventory_of
from sambasim.ir.program import Program
from sambasim.options.flags import HostSyncName
from sambasim.options.run import ResolvedRun, RunOptions, resolve_run
from sambasim.pef import PefDocument, read
from sambasim.runtime.admission import check_trusted
from sambasim.runtime.arguments import Arguments, bind_arguments
from sambasim.runtime.capacity import check_device
from sambasim.runtime.engine.choice import Tiles, agree_on_tiles
from sambasim.runtime.ranks import Communicator
from sambasim.runtime.runnable import check_is_for_run
from sambasim.runtime.seating import seat
from sambasim.runtime.threads import default_threads
from sambasim.runtime.transports.host import Roles, roles_of


@dataclass(frozen=True, slots=True)
class Setup:
    """One rank's view of a run. `emulated` is the number of replicas that this process plays: one, but in an emulation.

    `roles` says which ranks have replicas, and which only serve; `placement` where replicas sit on `inventory`, the
    simulated machine; `arguments` are the runtime arguments of the program, `threads` those of a rank, and `tiles` says
    whether they multiply by tiles.
    """

    path: Path
    options: RunOptions
    communicator: Communicator
    document: PefDocument
    resolved: ResolvedRun
    roles: Roles
    emulated: int
    inventory: Inventory
    placement: Placement
    arguments: Arguments
    threads: int
    tiles: Tiles

    @property
    def program(self) -> Program:
        return self.document.program

    @property
    def world_size(self) -> int:
        """Replicas in all, whoever plays them."""
        return len(self.roles.workers) * self.emulated

    @property
    def works(self) -> bool:
        """Whether this process has replicas. One that only serves opens the data too, but takes no sample of it."""
        return self.communicator.rank in self.roles.workers

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which tells and writes what is there once."""
        return self.communicator.rank == 0

    @property
    def seed(self) -> int:
        return self.resolved.training.seed

    @property
    def host_sync(self) -> HostSyncName:
        return self.options.host_sync or "mpi"

    @property
    def instructions(self) -> str:
        """What of the processor decides bits: its vectors, and its tiles where products are multiplied by them."""
        return torch.backends.cpu.get_cpu_capability() + (" with tiles" if self.tiles.used else "")

    @property
    def own_replicas(self) -> range:
        """The numbers of the replicas that this process plays."""
        first = self.communicator.rank
        return range(first, first + self.emulated) if self.works else range(0)


def set_up(path: Path, options: RunOptions, communicator: Communicator) -> Setup:
    """Collective. Read the PEF at `path`, and settle how it is run. Raises what is wrong with either of them."""
    document = read(path)
    check_device(document)
    resolved = resolve_run(options, document.training_defaults, document.data_source)
    check_trusted(path, document, options, communicator)
    if resolved.optimizer is None:
        raise InternalError("a training job without an optimizer")
    check_is_for_run(document.program)
    emulated = options.emulate_replicas or 1
    topology = communicator.topology
    who = roles_of(topology.world_size, options.parameter_servers or 0)
    threads = options.threads or default_threads(communicator, emulated)
    inventory = inventory_of(document.compile_options, cluster=options.cluster)
    return Setup(
        path=path,
        options=options,
        communicator=communicator,
        document=document,
        resolved=resolved,
        roles=who,
        emulated=emulated,
        inventory=inventory,
        placement=seat(inventory, [topology.node_of[rank] for rank in who.workers], emulated),
        arguments=bind_arguments(
            document.program, resolved.optimizer, len(who.workers) * emulated, topology.rank, resolved.training.seed
        ),
        threads=threads,
        tiles=agree_on_tiles(options.engine, threads, communicator),
    )
