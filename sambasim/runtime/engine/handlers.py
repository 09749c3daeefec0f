"""The handler table: how the runtime executes each operator of a program."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import TypeAlias

import torch
from torch import Tensor

from sambasim.errors import AssertionFailedError, InternalError
from sambasim.ir.dataflow import axis_of, groups_of, kind_of, number_of
from sambasim.ir.graph import Node, Ref
from sambasim.ir.operators import ASSERTION, OPERATORS, OperatorKind
from sambasim.ir.program import ParameterGroup
from sambasim.ir.ranks import ends_of
from sambasim.ir.types import Cut, TensorType
from sambasim.optimizers import KINDS
from sambasim.runtime.engine import instructions
from sambasim.runtime.engine.instructions import Instruction, RegisterFile, value_of
from sambasim.runtime.transports.communication import AxisGroup, Communication, Simple, mean_of, nothing, sum_of
from sambasim.runtime.transports.connect import Transport
from sambasim.runtime.values.mean import parts_of, square_sums
from sambasim.runtime.values.memory import SHARED_KINDS, joined, part, storage_of
from sambasim.runtime.values.operators import Function
from sambasim.runtime.values.optimizers import Optimizers


@dataclass(frozen=True, slots=True)
class Binding:
    """What nodes of a graph work on. `tensor_of`: by symbol; `transport`, `optimizers`: None if they only compute."""

    registers: RegisterFile
    values: Mapping[str, TensorType]
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
        """The group of ranks in which `node` communicates: it names an axis (invariant 10)."""
        return self.connected.axis_group(axis_of(node) or "")

    def groups(self, node: Node) -> list[ParameterGroup]:
        return [self.connected.groups[name] for name in groups_of(node)]


Work: TypeAlias = Communication | Function | None
"""What executes a node: it takes the values that the node reads, and returns its one result. None: nothing to do."""


def lower(nodes: Sequence[Node], binding: Binding, keep: Collection[str]) -> list[Instruction | None]:
    """The instructions of a pass; None for a view that is evaluated here, once. Values in `keep` are not freed."""
    lowered = [instruction_of(node, binding) for node in nodes]
    left = [None if _evaluate_view(instruction, binding.registers) else instruction for instruction in lowered]
    return instructions.free_after_use(left, keep, binding.registers)


def _evaluate_view(instruction: Instruction, registers: RegisterFile) -> bool:
    """Evaluate `instruction` once if it is a view of symbols only, and keep the view in its register."""
    is_view = kind_of(instruction.node) is OperatorKind.VIEW and instruction.returned == 1 and not instruction.stores
    result = next(iter(instruction.results), None)
    if not is_view or result is None:
        return False
    operands = [registers.initial[registers.value(name)] for name in instruction.node.reads]
    if not operands or not all(isinstance(operand, Tensor) for operand in operands):
        return False
    try:
        view = instruction.function(*(value_of(operand, registers.initial) for operand in instruction.operands))
    except Exception:  # the first pass raises it again, with its context
        return False
    memories = {storage_of(operand) for operand in operands}
    if not isinstance(view, Tensor) or storage_of(view) not in memories:
        return False
    registers.initial[result] = view
    return True


def instruction_of(node: Node, binding: Binding) -> Instruction:
    """Raises InternalError if there is no handler for the operator of `node`."""
    if node.operator.startswith("aten."):
        return _aten(node, binding)
    if node.operator not in HANDLERS:
        raise InternalError(f"no handler for {node.operator}")
    return executed_by(HANDLERS[node.operator](node, binding), node, binding)


def executed_by(work: Work, node: Node, binding: Binding) -> Instruction:
    """The instruction for `node`, which `work` executes."""
    registers = binding.registers
    operands = [registers.value(argument.name) for argument in node.args if isinstance(argument, Ref)]
    if node.operator in UPDATES:
        operands = []  # `opt.total_norm`, which runs before, has called `clip`
    function, begun = (work.finish, work) if isinstance(work, Communication) else (work or nothing, None)
    return instructions.instruction_for(node, function, operands, registers, returned=1, communication=begun)


def _aten(node: Node, binding: Binding) -> Instruction:
    """An operator of torch; computed in float32 and rounded once if torch's kernel for its 16-bit type is slow."""
    instruction = instructions.aten_instruction(node, binding.registers)
    types = [None if name is None else binding.values[name] for name in node.results]
    for dtype in ("float16", "bfloat16"):
        narrow = frozenset(at for at, type_ in enumerate(types) if type_ and type_.dtype == dtype)
        if narrow and is_slow(node.operator, dtype, types):
            return replace(
                instruction, function=partial(_in_float32, instruction.function, narrow, getattr(torch, dtype))
            )
    return instruction


