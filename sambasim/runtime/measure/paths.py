"""The all-reduce paths that `bench` measures. Each result is overwritten before the next run, and checked after it.
What they reduce is a program of one flat gradient group."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from sambasim.errors import InternalError, MachineError, SambasimError
from sambasim.ir.graph import Graph
from sambasim.ir.mesh import DATA_PARALLEL, Axis
from sambasim.ir.program import Optimizer, ParameterGroup, Program, RuntimeArgument
from sambasim.ir.types import ALIGNMENT_BYTES, ALIGNMENT_ELEMENTS, Symbol, SymbolKind, TensorType, align
from sambasim.runtime.machine import process
from sambasim.runtime.machine.communicator import Communicator, SharedWindow
from sambasim.runtime.machine.mpi import MpiCommunicator
from sambasim.runtime.machine.node_memory import private_storage
from sambasim.runtime.transports.connect import Allocated, Way, connect
from sambasim.runtime.transports.window import SmallWindow, Window, WindowReduce, is_small
from sambasim.runtime.values.mean import tree_mean
from sambasim.runtime.values.memory import DeviceMemory

ELEMENT_BYTES = 4
GRANULE_BYTES = ALIGNMENT_ELEMENTS * ELEMENT_BYTES
"""A group consists of whole cuts, so its size is a multiple of this."""


def flat_program(numel: int) -> Program:
    """A program with `numel` float32 gradients, rounded up to whole cuts, a reduce operand buffer of that size, and no
    optimizer state. Parameters share the memory of the gradients, so GATHER sends the means."""
    numel = align(max(numel, 1), ALIGNMENT_ELEMENTS)
    size_bytes = align(numel * ELEMENT_BYTES, ALIGNMENT_BYTES)
    group = ParameterGroup("group_0", "float32", numel, (), 0, {"parameter": 0, "gradient": 0}, wrapper="group_0")
    buffer = Symbol("reduce_buffer", SymbolKind.REDUCE_BUFFER, TensorType("float32", (numel,)), offset=size_bytes)
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


class Expected(NamedTuple):
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


class Operands(NamedTuple):
    """This rank's block for one turn, and the expected results: `mean` in the order of the tree, the others in float64,
    rounded once, with bounds for any order of float32 additions."""

    own: Tensor
    mean: Expected
    near_mean: Expected
    near_sum: Expected
    copied: Expected


def draw(turn: int, rank: int, world_size: int, numel: int) -> Operands:
    """The operands of turn `turn` (from 0), for buffers of `numel` elements."""
    generators = [torch.Generator().manual_seed(turn * world_size + other) for other in range(world_size)]
    blocks = [torch.randn(min(PERIOD_ELEMENTS, numel), generator=generator) for generator in generators]
    wide = torch.stack(blocks).double()
    total, size = wide.sum(0), wide.abs().sum(0)
    # eps / 2 for each of n - 1 additions, the division, and the rounding of the reference; doubled for safety.
    bound = ((world_size + 1) * torch.finfo(torch.float32).eps * size).float()
    near_mean = Expected((total / world_size).float(), bound / world_size)
    mean = torch.empty_like(blocks[0])
    tree_mean(blocks, mean, world_size)()
    if near_mean.first_difference(mean, 0) is not None:
        raise InternalError("the tree of additions is not near the mean in float64")
    near_sum, own = Expected(total.float(), bound), blocks[rank]
    return Operands(own, Expected(mean), near_mean, near_sum, copied=Expected(own))


def fill(flat: Tensor, block: Tensor) -> None:
    for a, b, at in _blocks(0, flat.numel()):
        flat[a:b].copy_(block[at : at + b - a])


def _blocks(start: int, stop: int) -> Iterator[tuple[int, int, int]]:
    """Split elements `start` to `stop` at block boundaries: yields (from, to, position of `from` in its block)."""
    while start < stop:
        at = start % PERIOD_ELEMENTS
        end = min(start - at + PERIOD_ELEMENTS, stop)
        yield start, end, at
        start = end


class Setting(NamedTuple):
    """The resources of the paths at one size. `window`: the device memories of the node, for the device path; `memory`:
    for the paths through the host; `operand`, `result`: private buffers, for the other paths."""

    program: Program
    communicator: Communicator
    window: SharedWindow | None
    memory: DeviceMemory
    operand: Tensor
    result: Tensor


class Measured(NamedTuple):
    """A measured path: `run` is timed; then `parts` of the result, by their first elements, must be what the operands
    call `expects`. `overwritten`: a result apart from the operand; `wrong_result`: the error for a wrong one."""

    operand: Tensor
    run: Callable[[], object]
    parts: Sequence[tuple[int, Tensor]]
    expects: Literal["mean", "near_mean", "near_sum", "copied"]
    overwritten: Tensor | None = None
    wrong_result: type[SambasimError] = MachineError

    def refill(self, block: Tensor) -> None:
        if self.overwritten is not None:
            self.overwritten[::PERIOD_ELEMENTS] = torch.nan
        fill(self.operand, block)


def _device(setting: Setting) -> Measured:
    """REDUCE of device sync. Each slice is read from its owner or from the rank of this node that received it."""
    if setting.window is None:
        raise InternalError("the device path without device memory")
    program, communicator = setting.program, setting.communicator
    memories = [DeviceMemory(program, part[: program.device_bytes]) for part in setting.window.parts]
    by_rank = dict(zip(communicator.local_ranks, memories, strict=True))
    (group,) = program.groups
    if is_small(program, communicator):
        small = SmallWindow(by_rank, communicator, "fp32")
        run, parts = partial(_reduce_small, small), [(0, small.means[group.name])]
    else:
        window = Window(by_rank, communicator, "fp32")
        run, parts = partial(_reduce, window, window.reduce_scatter(program.groups)), list(window.means(group))
    gradient = by_rank[communicator.rank].region(group, "gradient")
    return Measured(gradient, run, parts, "mean", wrong_result=InternalError)


def _reduce_small(sync: SmallWindow) -> None:
    sync.wait_for_readers()
    sync.reduce()


def _reduce(sync: Window, reduce: WindowReduce) -> None:
    """REDUCE without an optimizer; the means, which lie where parameters do, are sent to all other nodes."""
    reduce.begin_step()
    reduce.begin()
    reduce.finish()
    sync.spread(sync.program.groups)
    sync.meet()


def _through_host(setting: Setting, way: Way) -> Measured:
    """REDUCE and GATHER of a host sync path, in this rank's device memory. Rank 0 serves if `way` has servers."""
    program, allocated = setting.program, Allocated([setting.memory], [setting.communicator])
    (transport,) = connect(setting.communicator, way, allocated)
    both = transport.sync.reduce_scatter(program.groups), transport.sync.all_gather(program.groups)
    communications = [communication for communication in both if communication is not None]
    gradient = setting.memory.region(program.groups[0], "gradient")

    def run() -> None:
        for communication in communications:
            communication.begin()
            communication.finish()

    expects: Literal["near_mean", "mean"] = "near_mean" if way is Way.GLOO else "mean"
    return Measured(gradient, run, [(0, gradient)], expects, wrong_result=InternalError)


