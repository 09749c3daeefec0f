"""The all-reduce paths that `bench` measures. Each result is overwritten before the next run, and checked after it.
What they reduce is a program of one flat gradient group."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from sambasim.errors import InternalError, MachineError, SambasimError
from sambasim.ir.graph import Graph
from sambasim.ir.mesh import DATA_PARALLEL, Axis
from sambasim.ir.program import Optimizer, ParameterGroup, Program, RuntimeArgument
from sambasim.ir.types import ALIGNMENT_BYTES, CUT_ELEMENTS, DTYPE_BYTES, Symbol, SymbolKind, TensorType, align
from sambasim.runtime.machine import resources
from sambasim.runtime.machine.communicator import Communicator, SharedWindow
from sambasim.runtime.machine.mpi import MpiCommunicator
from sambasim.runtime.transports.connect import Allocated, Way, connect
from sambasim.runtime.transports.host import roles_of
from sambasim.runtime.transports.small_window import SmallWindow
from sambasim.runtime.transports.window import Devices, Window, is_small
from sambasim.runtime.values.mean import tree_mean
from sambasim.runtime.values.memory import DeviceMemory, private_storage

_GROUP = "group_0"
_DTYPE = "float32"

ELEMENT_BYTES = DTYPE_BYTES[_DTYPE]
GRANULE_BYTES = CUT_ELEMENTS * ELEMENT_BYTES
"""A group consists of whole cuts, so its size is a multiple of this."""


def flat_program(numel: int) -> Program:
    """A program with `numel` float32 gradients, rounded up to whole cuts, a reduce operand buffer of that size, and no
    optimizer state. Parameters share the memory of the gradients, so GATHER sends the means."""
    numel = align(max(numel, 1), CUT_ELEMENTS)
    size_bytes = align(numel * ELEMENT_BYTES, ALIGNMENT_BYTES)
    group = ParameterGroup(_GROUP, _DTYPE, numel, (), 0, {"parameter": 0, "gradient": 0}, wrapper=_GROUP)
    buffer = Symbol("reduce_buffer", SymbolKind.REDUCE_BUFFER, TensorType(_DTYPE, (numel,)), offset=size_bytes)
    return Program(
        name="flat",
        batch_size=1,
        symbols={buffer.name: buffer},
        training=None,
        evaluation=Graph("evaluation", (), (), (), {}),
        single=None,
        loss=None,
        per_sample_loss=False,
        optimizers=(Optimizer("sgd0", "sgd", ()),),
        groups=(group,),
        runtime_arguments=(RuntimeArgument("dp_scale_factor", 1, "replicas"),),
        device_bytes=2 * size_bytes,
        mesh=(Axis(DATA_PARALLEL, 1, at_run_time=True),),
        reduce_buffer=buffer.name,
        zero=1,
    )


PERIOD_ELEMENTS = 65_521
"""The length of a block: a prime, so that no two slices, pages or chunks have the same content."""

_EPSILON = torch.finfo(torch.float32).eps


@dataclass(frozen=True, slots=True)
class Expected:
    """A result, as a repeating block. `bound`: the maximum error of each element; None if the bits must be equal."""

    block: Tensor
    bound: Tensor | None = None

    def first_difference(self, part: Tensor, start: int) -> int | None:
        """The index of the first wrong element in `part`, which begins at element `start` of the result, or None."""
        for a, b, at in _blocks(start, start + part.numel()):
            actual, wanted = part[a - start : b - start], self.block[at : at + b - a]
            if self.bound is None:
                right = actual.view(torch.int32) == wanted.view(torch.int32)
            else:
                right = (actual - wanted).abs() <= self.bound[at : at + b - a]  # False for NaN
            if not bool(right.all()):
                return a + int(right.logical_not().nonzero()[0])
        return None

    def at(self, element: int) -> float:
        return float(self.block[element % PERIOD_ELEMENTS])


@dataclass(frozen=True, slots=True)
class Operands:
    """This rank's block for one turn, and the expected results: `mean` in the order of the tree, the others in float64,
    rounded once, with bounds for any order of float32 additions."""

    own: Tensor
    mean: Expected
    near_mean: Expected
    near_sum: Expected


def draw(turn: int, rank: int, world_size: int, numel: int) -> Operands:
    """The operands of turn `turn` (from 0), for buffers of `numel` elements."""
    blocks = [_block(turn * world_size + other, numel) for other in range(world_size)]
    wide = torch.stack(blocks).double()
    total, size = wide.sum(0), wide.abs().sum(0)
    # eps / 2 for each of n - 1 additions, the division, and the rounding of the reference; doubled for safety.
    bound = ((world_size + 1) * _EPSILON * size).float()
    near_mean = Expected((total / world_size).float(), bound / world_size)
    mean = torch.empty_like(blocks[0])
    tree_mean(blocks, mean, world_size)()
    if near_mean.first_difference(mean, 0) is not None:
        raise InternalError("the tree of additions is not near the mean in float64")
    return Operands(blocks[rank], Expected(mean), near_mean, Expected(total.float(), bound))


def fill(flat: Tensor, block: Tensor) -> None:
    for a, b, at in _blocks(0, flat.numel()):
        flat[a:b].copy_(block[at : at + b - a])


def _block(seed: int, numel: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(min(PERIOD_ELEMENTS, numel), generator=generator)


def _blocks(start: int, stop: int) -> Iterator[tuple[int, int, int]]:
    """Split elements `start` to `stop` at block boundaries: yields (from, to, position of `from` in its block)."""
    while start < stop:
        at = start % PERIOD_ELEMENTS
        end = min(start - at + PERIOD_ELEMENTS, stop)
        yield start, end, at
        start = end


@dataclass(frozen=True, slots=True)
class Setting:
    """The resources of the paths at one size. `window`: the device memories of the node, for the device path; `memory`:
    for the paths through the host; `operand`, `result`: private buffers, for the other paths."""

    program: Program
    communicator: Communicator
    window: SharedWindow | None
    memory: DeviceMemory
    operand: Tensor
    result: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A measured path: `run` is timed; then `parts` of the result (each with its first element) must be what `expected`
    gives from this rank's operands. `overwritten`: a result apart from the operand; `wrong_result`: the error for a
    wrong one."""

    name: str
    operand: Tensor
    run: Callable[[], object]
    parts: Sequence[tuple[int, Tensor]]
    expected: Callable[[Operands], Expected]
    overwritten: Tensor | None = None
    wrong_result: type[SambasimError] = MachineError

    def refill(self, block: Tensor) -> None:
        if self.overwritten is not None:
            self.overwritten[::PERIOD_ELEMENTS] = torch.nan
        fill(self.operand, block)


