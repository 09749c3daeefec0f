"""Chooses what inductor compiles together: units of sections, and in each unit the regions of nodes.

The forward is one unit and the backward at most four. At the end of a unit, its gradients are complete and can be
reduced while the next unit computes. Recurrent layers keep torch's kernels, because they need recorded gradients.
Products that are only gradients come last in their unit: their kernels write directly into the group.
"""

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from sambasim.ir.graph import Node, SectionKind
from sambasim.ir.operators import OPERATORS, OperatorKind
from sambasim.runtime.engine.routes import Route

BACKWARD_UNITS = 4
"""The maximum number of units of the backward. The gradients of the last one are reduced after it."""


@dataclass(frozen=True, slots=True)
class Unit:
    start: int
    stop: int
    sections: int


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


def choose_units(sections: Sequence[tuple[SectionKind, int]]) -> list[Unit]:
    """The units of a pass. `sections` gives the kind and number of nodes of each section."""
    backward = sum(count for kind, count in sections if kind is SectionKind.BCKWD)
    units: list[Unit] = []
    start = stop = number = done = made = 0
    for index, (kind, count) in enumerate(sections):
        stop, number = stop + count, number + 1
        is_backward = kind is SectionKind.BCKWD
        done += count if is_backward else 0
        following = sections[index + 1][0] if index + 1 < len(sections) else None
        if following is not kind or (is_backward and done * BACKWARD_UNITS >= backward * (made + 1)):
            units.append(Unit(start, stop, number))
            start, number, made = stop, 0, made + is_backward
    return units


@dataclass(frozen=True, slots=True)
class Steps:
    """Plans the steps of every unit. `taken`: positions of views of symbols, which have no step; `needed`: values that
    regions must output."""

    nodes: Sequence[Node]
    taken: Collection[int]
    needed: Collection[str]
    routes: Sequence[Route]

    def of(self, units: Sequence[Unit]) -> list[list[Step]]:
        last = self._gradient_products()
        drafts = [self._draft(unit, last) for unit in units]
        outside = set(self.needed)
        maker = {result: at for at, node in enumerate(self.nodes) for result in node.results if result is not None}
        bodies: dict[tuple[int, ...], tuple[tuple[int, ...], tuple[str, ...]]] = {}
        for step in (step for draft in drafts for step in draft):
            if isinstance(step, int):
                outside.update(self.nodes[step].reads)
            else:
                bodies[step] = self._inputs(step, maker)
                outside.update(bodies[step][1])
        return [
            [step if isinstance(step, int) else self._region(step, *bodies[step], outside) for step in draft]
            for draft in drafts
        ]

    def _draft(self, unit: Unit, last: Collection[int]) -> list[tuple[int, ...] | int]:
        draft: list[tuple[int, ...] | int] = []
        together: list[int] = []
        for position in range(unit.start, unit.stop):
            if position in self.taken or position in last:
                continue
            if OPERATORS[self.nodes[position].operator].kind in _ALONE:
                draft += [tuple(together)] if together else []
                draft.append(position)
                together = []
            else:
                together.append(position)
        draft += [tuple(together)] if together else []
        return draft + [position for position in range(unit.start, unit.stop) if position in last]

    def _region(
        self, nodes: tuple[int, ...], views: tuple[int, ...], inputs: tuple[str, ...], outside: Collection[str]
    ) -> Region:
        results = (result for position in nodes for result in self.nodes[position].results)
        return Region(views, nodes, inputs, tuple(one for one in results if one is not None and one in outside))

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
        readers: dict[str, list[int]] = defaultdict(list)
        for position, node in enumerate(self.nodes):
            for name in set(node.reads):
                readers[name].append(position)
        last: set[int] = set()
        for route in self.routes:
            members = {route.maker, *route.views}
            made = self.nodes[route.maker].results[0] or ""
            is_product = OPERATORS[self.nodes[route.maker].operator].kind is OperatorKind.MATMUL
            alone = route.unread == tuple(reversed(route.views)) and members.issuperset(readers[made])
            if is_product and alone and not readers[route.value]:
                last |= members
        for position in range(len(self.nodes) - 1, -1, -1):
            node = self.nodes[position]
            if position not in self.taken and _is_plain_view(node) and node.results[0] not in self.needed:
                found = readers[node.results[0] or ""]
                if found and all(reader in last for reader in found):
                    last.add(position)
        return last


def _is_plain_view(node: Node) -> bool:
    one = len(node.results) == 1 and node.results[0] is not None and len(node.reads) == 1
    return one and OPERATORS[node.operator].kind is OperatorKind.VIEW