WIDENED_ATTENTION = 16_384
"""The most numbers in the keys of a head at which torch's backward of attention is faster in float32 than in bfloat16:
it takes half of the time at 128 keys of 64, as long at 256, and 1.2 times as long at 512 (torch 2.13, Zen 4)."""


def is_slow(operator: str, dtype: str, results: Sequence[TensorType | None]) -> bool:
    """Whether float32 is faster. Products of float16 on CPUs without such instructions take 4 to 40 times as long
    (torch 2.13)."""
    if dtype == "float16":
        return OPERATORS[operator].flops is not None
    if operator != "aten._scaled_dot_product_flash_attention_for_cpu_backward.default":
        return False
    of_head = max(prod(type_.shape[-2:]) for type_ in results if type_)
    return of_head <= WIDENED_ATTENTION and not torch.cpu._is_amx_tile_supported()


def _in_float32(
    function: Function, narrow: Collection[int], dtype: torch.dtype, *operands: object, out: Tensor | None = None
) -> object:
    """Call `function` with float32 for `dtype`, and round the results at the positions `narrow`."""
    result = function(*(_widened(operand, dtype) for operand in operands))
    if isinstance(result, tuple | list):
        rounds = (at in narrow and isinstance(value, Tensor) for at, value in enumerate(result))
        return tuple(value.to(dtype) if narrowed else value for narrowed, value in zip(rounds, result, strict=True))
    if not isinstance(result, Tensor):
        return result
    return result.to(dtype) if out is None else out.copy_(result)


def _widened(operand: object, dtype: torch.dtype) -> object:
    if isinstance(operand, list):
        return [_widened(item, dtype) for item in operand]
    return operand.float() if isinstance(operand, Tensor) and operand.dtype is dtype else operand


def _reduce_scatter(node: Node, binding: Binding) -> Work:
    if groups_of(node):
        return binding.connected.sync.reduce_scatter(binding.groups(node))
    group, cut = binding.axis_group(node), _cut(node, binding)
    return group.gather(node.name, lambda tensors: _part(cut, group.position, sum_of(tensors)))


def _part(cut: Cut, position: int, whole: Tensor) -> Tensor:
    return part(whole, cut, position).contiguous()


def _all_gather(node: Node, binding: Binding) -> Work:
    if groups_of(node):
        return binding.connected.sync.all_gather(binding.groups(node))
    cuts = (_cut(node, binding),)
    return binding.axis_group(node).gather(node.name, lambda tensors: joined(tensors, cuts))


_REDUCTIONS = {"sum": sum_of, "mean": mean_of, "max": lambda tensors: torch.stack([*tensors]).amax(0)}


def _all_reduce(node: Node, binding: Binding) -> Work:
    return binding.axis_group(node).gather(node.name, _REDUCTIONS[str(dict(node.kwargs).get("op", "sum"))])


def _broadcast(node: Node, binding: Binding) -> Work:
    root = number_of(node, "root")
    return binding.axis_group(node).gather(node.name, lambda tensors: tensors[root].clone())


def _index(node: Node, binding: Binding) -> Work:
    position = torch.tensor(binding.axis_group(node).position)
    return lambda: position


def _cut(node: Node, binding: Binding) -> Cut:
    size = binding.axis_group(node).size
    return Cut(axis_of(node) or "", number_of(node, "dim"), size, number_of(node, "outer", 1))