@dataclass(frozen=True, slots=True, kw_only=True)
class AllReduce(Measured):
    """A path that leaves `result` on every rank; `checked` for equal bits or for rounding errors."""

    result: Literal["mean", "sum"]
    checked: Literal["bits", "rounding"]


def _device(name: str, setting: Setting) -> AllReduce:
    """REDUCE of device sync. Each slice is read from its owner or from the rank of this node that received it."""
    if setting.window is None:
        raise InternalError("the device path without device memory")
    program, communicator = setting.program, setting.communicator
    by_rank = {
        rank: DeviceMemory(program, setting.window.of(index)[: program.device_bytes])
        for index, rank in enumerate(communicator.local_ranks)
    }
    devices = Devices(setting.window, by_rank, shares_parameters=not is_small(program, communicator))
    allocated = Allocated([by_rank[communicator.rank]], [communicator], [devices])
    (transport,) = connect(communicator, Way.DEVICE, allocated)
    (group,) = program.groups
    sync = transport.sync
    if isinstance(sync, SmallWindow):
        run: Callable[[], None] = partial(_reduce_small, sync)
        parts = [(0, sync.means[group.name])]
    elif isinstance(sync, Window):
        run = _reduce_in_window(sync)
        parts = list(sync.means(group))
    else:
        raise InternalError("device sync without a window")
    return AllReduce(
        name=name,
        operand=transport.memory.region(group, "gradient"),
        run=run,
        parts=parts,
        expected=attrgetter("mean"),
        wrong_result=InternalError,
        result="mean",
        checked="bits",
    )


def _reduce_small(sync: SmallWindow) -> None:
    sync.wait_for_readers()
    sync.reduce()


def _reduce_in_window(sync: Window) -> Callable[[], None]:
    """REDUCE without an optimizer; the means, which lie where parameters do, are sent to all other nodes."""
    reduce = sync.reduce_scatter(sync.program.groups)
    has_other_nodes = bool(sync.network.sources)

    def run() -> None:
        reduce.begin_step()
        reduce.begin()
        reduce.finish()
        if has_other_nodes:
            sync.spread()
        sync.meet()

    return run


