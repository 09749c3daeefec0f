"""The handler table: how the runtime executes each operator of a program."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor

from sambasim.errors import AssertionFailedError, InternalError
from sambasim.ir.dataflow import axis_of, groups_of
from sambasim.ir.graph import Node, Ref
from sambasim.ir.operators import ASSERTION, OPERATORS, OperatorKind
from sambasim.ir.program import ParameterGroup
from sambasim.ir.ranks import ends_of
from sambasim.ir.types import NORM_BLOCK_ELEMENTS, Cut, TensorType
from sambasim.optimizers import OPTIMIZERS
from sambasim.runtime.engine.instructions import (
    Instruction,
    RegisterFile,
    aten_instruction,
    free_after_use,
    instruction_for,
    value_of,
)
from sambasim.runtime.transports.communication import (
    AxisGroup,
    Combine,
    Communication,
    Finishing,
    Receiving,
    max_of,
    mean_of,
    of_root,
    sum_of,
)
from sambasim.runtime.transports.connect import Transport
from sambasim.runtime.values.mean import SquareSums, parts_of, total_norm
from sambasim.runtime.values.memory import SHARED_KINDS, joined, part
from sambasim.runtime.values.optimizers import Optimizers


@dataclass(frozen=True, slots=True)
class Binding:
    """What the nodes of one graph work on. `stores`: for each gradient, the tensors to store it in; `tensor_of`: the
    tensor of every symbol; `transport` and `optimizers` are None for a graph that only computes."""

    registers: RegisterFile
    values: Mapping[str, TensorType]
    stores: Mapping[str, Sequence[Tensor]]
    tensor_of: Callable[[str], Tensor]
    transport: Transport | None = None
    optimizers: Optimizers | None = None

    @property
    def connected(self) -> Transport:
        if self.transport is None:
            raise InternalError("a communication node in a graph without a transport")
        return self.transport

    @property
    def updating(self) -> Optimizers:
        if self.optimizers is None:
            raise InternalError("an update in a graph without optimizers")
        return self.optimizers

    def axis_group(self, node: Node) -> AxisGroup:
        """The group of ranks in which `node` communicates. Raises InternalError for a node without an axis."""
        axis = axis_of(node)
        if axis is None:
            raise InternalError(f"{node.name} names no mesh axis")
        return self.connected.axis_group(axis)


Function: TypeAlias = Callable[..., object]
Work: TypeAlias = Communication | Function | None
"""What executes a node: it takes the values that the node reads, and returns its one result. None: nothing to do."""

Handler: TypeAlias = Callable[[Node, Binding], Work]


def instruction_of(node: Node, binding: Binding) -> Instruction:
    """Raises InternalError if there is no handler for the operator of `node`."""
    if node.operator.startswith("aten."):
        return _aten(node, binding)
    if node.operator not in HANDLERS:
        raise InternalError(f"no handler for {node.operator}")
    return executed_by(HANDLERS[node.operator](node, binding), node, binding)


def executed_by(work: Work, node: Node, binding: Binding) -> Instruction:
    """The instruction for `node`, which `work` executes."""
    registers, stores = binding.registers, binding.stores
    operands = [registers.value(argument.name) for argument in node.args if isinstance(argument, Ref)]
    if node.operator in UPDATES:
        operands = []  # `opt.total_norm`, which runs before, has called `clip`
    if isinstance(work, Communication):
        return instruction_for(node, work.finish, operands, registers, stores, single=True, communication=work)
    return instruction_for(node, work or nothing, operands, registers, stores, single=True)


def nothing(*operands: object) -> None:
    """A communication that this rank does not take part in."""


def _aten(node: Node, binding: Binding) -> Instruction:
    """An operator of torch. Products of float16 are computed in float32 and rounded once: torch's float16 kernels for
    CPUs without such instructions are 4 to 40 times slower (torch 2.13)."""
    instruction = aten_instruction(node, binding.registers, binding.stores)
    if OPERATORS[node.operator].flops is None:
        return instruction
    types = [None if name is None else binding.values[name].dtype for name in node.results]
    narrow = frozenset(position for position, dtype in enumerate(types) if dtype == "float16")
    return replace(instruction, function=partial(_in_float32, instruction.function, narrow)) if narrow else instruction


def _in_float32(
    function: Callable[..., object], narrow: Collection[int], *operands: object, out: Tensor | None = None
) -> object:
    """Call `function` with float32 for float16, and round the results at the positions `narrow`."""
    result = function(*map(_widened, operands))
    if isinstance(result, tuple | list):
        return tuple(
            value.half() if position in narrow and isinstance(value, Tensor) else value
            for position, value in enumerate(result)
        )
    if not isinstance(result, Tensor):
        return result
    return result.half() if out is None else out.copy_(result)


def _widened(operand: object) -> object:
    if isinstance(operand, list):
        return list(map(_widened, operand))
    return operand.float() if isinstance(operand, Tensor) and operand.dtype is torch.float16 else operand


def _named(node: Node, binding: Binding) -> list[ParameterGroup]:
    return [binding.connected.group(name) for name in groups_of(node)]


def _reduce_scatter(node: Node, binding: Binding) -> Work:
    """Reduce-scatter of parameter groups, or of one value along a dimension."""
    if groups_of(node):
        return binding.connected.sync.reduce_scatter(_named(node, binding))
    group = binding.axis_group(node)
    cut, position = _cut(node, group), group.position
    return group.gather(node.name, lambda tensors: part(sum_of(tensors), cut, position).contiguous())


def _all_gather(node: Node, binding: Binding) -> Work:
    """All-gather of parameter groups, or of one value along a dimension."""
    if groups_of(node):
        return binding.connected.sync.all_gather(_named(node, binding))
    group = binding.axis_group(node)
    cut = _cut(node, group)
    return group.gather(node.name, lambda tensors: joined(tensors, cut))


def _all_reduce(node: Node, binding: Binding) -> Work:
    return binding.axis_group(node).gather(node.name, _REDUCTIONS[str(dict(node.kwargs).get("op", "sum"))])


_REDUCTIONS: Mapping[str, Combine] = {"sum": sum_of, "mean": mean_of, "max": max_of}


def _shard(node: Node, binding: Binding) -> Work:
    """This rank's part of a value that all ranks of the axis have."""
    group = binding.axis_group(node)
    cut, position = _cut(node, group), group.position
    return lambda whole: part(whole, cut, position).contiguous()


