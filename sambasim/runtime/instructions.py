"""Instructions over numbered registers, and how a node of an ATen operator becomes one.

Everything that can be decided once is decided here: which function, where its operands are, what to keep, what to free.
What is left for each step is one call after another (`engine.straight_line`).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch._ops import OpOverload

from sambasim.errors import PefError
from sambasim.ir.graph import Argument, Node, Ref, TorchConstant, node_references
from sambasim.pef.archive import COMPILE_AGAIN
from sambasim.runtime.engine.builtins import builtin

if TYPE_CHECKING:
    from sambasim.runtime.transports.base import Communication

Registers = list[object]

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
    """Call `function` with what is in the registers `operands`; put what it returns into `results`.

    `single` says that the operator returns one tensor, and not several. `results` has a register for each tensor, None
    for one that nobody reads: an operator that draws random numbers runs even so. `stores` are (register, destination):
    gradients that are complete now. `frees` are registers that nothing reads any more. `node` is what it carries out;
    of several, the first. A `communication` begins with the operands; `function` then finishes it, and takes none.
    """

    node: Node
    function: Callable[..., object]
    operands: tuple[int, ...]
    single: bool
    results: tuple[int | None, ...]
    stores: tuple[tuple[int, Tensor], ...]
    frees: tuple[int, ...] = ()
    communication: "Communication | None" = None


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

    def has(self, name: str) -> bool:
        """Whether there is a register of the value or symbol called `name`."""
        return name in self._number_of


def free_after_use(
    instructions: Sequence[Instruction | None], keep: Iterable[str], registers: RegisterFile
) -> list[Instruction | None]:
    """The same instructions, each with what nothing after it reads, `keep` excepted, as its `frees`."""
    dying = _last_uses([None if one is None else one.node for one in instructions], set(keep))
    return [
        None if one is None else replace(one, frees=tuple(map(registers.value, names)))
        for one, names in zip(instructions, dying, strict=True)
    ]


def _last_uses(nodes: Sequence[Node | None], keep: set[str]) -> list[list[str]]:
    """By position of the node: the values that nothing after it reads."""
    dying: list[list[str]] = [[] for _ in nodes]
    defined = {result for node in nodes if node for result in node.results if result is not None}
    seen: set[str] = set(keep)
    for position in range(len(nodes) - 1, -1, -1):
        node = nodes[position]
        if node is None:
            continue
        for name in (*node_references(node), *(result for result in node.results if result is not None)):
            if name in defined and name not in seen:
                seen.add(name)
                dying[position].append(name)
    return dying


def aten_instruction(node: Node, registers: RegisterFile, stores: Mapping[str, Sequence[Tensor]]) -> Instruction:
    """The call of an ATen operator. Raises PefError for an operator or a constant that this torch does not have."""
    operator = find_operator(node.operator)
    function, operands = _call(operator, node, registers)
    results = tuple(None if name is None else registers.value(name) for name in node.results)
    return Instruction(
        node=node,
        function=function,
        operands=tuple(operands),
        single=returns_one_tensor(operator._schema),
        results=results,
        stores=_stores(node, registers, stores),
        frees=(),
    )


def compiled_instruction(
    node: Node, function: Callable[..., object], registers: RegisterFile, stores: Mapping[str, Sequence[Tensor]]
) -> Instruction:
    """An instruction for `function`, which takes the values that `node` refers to, and gives its results, of which
    there may be none or one."""
    return Instruction(
        node=node,
        function=function,
        operands=tuple(registers.value(name) for name in node_references(node)),
        single=False,
        results=tuple(None if name is None else registers.value(name) for name in node.results),
        stores=_stores(node, registers, stores),
        frees=(),
    )


def _stores(
    node: Node, registers: RegisterFile, stores: Mapping[str, Sequence[Tensor]]
) -> tuple[tuple[int, Tensor], ...]:
    named = [name for name in node.results if name is not None]
    return tuple((registers.value(name), tensor) for name in named for tensor in stores.get(name, ()))


def returns_one_tensor(schema: torch.FunctionSchema) -> bool:
    """Whether an operator of this schema returns one tensor, and not several or a list."""
    return [str(value.type) for value in schema.returns] == ["Tensor"]


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
    fixed = {name: plain_argument(value) for name, value in node.kwargs if not _refers(value)}
    varying = [(name, value) for name, value in node.kwargs if _refers(value)]
    quick: Callable[..., object] = builtin(node, operator._schema) or operator._op
    function: Callable[..., object] = partial(quick, **fixed) if fixed else quick
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
    return registers.constant(None if _is_list(argument) else plain_argument(argument))


def _is_list(argument: Argument) -> bool:
    return isinstance(argument, tuple) and any(_refers(item) for item in argument)


def _refers(argument: Argument) -> bool:
    return isinstance(argument, Ref) or _is_list(argument)


def plain_argument(argument: Argument) -> object:
    """A constant argument as torch takes it."""
    match argument:
        case TorchConstant():
            return _constant(argument)
        case tuple():
            return [plain_argument(item) for item in argument]
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
