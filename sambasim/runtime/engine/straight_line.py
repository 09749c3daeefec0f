"""A pass as straight-line Python: one generated function per part, one line per instruction."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby, islice
from types import CodeType
from typing import Any

import torch
from torch import Tensor

from sambasim.errors import AssertionFailedError, DataError, InternalError, MachineError, PefError, SambasimError
from sambasim.ir.dataflow import axis_of
from sambasim.ir.graph import Node, Section
from sambasim.ir.mesh import DATA_PARALLEL
from sambasim.ir.types import Symbol
from sambasim.ir.zero import ends_step
from sambasim.pef.archive import COMPILE_AGAIN
from sambasim.runtime.engine.routes import Watch, find_routes
from sambasim.runtime.instructions import Instruction, Registers
from sambasim.runtime.transports.base import Communication


@dataclass(frozen=True, slots=True)
class Part:
    """Instructions after which the first `sections` sections of the graph have run. A communication is a part of its
    own."""

    sections: int
    instructions: tuple[Instruction, ...]


def merged(parts: Sequence[Part]) -> list[Part]:
    """The same instructions in as few parts as possible: those between two communications are one."""
    found: list[Part] = []
    for part in parts:
        if found and not any(one.communication for one in (*found[-1].instructions, *part.instructions)):
            part = Part(part.sections, found.pop().instructions + part.instructions)
        found.append(part)
    return found


def by_part(instructions: Sequence[Instruction | None], sizes: Sequence[tuple[int, int]]) -> list[Part]:
    """Split `instructions` into parts; None entries are dropped. `sizes`: by unit, its number of sections and
    instructions. A communication finishes where its result is read, within its unit."""
    parts: list[Part] = []
    start = done = 0
    for sections, size in sizes:
        kept = [one for one in instructions[start : start + size] if one is not None]
        *first, last = list(_split_at_communication(finished_late(kept))) or [()]
        parts += [Part(done, one) for one in first]
        done += sections
        parts.append(Part(done, last))
        start += size
    return parts


def finished_late(instructions: Sequence[Instruction]) -> list[Instruction]:
    """The same instructions, where what does not depend on a communication runs between its begin and its end. Only one
    is under way at a time, so that ranks can meet in their order."""
    found: list[Instruction] = []
    begun: Instruction | None = None

    def finish() -> None:
        nonlocal begun
        if begun is not None and found[-1].communication is begun.communication:
            found[-1] = begun  # nothing ran meanwhile
        elif begun is not None:
            frees = tuple(one for one in begun.frees if one in begun.results)
            node = replace(begun.node, args=())
            found.append(replace(begun, node=node, operands=(), frees=frees, begins=False))
        begun = None

    for one in instructions:
        frees_memory = one.node.operator.startswith("memory.")  # which a message may still read
        is_reader = begun is not None and not {*begun.results}.isdisjoint(one.operands)
        if is_reader or frees_memory or one.communication is not None:
            finish()
        if one.communication is None or not one.operands or set(one.results) <= {None}:
            found.append(one)
            continue
        begun, frees = one, tuple(register for register in one.frees if register not in one.results)
        node = replace(one.node, results=())
        found.append(replace(one, node=node, function=_nothing, results=(), stores=(), frees=frees, finishes=False))
    finish()
    return found


def _nothing() -> None:
    """A communication that has begun: its result comes later."""


def _without_end(part: Part) -> Part:
    return replace(part, instructions=tuple(one for one in part.instructions if not ends_step(one.node)))


def _split_at_communication(instructions: Sequence[Instruction]) -> Iterator[tuple[Instruction, ...]]:
    """The runs of instructions between communications, and each communication by itself."""
    for communicates, run in groupby(instructions, key=lambda one: one.communication is not None):
        if communicates:
            yield from ((one,) for one in run)
        else:
            yield tuple(run)


_FIRST_LINE = 3


class Misfit(Exception):
    """An operator did not return the tensors that its node states."""


class StraightLine:
    """`part` as one Python function of the registers. `ended`: the sections that end with it; `accumulate`: add
    gradients instead of overwriting them. `function` is None until `compile`; if it raises, `failed` returns the
    instruction."""

    def __init__(self, part: Part, ended: Sequence[Section], *, accumulate: bool) -> None:
        self.sections, self.ended = part.sections, ended
        self.function: Callable[[Registers], None] | None = None
        first = part.instructions[0] if part.instructions else None
        self.communication = first.communication if first is not None and len(part.instructions) == 1 else None
        self.operands: Sequence[int] = ()
        self.begins = self.waits = False  # most communications need neither
        self.axis = DATA_PARALLEL
        if first is not None and self.communication is not None:
            kind = type(self.communication)
            self.operands, self.axis = first.operands, axis_of(first.node) or DATA_PARALLEL
            self.begins = first.begins and kind.begin is not Communication.begin
            self.waits = first.finishes and kind.is_ready is not Communication.is_ready
        self._instructions = part.instructions
        self._keep = add if accumulate else overwrite

    def compile(self) -> Callable[[Registers], None]:
        self.function = _function(self._instructions, self._keep)
        return self.function

    def failed(self, error: BaseException) -> Instruction:
        code: CodeType | None = self.function.__code__ if self.function is not None else None
        line, traceback = _FIRST_LINE, error.__traceback__
        while traceback is not None:
            if code is not None and traceback.tb_frame.f_code is code:
                line = traceback.tb_lineno
            traceback = traceback.tb_next
        return self._instructions[line - _FIRST_LINE]


def straight_lines(
    parts: Sequence[Part], sections: Sequence[Section], done: int, *, accumulate: bool = False
) -> list[StraightLine]:
    """The code of `parts` of a graph with `sections`, the first `done` of which run before them."""
    lines = []
    for part in parts:
        lines.append(StraightLine(part, sections[done : part.sections], accumulate=accumulate))
        done = part.sections
    return lines


def misfit(instruction: Instruction) -> SambasimError:
    node = instruction.node
    what = f"node {node.name}: {node.operator} does not return the {len(node.results)} tensors that the PEF states"
    return PefError(what, where=str(node.source or node.operator), remedy=COMPILE_AGAIN)


_REPORT = re.compile(r"[,.]? ?please report a bug to PyTorch\.?", re.IGNORECASE)
_OUT_OF_MEMORY = ("can't allocate memory", "not enough memory", "out of memory")


def operator_error(
    node: Node, raised: Exception, inputs: Iterable[Symbol], tensors: Mapping[str, Tensor]
) -> SambasimError:
    """The error for `raised`, which `node`'s operator raised while `inputs` held `tensors` (by symbol): DataError for
    integers out of range, MachineError if memory ran out."""
    said = _REPORT.sub("", str(raised).strip().partition("\n")[0])
    text = f"{type(raised).__name__}: {said}"
    where = str(node.source) if node.source else f"the operator {node.operator}"
    if isinstance(raised, MemoryError) or any(mark in text for mark in _OUT_OF_MEMORY):
        return MachineError(
            f"there is not enough memory for a step: {text}",
            where=where,
            remedy="compile for a smaller --batch-size, or start fewer ranks on this host",
        )
    if isinstance(raised, torch.linalg.LinAlgError):
        return AssertionFailedError(said, where=where, remedy="add a small number to the diagonal of the matrix")
    suspects = [found for symbol in inputs if (found := _unseen(symbol, tensors[symbol.name]))]
    if suspects:
        return DataError(
            f"the samples hold values that the model cannot take ({text}): {'; '.join(suspects)}",
            where=where,
            remedy="correct the samples, or enlarge the model for these values and compile it again",
        )
    return InternalError(f"the operator {node.operator} failed: {text}", where=where)


def _unseen(symbol: Symbol, tensor: Tensor) -> str | None:
    """The range of an input's integers, if it exceeds the one at compile time."""
    if symbol.exclusive_bound is None or tensor.numel() == 0:
        return None
    least, largest = int(tensor.min()), int(tensor.max())
    if least >= 0 and largest < symbol.exclusive_bound:
        return None
    return f"{symbol.name} goes from {least} to {largest}, and went up to {symbol.exclusive_bound - 1} when compiled"


