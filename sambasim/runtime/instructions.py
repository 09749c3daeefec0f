"""From a graph's nodes to a flat list of instructions over numbered registers.

Everything that can be decided once is decided here: which function, where its operands are, what to keep, what to free.
What is left for each step is a loop of calls.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import itemgetter

import torch
from torch import Tensor
from torch._ops import OpOverload

from sambasim.errors import PefError
from sambasim.ir.graph import Argument, Node, Ref, TorchConstant, node_references
from sambasim.pef.operands import check_operands, returns_one_tensor
from sambasim.pef.rules import COMPILE_AGAIN

Registers = list[object]
Load = Callable[[Registers], tuple[object, ...]]

_CPU = torch.device("cpu")
_KINDS: Mapping[str, type] = {
    "dtype": torch.dtype,
    "layout": torch.layout,
    "memory_format": torch.memory_format,
    "device": torch.device,
}
"""By kind of a constant: what it is to torch."""


@dataclass(frozen=True, slots=True)
class Instruction:
    """Call `function` with what `load` takes from the registers; put what it returns into `results`.

    `single` says that the operator returns one tensor, and not several. `results` has a register for each tensor, None
    for one that nobody reads: an operator that draws random numbers runs even so. `stores` are (register, destination):
    gradients that are complete now. `frees` are registers that nothing reads any more.
    """

    function: Callable[..., object]
    load: Load
    single: bool
    results: tuple[int | None, ...]
    stores: tuple[tuple[int, Tensor], ...]
    frees: tuple[int, ...]


class RegisterFile:
    """Numbers for values and constants. `initial` is what the registers hold before the first instruction."""

    def __init__(self) -> None:
        self._number_of: dict[str, int] = {}
        self.initial: Registers = []

    def constant(self, value: object) -> int:
        """The number of a new register that always holds `value`."""
        self.initial.append(value)
        return len(self.initial) - 1

    def value(self, name: str) -> int:
        """The number of the register of the value or symbol called `name`."""
        if name not in self._number_of:
            self._number_of[name] = self.constant(None)
        return self._number_of[name]


def lower(
    nodes: Sequence[Node],
    registers: RegisterFile,
    stores: Mapping[str, Sequence[Tensor]],
    keep: Iterable[str],
) -> list[Instruction]:
    """The instructions of `nodes`. `stores` says, by value, into which tensors a gradient goes as soon as it is there;
    values in `keep` are not freed. Raises PefError for an operator that this torch does not have, and for a node whose
    arguments or results do not fit its operator."""
    last_use = _last_uses(nodes, set(keep))
    return [_instruction(node, registers, stores, last_use[position]) for position, node in enumerate(nodes)]


def _last_uses(nodes: Sequence[Node], keep: set[str]) -> list[list[str]]:
    """By position of the node: the values that nothing after it reads."""
    dying: list[list[str]] = [[] for _ in nodes]
    defined = {result for node in nodes for result in node.results if result is not None}
    seen: set[str] = set(keep)
    for position in range(len(nodes) - 1, -1, -1):
        node = nodes[position]
        for name in (*node_references(node), *(result for result in node.results if result is not None)):
            if name in defined and name not in seen:
                seen.add(name)
                dying[position].append(name)
    return dying


def _instruction(
    node: Node, registers: RegisterFile, stores: Mapping[str, Sequence[Tensor]], dying: Sequence[str]
) -> Instruction:
    operator = find_operator(node.operator)
    check_operands(node, operator._schema)
    function, operands = _call(operator, node, registers)
    results = tuple(None if name is None else registers.value(name) for name in node.results)
    destinations = [
        (registers.value(name), tensor) for name in node.results if name is not None for tensor in stores.get(name, ())
    ]
    return Instruction(
        function=function,
        load=_loader(operands),
        single=returns_one_tensor(operator._schema),
        results=results,
        stores=tuple(destinations),
        frees=tuple(registers.value(name) for name in dying),
    )


def find_operator(name: str) -> OpOverload:
    """The operator called `aten.addmm.default`. Raises PefError if this torch does not have it."""
    namespace, packet, overload = name.split(".")
    try:
        found = getattr(getattr(getattr(torch.ops, namespace), packet), overload)
    except AttributeError as error:
        raise PefError(
            f"the PEF uses {name}, which torch {torch.__version__} does not have",
            remedy="compile it again with this torch",
        ) from error
    if not isinstance(found, OpOverload):
        raise PefError(f"the PEF uses {name}, which is no operator of torch {torch.__version__}")
    return found


def _call(operator: OpOverload, node: Node, registers: RegisterFile) -> tuple[Callable[..., object], list[int]]:
    """The function to call with positional operands only, and the registers of those."""
    operands = [_operand(argument, registers) for argument in node.args]
    fixed = {name: _plain(value) for name, value in node.kwargs if not _refers(value)}
    varying = [(name, value) for name, value in node.kwargs if _refers(value)]
    function: Callable[..., object] = partial(operator, **fixed) if fixed else operator
    if varying:
        names = tuple(name for name, _ in varying)
        function = partial(_call_with_keywords, function, names)
        operands += [_operand(value, registers) for _, value in varying]
    return _packing(function, operands, node, registers), operands


def _call_with_keywords(function: Callable[..., object], names: tuple[str, ...], *operands: object) -> object:
    split = len(operands) - len(names)
    return function(*operands[:split], **dict(zip(names, operands[split:], strict=True)))


def _packing(
    function: Callable[..., object], operands: list[int], node: Node, registers: RegisterFile
) -> Callable[..., object]:
    """`function`, with the lists of tensors among its arguments (`cat`, `stack`, `index`) put together first.

    Such an argument is flattened: its items become operands of their own at the end, and a plan says how to pack them.
    """
    lists = [(position, argument) for position, argument in enumerate(node.args) if _is_list(argument)]
    if not lists:
        return function
    plan = []
    for position, argument in lists:
        items = argument if isinstance(argument, tuple) else ()
        first = len(operands)
        operands += [_operand(item, registers) for item in items]
        plan.append((position, first, len(operands)))
    return partial(_call_with_lists, function, tuple(plan))


def _call_with_lists(
    function: Callable[..., object], plan: tuple[tuple[int, int, int], ...], *operands: object
) -> object:
    arguments = list(operands[: plan[0][1]])
    for position, start, stop in plan:
        arguments[position] = list(operands[start:stop])
    return function(*arguments)


def _operand(argument: Argument, registers: RegisterFile) -> int:
    if isinstance(argument, Ref):
        return registers.value(argument.name)
    return registers.constant(None if _is_list(argument) else _plain(argument))


def _is_list(argument: Argument) -> bool:
    return isinstance(argument, tuple) and any(_refers(item) for item in argument)


def _refers(argument: Argument) -> bool:
    return isinstance(argument, Ref) or _is_list(argument)


def _plain(argument: Argument) -> object:
    """A constant argument as torch takes it."""
    match argument:
        case TorchConstant():
            return _constant(argument)
        case tuple():
            return [_plain(item) for item in argument]
    return argument


def _constant(constant: TorchConstant) -> object:
    """What torch calls `constant`. Its name comes from a file: what it finds in torch must be of its kind."""
    found = _CPU if constant == TorchConstant("device", "cpu") else getattr(torch, constant.name, None)
    if isinstance(found, _KINDS.get(constant.kind, ())):
        return found
    raise PefError(
        f"the PEF uses {constant.name[:40]!r} as a {constant.kind[:40]}, which torch {torch.__version__} does not have",
        remedy=COMPILE_AGAIN,
    )


def _loader(operands: Sequence[int]) -> Load:
    if not operands:
        return lambda registers: ()
    if len(operands) == 1:
        (only,) = operands
        return lambda registers: (registers[only],)
    return itemgetter(*operands)
