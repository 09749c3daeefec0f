"""What a run decides and checks before it allocates anything, and the replicas of a process that are then made."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal

from sambasim.data.datasets import Given, Source, open_source
from sambasim.errors import DataError, InternalError, MachineError, OptionError, PefError
from sambasim.hardware.placement import Inventory, Placement, inventory_of, place_replicas
from sambasim.ir.mesh import DATA_PARALLEL, Mesh, copy_mesh, mesh_of
from sambasim.ir.pieces import in_pieces
from sambasim.ir.program import LOSS_SCALE, Program
from sambasim.ir.ranks import in_slices
from sambasim.options.fields import BuildFields
from sambasim.options.run import ResolvedRun, RunOptions, resolve_run, with_deepspeed
from sambasim.options.schedules import LossScaleOptions
from sambasim.pef import PefDocument, map_weights, read
from sambasim.pef.archive import COMPILE_AGAIN
from sambasim.pef.files import is_compiled_here
from sambasim.runtime.machine.agreement import DATA, check_equal
from sambasim.runtime.machine.communicator import Communicator
from sambasim.runtime.machine.kernels import cpu_kind, find_cpp_compiler
from sambasim.runtime.machine.launcher import cores_of_this_process, ranks_of_process
from sambasim.runtime.machine.process import Stream, check_device, default_threads, derive, repeatable, seed_everything
from sambasim.runtime.run.graphs import Graphs, as_it_is
from sambasim.runtime.run.replica import Replica, Shard, input_specs
from sambasim.runtime.run.run_observer import RunObserver
from sambasim.runtime.transports.connect import Transport, Way, open_ranks
from sambasim.runtime.transports.host import Roles, roles_of
from sambasim.runtime.transports.in_process import Hub
from sambasim.runtime.values.memory import DeviceMemory, Tensors, place_weights, slices_of
from sambasim.runtime.values.operators import check_operators
from sambasim.runtime.values.optimizers import Arguments, Optimizers, bind_arguments
from sambasim.runtime.watch.observer import StepObserver
from sambasim.units import counted

if TYPE_CHECKING:
    from sambasim.runtime.engine.inductor import Inductor


@dataclass(frozen=True, slots=True)
class Setup:
    """One process's view of a run. `mesh`: its ranks, but for parameter servers; `ranks`: those that this process runs;
    `inventory`, `placement`: the simulated machine; `threads`: intra-op threads of a rank; `cpus`: the kinds of
    CPU of all ranks; `notes`: on DeepSpeed and on cores; `data_identity`: of the data, once it is open."""

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
    cpus: Sequence[str]
    notes: tuple[str, ...]
    data_identity: str = ""

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
    def wire(self) -> Literal["fp32", "bf16"]:
        """To what float32 gradients are rounded that replicas add; those of one replica are not."""
        is_float32 = any(group.dtype == "float32" for group in self.program.groups)
        return self.options.wire if self.shards > 1 and is_float32 else "fp32"

    @property
    def works(self) -> bool:
        return self.communicator.rank in self.roles.workers

    @property
    def is_first(self) -> bool:
        return self.communicator.rank == 0

    @property
    def shows_device(self) -> bool:
        """Whether the user has asked for a device: else the run does not speak of the simulated machine."""
        options, compiled = self.options, self.document.compile_options
        asked = options.verbose or options.reduce_on_rdu or options.predict or options.cluster is not None
        return asked or compiled.get("arch", BuildFields.arch) != BuildFields.arch

    @property
    def seed(self) -> int:
        return self.resolved.training.seed


def set_up(path: Path, options: RunOptions, communicator: Communicator) -> Setup:
    """Collective. Read the PEF at `path` and decide how to run it. Raises SambasimError if the two do not fit."""
    document = read(path)
    program, compiled = document.program, document.compile_options
    check_device(document)
    emulated, whole = options.emulate_replicas, options.one_process_per_replica
    count = ranks_of_process(communicator.world_size, program.ranks_of_replica, emulated, whole=whole)
    ranks = range(communicator.rank * count, (communicator.rank + 1) * count)
    roles = roles_of(communicator.world_size, options.parameter_servers or 0)
    mesh = mesh_of(program.mesh, len(roles.workers) * count)
    shards = mesh.size(DATA_PARALLEL)
    replicas = shards // program.chips
    options, given, notes = with_deepspeed(options, document.training_defaults, compiled, replicas)
    states = [optimizer.states for optimizer in program.optimizers]
    resolved = resolve_run(options, document.training_defaults, document.data_source, given, states)
    check_trusted(path, document, options, communicator)
    if resolved.optimizer is None:
        raise InternalError("a training job without an optimizer")
    _check_trainable(program, resolved)
    threads = options.threads or default_threads(communicator, count)
    inventory = inventory_of(compiled, cluster=options.cluster)
    placement = place_replicas(inventory, [communicator.node_of[rank] for rank in roles.workers], count)
    of_rank = mesh.coordinate(ranks[0], DATA_PARALLEL)
    if (resolved.ema is None) == bool(program.averages):
        raise PefError("the PEF does not say how its weights are averaged", remedy=COMPILE_AGAIN)
    machines = communicator.all_gather_object((cpu_kind(), cores_of_this_process()))
    ranks_here = communicator.local_size
    cores = len(frozenset().union(*(machines[rank][1] for rank in communicator.local_ranks)))
    arguments = bind_arguments(program, resolved.optimizer, shards, of_rank, resolved.training.seed, resolved.ema)
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
        cpus=sorted({kind for kind, _ in machines}),
        notes=(*notes, *([f"{ranks_here} ranks share {counted(cores, 'core')}"] if ranks_here > cores else ())),
    )


def check_trusted(path: Path, document: PefDocument, options: RunOptions, communicator: Communicator) -> None:
    """Collective. Raises OptionError for a PEF that this account did not compile, unless --trust was given; then
    PefError if its operators do not fit its graph."""
    is_own = communicator.rank == 0 and is_compiled_here(document.digest)
    is_own, is_trusted = communicator.broadcast_object((is_own, options.trust))
    if is_own:
        return
    if not is_trusted:
        raise OptionError(
            f"this account did not compile {path.name}: its graph and its data source are not executed",
            where=str(path),
            remedy="compile the model yourself: sambasim compile; or, if you trust the author of the file, add --trust",
        )
    with communicator.alike():
        if communicator.rank == 0:  # it imports a part of torch that takes a second
            for graph in document.graphs.values():
                check_operators(graph.program)


@contextmanager
def blamed_on_strangers(document: PefDocument) -> Iterator[None]:
    """What fails within is a fault of the PEF, if this account did not compile it: an argument can be of the right type
    and have an impossible value. Raises PefError."""
    try:
        yield
    except InternalError as error:
        if is_compiled_here(document.digest):
            raise
        raise PefError(error.what, where=error.where, remedy=COMPILE_AGAIN) from error


def _check_trainable(program: Program, run: ResolvedRun) -> None:
    """Raises OptionError for programs that only apps can run, and for a scale of a loss that is not scaled."""
    scales = any(argument.name == LOSS_SCALE for argument in program.runtime_arguments)
    if run.training.loss_scale != LossScaleOptions() and not scales:
        what = "training.loss_scale is for float16, and this PEF was compiled for another dtype"
        raise OptionError(what, remedy="leave it out, or compile again with --dtype fp16")
    loss = program.symbols[program.loss or ""].type
    if run.optimizer is not None and len(program.optimizers) != len(run.optimizer.updates()):
        what = f"this PEF has {len(program.optimizers)} optimizers, or groups of parameters, with options of their own"
    elif loss.numel > 1:
        what = f"this PEF's first output, {loss}, is a loss for each sample and not one number"
    else:
        return
    raise OptionError(what, remedy="run it by the app that compiled it: python APP.py run --pef …")


def open_sources(setup: Setup, given: Given) -> Sequence[Source]:
    """The data, opened once for each rank of this process, with the same random numbers for all."""
    resolved, specs, sources = setup.resolved, tuple(input_specs(setup.program)), list[Source]()
    for _ in setup.ranks:
        seed_everything(derive(setup.seed, 0, 0, 0, Stream.SOURCE))
        with repeatable(setup.threads):  # its module may set a number of threads
            sources.append(open_source(resolved.padded_data, specs, given, held_out_by=resolved.evaluation))
    return sources


def check_sources(communicator: Communicator, sources: Sequence[Source]) -> str:
    """Collective. The identity of the data. Raises DataError if ranks have other data."""

    def facts(source: Source, identity: str) -> dict[str, str]:
        held_out = "" if source.evaluation is None else f" and {len(source.evaluation)} held out"
        return {DATA: f"{source.name} with {len(source.train)} samples to train{held_out}, {identity}"}

    identities = [source.identity() for source in sources]
    check_equal(communicator, *map(facts, sources, identities), kind=DataError)
    return identities[0]


EngineName = Literal["plain", "inductor"]

INDUCTOR_EXEMPT = "--engine inductor: its bits are its own, equal over sync paths and runs"


@dataclass(frozen=True, slots=True)
class Engine:
    """The engine that runs. `inductor` is None for the plain engine; `notice` says why it is not the requested one."""

    name: EngineName
    inductor: "Inductor | None" = None
    notice: str | None = None


def choose_engine(wanted: EngineName, communicator: Communicator, report: Callable[[str], None]) -> Engine:
    """Collective. `report` is called with the progress of the compiler."""
    if wanted == "plain":
        return Engine("plain")
    missing = None
    try:
        find_cpp_compiler()
    except MachineError as error:
        missing = f"{error.what} ({error.remedy})"
    if why := next(filter(None, communicator.all_gather_object(missing)), None):
        return Engine("plain", notice=f"{why}; the plain engine runs instead")
    from sambasim.runtime.engine.inductor import Inductor  # takes seconds to import

    text = "inductor: {} of {} parts compiled, or loaded, in {:.0f} s (measured)"
    return Engine("inductor", Inductor(lambda *progress: report(text.format(*progress))))


@dataclass(frozen=True, slots=True)
class Team:
    """The replicas of this process. A parameter server without a replica has one without data."""

    replicas: Sequence[Replica]
    way: Way
    engine: Engine

    @property
    def sync_name(self) -> Literal["none", "host", "device", "emulated"]:
        """The sync path as the summary names it."""
        if self.way is Way.IN_PROCESS:
            return "emulated" if len(self.replicas) > 1 else "none"
        return "device" if self.way is Way.DEVICE else "host"

    @property
    def hub(self) -> Hub | None:
        return self.transport.hub

    @property
    def memory(self) -> DeviceMemory:
        return self.replicas[0].memory

    @property
    def transport(self) -> Transport:
        """The transport of the first replica."""
        return self.replicas[0].transport

    @property
    def keeps_slices(self) -> bool:
        """Whether a rank keeps a slice of the parameters only."""
        return self.way is Way.HOST and self.memory.program.zero == 3

    def settle(self) -> None:
        """Wait for all parameters of the last step."""
        for replica in self.replicas:
            replica.transport.sync.settle()

    @contextmanager
    def whole_parameters(self) -> Iterator[None]:
        """Collective. Parameters are whole within, also where ranks keep slices only."""
        for replica in self.replicas:
            replica.transport.sync.make_whole()
        try:
            yield
        finally:
            self.release_parameters()

    def release_parameters(self) -> None:
        """Free the parameters of which this process keeps slices only."""
        if self.keeps_slices:
            for replica in self.replicas:
                for group in replica.memory.program.groups:
                    replica.transport.sync.releasing(group, "parameter")()

    @property
    def first(self) -> Sequence[Replica]:
        """The ranks of one replica that this process runs: of replica 0 in an emulation, where they update all."""
        return [replica for replica in self.replicas if replica.replica == self.replicas[0].replica]


def assemble(
    setup: Setup,
    sources: Sequence[Source],
    report: RunObserver,
    probe: StepObserver | None = None,
    weights: Tensors = MappingProxyType({}),
) -> Team:
    """Collective. Create the replicas of this process, one for each of `sources`, with the weights of the PEF, or with
    `weights`, by symbol. Raises MachineError if there is too little memory. `probe`: replaces the functions of their
    instructions."""
    communicator, options, way = setup.communicator, setup.options, _way(setup)
    mesh = setup.mesh if copy_mesh(setup.program.mesh).world_size > 1 else None
    in_parts = way in (Way.HOST, Way.IN_PROCESS) and setup.shards > 1
    change = in_slices if in_parts else as_it_is
    if way is Way.DEVICE and communicator.node_count > 1:
        change = in_pieces
    graphs = Graphs(setup.path, setup.document, setup.resolved, change)
    program = graphs.program
    fill = _with_weights(setup, weights, sliced=way is Way.HOST and program.zero == 3)
    transports = open_ranks(program, communicator, way, fill, setup.ranks, mesh, setup.roles, setup.wire)
    engine = choose_engine(options.engine, communicator, report.preparing)
    # One rank per node compiles; the others then load its result from the cache folder.
    if engine.inductor and communicator.local_rank > 0:
        communicator.node_barrier()
    training, replicas = setup.resolved.training, list[Replica]()
    for transport, source in zip(transports, sources, strict=True):
        shard = Shard(
            source.train,
            rank=transport.replica,
            world_size=setup.shards,
            batch_size=setup.program.batch_size,
            accumulation_steps=training.accumulation_steps * setup.program.micro_batches,
            options=setup.resolved.data,
            shapes=graphs.shapes(),
            seed=setup.seed,
        )
        replica = Replica(
            transport,
            shard if setup.works else None,
            training,
            Optimizers(transport.sync.memory, setup.arguments),
            engine.inductor if setup.works else None,
            overlaps=not (options.debug_numerics or options.record_digests),
            skips_nonfinite=options.on_nonfinite == "skip",
            observer=probe,
            graphs=[*graphs.in_memory(transport.memory)],
        )
        replicas.append(replica)
    if engine.inductor:
        if communicator.local_rank == 0:
            communicator.node_barrier()
        communicator.barrier()  # so that the time of the first step includes no compilation
    return Team(replicas, way, engine)


def _way(setup: Setup) -> Way:
    has_no_peer = setup.shards == 1 and setup.program.ranks_of_replica > 1  # along dp
    if setup.communicator.world_size == 1 or has_no_peer:
        return Way.IN_PROCESS
    if setup.options.reduce_on_rdu:
        return Way.DEVICE
    host_sync = setup.options.host_sync
    if host_sync == "mpi" and setup.program.zero == 0:
        return Way.HOST_REPLICATED
    return {"mpi": Way.HOST, "gloo": Way.GLOO, "parameter-server": Way.PARAMETER_SERVER}[host_sync]


def _with_weights(setup: Setup, given: Tensors, *, sliced: bool) -> Callable[[DeviceMemory, int], None]:
    """Collective. Fills the memory of a rank; `sliced`: only its slices of the parameters are kept. Of the ranks that
    read the same file the last one checks its bytes: the first one of a node may have most to fill."""
    status, communicator = setup.path.stat(), setup.communicator
    file = communicator.node_index, status.st_dev, status.st_ino
    checks = file not in communicator.all_gather_object(file)[communicator.rank + 1 :]
    mapped = cache(lambda: {**map_weights(setup.path, setup.document, check=checks), **given})

    def fill(memory: DeviceMemory, rank: int) -> None:
        weights = mapped()
        at, slices = setup.mesh.coordinates(rank), slices_of(memory.program, setup.shards) if sliced else {}
        keep = {name: of_ranks[at[DATA_PARALLEL]] for name, of_ranks in slices.items()}
        place_weights(memory, weights, at, keep)

    return fill
