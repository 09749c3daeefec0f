"""Programs of a model with fewer layers, made from that of the whole model.

Repeated layers are a run of operators that repeats in the forward, and one that repeats in the backward. The last
layers of the forward are removed, and the first of the backward. Operators that read their results then read those of
the last layer that is left; in the backward, they read what the first removed layer read.
"""

from collections import Counter
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import replace

from sambasim.ir.graph import Argument, Graph, Node, Output, Ref, SectionKind, renamed
from sambasim.ir.program import Program
from sambasim.ir.types import gradient_name, parameter_of
from sambasim.report.analysis import Run, runs_of
from sambasim.simulation.planning.layers import Shorter


def fewer_layers(program: Program, left: int) -> Shorter | None:
    """The training step of `program` as captured, with `left` of its repeated layers; None if it has no more, or if
    something beside a layer's neighbours reads what it computes."""
    graph = program.training
    if graph is None:
        return None
    split = next(section.start for section in graph.sections if section.kind is SectionKind.BCKWD)
    keys = _keys(graph, program)
    forward = max(runs_of(keys[:split]), key=_covered)
    for run in sorted(runs_of(keys[split:]), key=_covered, reverse=True):
        backward = replace(run, start=split + run.start)
        gone = forward.count - left
        if gone <= 0 or abs(forward.count - backward.count) > 1:
            continue
        shorter = _without(program, graph, forward, backward, gone)
        if shorter is not None:
            starts = [graph.nodes[forward.start + at * forward.period].name for at in range(forward.count - gone)]
            return Shorter(shorter, forward.count, tuple(starts), graph.nodes[forward.stop].name)
    return None


def _covered(run: Run) -> int:
    return run.period * (run.count - 1)


def _keys(graph: Graph, program: Program) -> list[Hashable]:
    """Equal for nodes that do the same with operands of the same types."""

    def shown(argument: Argument) -> Hashable:
        if isinstance(argument, Ref):
            own = graph.values.get(argument.name)
            return program.symbols[argument.name].type if own is None else own
        if isinstance(argument, tuple):
            return tuple(map(shown, argument))
        return type(argument), argument

    return [
        (
            node.operator,
            shown(node.args),
            tuple((name, shown(argument)) for name, argument in node.kwargs),
            tuple(None if name is None else graph.values[name] for name in node.results),
        )
        for node in graph.nodes
    ]


def _without(program: Program, graph: Graph, forward: Run, backward: Run, gone: int) -> Program | None:
    """`program` without the last `gone` layers of `forward` and the first of `backward`."""
    first_gone = forward.stop - gone * forward.period
    last_gone = backward.start + gone * backward.period
    dropped = {*range(first_gone, forward.stop), *range(backward.start, last_gone)}
    lost = {name for at in dropped for name in graph.nodes[at].results if name is not None}
    instead: dict[str, str] = {}
    for at in range(max(first_gone, forward.start + gone * forward.period), forward.stop):
        instead.update(_counterparts(graph.nodes[at], graph.nodes[at - gone * forward.period], program))
    nodes = []
    for at, node in enumerate(graph.nodes):
        if at in dropped:
            continue
        names = instead
        if last_gone <= at < backward.stop:
            before = graph.nodes[at - gone * backward.period]
            pairs = zip(node.reads, before.reads, strict=True)
            names = {**{name: instead.get(other, other) for name, other in pairs if name in lost}, **instead}
        nodes.append(renamed(node, names))
    known = {name for node in nodes for name in node.results if name is not None}
    read = {name for node in nodes for name in node.reads}
    left_out = {name for at in dropped for name in graph.nodes[at].reads} - read
    left_out |= {gradient_name(name) for name in left_out}
    outputs = [
        Output(one.value, _of_layer_that_stays(one.symbol, instead))
        for one in graph.outputs
        if one.value in known or one.value in graph.inputs
    ]
    symbols = {name: symbol for name, symbol in program.symbols.items() if name not in left_out}
    expected = Counter(one.symbol for one in graph.outputs if one.symbol in symbols)
    if Counter(one.symbol for one in outputs) != expected:
        return None
    if not lost.isdisjoint(read) or not left_out.isdisjoint(program.evaluation.inputs):
        return None
    sections, start = [], 0
    for section in graph.sections:
        stop = start + sum(at not in dropped for at in range(section.start, section.stop))
        sections.append(replace(section, start=start, stop=stop))
        start = stop
    training = replace(
        graph,
        inputs=tuple(name for name in graph.inputs if name in symbols),
        nodes=tuple(nodes),
        outputs=tuple(outputs),
        values={name: type_ for name, type_ in graph.values.items() if name in known},
        sections=tuple(sections),
    )
    return replace(program, symbols=symbols, training=training)


def _counterparts(node: Node, other: Node, program: Program) -> Iterator[tuple[str, str]]:
    """The results of `node` and the symbols that it reads, each with that of `other`."""
    for name, instead in zip(node.results, other.results, strict=True):
        if name is not None and instead is not None:
            yield name, instead
    for name, instead in zip(node.reads, other.reads, strict=True):
        if name in program.symbols and name != instead:
            yield name, instead


def _of_layer_that_stays(symbol: str, instead: Mapping[str, str]) -> str:
    parameter = parameter_of(symbol)
    return instead[parameter] + symbol.removeprefix(parameter) if parameter in instead else symbol
