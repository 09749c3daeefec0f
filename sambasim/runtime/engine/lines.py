"""The straight-line code of a pass: one for passes that write gradients, and one for passes that add to them.

The first pass that writes is watched: it shows how results lie in memory, and which products our own kernel computes
faster. From then on kernels write gradients to their places in the groups where they can (see `routes`), and the
quicker products are used (see `products`).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice

from torch import Tensor

from sambasim.runtime.engine.parts import Part
from sambasim.runtime.engine.products import Products
from sambasim.runtime.engine.routes import Watch, find_routes
from sambasim.runtime.engine.straight_line import StraightLine
from sambasim.runtime.instructions import Instruction


class PassLines:
    """`parts` as straight-line code. `stores` gives the places of gradients by value; values in `keep` are handed out,
    so they never lie in a gradient's place."""

    def __init__(self, parts: Sequence[Part], stores: Mapping[str, Sequence[Tensor]], keep: Iterable[str]) -> None:
        self._parts = parts
        self._products = Products()
        self.adding = [StraightLine(part, accumulate=True) for part in parts]
        flat = [one for part in parts for one in part.instructions]
        part_of = [part.sections for part in parts for _ in part.instructions]
        single = {value: places[0] for value, places in stores.items() if len(places) == 1}
        routes = find_routes([one.node for one in flat], part_of, list(stores), list(keep))
        routes = [route for route in routes if route.value in single]
        watch = Watch(routes, single)
        self._watch: Watch | None = watch if routes else None
        timed = [self._products.watched(i, one.function) for i, one in enumerate(flat)]
        watched = [replace(one, function=watch.watched(i, timed[i])) for i, one in enumerate(flat)]
        self.writing = self._like(watched)

    def end_writing_pass(self) -> None:
        """A pass that wrote gradients has ended: the first one decides how the next are run."""
        if self._watch is not None:
            self.writing, self.adding = self._direct(self._watch), self._quicker()
            self._watch = None

    def _direct(self, watch: Watch) -> list[StraightLine]:
        """Code in which kernels write to the places of gradients, as far as `watch` says."""
        direct: list[Instruction | None] = [one for part in self._parts for one in part.instructions]
        for position, one in enumerate(direct):
            out = watch.outs.get(position)
            quicker = self._products.quicker(position, out)
            if one is not None and quicker is not None:
                direct[position] = replace(one, function=quicker)
            elif one is not None and out is not None:
                direct[position] = replace(one, function=partial(one.function, out=out))
        for route in watch.routes:
            if route.maker in watch.outs:
                last = direct[route.last]
                direct[route.last] = None if last is None else replace(last, stores=())
                for position in route.unread:
                    direct[position] = None
        return self._like(direct)

    def _quicker(self) -> list[StraightLine]:
        """Code that adds to gradients, with the products that are quicker."""
        flat = [one for part in self._parts for one in part.instructions]
        found = [self._products.quicker(position) for position in range(len(flat))]
        quick = [
            one if function is None else replace(one, function=function)
            for one, function in zip(flat, found, strict=True)
        ]
        return self._like(quick, accumulate=True)

    def _like(self, instructions: Sequence[Instruction | None], *, accumulate: bool = False) -> list[StraightLine]:
        """Other `instructions` in the same parts; None where one of them is left out. They write gradients, or add."""
        rest, lines = iter(instructions), []
        for part in self._parts:
            kept = tuple(one for one in islice(rest, len(part.instructions)) if one is not None)
            lines.append(StraightLine(replace(part, instructions=kept), accumulate=accumulate))
        return lines
