"""The pass that computes activations again in the backward instead of keeping them: `--recompute`.

`sections` keeps what crosses from one section of the forward to another. `full` cuts the forward into about √n
segments, n being the places where one tensor crosses, and keeps what crosses between segments (Chen et al.,
arXiv:1604.06174). Kept as well are results of communication and of operators that draw random numbers: of dropout, the
mask. Each stage of a pipeline has segments of its own, and computes again what itself has computed. A stage that would
keep as much as before does not recompute.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby
from math import sqrt
from typing import ClassVar, Literal

from sambasim.compiler.pipeline.assign import Values, crossing_of, is_view, values_of
from sambasim.ir.graph import MADE_AGAIN, Graph, Node, Ref, Section, SectionKind, TorchConstant, renamed
from sambasim.ir.operators import OPERATORS, OperatorKind
from sambasim.ir.program import Program
from sambasim.ir.verify import Progress

_DROPOUT = "aten.native_dropout.default"
_MADE_ONCE = (OperatorKind.COLLECTIVE, OperatorKind.GENERATOR)


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
        values, passes = values_of(training, program), _passes(training.sections)
        forward = [section for section in passes if section.kind is SectionKind.FWD]
        ends = [section.stop for section in training.sections if section.kind is SectionKind.FWD]
        if self.mode == "full":
            ends = [end for section in forward for end in _segments(training, section, values)]
        kept = _kept(training, ends, passes, values)
        before, after = _held(training), _held(_Repeated(training, kept).graph())
        for one in forward:
            if after[one.stage] >= before[one.stage]:
                kept |= {name for node in training.section_nodes(one) for name in node.results if name is not None}
        return replace(program, training=_Repeated(training, kept).graph())


def _passes(sections: Sequence[Section]) -> list[Section]:
    """One section for the forward of each stage, and one or two for its backward."""
    parts = (tuple(run) for _, run in groupby(sections, key=lambda one: (one.kind, one.stage, one.weights_only)))
    return [replace(run[0], index=index, stop=run[-1].stop) for index, run in enumerate(parts)]


def _segments(graph: Graph, stage: Section, values: Values) -> list[int]:
    """The ends of segments of the forward of `stage`, with about the same bytes of activations. A segment ends where
    one tensor crosses."""
    forward = graph.section_nodes(stage)
    crossing = crossing_of(forward, values)
    places = [at for at, count in enumerate(crossing, 1) if count == 1]
    made = [sum(graph.values[name].size_bytes for name in node.results if name) for node in forward]
    total = list(accumulate(made, initial=0))
    count = max(round(sqrt(len(places))), 1)
    wanted = (total[-1] * part / count for part in range(1, count))
    found = sorted({min(places, key=lambda at: abs(total[at] - goal)) for goal in wanted})
    return [*(stage.start + at for at in found), stage.stop]


def _kept(graph: Graph, ends: list[int], passes: Sequence[Section], values: Values) -> frozenset[str]:
    """The values of the forward that the backward may read: what crosses `ends`, what another stage reads, and what
    cannot be made again."""
    kept = {output.value for output in graph.outputs}
    made_in: dict[str, tuple[int, int]] = {}  # by value of the forward: its segment and stage
    for section in passes:
        for at, node in enumerate(graph.section_nodes(section), section.start):
            segment, is_forward = bisect_right(ends, at), section.kind is SectionKind.FWD
            for name in made_in.keys() & set(node.reads):
                if made_in[name][1] != section.stage or (is_forward and made_in[name][0] != segment):
                    kept.add(name)
            if is_forward:
                made_in |= {name: (segment, section.stage) for name in node.results if name is not None}
                kept.update(_made_once(node, values))
    return frozenset(kept)


def _made_once(node: Node, values: Values) -> Sequence[str]:
    """The results of `node` that cannot be made again."""
    operator = OPERATORS[node.operator]
    results = node.results[1:] if _dropout_of(node) is not None else node.results
    if (
        operator.draws_random_numbers
        or operator.kind in _MADE_ONCE
        or values.buffers_read_by(node)  # in an app, they have changed before the backward
    ):
        return [name for name in results if name is not None]
    return ()


def _held(graph: Graph) -> Counter[int]:
    """By stage, the bytes of its forward that the backward reads."""
    maker: dict[str, tuple[str, int]] = {}  # by value of the forward: what it is, or is a view of, and the stage
    read: set[tuple[str, int]] = set()
    for section in _passes(graph.sections):
        for node in graph.section_nodes(section):
            found = [maker[name] for name in node.reads if name in maker]
            if section.kind is not SectionKind.FWD:
                read.update(found)
            elif not is_view(node):
                maker |= {name: (name, section.stage) for name in node.results if name is not None}
            elif found:
                maker |= {name: found[0] for name in node.results if name is not None}
    held: Counter[int] = Counter()
    for name, stage in read:
        held[stage] += graph.values[name].size_bytes
    return held


class _Repeated:
    def __init__(self, graph: Graph, kept: frozenset[str]) -> None:
        self._graph = graph
        self._kept = kept
        forward = graph.nodes_of(SectionKind.FWD)
        self._maker = {name: node for node in forward for name in node.results if name is not None}
        self._types = dict(graph.values)
        self._again: dict[str, str] = {}
        self._nodes: list[Node] = []

    def graph(self) -> Graph:
        graph, sections = self._graph, []
        for section in _passes(graph.sections):
            start = len(self._nodes)
            for node in graph.section_nodes(section):
                # This also appends the nodes that are repeated for it.
                placed = node if section.kind is SectionKind.FWD else self._with_repeated_operands(node)
                self._nodes.append(placed)
            sections.append(replace(section, start=start, stop=len(self._nodes)))
        return replace(graph, nodes=tuple(self._nodes), values=self._types, sections=tuple(sections))

    def _with_repeated_operands(self, node: Node) -> Node:
        """`node`, with the names of values that were made again."""
        names = {name: self._available(name) for name in dict.fromkeys(node.reads)}
        return renamed(node, names)

    def _available(self, name: str) -> str:
        maker = self._maker.get(name)
        if maker is None or name in self._kept:
            return name
        if name not in self._again:
            self._repeat(maker)
        return self._again[name]

    def _repeat(self, maker: Node) -> None:
        results = tuple(None if name is None else name + MADE_AGAIN for name in maker.results)
        node = replace(maker, name=maker.name + MADE_AGAIN, results=results)
        if maker.operator == _DROPOUT:
            node = self._dropped(node, maker)
        for old, new in zip(maker.results, node.results, strict=False):
            if old is not None and new is not None:
                self._again[old], self._types[new] = new, self._types[old]
        self._nodes.append(self._with_repeated_operands(node))

    def _dropped(self, node: Node, maker: Node) -> Node:
        """Dropout by the mask that the forward drew, as torch's kernel computes it: the scale has the value's dtype."""
        value, dropped = maker.results[0] or "", _dropout_of(maker) or 0.0
        mask, scale = f"{value}__mask{MADE_AGAIN}", f"{value}__scale{MADE_AGAIN}"
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
