"""The instructions of a part as one Python function, a line for each, without a loop that looks them up.

    def run(registers):
        r = registers
        r[6] = f0(r[2], r[3], r[5])
        unpack(f1(r[6], r[4]), t1, r); r[6] = None
        r[9] = f2(r[7]); keep(r[9], d2); r[7] = None

For operators that take microseconds, the loop took a quarter of a step. Nothing of a PEF is in the text but the numbers
of registers, which are counted here: functions, places and constants are handed in by name.
"""

from collections.abc import Callable, Sequence
from types import CodeType
from typing import Any

from torch import Tensor

from sambasim.errors import PefError, SambasimError
from sambasim.pef.archive import COMPILE_AGAIN
from sambasim.runtime.engine.parts import Part
from sambasim.runtime.instructions import Instruction, Registers

_FIRST_LINE = 3
"""Of the function's text: where the first instruction is."""


class Misfit(Exception):
    """An operator did not return the tensors that its node states."""


class StraightLine:
    """`part`, ready to be run. With `accumulate`, gradients are added to what is in their places.

    The text is made when it is first needed.
    """

    def __init__(self, part: Part, *, accumulate: bool) -> None:
        self.sections = part.sections
        self.communication = part.instructions[0].communication if len(part.instructions) == 1 else None
        self._instructions = part.instructions
        self._keep = add if accumulate else overwrite
        self._run: Callable[[Registers], None] | None = None

    def __call__(self, registers: Registers) -> None:
        """Run it. Raises what an operator raises, and Misfit; `failed` tells which one it was."""
        if self._run is None:
            self._run = _function(self._instructions, self._keep)
        self._run(registers)

    def begin(self, registers: Registers) -> None:
        """Begin the communication that this part is, with its operands."""
        if self.communication is not None:
            self.communication.begin(*[registers[operand] for operand in self._instructions[0].operands])

    def failed(self, error: BaseException) -> Instruction:
        """The instruction that raised `error`."""
        code: CodeType | None = self._run.__code__ if self._run is not None else None
        line, traceback = _FIRST_LINE, error.__traceback__
        while traceback is not None:
            if code is not None and traceback.tb_frame.f_code is code:
                line = traceback.tb_lineno
            traceback = traceback.tb_next
        return self._instructions[line - _FIRST_LINE]


def misfit(instruction: Instruction) -> SambasimError:
    """The error for an instruction that raised Misfit."""
    node = instruction.node
    what = f"node {node.name}: {node.operator} does not return the {len(node.results)} tensors that the PEF states"
    return PefError(what, where=str(node.source or node.operator), remedy=COMPILE_AGAIN)


def _function(
    instructions: Sequence[Instruction], keep: Callable[[object, Tensor], None]
) -> Callable[[Registers], None]:
    names: dict[str, Any] = {"unpack": _unpack, "keep": keep}
    lines = ["def run(registers):", "    r = registers"]
    for number, instruction in enumerate(instructions):
        lines.append(f"    {_line(number, instruction, names)}")
    exec(compile("\n".join(lines), "<section>", "exec"), names)
    # A function that lies among its own names is a cycle, and would keep its destinations until the next collection.
    run: Callable[[Registers], None] = names.pop("run")
    return run


def _line(number: int, instruction: Instruction, names: dict[str, Any]) -> str:
    """What carries out instruction `number`; what it calls and where it stores goes into `names`."""
    names[f"f{number}"] = instruction.function
    line = f"f{number}({', '.join(f'r[{operand}]' for operand in instruction.operands)})"
    if instruction.communication is not None:
        line = f"f{number}()"  # it was begun with its operands
    if instruction.results and not instruction.single:
        names[f"t{number}"] = instruction.results
        line = f"unpack({line}, t{number}, r)"
    elif instruction.results and instruction.results[0] is not None:
        line = f"r[{instruction.results[0]}] = {line}"
    for index, (register, destination) in enumerate(instruction.stores):
        names[f"d{number}_{index}"] = destination
        line += f"; keep(r[{register}], d{number}_{index})"
    if instruction.frees:
        line += f"; {' = '.join(f'r[{register}]' for register in instruction.frees)} = None"
    return line


def _unpack(value: object, results: Sequence[int | None], registers: Registers) -> None:
    if not isinstance(value, (tuple, list)) or len(value) != len(results):
        raise Misfit
    for number, tensor in zip(results, value, strict=True):
        if number is not None:
            registers[number] = tensor


def overwrite(value: object, destination: Tensor) -> None:
    """The first pass of a step keeps `value` so. Raises Misfit if it is no tensor."""
    destination.copy_(_tensor(value))


def add(value: object, destination: Tensor) -> None:
    """Later passes of a step keep `value` so. Raises Misfit if it is no tensor."""
    destination.add_(_tensor(value))


def _tensor(value: object) -> Tensor:
    if not isinstance(value, Tensor):
        raise Misfit
    return value
