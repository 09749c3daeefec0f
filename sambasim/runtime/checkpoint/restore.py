"""What each rank takes of a checkpoint, also if replicas, the mesh or what is trained have changed since."""

from itertools import product

from sambasim.ir.program import AVERAGE, MASTER
from sambasim.ir.types import Symbol, SymbolKind
from sambasim.options.given import leaves
from sambasim.runtime.checkpoint.content import Checkpoint, buffer_name, states_of
from sambasim.runtime.checkpoint.saver import pieces_of
from sambasim.runtime.run.setup import Setup, Team
from sambasim.runtime.values.memory import DeviceMemory


def restore(setup: Setup, team: Team, checkpoint: Checkpoint) -> None:
    """Collective. Make `checkpoint` the state of `team`: parameters in each memory, optimizer states of the slices that
    a rank updates; zeros without momentum begin anew. More replicas get buffers of replica 0, chips of the first."""
    program, saved, run = setup.program, checkpoint.manifest, checkpoint.manifest.run

    def read(symbol: Symbol, memory: DeviceMemory, rank: int, prefix: str = "") -> None:
        if symbol.name in memory.program.symbols:
            flat = memory.tensor(symbol.name).view(-1)
            checkpoint.read_part(symbol, setup.mesh.coordinates(rank), 0, flat, prefix)

    own = {id(rank.memory): rank for rank in team.replicas if rank.memory.has_own_parameters}
    memories = [(rank.memory, rank.rank) for rank in own.values()]
    memories += [(of.memory, rank.rank) for rank in team.first if (of := rank.transport.sync).memory is not rank.memory]
    for symbol in program.symbols.values():
        if symbol.kind is SymbolKind.PARAMETER:
            for memory, number in memories:
                read(symbol, memory, number)
        elif symbol.kind is SymbolKind.BUFFER:
            for rank in team.replicas:
                replica, chip = divmod(rank.replica, program.chips)
                prefix = buffer_name(replica if replica < run.replicas else 0, chip if chip < run.chips else 0, "")
                read(symbol, rank.memory, rank.rank, prefix)
    states, there = program.optimizer_states, states_of(saved)
    has_momentum = saved.position.step > 0 and bool(leaves(saved.options).get("optimizer.momentum"))
    begun = set(range(len(program.optimizers)) if has_momentum else ())
    for rank in team.first:
        sync, at = rank.transport.sync, setup.mesh.coordinates(rank.rank)
        for piece in pieces_of(sync.memory, sync.current, at):
            if piece.symbol.kind is SymbolKind.OPTIMIZER_STATE:
                group, member, state = states[piece.symbol.name]
                kind = program.optimizers[group.optimizer].name.rstrip("0123456789")
                name = there.get(member.parameter, {}).get((kind, state, (piece.symbol.kind, piece.symbol.whole)))
                if name is not None:
                    checkpoint.read_part(piece.symbol, at, piece.start, piece.data, name=name)
                elif state in (MASTER, AVERAGE):
                    checkpoint.read_part(program.symbols[member.parameter], at, piece.start, piece.data)
                begun |= {group.optimizer} if state not in (MASTER, AVERAGE) and bool(piece.data.any()) else set()
    # Also: other ranks have restored what this one reads.
    for rank, each in product(team.replicas, set().union(*setup.communicator.all_gather_object(begun))):
        rank.optimizers.begun[each] = 0
