"""Chooses what inductor compiles together: units of sections, and in each unit the regions of nodes.

The forward is one unit and the backward at most four. At the end of a unit, its gradients are complete and can be
reduced while the next unit computes. Recurrent layers keep torch's kernels, because they need recorded gradients.
Products that are only gradients come last in their unit: their kernels write directly into the group.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, zip_longest

from sambasim.ir.dataflow import readers_of
from sambasim.ir.graph import Node, Section, SectionKind
from sambasim.ir.operators import OPERATORS, OperatorKind
from sambasim.runtime.engine.routes import Route

BACKWARD_UNITS = 4
"""The maximum number of units of the backward. The gradients of the last one are reduced after it."""


@dataclass(frozen=True, slots=True)
class Region:
    """Nodes that are compiled together, by position, with the values they read and return. `views`: nodes of other
    regions that are evaluated again here, which costs nothing."""

    views: tuple[int, ...]
    nodes: tuple[int, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


_ALONE = (OperatorKind.RECURRENT, OperatorKind.CHECK)

Step = Region | int
"""A region, or the position of a node that keeps its own kernel."""


Run = tuple[Section, ...]
"""Sections that are compiled together."""


def choose_units(sections: Sequence[Section]) -> list[Run]:
    """The sections of each unit of a pass."""
    backward = sum(section.stop - section.start for section in sections if section.kind is SectionKind.BCKWD)
    units: list[Run] = []
    unit: list[Section] = []
    done = made = 0
    for section, following in zip_longest(sections, sections[1:]):
        unit.append(section)
        is_backward = section.kind is SectionKind.BCKWD
        done += section.stop - section.start if is_backward else 0
        ends = following is None or following.kind is not section.kind
        if ends or (is_backward and done * BACKWARD_UNITS >= backward * (made + 1)):
            units.append(tuple(unit))
            unit, made = [], made + is_backward
    return units


@dataclass(frozen=True, slots=True)
class Steps:
    """Plans the steps of every unit. `nodes`: of the pass; `taken`: positions of views of symbols, which have no step;
    `needed`: values that regions must output."""

    nodes: Sequence[Node]
    taken: Collection[int]
    needed: Collection[str]
    routes: Sequence[Route]

    def of(self, units: Sequence[Run]) -> list[list[Step]]:
        last = self._gradient_products()
        drafts = [self._draft(unit, last) for unit in units]
        steps = [step for draft in drafts for step in draft]
        maker = {result: at for at, node in enumerate(self.nodes) for result in node.results if result is not None}
        bodies = {step: self._inputs(step, maker) for step in steps if not isinstance(step, int)}
        outside = set(self.needed).union(
            *(inputs for _, inputs in bodies.values()),
            *(self.nodes[step].reads for step in steps if isinstance(step, int)),
        )
        return [
            [step if isinstance(step, int) else self._region(step, *bodies[step], outside) for step in draft]
            for draft in drafts
        ]

    def _draft(self, unit: Run, last: Collection[int]) -> list[tuple[int, ...] | int]:
        """The positions of nodes that are compiled together, and of those that keep their own kernels."""
        draft: list[tuple[int, ...] | int] = []
        positions = range(unit[0].start, unit[-1].stop)
        rest = [position for position in positions if position not in self.taken and position not in last]
        for keeps_kernel, run in groupby(rest, lambda at: OPERATORS[self.nodes[at].operator].kind in _ALONE):
            nodes = tuple(run)
            draft += nodes if keeps_kernel else [nodes]
        return draft + [position for position in positions if position in last]

    def _region(
        self, nodes: tuple[int, ...], views: tuple[int, ...], inputs: tuple[str, ...], outside: Collection[str]
    ) -> Region:
        results = (result for position in nodes for result in self.nodes[position].results)
        return Region(views, nodes, inputs, tuple(name for name in results if name is not None and name in outside))

    def _inputs(self, nodes: tuple[int, ...], maker: Mapping[str, int]) -> tuple[tuple[int, ...], tuple[str, ...]]:
        """The views to evaluate again for `nodes`, and the values that are then read from outside. `maker`: by value,
        the node that gives it."""
        inside, views, inputs = set(nodes), set[int](), dict[str, None]()
        waiting = [name for position in nodes for name in self.nodes[position].reads]
        while waiting:
            name = waiting.pop(0)
            position = maker.get(name, -1)
            if position in inside or position in views:
                continue
            if position >= 0 and position not in self.taken and _is_plain_view(self.nodes[position]):
                views.add(position)
                waiting += self.nodes[position].reads
            else:
                inputs[name] = None
        return tuple(sorted(views)), tuple(inputs)

    def _gradient_products(self) -> set[int]:
        """The products that are only gradients, the views up to the gradient, and the views that only they read."""
        readers = readers_of(self.nodes)
        last: set[int] = set()
        for route in self.routes:
            members = {route.maker, *route.views}
            made = self.nodes[route.maker].results[0] or ""
            is_product = OPERATORS[self.nodes[route.maker].operator].kind is OperatorKind.MATMUL
            alone = route.unread == tuple(reversed(route.views)) and members.issuperset(readers.get(made, ()))
            if is_product and alone and route.value not in readers:
                last |= members
        for position in range(len(self.nodes) - 1, -1, -1):
            node = self.nodes[position]
            is_view = position not in self.taken and _is_plain_view(node) and node.results[0] not in self.needed
            if is_view and last.issuperset(readers.get(node.results[0] or "", [-1])):
                last.add(position)
        return last


def _is_plain_view(node: Node) -> bool:
    is_single = len(node.results) == 1 and node.results[0] is not None and len(node.reads) == 1
    return is_single and OPERATORS[node.operator].kind is OperatorKind.VIEW
