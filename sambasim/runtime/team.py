"""The replicas that a process plays, with their device memory, their shards of the data, and their sync."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from sambasim.data.sources import Source
from sambasim.ir.types import SymbolKind
from sambasim.pef import map_weights
from sambasim.runtime.capacity import check_node_memory
from sambasim.runtime.device import DeviceMemory, private_storage
from sambasim.runtime.engine.choice import Engine, choose_engine
from sambasim.runtime.listener import Listener
from sambasim.runtime.optimizers import Optimizers
from sambasim.runtime.replica import Replica, input_specs, place_weights
from sambasim.runtime.setup import Setup
from sambasim.runtime.sharding import Shard
from sambasim.runtime.sync.device import DeviceSync
from sambasim.runtime.sync.device_memories import Devices, allocate_devices
from sambasim.runtime.sync.emulation import EmulatedSync
from sambasim.runtime.sync.gloo import GlooSync
from sambasim.runtime.sync.host import HostSync
from sambasim.runtime.sync.interface import GradientSync
from sambasim.runtime.sync.parameter_server import ParameterServerSync
from sambasim.runtime.sync.single import SingleSync
from sambasim.runtime.sync.small_device import SmallDeviceSync
from sambasim.runtime.weights import load_weights

SyncName: TypeAlias = Literal["none", "host", "device", "emulated"]


@dataclass(frozen=True, slots=True)
class Team:
    """The replicas that this process plays, and how they sync with one another and with those of other ranks.

    `memories` are those of the replicas; a rank that only serves has one, with parameters in it, and no replica.
    """

    replicas: Sequence[Replica]
    memories: Sequence[DeviceMemory]
    sync: GradientSync
    sync_name: SyncName
    engine: Engine

    @property
    def memory(self) -> DeviceMemory:
        """That of the first replica."""
        return self.memories[0]


def assemble(setup: Setup, sources: Sequence[Source], listener: Listener) -> Team:
    """Collective. The team of this process, with the weights of the PEF in place; `sources` are those of its replicas.

    Raises MachineError if there is too little memory.
    """
    program, communicator = setup.program, setup.communicator
    devices = None
    if setup.emulated == 1 and communicator.world_size > 1 and setup.options.reduce_on_rdu:
        devices = allocate_devices(program, communicator)
        memories = [devices.by_rank[communicator.rank]]
    else:
        check_node_memory(communicator, program.device_bytes * setup.emulated)
        memories = [DeviceMemory(program, private_storage(program.device_bytes)) for _ in range(setup.emulated)]
    _place_weights(setup, memories)
    sync, name = _sync(setup, memories, devices)
    engine = choose_engine(setup.options.engine, setup.tiles, communicator, listener.preparing)
    return Team(_replicas(setup, memories, sources, engine), memories, sync, name, engine)


def changes_buffers(setup: Setup) -> bool:
    """Whether training changes buffers, of which each replica has its own."""
    training = setup.program.training
    outputs = training.outputs if training else ()
    return any(setup.program.symbols[output.symbol].kind is SymbolKind.BUFFER for output in outputs)


def _place_weights(setup: Setup, memories: Sequence[DeviceMemory]) -> None:
    weights = dict(map_weights(setup.path))
    if setup.options.weights is not None and setup.options.checkpoint.resume is None:
        weights |= load_weights(setup.options.weights, setup.program)
    for memory in memories:
        place_weights(setup.program, memory, weights)
    setup.communicator.node_barrier()  # a peer may have placed what is read here


def _sync(setup: Setup, memories: Sequence[DeviceMemory], devices: Devices | None) -> tuple[GradientSync, SyncName]:
    program, arguments, communicator = setup.program, setup.arguments, setup.communicator
    optimizers = Optimizers(program, memories[0], arguments)
    if setup.emulated > 1:
        return EmulatedSync(program, arguments, optimizers, memories), "emulated"
    if communicator.world_size == 1:
        return SingleSync(program, arguments, optimizers, memories[0]), "none"
    if devices is not None:
        one = DeviceSync if devices.shares_parameters else SmallDeviceSync
        return one(program, arguments, optimizers, devices, communicator), "device"
    if setup.host_sync == "gloo":
        return GlooSync(program, arguments, optimizers, memories[0], communicator), "host"
    if setup.host_sync == "parameter-server":
        return ParameterServerSync(program, arguments, memories[0], setup.roles, communicator), "host"
    return HostSync(program, arguments, optimizers, memories[0], communicator), "host"


def _replicas(
    setup: Setup, memories: Sequence[DeviceMemory], sources: Sequence[Source], engine: Engine
) -> Sequence[Replica]:
    """Collective. What one rank of a node has compiled, the others find on the disk."""
    communicator = setup.communicator
    if engine.inductor and communicator.local_rank > 0:
        communicator.node_barrier()
    replicas = [
        Replica(
            number,
            setup.program,
            memory,
            _shard(setup, source, number),
            setup.seed,
            engine.inductor,
            debug_numerics=setup.options.debug_numerics,
        )
        for number, memory, source in zip(setup.own_replicas, memories, sources, strict=False)
    ]
    if engine.inductor:
        if communicator.local_rank == 0:
            communicator.node_barrier()
        communicator.barrier()  # so that the first step waits for nobody's compiler
    return replicas


def _shard(setup: Setup, source: Source, rank: int) -> Shard:
    return Shard(
        source.train,
        rank=rank,
        world_size=setup.world_size,
        batch_size=setup.program.batch_size,
        accumulation_steps=setup.resolved.training.accumulation_steps,
        options=setup.resolved.data,
        inputs=input_specs(setup.program),
        seed=setup.seed,
    )
