"""A pass as straight-line Python: one generated function per part, one line per instruction.

    def run(registers):
        r = registers
        r[7] = f0(r[2], r[5])
        r[8] = f1(r[7]); d1_0.copy_(r[8]); r[7] = None

`r[8]` is a gradient: it is stored at once in its destination, and `r[7]` is freed at its last use.

Kernels write gradients in place where they can. A kernel may round differently for a result with other strides, so the
first pass records the layout that the kernel itself chooses; a gradient is written in place only with that layout.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby, islice
from types import CodeType
from typing import Any

import torch
from torch import Tensor

from sambasim.ir.dataflow import axis_of
from sambasim.ir.graph import Section
from sambasim.ir.mesh import DATA_PARALLEL
from sambasim.ir.ranks import ends_step
from sambasim.runtime.engine.instructions import Instruction, Registers
from sambasim.runtime.engine.operator_errors import Misfit
from sambasim.runtime.engine.routes import Function, Route, find_routes
from sambasim.runtime.transports.communication import Communication


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
        self._accumulate = accumulate

    def compile(self) -> Callable[[Registers], None]:
        self.function = _function(self._instructions, accumulate=self._accumulate)
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


def _function(instructions: Sequence[Instruction], *, accumulate: bool) -> Callable[[Registers], None]:
    names: dict[str, Any] = {"unpack": _unpack}
    lines = ["def run(registers):", "    r = registers"]
    store = "add_" if accumulate else "copy_"
    for number, instruction in enumerate(instructions):
        lines.append(f"    {_line(number, instruction, names, store)}")
    exec(compile("\n".join(lines), "<section>", "exec"), names)
    # A function in its own globals is a reference cycle, which would keep the destinations alive.
    run: Callable[[Registers], None] = names.pop("run")
    return run


def _line(number: int, instruction: Instruction, names: dict[str, Any], store: str) -> str:
    """The line for instruction `number`; the objects that it uses are added to `names`. `store`: the method by which a
    gradient's destination takes it."""
    names[f"f{number}"] = instruction.function
    line = f"f{number}({', '.join(f'r[{operand}]' for operand in instruction.operands)})"
    if instruction.communication is not None:
        line = f"f{number}()"  # it was begun with its operands
    if instruction.results and not instruction.single:
        names[f"t{number}"], names[f"s{number}"] = instruction.results, [register for register, _ in instruction.stores]
        line = f"unpack({line}, t{number}, r, s{number})"
    elif instruction.results and instruction.results[0] is not None:
        line = f"r[{instruction.results[0]}] = {line}"
    for index, (register, destination) in enumerate(instruction.stores):
        names[f"d{number}_{index}"] = destination
        line += f"; d{number}_{index}.{store}(r[{register}])"
    if instruction.frees:
        line += f"; {' = '.join(f'r[{register}]' for register in instruction.frees)} = None"
    return line


def _unpack(value: object, results: Sequence[int | None], registers: Registers, stored: Sequence[int]) -> None:
    """Put the members of `value` into their registers. Raises Misfit for another number of them, and where a gradient
    to be stored is no tensor: a masked result is None."""
    if not isinstance(value, (tuple, list)) or len(value) != len(results):
        raise Misfit
    for number, tensor in zip(results, value, strict=True):
        if number is not None:
            registers[number] = tensor
    for number in stored:
        if not isinstance(registers[number], Tensor):
            raise Misfit


class Lines:
    """`parts` of a pass, which consists of `sections`, as straight-line code that overwrites gradients, or adds to
    them."""

    def __init__(self, parts: Sequence[Part], sections: Sequence[Section], *, accumulate: bool) -> None:
        self._parts, self._sections, self._accumulate = parts, sections, accumulate
        self._found: dict[tuple[int, int, bool, bool], Sequence[StraightLine]] = {}

    def of_sections(self, start: int, stop: int, *, whole: bool = False, last: bool = True) -> Sequence[StraightLine]:
        """The code of sections `start` to `stop`: `whole` in as few parts as possible, or to report every section;
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


@dataclass(slots=True)
class Watch:
    """Records the layouts of the makers' results in one pass. `places`: the destination of each gradient; `outs`: for
    each maker that can write directly, the view of the destination to write to."""

    routes: Sequence[Route]
    places: Mapping[str, Tensor]
    seen: dict[int, Tensor] = field(default_factory=dict)
    outs: dict[int, Tensor] = field(default_factory=dict)

    def watched(self, position: int, function: Function) -> Function:
        """`function`, the one of the node at `position`; it records its result."""
        made = [route for route in self.routes if route.maker == position]
        ends = [route for route in self.routes if route.last == position]
        if not made and not ends:
            return function

        def recorded(*operands: object) -> object:
            result = function(*operands)
            if isinstance(result, Tensor):
                for route in made:
                    self.seen[route.maker] = result
                for route in ends:
                    self._decide(route, result)
            return result

        return recorded

    def _decide(self, route: Route, value: Tensor) -> None:
        """Let the maker write directly to the destination, if the gradient `value` views its whole result and the
        destination can be viewed with the strides that the kernel chose."""
        made, place = self.seen.pop(route.maker), self.places[route.value]
        same_memory = made.untyped_storage().data_ptr() == value.untyped_storage().data_ptr()
        from_first = made.storage_offset() == value.storage_offset()
        alike = value.dtype == place.dtype and value.shape == place.shape and value.numel() == made.numel()
        if same_memory and from_first and alike and value.is_contiguous() and _dense(made):
            self.outs[route.maker] = torch.as_strided(place, made.shape, made.stride())


def _dense(tensor: Tensor) -> bool:
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


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