def _mpi(setting: Setting, *, in_place: bool) -> Measured:
    if not isinstance(setting.communicator, MpiCommunicator):
        raise InternalError("MPI's Allreduce without MPI")
    result = setting.operand if in_place else setting.result
    send = None if in_place else setting.operand.numpy()
    run = partial(setting.communicator.all_reduce_sum_for_comparison, send, result.numpy())
    return Measured(setting.operand, run, [(0, result)], "near_sum", result)


def copy_bound(setting: Setting) -> Measured:
    """An all-reduce of n ranks moves (n + 1) / 2 buffers: each rank copies 1 / n of that, between private buffers."""
    ranks = setting.communicator.world_size
    numel = setting.operand.numel() * (ranks + 1) // (2 * ranks)
    source, target = setting.operand[:numel], setting.result[:numel]
    return Measured(source, partial(target.copy_, source), [(0, target)], "copied", target)


PATHS: Mapping[str, Callable[[Setting], Measured]] = {
    "device": _device,
    "host-mpi": partial(_through_host, way=Way.HOST),
    "host-gloo": partial(_through_host, way=Way.GLOO),
    "host-parameter-server": partial(_through_host, way=Way.PARAMETER_SERVER),
    "mpi": partial(_mpi, in_place=False),
    "mpi-in-place": partial(_mpi, in_place=True),
    "gloo": lambda at: Measured(at.operand, partial(dist.all_reduce, at.operand), [(0, at.operand)], "near_sum"),
}
THROUGH_GLOO = frozenset({"host-gloo", "gloo"})


def private_buffers(numel: int) -> tuple[Tensor, Tensor]:
    """An operand and a result, float32 [numel] each, in huge pages like device memory, with all pages touched."""
    operand, result = (torch.from_numpy(private_storage(numel * ELEMENT_BYTES)).view(torch.float32) for _ in range(2))
    return operand.zero_(), result.zero_()


def check_host_memory(communicator: Communicator, size_bytes: int, paths: Collection[str]) -> None:
    """Collective. Raises MachineError, the same on all ranks, if a node lacks memory for such buffers (estimate)."""
    chosen = set(paths)
    buffers = 2  # operand and result: those of the copy bound, of MPI and of gloo
    if "device" in chosen:
        buffers += 1 if communicator.node_count == 1 else 2  # gradients in the window; what arrives from other nodes
    buffers += bool(chosen & {"host-mpi", "host-gloo", "host-parameter-server"})  # gradients in private device memory
    buffers += "host-gloo" in chosen  # the same on the host
    buffers += "host-parameter-server" in chosen and communicator.rank == 0  # what it serves
    buffers += bool(chosen & {"mpi", "mpi-in-place"})  # MPI's own, in which it receives what it adds
    what = "the memory for the buffers of this node's ranks"
    remedy = "measure smaller sizes (--min-bytes, --max-bytes) or fewer --paths, or start fewer ranks"
    process.check_node_memory(communicator, buffers * size_bytes, what, remedy)