def _function(
    instructions: Sequence[Instruction], keep: Callable[[object, Tensor], None]
) -> Callable[[Registers], None]:
    names: dict[str, Any] = {"unpack": _unpack, "keep": keep}
    lines = ["def run(registers):", "    r = registers"]
    for number, instruction in enumerate(instructions):
        lines.append(f"    {_line(number, instruction, names)}")
    exec(compile("\n".join(lines), "<section>", "exec"), names)
    # A function in its own globals is a reference cycle, which would keep the destinations alive.
    run: Callable[[Registers], None] = names.pop("run")
    return run


def _line(number: int, instruction: Instruction, names: dict[str, Any]) -> str:
    """The line for instruction `number`; the objects that it uses are added to `names`."""
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
    """Store a gradient in the first pass of a step. Raises Misfit if `value` is no tensor."""
    destination.copy_(_tensor(value))


def add(value: object, destination: Tensor) -> None:
    """Store a gradient in later passes of a step. Raises Misfit if `value` is no tensor."""
    destination.add_(_tensor(value))


def _tensor(value: object) -> Tensor:
    if not isinstance(value, Tensor):
        raise Misfit
    return value


class Lines:
    """`parts` of a pass, which consists of `sections`, as straight-line code."""

    def __init__(self, parts: Sequence[Part], sections: Sequence[Section], *, accumulate: bool) -> None:
        self._parts, self._sections, self._accumulate = parts, sections, accumulate
        self._found: dict[tuple[int, int, bool, bool], Sequence[StraightLine]] = {}

    def of_sections(self, start: int, stop: int, *, whole: bool, last: bool = True) -> Sequence[StraightLine]:
        """The code of sections `start` to `stop`: `whole` in as few parts as possible, or to report every section.
        `last`: with what only the last pass of a step runs."""
        key = start, stop, whole, last
        found = self._found.get(key)
        if found is None:
            parts, done = [], 0
            for part in self._parts:
                if start <= done < stop:
                    parts.append(part if last else _without_end(part))
                done = part.sections
            parts = merged(parts) if whole else parts
            found = straight_lines(parts, self._sections, start, accumulate=self._accumulate)
            self._found[key] = found
        return found