def _through_host(name: str, setting: Setting, way: Way) -> AllReduce:
    """REDUCE and GATHER of a host sync path, in this rank's device memory. Rank 0 serves if `way` has servers."""
    program, roles = setting.program, roles_of(setting.communicator.world_size, dedicated=0)
    allocated = Allocated([setting.memory], [setting.communicator])
    (transport,) = connect(setting.communicator, way, allocated, roles)
    both = transport.sync.reduce_scatter(program.groups), transport.sync.all_gather(program.groups)
    communications = [communication for communication in both if communication is not None]
    gradient = setting.memory.region(program.groups[0], "gradient")

    def run() -> None:
        for communication in communications:
            communication.begin()
            communication.finish()

    return AllReduce(
        name=name,
        operand=gradient,
        run=run,
        parts=[(0, gradient)],
        expected=attrgetter("near_mean" if way is Way.GLOO else "mean"),
        wrong_result=InternalError,
        result="mean",
        checked="rounding" if way is Way.GLOO else "bits",
    )


def _mpi(name: str, setting: Setting, *, in_place: bool) -> AllReduce:
    if not isinstance(setting.communicator, MpiCommunicator):
        raise InternalError("MPI's Allreduce without MPI")
    result = setting.operand if in_place else setting.result
    send = None if in_place else setting.operand.numpy()
    return AllReduce(
        name=name,
        operand=setting.operand,
        run=partial(setting.communicator.all_reduce_sum_for_comparison, send, result.numpy()),
        parts=[(0, result)],
        expected=attrgetter("near_sum"),
        overwritten=result,
        result="sum",
        checked="rounding",
    )


def _gloo(name: str, setting: Setting) -> AllReduce:
    return AllReduce(
        name=name,
        operand=setting.operand,
        run=lambda: dist.all_reduce(setting.operand),
        parts=[(0, setting.operand)],
        expected=attrgetter("near_sum"),
        result="sum",
        checked="rounding",
    )


def copy_bound(setting: Setting) -> Measured:
    """The copy bound: an all-reduce in memory of n ranks moves (n + 1) / 2 buffers, so each rank copies 1 / n of that,
    between two private buffers."""
    ranks = setting.communicator.world_size
    numel = setting.operand.numel() * (ranks + 1) // (2 * ranks)
    source, target = setting.operand[:numel], setting.result[:numel]
    return Measured(
        name="copy",
        operand=source,
        run=partial(target.copy_, source),
        parts=[(0, target)],
        expected=lambda operands: Expected(operands.own),
        overwritten=target,
    )


PATHS: Mapping[str, Callable[[str, Setting], AllReduce]] = {
    "device": _device,
    "host-mpi": partial(_through_host, way=Way.HOST),
    "host-gloo": partial(_through_host, way=Way.GLOO),
    "host-parameter-server": partial(_through_host, way=Way.PARAMETER_SERVER),
    "mpi": partial(_mpi, in_place=False),
    "mpi-in-place": partial(_mpi, in_place=True),
    "gloo": _gloo,
}

THROUGH_GLOO = frozenset({"host-gloo", "gloo"})


def private_buffers(numel: int) -> tuple[Tensor, Tensor]:
    """An operand and a result, float32 [numel] each, in huge pages like device memory, with all pages touched."""
    operand, result = (torch.from_numpy(private_storage(numel * ELEMENT_BYTES)).view(torch.float32) for _ in range(2))
    return operand.zero_(), result.zero_()


def needed_bytes(size_bytes: int, paths: Collection[str], rank: int, node_count: int) -> int:
    """Estimated bytes that `rank` needs to measure `paths` at one size. Only buffers of this size count."""
    chosen = set(paths)
    buffers = 2  # operand and result: those of the copy bound, of MPI and of gloo
    if "device" in chosen:
        buffers += 1 if node_count == 1 else 2  # gradients in the window; what arrives from other nodes
    buffers += bool(chosen & {"host-mpi", "host-gloo", "host-parameter-server"})  # gradients in private device memory
    buffers += "host-gloo" in chosen  # the same on the host
    buffers += "host-parameter-server" in chosen and rank == 0  # what it serves
    buffers += bool(chosen & {"mpi", "mpi-in-place"})  # MPI's own, in which it receives what it adds
    return buffers * size_bytes


def check_host_memory(communicator: Communicator, size_bytes: int, paths: Collection[str]) -> None:
    """Collective. Raises MachineError, the same on every rank, if a node lacks the memory to measure this size."""
    resources.check_node_memory(
        communicator,
        needed_bytes(size_bytes, paths, communicator.rank, communicator.node_count),
        what="the memory for the buffers of this node's ranks",
        remedy="measure smaller sizes (--min-bytes, --max-bytes) or fewer --paths, or start fewer ranks",
    )
