"""Instructions over numbered registers, and how a node of an ATen operator becomes one."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor
from torch._ops import OpOverload

from sambasim.errors import PefError
from sambasim.ir.graph import Argument, ComplexNumber, Node, Ref, TorchConstant
from sambasim.pef.archive import COMPILE_AGAIN
from sambasim.runtime.engine.routes import builtin
from sambasim.runtime.transports.communication import Communication

Registers = list[object]

_CPU = torch.device("cpu")
_KINDS: Mapping[str, type] = {
    "dtype": torch.dtype,
    "layout": torch.layout,
    "memory_format": torch.memory_format,
    "device": torch.device,
}


@dataclass(frozen=True, slots=True)
class Instruction:
    """Call `function` with the registers `operands`, and put its results into the registers `results` (None: never
    read). `node`: the first node that it executes; `single`: one tensor; `frees`: registers to clear afterwards.
    `communication` begins with the operands if `begins`, and ends in `function` if `finishes`."""

    node: Node
    function: Callable[..., object]
    operands: tuple[int, ...]
    single: bool
    results: tuple[int | None, ...]
    stores: tuple[tuple[int, Tensor], ...]
    frees: tuple[int, ...] = ()
    communication: Communication | None = None
    begins: bool = True
    finishes: bool = True


class RegisterFile:
    """Assigns registers to values and constants. `initial` is their content before the first instruction."""

    def __init__(self) -> None:
        self._number_of: dict[str, int] = {}
        self.initial: Registers = []

    def constant(self, value: object) -> int:
        self.initial.append(value)
        return len(self.initial) - 1

    def value(self, name: str) -> int:
        if name not in self._number_of:
            self._number_of[name] = self.constant(None)
        return self._number_of[name]

    def has(self, name: str) -> bool:
        """Whether there is a register of the value or symbol called `name`."""
        return name in self._number_of


def free_after_use(
    instructions: Sequence[Instruction | None], keep: Iterable[str], registers: RegisterFile
) -> list[Instruction | None]:
    """The same instructions, each freeing the values that it is the last to read, except those in `keep`."""
    last_uses = _last_uses([None if one is None else one.node for one in instructions], set(keep))
    return [
        None if one is None else replace(one, frees=tuple(map(registers.value, names)))
        for one, names in zip(instructions, last_uses, strict=True)
    ]


def _last_uses(nodes: Sequence[Node | None], keep: set[str]) -> list[list[str]]:
    last_uses: list[list[str]] = [[] for _ in nodes]
    defined = {result for node in nodes if node for result in node.results if result is not None}
    seen: set[str] = set(keep)
    for position in range(len(nodes) - 1, -1, -1):
        node = nodes[position]
        if node is None:
            continue
        for name in (*node.reads, *(result for result in node.results if result is not None)):
            if name in defined and name not in seen:
                seen.add(name)
                last_uses[position].append(name)
    return last_uses


def aten_instruction(node: Node, registers: RegisterFile, stores: Mapping[str, Sequence[Tensor]]) -> Instruction:
    """The call of an ATen operator. Raises PefError if this torch lacks the operator or a constant."""
    operator = find_operator(node.operator)
    function, operands = _call(operator, node, registers)
    return _instruction(node, function, operands, returns_one_tensor(operator._schema), registers, stores)


def compiled_instruction(
    node: Node, function: Callable[..., object], registers: RegisterFile, stores: Mapping[str, Sequence[Tensor]]
) -> Instruction:
    operands = [registers.value(name) for name in node.reads]
    return _instruction(node, function, operands, False, registers, stores)


def _instruction(
    node: Node,
    function: Callable[..., object],
    operands: Sequence[int],
    single: bool,
    registers: RegisterFile,
    stores: Mapping[str, Sequence[Tensor]],
) -> Instruction:
    results = tuple(None if name is None else registers.value(name) for name in node.results)
    return Instruction(node, function, tuple(operands), single, results, stores_of(node, registers, stores))


def stores_of(
    node: Node, registers: RegisterFile, stores: Mapping[str, Sequence[Tensor]]
) -> tuple[tuple[int, Tensor], ...]:
    """(register, destination) of each result of `node` that is kept in device memory, as gradients are."""
    named = [name for name in node.results if name is not None]
    return tuple((registers.value(name), tensor) for name in named for tensor in stores.get(name, ()))


def returns_one_tensor(schema: torch.FunctionSchema) -> bool:
    return [str(value.type) for value in schema.returns] == ["Tensor"]


def find_operator(name: str) -> OpOverload:
    """The operator called `name`, as in `aten.addmm.default`. Raises PefError if this torch does not have it."""
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
    """`function` with the items of list arguments (`cat`, `stack`, `index`) as separate operands at the end, by a plan
    of what to pack."""
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
    """`plan`: position, start and stop of each list among the arguments; operands before the first start are as they
    are."""
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
    match argument:
        case TorchConstant():
            return _constant(argument)
        case ComplexNumber():
            return complex(argument.real, argument.imaginary)
        case tuple():
            return [plain_argument(item) for item in argument]
    return argument


def _constant(constant: TorchConstant) -> object:
    """The torch object called `constant`. The name comes from a file, so the object must be of the stated kind."""
    found = _CPU if constant == TorchConstant("device", "cpu") else getattr(torch, constant.name, None)
    if isinstance(found, _KINDS.get(constant.kind, ())):
        return found
    raise PefError(
        f"the PEF uses {constant.name[:40]!r} as a {constant.kind[:40]}, which torch {torch.__version__} does not have",
        remedy=COMPILE_AGAIN,
    )