def _index(node: Node, binding: Binding) -> Work:
    """This rank's position on the axis, as a tensor."""
    position = torch.tensor(binding.axis_group(node).position)
    return lambda: position


def _cut(node: Node, group: AxisGroup) -> Cut:
    return Cut(axis_of(node) or "", _number(node, "dim"), group.size, _number(node, "outer", 1))


def _broadcast(node: Node, binding: Binding) -> Work:
    return binding.axis_group(node).gather(node.name, of_root(_number(node, "root")))


def _send(node: Node, binding: Binding) -> Work:
    return binding.axis_group(node).send(_peer(node, binding), _number(node, "tag"))


def _recv(node: Node, binding: Binding) -> Work:
    type_ = binding.values[node.results[0] or ""]
    return binding.axis_group(node).recv(_peer(node, binding), _number(node, "tag"), type_)


def _copy(node: Node, binding: Binding) -> Work:
    """One symbol, from the device memory of a rank into that of another."""
    group, transport, tag = binding.axis_group(node), binding.connected, _number(node, "tag")
    source, target = ends_of(node)
    symbol = transport.program.symbols[str(node.args[1])]
    tensor, is_shared = binding.tensor_of(symbol.name), symbol.kind in SHARED_KINDS
    if group.position != source:
        # Ranks that share their parameters all write the same bytes.
        message = group.recv(source, tag, symbol.type)
        return Receiving(message.is_ready, lambda: tensor.copy_(message.finish()))
    sent = group.send(target, tag)

    def send() -> None:
        if is_shared:
            transport.sync.wait_for_updates()
        sent.begin(tensor)
        sent.finish()

    return Finishing(send)


def _peer(node: Node, binding: Binding) -> int:
    """The position of the rank `shift` places further along the axis, which is a ring."""
    group = binding.axis_group(node)
    return (group.position + _number(node, "shift")) % group.size


def _number(node: Node, name: str, default: int = 0) -> int:
    value = dict(node.kwargs).get(name, default)
    if not isinstance(value, int):
        raise InternalError(f"{node.name}: {value!r} is not a whole number")
    return value


def _release(node: Node, binding: Binding) -> Work:
    """Free the parameters or gradients of a group outside the own slice."""
    (group,) = _named(node, binding)
    return binding.connected.sync.releasing(group, str(node.args[1]))


def _generator_state(node: Node, binding: Binding) -> Work:
    return torch.get_rng_state


