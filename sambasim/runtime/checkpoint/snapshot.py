"""What this process has of a run's state: taken to be saved, and put back.

groups      parameters and states of the optimizer; of each, what this rank saves: the ranks together have all of it
buffers     of each replica that this process plays
untrained   parameters that belong to no group; rank 0 saves them
"""

from collections.abc import Mapping, Sequence

from torch import Tensor

from sambasim.collectives.slices import Slice
from sambasim.ir.program import ParameterGroup, Program
from sambasim.ir.types import SymbolKind
from sambasim.runtime.checkpoint.manifest import GroupModel, MemberModel, TensorModel
from sambasim.runtime.checkpoint.reader import Checkpoint
from sambasim.runtime.checkpoint.shards import PARAMETER, buffer_name, part_name, places
from sambasim.runtime.setup import Setup
from sambasim.runtime.team import Team
from sambasim.runtime.watch.activity import Activity


def group_models(program: Program) -> tuple[GroupModel, ...]:
    """The groups of `program`, as a manifest has them."""
    return tuple(
        GroupModel(
            name=group.name,
            dtype=group.dtype,
            numel=group.numel,
            states=tuple(program.optimizers[group.optimizer].states),
            members=tuple(MemberModel(parameter=m.parameter, start=m.start, numel=m.numel) for m in group.members),
        )
        for group in program.groups
    )


def buffer_models(program: Program) -> tuple[TensorModel, ...]:
    """The buffers of one replica."""
    return _models(program, [s.name for s in program.symbols.values() if s.kind is SymbolKind.BUFFER])


def untrained_models(program: Program) -> tuple[TensorModel, ...]:
    """The parameters that belong to no group."""
    trained = {member.parameter for group in program.groups for member in group.members}
    parameters = [s.name for s in program.symbols.values() if s.kind is SymbolKind.PARAMETER]
    return _models(program, [name for name in parameters if name not in trained])


def spans_of(program: Program, team: Team) -> tuple[Slice, ...]:
    """Of each group, what this rank saves."""
    return tuple(_span(team.transport.saved(group)) for group in program.groups)


def take(setup: Setup, team: Team) -> dict[str, Tensor]:
    """The tensors of this rank's shard, by name: views of what will change with the next step."""
    program, keeper = setup.program, team.transport.memory
    tensors = {}
    for group, span in zip(program.groups, spans_of(program, team), strict=True):
        if span[0] < span[1]:
            for region in _regions(program, group):
                tensors[part_name(group.name, region, span)] = keeper.region(group, region)[slice(*span)]
    buffers = buffer_models(program)
    for replica in team.replicas:
        tensors |= {buffer_name(replica.rank, one.name): replica.memory.tensor(one.name) for one in buffers}
    if setup.is_first:
        tensors |= {one.name: team.memory.tensor(one.name) for one in untrained_models(program)}
    return tensors


def nonfinite_parameter(setup: Setup, team: Team, activity: Activity) -> str | None:
    """Collective. The first trained parameter with an element that is NaN or infinite, if there is one."""
    own = _own_nonfinite_parameter(setup.program, team)
    activity.waits("waiting for peers to begin a checkpoint")
    found = setup.communicator.all_gather_object(own)
    return next((name for name in found if name is not None), None)


def restore(setup: Setup, team: Team, checkpoint: Checkpoint) -> None:
    """Collective. All that `checkpoint` has becomes the state of `team`. It must be one of this program.

    A replica that the checkpoint does not have gets the buffers of replica 0.
    """
    program, keeper = setup.program, team.transport.memory
    shards = _Shards(checkpoint)
    memories = {id(memory): memory for memory in (*team.memories, keeper) if memory.has_own_parameters}
    for number, group in enumerate(program.groups):
        whole = (0, group.numel)
        for memory in memories.values():
            shards.read(number, PARAMETER, whole, memory.region(group, PARAMETER))
        for state in program.optimizers[group.optimizer].states:
            shards.read(number, state, team.transport.kept(group), keeper.region(group, state))
    for model in untrained_models(program):
        for memory in memories.values():
            memory.tensor(model.name).copy_(shards.of(0)[model.name])
    for replica in team.replicas:
        saved = replica.rank if replica.rank < checkpoint.manifest.run.world_size else 0
        for model in buffer_models(program):
            replica.memory.tensor(model.name).copy_(shards.buffer(saved, model.name))
    setup.communicator.node_barrier()  # a peer may have restored what is read here


class _Shards:
    """The tensors of a checkpoint, each shard mapped when it is first asked for."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._mapped: dict[int, Mapping[str, Tensor]] = {}
        shards = checkpoint.manifest.shards
        self._shard_of = {replica: index for index, shard in enumerate(shards) for replica in shard.replicas}

    def of(self, index: int) -> Mapping[str, Tensor]:
        if index not in self._mapped:
            self._mapped[index] = self._checkpoint.tensors(index)
        return self._mapped[index]

    def buffer(self, replica: int, name: str) -> Tensor:
        return self.of(self._shard_of[replica])[buffer_name(replica, name)]

    def read(self, group: int, region: str, wanted: Slice, into: Tensor) -> None:
        """Elements `wanted` of a flat tensor, to their places in `into`, which is the whole of it."""
        manifest = self._checkpoint.manifest
        for index, held, part in places(manifest, group, wanted):
            tensor = self.of(index)[part_name(manifest.groups[group].name, region, held)]
            into[slice(*part)].copy_(tensor[part[0] - held[0] : part[1] - held[0]])


def _own_nonfinite_parameter(program: Program, team: Team) -> str | None:
    for group, (start, stop) in zip(program.groups, spans_of(program, team), strict=True):
        part = team.transport.memory.region(group, PARAMETER)[start:stop]
        if not len(part) or all(one.isfinite() for one in part.aminmax()):
            continue
        for member in group.members:
            of_member = part[max(member.start - start, 0) : max(member.start + member.numel - start, 0)]
            if not of_member.isfinite().all():
                return member.parameter
    return None


def _regions(program: Program, group: ParameterGroup) -> Sequence[str]:
    return (PARAMETER, *program.optimizers[group.optimizer].states)


def _models(program: Program, names: Sequence[str]) -> tuple[TensorModel, ...]:
    types = [(name, program.symbols[name].type) for name in names]
    return tuple(TensorModel(name=name, dtype=type_.dtype, shape=type_.shape) for name, type_ in types)


def _span(part: Slice) -> Slice:
    """Nothing has one name."""
    return part if part[0] < part[1] else (0, 0)
