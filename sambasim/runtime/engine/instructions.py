"""Instructions over numbered registers, and how a node of an ATen operator becomes one."""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

from torch import Tensor

from sambasim.ir.dataflow import last_uses
from sambasim.ir.graph import Argument, Node, Ref, Section
from sambasim.runtime.transports.communication import Communication
from sambasim.runtime.values.operators import Function, builtin, find_operator, plain_argument, tensors_returned

Registers: TypeAlias = list[Any]

Operand: TypeAlias = "int | tuple[Operand, ...]"  # a register, or a list of them, as `cat` takes


@dataclass(frozen=True, slots=True)
class Instruction:
    """Call `function` with the registers `operands`, put its results into the registers `results` (None: never read)
    and into the device memory of `stores`, and clear `frees`. `returned`: how many tensors each call returns, as a
    tuple if several; 0 for a list of them. A `communication` begins with the operands, and ends in `function`."""

    node: Node
    function: Function
    operands: tuple[Operand, ...]
    returned: int
    results: tuple[int | None, ...]
    stores: tuple[tuple[int, Tensor], ...]
    frees: tuple[int, ...] = ()
    communication: Communication | None = None


@dataclass(frozen=True, slots=True)
class Unit:
    """Instructions that run together, the sections that end with them (none with the first parts of a section), and how
    many nodes of the graph have run then."""

    sections: tuple[Section, ...]
    instructions: tuple[Instruction, ...]
    stop: int


class RegisterFile:
    """Assigns registers to values and constants. `initial` is their content before the first instruction; `stores`:
    for values that device memory keeps, as gradients are, the tensors to store them in."""

    def __init__(self) -> None:
        self._number_of: dict[str, int] = {}
        self.initial: Registers = []
        self.stores: dict[str, list[Tensor]] = {}

    def constant(self, value: object) -> int:
        self.initial.append(value)
        return len(self.initial) - 1

    def value(self, name: str) -> int:
        if name not in self._number_of:
            self._number_of[name] = self.constant(None)
        return self._number_of[name]

    def __contains__(self, name: str) -> bool:
        return name in self._number_of


def registers_in(operands: Iterable[Operand]) -> Iterator[int]:
    for operand in operands:
        yield from (operand,) if isinstance(operand, int) else registers_in(operand)


def value_of(operand: Operand, registers: Registers) -> object:
    if isinstance(operand, int):
        return registers[operand]
    return [value_of(item, registers) for item in operand]


def free_after_use(
    instructions: Sequence[Instruction | None], keep: Collection[str], registers: RegisterFile
) -> list[Instruction | None]:
    """The same instructions, each freeing the values that it is the last to read, except those in `keep`."""
    last = iter(last_uses([instruction.node for instruction in instructions if instruction], keep))
    return [one and replace(one, frees=tuple(map(registers.value, next(last)))) for one in instructions]


def instruction_for(
    node: Node,
    function: Function,
    operands: Iterable[Operand],
    registers: RegisterFile,
    *,
    returned: int,
    communication: Communication | None = None,
) -> Instruction:
    results = tuple(None if name is None else registers.value(name) for name in node.results)
    stores = registers.stores
    kept = ((registers.value(name), tensor) for name in node.results if name for tensor in stores.get(name, ()))
    return Instruction(node, function, tuple(operands), returned, results, tuple(kept), communication=communication)


def reporting(node: Node, function: Function, report: Callable[[str, Tensor, Sequence[object]], None]) -> Function:
    """`function`, which calls `report` with each result of `node` that is read: its name, the tensor, the operands."""

    def reported(*operands: object, **keywords: object) -> object:
        result = function(*operands, **keywords)
        results = result if isinstance(result, tuple | list) else (result,)
        for name, value in zip(node.results, results, strict=False):  # the code of the pass checks their number
            if name is not None and isinstance(value, Tensor):
                report(name, value, operands)
        return result

    return reported


def aten_instruction(node: Node, registers: RegisterFile) -> Instruction:
    """The call of an ATen operator. Raises PefError if this torch lacks the operator or a constant."""
    operator = find_operator(node.operator)
    function: Function = builtin(node) or operator._op
    fixed = {name: plain_argument(value) for name, value in node.kwargs if not _refers(value)}
    varying = {name: value for name, value in node.kwargs if name not in fixed}
    if fixed:
        function = partial(function, **fixed)
    if varying:
        function = partial(_call_with_keywords, function, tuple(varying))
    operands = [_operand(argument, registers) for argument in (*node.args, *varying.values())]
    return instruction_for(node, function, operands, registers, returned=tensors_returned(operator))


def _call_with_keywords(function: Function, names: tuple[str, ...], *operands: object) -> object:
    split = len(operands) - len(names)
    return function(*operands[:split], **dict(zip(names, operands[split:], strict=True)))


def _operand(argument: Argument, registers: RegisterFile) -> Operand:
    if isinstance(argument, Ref):
        return registers.value(argument.name)
    if isinstance(argument, tuple) and _refers(argument):
        return tuple(_operand(item, registers) for item in argument)
    return registers.constant(plain_argument(argument))


def _refers(argument: Argument) -> bool:
    return isinstance(argument, Ref) or (isinstance(argument, tuple) and any(map(_refers, argument)))