def _set_generator_state(node: Node, binding: Binding) -> Work:
    # A clone, because torch reads a state from the start of its storage.
    return lambda state: torch.set_rng_state(state.clone())


_NO_MESSAGES = ("assertion error", "Assertion failed")
"""What torch says where the user says nothing."""


def _assertion(node: Node, binding: Binding) -> Work:
    message = dict(node.kwargs).get("message")
    message = None if message in _NO_MESSAGES else message

    def check(condition: Tensor) -> None:
        if not condition:
            said = f": {message}" if message else ""
            raise AssertionFailedError(
                f"an assertion of the model does not hold{said}",
                where=str(node.source) if node.source else node.module,
                remedy="check the samples and the learning rate",
            )

    return check


def _square_sums(node: Node, binding: Binding) -> Work:
    """The sums of squares of all gradients, by block; zero for blocks that other ranks sum. Of gradients that several
    ranks of a replica have, the first one sums the squares."""
    transport = binding.connected
    symbols = transport.program.symbols
    sums = SquareSums(
        (
            (member.block + begin // NORM_BLOCK_ELEMENTS, part)
            for group in _named(node, binding)
            for member, begin, part in parts_of(
                group, transport.sync.memory.region(group, "gradient"), transport.sync.summed(group)
            )
            if transport.is_first_copy or symbols[member.parameter].cuts
        ),
        binding.values[node.results[0] or ""].numel,
    )
    return lambda: torch.tensor(sums(), dtype=torch.float64)


def _total_norm(node: Node, binding: Binding) -> Work:
    """The norm of the gradients, of scaled ones without the scale. The updates that follow clip by it."""
    optimizers = binding.updating

    def norm_of(sums: Tensor) -> float:
        norm = total_norm(sums.tolist()) / optimizers.loss_scale
        optimizers.clip(norm)
        return norm

    return norm_of


def _optimizer(node: Node, binding: Binding) -> Work:
    """One optimizer step on the owned slice."""
    (group,) = _named(node, binding)
    sync = binding.connected.sync
    start, stop = sync.updated(group)
    gradient = sync.memory.region(group, "gradient")[start:stop]
    return binding.updating.slice(group, start, stop, gradient)


UPDATES = frozenset(f"opt.{kind}" for kind in OPTIMIZERS)
"""The operators that are a step of an optimizer."""

HANDLERS: Mapping[str, Handler] = {
    "comm.reduce_scatter": _reduce_scatter,
    "comm.all_gather": _all_gather,
    "comm.all_reduce": _all_reduce,
    "comm.broadcast": _broadcast,
    "comm.send": _send,
    "comm.recv": _recv,
    "comm.copy": _copy,
    "comm.shard": _shard,
    "comm.index": _index,
    "memory.release": _release,
    "random.state": _generator_state,
    "random.set_state": _set_generator_state,
    ASSERTION: _assertion,
    "opt.square_sums": _square_sums,
    "opt.total_norm": _total_norm,
    **dict.fromkeys(UPDATES, _optimizer),
}
"""By operator; ATen operators are not listed."""


def lower(nodes: Sequence[Node], binding: Binding, keep: Collection[str]) -> list[Instruction | None]:
    """The instructions of a pass; None for a view that is evaluated here, once. Values in `keep` are not freed. Raises
    PefError."""
    lowered = [instruction_of(node, binding) for node in nodes]
    left = [None if _evaluate_view(instruction, binding.registers) else instruction for instruction in lowered]
    return free_after_use(left, keep, binding.registers)


def _evaluate_view(instruction: Instruction, registers: RegisterFile) -> bool:
    """Evaluate `instruction` once if it is a view of symbols only, and keep the view in its register."""
    node, result = instruction.node, instruction.results[0] if instruction.results else None
    if OPERATORS[node.operator].kind is not OperatorKind.VIEW or not instruction.single:
        return False
    if result is None or instruction.stores:
        return False
    operands = [registers.initial[registers.value(name)] for name in node.reads]
    if not operands or not all(isinstance(operand, Tensor) for operand in operands):
        return False
    try:
        view = instruction.function(*(value_of(operand, registers.initial) for operand in instruction.operands))
    except Exception:  # the first pass raises it again, with its context
        return False
    memories = {operand.untyped_storage().data_ptr() for operand in operands if isinstance(operand, Tensor)}
    if not isinstance(view, Tensor) or view.untyped_storage().data_ptr() not in memories:
        return False
    registers.initial[result] = view
    return True
