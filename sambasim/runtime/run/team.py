"""The replicas of a process, with their device memories, their shards of the data, and their transports."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from sambasim.data.sources import Source
from sambasim.errors import MachineError
from sambasim.ir.mesh import DATA_PARALLEL, copy_mesh
from sambasim.ir.ranks import in_slices
from sambasim.pef import map_weights
from sambasim.runtime.machine.communicator import Communicator
from sambasim.runtime.machine.kernels.build import find_cpp_compiler
from sambasim.runtime.run.replica import Replica, Shard, input_specs
from sambasim.runtime.run.run_observer import RunObserver
from sambasim.runtime.run.setup import Setup
from sambasim.runtime.transports.connect import Transport, Way, open_ranks
from sambasim.runtime.transports.in_process import Hub
from sambasim.runtime.values.memory import DeviceMemory, load_weights, place_weights, slices_of
from sambasim.runtime.values.optimizers import Optimizers
from sambasim.runtime.watch.observer import StepObserver

if TYPE_CHECKING:
    from sambasim.runtime.engine.inductor import Inductor


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
    try:
        find_cpp_compiler()
        missing = None
    except MachineError as error:
        missing = f"{error.what} ({error.remedy})"
    if why := next(filter(None, communicator.all_gather_object(missing)), None):
        return Engine("plain", notice=f"{why}; the plain engine runs instead")

    from sambasim.runtime.engine.inductor import Inductor  # takes seconds to import

    def progress(done: int, parts: int, elapsed_s: float) -> None:
        report(f"inductor: {done} of {parts} parts compiled in {elapsed_s:.0f} s (measured)")

    return Engine("inductor", Inductor(progress))


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
    setup: Setup, sources: Sequence[Source], run_observer: RunObserver, observer: StepObserver | None = None
) -> Team:
    """Collective. Create the replicas of this process, one for each of `sources`, with the weights of the PEF. Raises
    MachineError if there is too little memory. `observer`: replaces the functions of their instructions."""
    program, communicator, options, way = setup.program, setup.communicator, setup.options, _way(setup)
    mesh = setup.mesh if copy_mesh(program.mesh).world_size > 1 else None
    if way in (Way.HOST, Way.IN_PROCESS) and setup.shards > 1:
        program = in_slices(program)
    fill = _with_weights(setup, sliced=way is Way.HOST and program.zero == 3)
    transports = open_ranks(program, communicator, way, fill, setup.ranks, mesh, setup.roles)
    engine = choose_engine(options.engine, communicator, run_observer.preparing)
    # One rank per node compiles; the others then load its result from the cache folder.
    if engine.inductor and communicator.local_rank > 0:
        communicator.node_barrier()
    replicas = [
        Replica(
            transport,
            _shard(setup, source, transport.replica) if setup.works else None,
            setup.resolved.training,
            Optimizers(transport.program, transport.sync.memory, setup.arguments),
            engine.inductor if setup.works else None,
            overlaps=not options.debug_numerics,
            skips_nonfinite=options.on_nonfinite == "skip",
            observer=observer,
        )
        for transport, source in zip(transports, sources, strict=True)
    ]
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
    if setup.host_sync == "mpi" and setup.program.zero == 0:
        return Way.HOST_REPLICATED
    return {"mpi": Way.HOST, "gloo": Way.GLOO, "parameter-server": Way.PARAMETER_SERVER}[setup.host_sync]


def _with_weights(setup: Setup, *, sliced: bool) -> Callable[[DeviceMemory, int], None]:
    """Fills the memory of a rank; `sliced`: only its slices of the parameters are kept."""
    weights = dict(map_weights(setup.path, setup.document))
    if setup.options.weights is not None and setup.options.checkpoint.resume is None:
        weights |= load_weights(setup.options.weights, setup.program)

    def fill(memory: DeviceMemory, rank: int) -> None:
        at, slices = setup.mesh.coordinates(rank), slices_of(memory.program, setup.shards) if sliced else {}
        keep = {name: of_ranks[at[DATA_PARALLEL]] for name, of_ranks in slices.items()}
        place_weights(memory.program, memory, weights, at, keep)

    return fill


def _shard(setup: Setup, source: Source, replica: int) -> Shard:
    return Shard(
        source.train,
        rank=replica,
        world_size=setup.shards,
        batch_size=setup.program.batch_size,
        accumulation_steps=setup.resolved.training.accumulation_steps * setup.program.micro_batches,
        options=setup.resolved.data,
        inputs=input_specs(setup.program),
        seed=setup.seed,
    )
