"""The code of a pass, with gradients that kernels write directly into device memory.

A kernel may round differently for a result with other strides, so the first pass records the layout that the kernel
itself chooses; a gradient is written in place only with that layout.
"""

from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import TypeAlias

import torch
from torch import Tensor

from sambasim.ir.dataflow import aliases_of, is_view, readers_of
from sambasim.ir.graph import Node
from sambasim.ir.ranks import ends_step
from sambasim.runtime.engine.code import Code, generate
from sambasim.runtime.engine.instructions import Instruction, Unit
from sambasim.runtime.values.memory import storage_of
from sambasim.runtime.values.operators import WRITES_OUT, Function, builtin


@dataclass(frozen=True, slots=True)
class Route:
    """The nodes from the kernel to the gradient `value`, by position: its `maker`, and the `views` up to `value`. The
    `unread` ones are not needed once the maker writes to the destination."""

    value: str
    maker: int
    views: tuple[int, ...]
    unread: tuple[int, ...]

    @property
    def last(self) -> int:
        return self.views[-1] if self.views else self.maker


def find_routes(
    nodes: Sequence[Node], sections: Sequence[int], stored: Collection[str], keep: Collection[str]
) -> list[Route]:
    """The safe routes to the values in `stored`. `sections` gives the section of each node. Values that a later section
    or the caller reads are not safe: other ranks may overwrite a gradient once its section is done."""
    position_of = {result: position for position, node in enumerate(nodes) for result in node.makes}
    readers = readers_of(nodes)
    routes = []
    for value in stored:
        chain = [position_of[value]]
        while is_plain_view(node := nodes[chain[0]]) and node.reads[0] in position_of:
            chain.insert(0, position_of[node.reads[0]])
        maker, *views = chain
        node, made = nodes[maker], nodes[maker].results[0]
        writes_out = node.operator in WRITES_OUT and builtin(node) is not None
        if made is None or not writes_out:
            continue
        aliases = aliases_of(made, nodes, readers)
        read_last = max((at for name in aliases for at in readers.get(name, ())), default=chain[-1])
        is_shared = not aliases.isdisjoint(keep) or any(name != value for name in aliases if name in stored)
        if not is_shared and sections[read_last] <= sections[chain[-1]]:
            unread: list[int] = []
            for position in reversed(views):
                needed_by = 1 if unread else 0  # the next view, which is not needed either
                if len(readers.get(nodes[position].results[0] or "", ())) > needed_by:
                    break
                unread.append(position)
            routes.append(Route(value, maker, tuple(views), tuple(unread)))
    return routes


def is_plain_view(node: Node) -> bool:
    """Whether `node` is a view of one value, with one result."""
    is_single = len(node.results) == 1 and node.results[0] is not None and len(node.reads) == 1
    return is_single and is_view(node)


Key: TypeAlias = tuple[int, int, bool, bool, bool]
"""Of code: how many nodes have run before and after it; whether it adds to gradients instead of writing them, runs
what only the last pass of a step runs, and reports the ends of sections."""


class PassCode(dict[Key, Code]):
    """By `Key`, generated at the first use. `stores`: the destinations of gradients by value; `keep`: values that the
    pass returns, which must not share memory with a gradient. Code adds to `waited_s`."""

    def __init__(
        self, units: Sequence[Unit], stores: Mapping[str, Sequence[Tensor]], keep: Set[str], waited_s: dict[str, float]
    ) -> None:
        super().__init__()
        self._units, self._waited_s = units, waited_s
        self._instructions = [instruction for unit in units for instruction in unit.instructions]
        unit_of = [number for number, unit in enumerate(units) for _ in unit.instructions]
        nodes = [instruction.node for instruction in self._instructions]
        self._places = {value: places[0] for value, places in stores.items() if len(places) == 1}
        self._routes = [route for route in find_routes(nodes, unit_of, stores, keep) if route.value in self._places]
        self._made: dict[int, Tensor] = {}  # by position of a maker: its result in this pass
        self._outs: dict[int, Tensor] = {}
        """By position of a maker that may write directly: the view of the destination to write to."""
        self.is_watching = bool(self._routes)
        """Whether the next pass that writes gradients finds out which kernels can write into their memory."""
        self._writing = self._watched() if self.is_watching else units

    def __missing__(self, key: Key) -> Code:
        start, stop, adds, is_last, reports = key
        units = [unit for unit in (self._units if adds else self._writing) if start < unit.stop <= stop]
        if not is_last:
            kept = [tuple(done for done in unit.instructions if not ends_step(done.node)) for unit in units]
            units = [replace(unit, instructions=left) for unit, left in zip(units, kept, strict=True)]
        code = self[key] = generate(units, self._waited_s, accumulate=adds, reports=reports)
        return code

    def end_watching(self) -> None:
        """After the first pass that wrote gradients."""
        self._writing = self._direct()
        self.is_watching = False
        for key in [*self]:
            if not key[2]:
                del self[key]

    def _watched(self) -> list[Unit]:
        """The units for the first pass, which records layouts."""
        watched = list(self._instructions)
        by_last = {route.last: route for route in self._routes}
        for at in {*by_last, *(route.maker for route in self._routes)}:
            function = self._recording(at, by_last.get(at), watched[at].function)
            watched[at] = replace(watched[at], function=function)
        return self._split(watched)

    def _direct(self) -> list[Unit]:
        """The units for all passes after it."""
        direct: list[Instruction | None] = list(self._instructions)
        for position, out in self._outs.items():
            maker = self._instructions[position]
            direct[position] = replace(maker, function=partial(maker.function, out=out))
        for route in self._routes:
            if route.maker in self._outs:
                last = direct[route.last]
                direct[route.last] = None if last is None else replace(last, stores=())
                for position in route.unread:
                    direct[position] = None
        return self._split(direct)

    def _split(self, instructions: Sequence[Instruction | None]) -> list[Unit]:
        """The units with other instructions; None stands for one that is left out."""
        rest = iter(instructions)
        kept = (tuple(filter(None, islice(rest, len(unit.instructions)))) for unit in self._units)
        return [replace(unit, instructions=of_unit) for unit, of_unit in zip(self._units, kept, strict=True)]

    def _recording(self, position: int, route: Route | None, function: Function) -> Function:
        """`function`, of a maker or the last of a `route`; it records what it returns."""

        def recorded(*operands: object) -> object:
            result = function(*operands)
            if isinstance(result, Tensor):
                self._made[position] = result
                if route is not None:
                    self._decide(route, result)
            return result

        return recorded

    def _decide(self, route: Route, value: Tensor) -> None:
        """Let the maker write directly to the destination, if the gradient `value` views its whole result and the
        destination can be viewed with the strides that the kernel chose."""
        made, place = self._made.pop(route.maker), self._places[route.value]
        self._made.pop(route.last, None)
        same_memory = storage_of(made) == storage_of(value)
        from_first = made.storage_offset() == value.storage_offset()
        alike = value.dtype == place.dtype and value.shape == place.shape and value.numel() == made.numel()
        dense = torch.ops.aten.is_non_overlapping_and_dense(made)
        if same_memory and from_first and alike and value.is_contiguous() and dense:
            self._outs[route.maker] = torch.as_strided(place, made.shape, made.stride())