def _peer(node: Node, binding: Binding) -> int:
    """The position of the rank `shift` places further along the axis, which is a ring."""
    group = binding.axis_group(node)
    return (group.position + number_of(node, "shift")) % group.size


def _copy(node: Node, binding: Binding) -> Work:
    group, transport, tag = binding.axis_group(node), binding.connected, number_of(node, "tag")
    source, target = ends_of(node)
    symbol = transport.program.symbols[str(node.args[1])]
    tensor = binding.tensor_of(symbol.name)
    if group.position != source:
        # Ranks that share their parameters all write the same bytes.
        message = group.recv(source, tag, symbol.type)
        return Simple(lambda: tensor.copy_(message.finish()), is_ready=message.is_ready)
    sent = group.send(target, tag)

    def send() -> None:
        if symbol.kind in SHARED_KINDS:
            transport.sync.wait_for_updates()
        sent.begin(tensor)
        sent.finish()

    return Simple(send)


def _assertion(node: Node, binding: Binding) -> Work:
    message = dict(node.kwargs).get("message")
    by_torch = ("assertion error", "Assertion failed")  # where the user says nothing
    what = "an assertion of the model does not hold" + (f": {message}" if message and message not in by_torch else "")
    where = str(node.source) if node.source else node.module

    def check(condition: Tensor) -> None:
        if not condition:
            raise AssertionFailedError(what, where=where, remedy="check the samples and the learning rate")

    return check


def _square_sums(node: Node, binding: Binding) -> Work:
    """The sums of squares of all gradients, by block. Of gradients that several ranks have, the first one sums."""
    transport = binding.connected
    sync, symbols = transport.sync, transport.program.symbols
    parts = (
        found
        for group in binding.groups(node)
        for found in parts_of(group, sync.memory.region(group, "gradient"), sync.summed(group))
        if transport.is_first_copy or symbols[found[0].parameter].cuts
    )
    sums = square_sums(parts, binding.values[node.results[0] or ""].numel)
    return lambda: torch.tensor(sums(), dtype=torch.float64)


def _total_norm(node: Node, binding: Binding) -> Work:
    optimizers = binding.updating
    return lambda sums: optimizers.clip(sums.tolist())


def _optimizer(node: Node, binding: Binding) -> Work:
    (group,) = binding.groups(node)
    sync = binding.connected.sync
    start, stop = sync.updated(group)
    return binding.updating.slice(group, start, stop, sync.memory.region(group, "gradient")[start:stop])


UPDATES = frozenset(f"opt.{kind}" for kind in KINDS)
"""The operators that are a step of an optimizer."""

HANDLERS: Mapping[str, Callable[[Node, Binding], Work]] = {
    "comm.reduce_scatter": _reduce_scatter,
    "comm.all_gather": _all_gather,
    "comm.all_reduce": _all_reduce,
    "comm.broadcast": _broadcast,
    "comm.send": lambda node, binding: binding.axis_group(node).send(_peer(node, binding), number_of(node, "tag")),
    "comm.recv": lambda node, binding: binding.axis_group(node).recv(
        _peer(node, binding), number_of(node, "tag"), binding.values[node.results[0] or ""]
    ),
    "comm.copy": _copy,
    # This rank's part of a value that all ranks of the axis have.
    "comm.shard": lambda node, binding: partial(_part, _cut(node, binding), binding.axis_group(node).position),
    "comm.index": _index,
    "memory.release": lambda node, binding: binding.connected.sync.releasing(
        binding.groups(node)[0], str(node.args[1])
    ),
    "random.state": lambda node, binding: torch.get_rng_state,
    # A clone, because torch reads a state from the start of its storage.
    "random.set_state": lambda node, binding: lambda state: torch.set_rng_state(state.clone()),
    ASSERTION: _assertion,
    "opt.square_sums": _square_sums,
    "opt.total_norm": _total_norm,
    **dict.fromkeys(UPDATES, _optimizer),
}
"""By operator; ATen operators are not listed."""
