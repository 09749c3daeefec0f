"""A pass or an update as one generated Python function of the registers, and the errors of its operators.

    def run(r, ended):
        r[7] = f0(r[2], r[5])
        r[8] = f1(r[7]); d1_0.copy_(r[8]); r[7] = None
        ended(u0)
        t = clock(); b2(r[8])
        r[9] = f3(r[5])
        r[10] = f2(); waited['tp'] += clock() - t - c2.update_s

`r[8]` is a gradient: it is stored at once in its destination, and `r[7]` is freed at its last use. `ended` reports the
sections that have run, where somebody wants to know. `b2` begins a communication, whose result is `r[10]`. The function
is a generator where it must wait for another rank of this process.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import starmap
from time import perf_counter
from types import FunctionType
from typing import Any, TypeAlias

import torch
from torch import Tensor

from sambasim.errors import (
    AssertionFailedError,
    DataError,
    InternalError,
    MachineError,
    SambasimError,
    is_out_of_memory,
)
from sambasim.ir.dataflow import axis_of
from sambasim.ir.graph import Node
from sambasim.ir.mesh import DATA_PARALLEL
from sambasim.ir.types import Symbol
from sambasim.runtime.engine.instructions import Instruction, Operand, Registers, Unit, registers_in
from sambasim.runtime.transports.communication import Communication
from sambasim.runtime.values.operators import wrong_number

_REPORT = re.compile(r"[,.]? ?please report a bug to PyTorch\.?", re.IGNORECASE)

Held: TypeAlias = Sequence[tuple[Symbol, Tensor]]  # inputs of the program, and the tensors that they hold


def operator_error(node: Node, raised: Exception, held: Held) -> SambasimError:
    """The error for `raised`, which `node`'s operator raised while inputs were `held`."""
    said = _REPORT.sub("", str(raised).strip().partition("\n")[0])
    text = f"{type(raised).__name__}: {said}"
    where = str(node.source) if node.source else f"the operator {node.operator}"
    if is_out_of_memory(raised):
        remedy = "compile for a smaller --batch-size, or start fewer ranks on this host"
        return MachineError(f"there is not enough memory for a step: {text}", where=where, remedy=remedy)
    if isinstance(raised, torch.linalg.LinAlgError):
        return AssertionFailedError(said, where=where, remedy="add a small number to the diagonal of the matrix")
    if suspects := "; ".join(filter(None, starmap(_unseen, held))):
        what = f"the samples hold values that the model cannot take ({text}): {suspects}"
        remedy = "correct the samples, or enlarge the model for these values and compile it again"
        return DataError(what, where=where, remedy=remedy)
    return InternalError(f"the operator {node.operator} failed: {text}", where=where)


def _unseen(symbol: Symbol, tensor: Tensor) -> str | None:
    """The range of an input's integers, if it exceeds the one at compile time."""
    bound = symbol.exclusive_bound
    if bound is None or tensor.numel() == 0:
        return None
    least, largest = int(tensor.min()), int(tensor.max())
    if least >= 0 and largest < bound:
        return None
    return f"{symbol.name} goes from {least} to {largest}, and went up to {bound - 1} when compiled"


Ended: TypeAlias = Callable[[Unit], None]  # called after each unit


@dataclass(frozen=True, slots=True)
class Code:
    """`function` takes the registers, and `Ended` or None. If the code `yields`, it is a generator."""

    function: FunctionType
    yields: bool
    _instructions: Sequence[Instruction | None]  # by line

    def run(self, registers: Registers, ended: Ended | None, held: Callable[[], Held] = list) -> Iterable[None]:
        """Run it: at once, or if it `yields`, while the result is iterated over. `held`: for errors."""
        if self.yields:
            return self._run_waiting(registers, ended, held)
        try:
            self.function(registers, ended)
        except Exception as error:
            self._raise_for(error, held)
            raise
        return ()

    def _run_waiting(self, registers: Registers, ended: Ended | None, held: Callable[[], Held]) -> Iterator[None]:
        try:
            yield from self.function(registers, ended)
        except Exception as error:
            self._raise_for(error, held)
            raise

    def _raise_for(self, error: Exception, held: Callable[[], Held]) -> None:
        if isinstance(error, SambasimError):
            return
        line, traceback = 0, error.__traceback__
        while traceback is not None:
            if traceback.tb_frame.f_code is self.function.__code__:
                line = traceback.tb_lineno
            traceback = traceback.tb_next
        instruction = self._instructions[line]
        if instruction is None:
            return
        node = instruction.node
        if node.operator.startswith(("comm.", "opt.")) and not isinstance(error, MemoryError):
            return  # its operands are ours: values of the inputs are not to blame
        raise operator_error(node, error, held()) from error


def generate(units: Iterable[Unit], waited_s: dict[str, float], *, accumulate: bool = False, reports: bool) -> Code:
    """The code of `units`. It adds the seconds of communication to `waited_s`, by mesh axis. `accumulate`: it adds to
    gradients instead of overwriting them; `reports`: it calls `Ended`."""
    writer = _Writer(waited_s, "add_" if accumulate else "copy_")
    for number, unit in enumerate(units):
        for instruction in unit.instructions:
            writer.add(instruction)
        if reports or unit.sections:
            writer.finish()  # who is told may change what a message reads
        if reports:
            writer.names[f"u{number}"] = unit
            writer.write(f"ended(u{number})")
    writer.finish()
    return writer.code()


