"""What is compiled together: units of sections, and in each of them the nodes that a compiler gets.

A section alone is too small a unit. What it hands to the next one must be in memory, in a layout that both know, so
nothing is fused across; and each call of compiled code costs a little. So the forward is one unit, and the backward a
few: their ends are where gradients are complete and can be reduced while the next unit computes.

Three kinds of node are left to their own kernels. Those of recurrent layers work only where torch records gradients,
and compiled code does not. Products that are gradients and nothing else come last in their unit: their kernels write
to the gradient's place in its group. So do the views that only these products read.
"""

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from sambasim.ir.graph import Node, SectionKind, node_references
from sambasim.ir.operator_table import OperatorKind
from sambasim.ir.operators import OPERATORS
from sambasim.runtime.engine.routes import Route

BACKWARD_UNITS = 4
"""Into how many units the backward is cut at most: gradients of the last one, a quarter, are reduced after it."""


@dataclass(frozen=True, slots=True)
class Unit:
    """Nodes `start` up to `stop`, which are those of `sections` sections."""

    start: int
    stop: int
    sections: int


@dataclass(frozen=True, slots=True)
class Region:
    """Nodes that are compiled together. `nodes` are positions in order: `views` of what other regions make are taken
    again here, as that costs nothing. `inputs` and `outputs` are values."""

    views: tuple[int, ...]
    nodes: tuple[int, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


Step = Region | int
"""A region, or the position of a node that its own kernel carries out."""


def choose_units(sections: Sequence[tuple[SectionKind, int]]) -> list[Unit]:
    """Units from the kind and the number of nodes of each section, in order."""
    backward = sum(count for kind, count in sections if kind is SectionKind.BCKWD)
    units: list[Unit] = []
    start = stop = number = done = 0
    for index, (kind, count) in enumerate(sections):
        stop, number = stop + count, number + 1
        done += count if kind is SectionKind.BCKWD else 0
        last = index + 1 == len(sections)
        turns = not last and sections[index + 1][0] is not kind
        enough = kind is SectionKind.BCKWD and done * BACKWARD_UNITS >= backward * (len(_backward(units, sections)) + 1)
        if last or turns or enough:
            units.append(Unit(start, stop, number))
            start, number = stop, 0
    return units


def _backward(units: Sequence[Unit], sections: Sequence[tuple[SectionKind, int]]) -> list[Unit]:
    forward = sum(count for kind, count in sections if kind is not SectionKind.BCKWD)
    return [unit for unit in units if unit.start >= forward]


@dataclass(frozen=True, slots=True)
class Steps:
    """Plans the steps of every unit. `taken` are positions of nodes that are views of symbols, and have no step;
    `needed` are values that must be there after the node that makes them: stored, or handed out at the end."""

    nodes: Sequence[Node]
    taken: Collection[int]
    needed: Collection[str]
    routes: Sequence[Route]

    def of(self, units: Sequence[Unit]) -> list[list[Step]]:
        """The steps of each unit, in order."""
        last = self._sinks()
        drafts = [self._draft(unit, last) for unit in units]
        outside = set(self.needed)
        bodies: dict[tuple[int, ...], tuple[tuple[int, ...], tuple[str, ...]]] = {}
        for step in (step for draft in drafts for step in draft):
            if isinstance(step, int):
                outside.update(node_references(self.nodes[step]))
            else:
                bodies[step] = self._inputs(step)
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
            if OPERATORS[self.nodes[position].operator].kind is OperatorKind.RECURRENT:
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
        outputs: list[str] = []
        for position in nodes:
            node = self.nodes[position]
            outputs += [result for result in node.results if result is not None and result in outside]
        return Region(views, nodes, inputs, tuple(outputs))

    def _inputs(self, nodes: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[str, ...]]:
        """The views that are taken again for `nodes`, and what is read from outside then."""
        maker = {result: p for p, node in enumerate(self.nodes) for result in node.results if result is not None}
        inside, views, inputs = set(nodes), set[int](), dict[str, None]()
        waiting = [name for position in nodes for name in node_references(self.nodes[position])]
        while waiting:
            name = waiting.pop(0)
            position = maker.get(name, -1)
            if position in inside or position in views:
                continue
            if position >= 0 and position not in self.taken and _is_plain_view(self.nodes[position]):
                views.add(position)
                waiting += node_references(self.nodes[position])
            else:
                inputs[name] = None
        return tuple(sorted(views)), tuple(inputs)

    def _sinks(self) -> set[int]:
        """Products that are gradients and nothing else, the views that lead from them to the gradient, and the views
        that only they read."""
        readers = self._readers()
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

    def _readers(self) -> Mapping[str, list[int]]:
        readers: dict[str, list[int]] = defaultdict(list)
        for position, node in enumerate(self.nodes):
            for name in set(node_references(node)):
                readers[name].append(position)
        return readers


def _is_plain_view(node: Node) -> bool:
    """Whether `node` gives one view of one value."""
    one = len(node.results) == 1 and node.results[0] is not None and len(list(node_references(node))) == 1
    return one and OPERATORS[node.operator].kind is OperatorKind.VIEW
