"""Which parameters are cut: found by trial.

A trial cuts the weights of all products that read one activation in their columns, and propagates that. What every node
then reads in one cut layout is cut at rest: the rows of the product where the parts meet, biases, running statistics.
The trial is taken if no activation has to be gathered for it. Repeated layers are tried together, and one by one if
that is refused.
"""

from collections.abc import Hashable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace

from sambasim.compiler.sharding.layouts import WHOLE, Layout, cut, fits
from sambasim.compiler.sharding.rules import EVEN_IF_WHOLE, RULES
from sambasim.compiler.sharding.sharder import Found, Sharder
from sambasim.ir.dataflow import gathers
from sambasim.ir.graph import Graph, Node, Ref, SectionKind
from sambasim.ir.operators import OPERATORS, OperatorKind
from sambasim.ir.program import Program
from sambasim.ir.types import SymbolKind
from sambasim.units import format_bytes

JOINED = (1, 3, 2)
"""How many tensors the columns of a weight may join: one; query, key and value; gate and value."""

_BY_OUTPUT = frozenset(f"aten.{name}.default" for name in ("linear", "convolution", "conv1d", "conv2d"))
"""Operators whose weight has its columns, the output features, along the first dimension."""

_CUT_KINDS = (SymbolKind.PARAMETER, SymbolKind.BUFFER)


@dataclass(frozen=True, slots=True)
class Product:
    """A forward product, in `module`, of the activation `operand` with the parameter `weight`, whose columns lie along
    dimension `columns`, and its rows along `rows`. The rows of a table are words, its columns elements of vectors."""

    weight: str
    operand: str
    columns: int
    rows: int
    module: str
    is_table: bool = False


@dataclass(frozen=True, slots=True)
class Plan:
    """The layouts at rest of the parameters and buffers that are cut, by symbol; what that gathers in a pass; and why
    weights stay whole, where a trial has shown it."""

    layouts: Mapping[str, Layout] = field(default_factory=dict)
    gathered_bytes: int = 0
    whole: Mapping[str, str] = field(default_factory=dict)


def propagate(program: Program, graph: Graph, axis: str, ranks: int, at_rest: Mapping[str, Layout]) -> Found:
    return Sharder(graph, program.symbols, axis, ranks, at_rest, RULES, EVEN_IF_WHOLE).run()


def find_plan(program: Program, graph: Graph, axis: str, ranks: int, start: Plan | None = None) -> Plan:
    """`start`, or nothing, with all trials that gather no more than it."""
    plan, whole = start or Plan(), dict[str, str]()
    groups = _groups(graph, program)
    alike: dict[Hashable, list[Sequence[Product]]] = {}
    for group in groups:
        alike.setdefault(_layer(group, program), []).append(group)
    for group in groups:
        layers = alike.pop(_layer(group, program), [])
        for tried in [layers, [group]] if len(layers) > 1 else [[group]]:
            cutting = [one for layer in tried for one in layer]
            if any(one.weight in plan.layouts for one in cutting):
                continue
            plan, why = _tried(program, graph, axis, ranks, plan, cutting)
            if why is not None:
                whole |= {one.weight: why for one in cutting}
    return replace(plan, whole={name: why for name, why in whole.items() if name not in plan.layouts})


def _tried(
    program: Program, graph: Graph, axis: str, ranks: int, plan: Plan, cutting: Sequence[Product]
) -> tuple[Plan, str | None]:
    """`plan` with the weights of `cutting` cut; or `plan` itself, and why not."""
    refused: list[Plan] = []
    for outer in JOINED:
        columns = {one.weight: cut(one.rows if one.is_table else one.columns, outer) for one in cutting}
        if not all(fits(program.symbols[name].whole.shape, layout, ranks) for name, layout in columns.items()):
            continue
        trial = settled(program, graph, axis, ranks, {**plan.layouts, **columns})
        if trial.gathered_bytes <= plan.gathered_bytes:
            return trial, None
        refused.append(trial)
    if not refused:
        return plan, f"its size does not divide by {ranks}"
    least = min(refused, key=lambda trial: trial.gathered_bytes)
    return plan, f"if it were cut, {format_bytes(least.gathered_bytes - plan.gathered_bytes)} would be gathered"


def _layer(group: Sequence[Product], program: Program) -> Hashable:
    """Equal for groups of the same products in different layers."""
    return tuple((general(one.module), one.rows, one.is_table, program.symbols[one.weight].type) for one in group)


def general(module: str) -> str:
    """The pattern of a module in all layers: `layers.0.mlp.2` becomes `layers.*.mlp.2`."""
    *outer, own = module.split(".")
    return ".".join(["*" if part.isdigit() else part for part in outer] + [own])


def settled(
    program: Program,
    graph: Graph,
    axis: str,
    ranks: int,
    layouts: Mapping[str, Layout],
    kept_whole: Set[str] = frozenset(),
) -> Plan:
    """`layouts` with all that is cut wherever it is read, but for what is `kept_whole`."""
    while True:
        found = propagate(program, graph, axis, ranks, layouts)
        added = {
            name: layout
            for name in graph.inputs
            if name not in layouts and name not in kept_whole and program.symbols[name].kind in _CUT_KINDS
            if len(found.wanted[name]) == 1
            for layout in found.wanted[name] - {WHOLE}
        }
        if not added:
            return Plan(layouts, sum(one.received_bytes for one in gathers(found.graph, axis, ranks)))
        layouts = {**layouts, **added}


def _groups(graph: Graph, program: Program) -> Sequence[Sequence[Product]]:
    """The forward products with a parameter, those of one activation together, in the order of execution."""
    groups: dict[str, list[Product]] = {}
    for product in products(graph, program):
        groups.setdefault(product.operand, []).append(product)
    return list(groups.values())


def products(graph: Graph, program: Program) -> Iterator[Product]:
    """The forward products with a parameter, in the order of execution."""
    made = {name: node for node in graph.nodes for name in node.results if name is not None}
    for section in graph.sections:
        if section.kind is SectionKind.FWD:
            for node in graph.section_nodes(section):
                yield from _products(node, made, program)


def _products(node: Node, made: Mapping[str, Node], program: Program) -> Iterator[Product]:
    columns, rows, is_table = 1, 0, node.operator == "aten.embedding.default"
    if node.operator in ("aten.mm.default", "aten.addmm.default"):
        operand, weight = node.args[-2:]
    elif node.operator in _BY_OUTPUT:
        operand, weight = node.args[:2]
        columns, rows = 0, 1
    elif is_table:
        weight, operand = node.args[:2]
    else:
        return
    if not (isinstance(operand, Ref) and isinstance(weight, Ref)):
        return
    name = weight.name
    producer = made.get(name)
    if producer is not None and producer.operator == "aten.t.default" and isinstance(producer.args[0], Ref):
        columns, rows, name = 0, 1, producer.args[0].name
    if name in program.symbols and program.symbols[name].kind is SymbolKind.PARAMETER:
        yield Product(name, _root(operand.name, made), columns, rows, node.module, is_table)


def _root(name: str, made: Mapping[str, Node]) -> str:
    """The value that `name` is a view of."""
    while name in made and OPERATORS[made[name].operator].kind is OperatorKind.VIEW:
        (operand,) = [one for one in made[name].args if isinstance(one, Ref)][:1]
        name = operand.name
    return name