class PassLines:
    """The code of passes that write gradients, and of passes that add to them. `stores`: the destinations of gradients
    by value; `keep`: values that the pass returns, which must not share memory with a gradient; `watches`: find out in
    the first pass which kernels can write into gradients."""

    def __init__(
        self,
        parts: Sequence[Part],
        sections: Sequence[Section],
        stores: Mapping[str, Sequence[Tensor]],
        keep: Iterable[str],
        *,
        watches: bool = True,
    ) -> None:
        self._parts, self._sections = parts, sections
        self.adding = Lines(parts, sections, accumulate=True)
        flat = [one for part in parts for one in part.instructions]
        part_of = [part.sections for part in parts for _ in part.instructions]
        single = {value: places[0] for value, places in stores.items() if len(places) == 1}
        routes = find_routes([one.node for one in flat], part_of, list(stores), list(keep))
        routes = [route for route in routes if route.value in single and watches]
        watch = self._watch = Watch(routes, single)
        self.is_watching = bool(routes)
        self.writing = self._replaced(
            [replace(one, function=watch.watched(i, one.function)) for i, one in enumerate(flat)]
        )

    def end_watching(self) -> None:
        """Call after the first pass that wrote gradients: it decides how the next ones run."""
        self.writing = self._direct(self._watch)
        self.is_watching = False

    def _direct(self, watch: Watch) -> Lines:
        """Code in which kernels write directly to the destinations of gradients that `watch` found."""
        direct: list[Instruction | None] = [one for part in self._parts for one in part.instructions]
        for position, one in enumerate(direct):
            out = watch.outs.get(position)
            if one is not None and out is not None:
                direct[position] = replace(one, function=partial(one.function, out=out))
        for route in watch.routes:
            if route.maker in watch.outs:
                last = direct[route.last]
                direct[route.last] = None if last is None else replace(last, stores=())
                for position in route.unread:
                    direct[position] = None
        return self._replaced(direct)

    def _replaced(self, instructions: Sequence[Instruction | None]) -> Lines:
        """The same parts with other `instructions`; None entries are dropped."""
        rest, parts = iter(instructions), []
        for part in self._parts:
            kept = tuple(one for one in islice(rest, len(part.instructions)) if one is not None)
            parts.append(replace(part, instructions=kept))
        return Lines(parts, self._sections, accumulate=False)
