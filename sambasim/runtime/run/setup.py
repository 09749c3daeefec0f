"""What a run decides and checks before it allocates anything: PEF, trust, options, replicas, placement, threads."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from pydantic import JsonValue

from sambasim.data.sources import Source
from sambasim.errors import DataError, InternalError, OptionError
from sambasim.hardware.placement import Inventory, Placement, inventory_of, place_replicas
from sambasim.ir.mesh import DATA_PARALLEL, Mesh, mesh_of
from sambasim.ir.program import LOSS_SCALE, Program
from sambasim.options.resolve import ResolvedRun, resolve_run, with_deepspeed
from sambasim.options.run import HostSyncName, RunOptions
from sambasim.options.schedule import LossScaleOptions
from sambasim.options.training import TrainingOptions
from sambasim.pef import PefDocument, read
from sambasim.pef.files import is_compiled_here
from sambasim.runtime.machine.communicator import Communicator
from sambasim.runtime.machine.launcher import ranks_of_process
from sambasim.runtime.machine.resources import check_device, default_threads
from sambasim.runtime.transports.host import Roles, roles_of
from sambasim.runtime.values.optimizers import Arguments, bind_arguments


@dataclass(frozen=True, slots=True)
class Setup:
    """One process's view of a run. `mesh`: its ranks, but for parameter servers; `ranks`: those that this process runs,
    as every process runs as many; `inventory`, `placement`: the simulated machine, and where the replicas are on it;
    `arguments`: the program's runtime arguments; `threads`: intra-op threads of a rank; `notes`: on the DeepSpeed
    config; `began_s`: when it began, by time.perf_counter."""

    path: Path
    options: RunOptions
    communicator: Communicator
    document: PefDocument
    resolved: ResolvedRun
    roles: Roles
    mesh: Mesh
    ranks: range
    inventory: Inventory
    placement: Placement
    arguments: Arguments
    threads: int
    notes: tuple[str, ...]
    began_s: float

    @property
    def program(self) -> Program:
        return self.document.program

    @property
    def is_emulation(self) -> bool:
        """Whether this process runs all ranks, and there are several."""
        return len(self.ranks) > 1 and self.communicator.world_size == 1

    @property
    def replicas(self) -> int:
        return self.shards // self.program.chips

    @property
    def shards(self) -> int:
        """The parts of the data: one for each replica, or for each of its chips."""
        return self.mesh.size(DATA_PARALLEL)

    @property
    def works(self) -> bool:
        return self.communicator.rank in self.roles.workers

    @property
    def is_first(self) -> bool:
        return self.communicator.rank == 0

    @property
    def seed(self) -> int:
        return self.resolved.training.seed

    @property
    def host_sync(self) -> HostSyncName:
        return self.options.host_sync or "mpi"

    @property
    def option_tables(self) -> dict[str, JsonValue]:
        """The resolved options of data, loss, optimizer and training."""
        tables = {name: getattr(self.resolved, name) for name in ("data", "loss", "optimizer", "training")}
        return {name: table and table.model_dump(mode="json") for name, table in tables.items()}

    @property
    def instructions(self) -> str:
        return torch.backends.cpu.get_cpu_capability()


def set_up(path: Path, options: RunOptions, communicator: Communicator) -> Setup:
    """Collective. Read the PEF at `path` and decide how to run it. Raises SambasimError if the two do not fit."""
    began_s = time.perf_counter()
    document = read(path)
    program, compiled = document.program, document.compile_options
    check_device(document)
    emulated, whole = options.emulate_replicas, options.one_process_per_replica
    count = ranks_of_process(communicator.world_size, program.ranks_of_replica, emulated, whole=whole)
    ranks = range(communicator.rank * count, (communicator.rank + 1) * count)
    roles = roles_of(communicator.world_size, options.parameter_servers or 0)
    mesh = mesh_of(program.mesh, len(roles.workers) * count)
    shards = mesh.size(DATA_PARALLEL)
    options, by_file = with_deepspeed(options, document.training_defaults, compiled, shards // program.chips)
    resolved = resolve_run(options, document.training_defaults, document.data_source, by_file.given)
    check_trusted(path, document, options, communicator)
    if resolved.optimizer is None:
        raise InternalError("a training job without an optimizer")
    _check_trainable(program, resolved.training)
    threads = options.threads or default_threads(communicator, count)
    inventory = inventory_of(compiled, cluster=options.cluster)
    placement = place_replicas(inventory, [communicator.node_of[rank] for rank in roles.workers], count)
    of_rank = mesh.coordinate(ranks[0], DATA_PARALLEL)
    arguments = bind_arguments(program, resolved.optimizer, shards, of_rank, resolved.training.seed)
    return Setup(
        path=path,
        options=options,
        communicator=communicator,
        document=document,
        resolved=resolved,
        roles=roles,
        mesh=mesh,
        ranks=ranks,
        inventory=inventory,
        placement=placement,
        arguments=arguments,
        threads=threads,
        notes=tuple(by_file.notes),
        began_s=began_s,
    )


def check_trusted(path: Path, document: PefDocument, options: RunOptions, communicator: Communicator) -> None:
    """Collective. Raises OptionError for a PEF that this account did not compile, unless --trust was given."""
    trusted = options.trust or (communicator.rank == 0 and is_compiled_here(document.digest))
    if not communicator.broadcast_object(trusted):
        raise OptionError(
            f"this account did not compile {path.name}: its graph and its data source are not executed",
            where=str(path),
            remedy="compile the model yourself: sambasim compile; or, if you trust the author of the file, add --trust",
        )


def _check_trainable(program: Program, training: TrainingOptions) -> None:
    """Raises OptionError for programs that only apps can run (several optimizers, or a loss per sample), and for a loss
    scale where the loss is not scaled."""
    scales = any(argument.name == LOSS_SCALE for argument in program.runtime_arguments)
    if training.loss_scale != LossScaleOptions() and not scales:
        what = "training.loss_scale is for float16, and this PEF was compiled for another dtype"
        raise OptionError(what, remedy="leave it out, or compile again with --dtype fp16")
    loss = program.symbols[program.loss or ""].type
    if len(program.optimizers) > 1:
        what = f"this PEF has {len(program.optimizers)} optimizers, or groups of parameters, with options of their own"
    elif loss.numel > 1:
        what = f"this PEF's first output, {loss}, is a loss for each sample and not one number"
    else:
        return
    raise OptionError(what, remedy="run it by the app that compiled it: python APP.py run --pef …")


def check_sources(communicator: Communicator, sources: Sequence[Source], mesh: Mesh) -> None:
    """Collective. Raises DataError if replicas have datasets of different sizes, and so different numbers of steps."""

    def sizes(source: Source) -> str:
        held_out = "" if source.evaluation is None else f" and {len(source.evaluation)} held out"
        return f"{len(source.train)} samples to train{held_out}"

    of_ranks = [size for own in communicator.all_gather_object([*map(sizes, sources)]) for size in own]
    if apart := [rank for rank, size in enumerate(of_ranks) if size != of_ranks[0]]:
        first, other = mesh.who(0), mesh.who(apart[0])
        raise DataError(
            f"{sources[0].name} gives {first} {of_ranks[0]}, but {other} {of_ranks[apart[0]]}",
            remedy="give every rank the whole data set: sambasim distributes the samples itself",
        )
