"""The mesh: the ranks of a program, arranged along named axes. The ranks that differ in the coordinate of one axis only
are a group along that axis, and a communication node names the axis whose groups it runs in. Ranks are numbered row by
row: the last axis is the innermost, so its neighbours have neighbouring ranks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from sambasim.errors import InternalError
from sambasim.ir.types import Ranks

DATA_PARALLEL = "dp"
"""The axis of replicas, or of their chips: each rank trains a copy of the model on its own part of the data."""

PIPELINE = "pp"
"""The axis of pipeline stages: each rank has some of the layers."""

TENSOR = "tp"
"""The axis along which the tensors of one replica are cut."""


@dataclass(frozen=True, slots=True)
class Axis:
    """One axis of a program's mesh. With `at_run_time`, a run chooses the size, and `size` is the smallest allowed.
    `chips`: on the axis dp, so many ranks share the batch of a replica, and the size is a multiple of it."""

    name: str
    size: Ranks
    at_run_time: bool = False
    chips: Ranks = 1


@dataclass(frozen=True, slots=True)
class Mesh:
    """The mesh of a job: the size of every axis, by name, outermost first."""

    sizes: Mapping[str, int]

    @property
    def world_size(self) -> int:
        return prod(self.sizes.values())

    def __str__(self) -> str:
        return " × ".join(f"{name} {size}" for name, size in self.sizes.items())

    def size(self, axis: str) -> int:
        """The size of `axis`: 1 for an axis that the mesh lacks."""
        return self.sizes.get(axis, 1)

    def coordinates(self, rank: int) -> Mapping[str, int]:
        """The coordinate of `rank` on each axis."""
        coordinates = dict.fromkeys(self.sizes, 0)
        for name in reversed(coordinates):
            rank, coordinates[name] = divmod(rank, self.sizes[name])
        return coordinates

    def place(self, rank: int) -> str:
        """The coordinates of `rank` as text: `dp 0, pp 1`."""
        return ", ".join(f"{axis} {position}" for axis, position in self.coordinates(rank).items())

    def label(self, rank: int) -> str:
        """What a message adds to the number of `rank`: its place, or nothing if the only axis is dp."""
        return self.place(rank) if self.sizes.keys() - {DATA_PARALLEL} else ""

    def who(self, rank: int, alone: str = "replica") -> str:
        """`rank 3 (dp 0, pp 1, tp 1)`, or `replica 3` if the only axis is dp; `alone` is that word."""
        label = self.label(rank)
        return f"rank {rank} ({label})" if label else f"{alone} {rank}"

    def coordinate(self, rank: int, axis: str) -> int:
        """The coordinate of `rank` on `axis`: 0 for an axis that the mesh lacks."""
        return self.coordinates(rank).get(axis, 0)

    def group(self, rank: int, axis: str) -> tuple[int, ...]:
        """The ranks with the coordinates of `rank` but that on `axis`; `rank` alone if there is no such axis."""
        names = list(self.sizes)
        stride = prod(self.sizes[name] for name in names[names.index(axis) + 1 :]) if axis in names else 1
        first = rank - self.coordinate(rank, axis) * stride
        return tuple(range(first, first + self.size(axis) * stride, stride))

    def gives_loss(self, rank: int) -> bool:
        """Whether the loss of `rank` counts for its replica: that of the last rank along pp, the first along tp."""
        return self._at_ends(rank, {PIPELINE: self.size(PIPELINE) - 1})

    def is_first_copy(self, rank: int) -> bool:
        """Whether `rank` stands for the ranks that have the same tensors in its replica, as those along tp may."""
        return self._at_ends(rank, {PIPELINE: self.coordinate(rank, PIPELINE)})

    def _at_ends(self, rank: int, ends: Mapping[str, int]) -> bool:
        coordinates = self.coordinates(rank)
        return all(at == ends.get(axis, 0) for axis, at in coordinates.items() if axis != DATA_PARALLEL)

    def ranks_of(self, replica: int) -> tuple[int, ...]:
        """The ranks of `replica`, the coordinate on the axis dp, in order."""
        return tuple(rank for rank in range(self.world_size) if self.coordinate(rank, DATA_PARALLEL) == replica)


def mesh_of(axes: Sequence[Axis], world_size: int) -> Mesh:
    """The mesh of a job of `world_size` ranks. The axis whose size a run chooses takes those that the others leave.
    Raises InternalError if they do not divide evenly."""
    fixed = prod(axis.size for axis in axes if not axis.at_run_time)
    chips = prod(axis.chips for axis in axes if axis.at_run_time)
    if world_size % (fixed * chips):
        raise InternalError(f"{world_size} ranks on a mesh whose fixed axes have {fixed}, with {chips} chips a replica")
    return Mesh({axis.name: world_size // fixed if axis.at_run_time else axis.size for axis in axes})


def copy_mesh(axes: Sequence[Axis]) -> Mesh:
    """The mesh of one copy of the model: that of a replica without chips that share its batch."""
    return Mesh({axis.name: axis.size for axis in axes if axis.name != DATA_PARALLEL})


def replica_mesh(axes: Sequence[Axis]) -> Mesh:
    """The mesh of one replica alone. It has the axis dp if chips share the batch."""
    chips = {axis.name: axis.chips for axis in axes if axis.chips > 1}
    return Mesh(chips | dict(copy_mesh(axes).sizes))


def least_replicas(axes: Sequence[Axis]) -> int:
    """The smallest number of replicas on a mesh with these axes."""
    return prod(axis.size // axis.chips for axis in axes if axis.name == DATA_PARALLEL)
