"""The pass that computes activations again in the backward instead of keeping them: `--recompute`.

`sections` keeps what crosses from one section of the forward to another. `full` cuts the forward into about √n
segments, n being the places where one tensor crosses, and keeps what crosses between segments (Chen et al.,
arXiv:1604.06174). Kept as well are results of communication and of operators that draw random numbers: of dropout, the
mask.
"""

from dataclasses import dataclass, replace
from itertools import accumulate
from math import sqrt
from typing import ClassVar, Literal

from sambasim.compiler.pipeline.assign import Values, crossing_of, values_of
from sambasim.ir.graph import Graph, Node, Ref, Section, SectionKind, TorchConstant, node_references, renamed
from sambasim.ir.operators import OPERATORS, OperatorKind
from sambasim.ir.program import Program
from sambasim.ir.verify import Progress

_DROPOUT = "aten.native_dropout.default"
_AGAIN = "__again"


@dataclass(frozen=True, slots=True)
class Recompute:
    """Repeat operators of the forward in the backward, right before it reads their results."""

    title: ClassVar[str] = "recompute activations"
    reaches: ClassVar[Progress] = Progress.CAPTURED
    mode: Literal["sections", "full"]

    def __call__(self, program: Program) -> Program:
        training = program.training
        if training is None:
            return program
        ends = [one.stop for one in training.sections if one.kind is SectionKind.FWD]
        if self.mode == "full":
            ends = _segments(training, program, ends[-1])
        return replace(
            program, training=_Repeated(training, _kept(training, ends, values_of(training, program))).graph()
        )


def _segments(graph: Graph, program: Program, stop: int) -> list[int]:
    """The ends of segments of the forward, up to node `stop`, with about the same bytes of activations."""
    forward = graph.nodes[:stop]
    crossing = crossing_of(forward, values_of(graph, program))
    places = [at for at, count in enumerate(crossing, 1) if count == 1]
    made = [sum(graph.values[name].size_bytes for name in node.results if name) for node in forward]
    total = list(accumulate(made, initial=0))
    count = max(round(sqrt(len(places))), 1)
    wanted = (total[-1] * part / count for part in range(1, count))
    return [*sorted({min(places, key=lambda at: abs(total[at] - goal)) for goal in wanted}), stop]


def _kept(graph: Graph, ends: list[int], values: Values) -> frozenset[str]:
    """The values of the forward that the backward may read: what crosses `ends`, and what cannot be made again."""
    forward = graph.nodes[: ends[-1]]
    segment_of = {name: sum(end <= at for end in ends) for at, node in enumerate(forward) for name in node.results}
    kept = {
        name
        for at, node in enumerate(forward)
        for name in node_references(node)
        if name in segment_of and segment_of[name] < sum(end <= at for end in ends)
    }
    for node in forward:
        operator = OPERATORS[node.operator]
        if _dropout_of(node) is not None:
            kept.update(name for name in node.results[1:] if name is not None)
        elif (
            operator.draws_random_numbers
            or operator.kind is OperatorKind.COLLECTIVE
            or values.buffers_read_by(node)  # in an app, they have changed before the backward
        ):
            kept.update(name for name in node.results if name is not None)
    return frozenset(kept | {output.value for output in graph.outputs})


class _Repeated:
    def __init__(self, graph: Graph, kept: frozenset[str]) -> None:
        self._graph = graph
        self._kept = kept
        forward = [node for one in graph.sections if one.kind is SectionKind.FWD for node in graph.section_nodes(one)]
        self._maker = {name: node for node in forward for name in node.results if name is not None}
        self._types = dict(graph.values)
        self._again: dict[str, str] = {}
        self._nodes = list(forward)
        self._count = len(forward)

    def graph(self) -> Graph:
        graph = self._graph
        for node in graph.nodes[self._count :]:
            self._nodes.append(self._with_repeated_operands(node))
        sections = (
            Section(0, SectionKind.FWD, "forward", 0, self._count),
            Section(1, SectionKind.BCKWD, "backward", self._count, len(self._nodes)),
        )
        return replace(graph, nodes=tuple(self._nodes), values=self._types, sections=sections)

    def _with_repeated_operands(self, node: Node) -> Node:
        """`node`, with the names of values that were made again."""
        names = {name: self._available(name) for name in dict.fromkeys(node_references(node))}
        return renamed(node, names)

    def _available(self, name: str) -> str:
        maker = self._maker.get(name)
        if maker is None or name in self._kept:
            return name
        if name not in self._again:
            self._repeat(maker)
        return self._again[name]

    def _repeat(self, maker: Node) -> None:
        results = tuple(None if name is None else name + _AGAIN for name in maker.results)
        node = replace(maker, name=maker.name + _AGAIN, results=results)
        if maker.operator == _DROPOUT:
            node = self._dropped(node, maker)
        for old, new in zip(maker.results, node.results, strict=False):
            if old is not None and new is not None:
                self._again[old], self._types[new] = new, self._types[old]
        self._nodes.append(self._with_repeated_operands(node))

    def _dropped(self, node: Node, maker: Node) -> Node:
        """Dropout by the mask that the forward drew, as torch's kernel computes it: the scale has the value's dtype."""
        value, dropped = maker.results[0] or "", _dropout_of(maker) or 0.0
        mask, scale = f"{value}__mask{_AGAIN}", f"{value}__scale{_AGAIN}"
        self._types[mask] = self._types[scale] = type_ = self._types[value]
        dtype = ("dtype", TorchConstant("dtype", type_.dtype))
        one_over = 1.0 / (1.0 - dropped)
        self._nodes += [
            Node(mask, "aten._to_copy.default", (Ref(maker.results[1] or ""),), (dtype,), (mask,), maker.module),
            Node(scale, "aten.mul.Scalar", (Ref(mask), one_over), (), (scale,), maker.module),
        ]
        return replace(node, operator="aten.mul.Tensor", args=(maker.args[0], Ref(scale)), results=node.results[:1])


def _dropout_of(node: Node) -> float | None:
    """The probability of an active dropout whose result its mask can make again; None for any other node."""
    if node.operator != _DROPOUT or node.args[2:] != (True,) or node.results[1] is None:
        return None
    probability = node.args[1]
    return float(probability) if isinstance(probability, (int, float)) and probability < 1 else None