class _Writer:
    """Writes the lines of a function. `names`: the objects that they use; `store`: the method by which a gradient's
    destination takes it. Between the begin and the end of a communication runs what does not depend on it. Only one is
    under way at a time, so that ranks can meet in their order."""

    def __init__(self, waited_s: dict[str, float], store: str) -> None:
        self.names: dict[str, Any] = {"clock": perf_counter, "waited": waited_s}
        self._store = store
        self._lines = ["def run(r, ended):"]
        self._instructions: list[Instruction | None] = [None, None]  # by line, from 1
        self._count = 0
        self._begun: tuple[int, Instruction, Communication] | None = None
        self._is_paused = False  # the time of the communication
        self._yields = False

    def code(self) -> Code:
        exec(compile("\n".join([*self._lines, "    return"]), "<pass>", "exec"), self.names)
        # A function in its own globals is a reference cycle, which would keep the destinations alive.
        return Code(self.names.pop("run"), self._yields, self._instructions)

    def write(self, line: str, instruction: Instruction | None = None) -> None:
        self._lines.append(f"    {line}")
        self._instructions.append(instruction)

    def add(self, instruction: Instruction) -> None:
        operands, communication, frees = instruction.operands, instruction.communication, instruction.frees
        if self._begun is not None:
            frees_memory = instruction.node.operator.startswith("memory.")  # which a message may still read
            is_reader = not {*self._begun[1].results}.isdisjoint(registers_in(operands))
            if is_reader or frees_memory or communication is not None:
                self.finish()
        number, self._count = self._count, self._count + 1
        self.names[f"f{number}"] = instruction.function
        called = ", ".join(map(_text, operands))
        if communication is None:
            self._pause()
            self.write("; ".join([*self._result(number, instruction, called), *_freed(frees)]), instruction)
            return
        statements = ["t = clock()"]
        if communication.begin is not Communication.begin:  # most communications need no begin
            self.names[f"b{number}"] = communication.begin
            statements.append(f"b{number}({called})")
        statements += _freed(register for register in frees if register not in instruction.results)
        self.write("; ".join(statements), instruction)
        self._begun = number, instruction, communication
        if not operands or set(instruction.results) <= {None}:
            self.finish()

    def finish(self) -> None:
        """End the communication that has begun."""
        if self._begun is None:
            return
        number, instruction, communication = self._begun
        self.names[f"c{number}"] = communication
        if communication.is_ready is not Communication.is_ready:
            self._yields = True
            self.names[f"q{number}"] = communication.is_ready
            self._pause()
            self.write(f"while not q{number}(): yield", instruction)
        axis = axis_of(instruction.node) or DATA_PARALLEL
        statements = ["t += clock()"] if self._is_paused else []
        statements += self._result(number, instruction, "")
        statements += _freed(register for register in instruction.frees if register in instruction.results)
        statements.append(f"waited[{axis!r}] += clock() - t - c{number}.update_s")
        self.write("; ".join(statements), instruction)
        self._begun, self._is_paused = None, False

    def _pause(self) -> None:
        if self._begun is not None and not self._is_paused:
            self.write("t -= clock()", self._begun[1])
            self._is_paused = True

    def _result(self, number: int, instruction: Instruction, operands: str) -> list[str]:
        results, stores = instruction.results, instruction.stores
        call = f"f{number}({operands})"
        statements = [call]
        if results and (len(results) != instruction.returned or (stores and len(results) > 1)):
            self.names[f"t{number}"] = partial(_unpack, instruction.node, results, [register for register, _ in stores])
            statements = [f"t{number}({call}, r)"]
        elif any(register is not None for register in results):
            targets = ("_" if register is None else f"r[{register}]" for register in results)
            statements = [f"{', '.join(targets)} = {call}"]
            if None in results:
                statements.append("_ = None")  # what nobody reads is freed at once
        for index, (register, destination) in enumerate(stores):
            self.names[f"d{number}_{index}"] = destination
            statements.append(f"d{number}_{index}.{self._store}(r[{register}])")
        return statements


def _text(operand: Operand) -> str:
    return f"r[{operand}]" if isinstance(operand, int) else f"[{', '.join(map(_text, operand))}]"


def _freed(registers: Iterable[int]) -> list[str]:
    names = [f"r[{register}]" for register in registers]
    return [f"{' = '.join(names)} = None"] if names else []


def _unpack(
    node: Node, results: Sequence[int | None], stored: Sequence[int], value: object, registers: Registers
) -> None:
    """Put the members of `value` into their registers. Raises PefError for another number of them, and where a gradient
    to be stored is no tensor: a masked result is None."""
    if not isinstance(value, (tuple, list)) or len(value) != len(results):
        raise wrong_number(node)
    for number, tensor in zip(results, value, strict=True):
        if number is not None:
            registers[number] = tensor
    for number in stored:
        if not isinstance(registers[number], Tensor):
            raise wrong_number(node)
