"""Which parameters are cut: found by trial.

A trial cuts the weights of all products that read one activation in their columns, and propagates that. What every node
then reads in one cut layout is cut at rest: the rows of the product where the parts meet, biases, running statistics.
The trial is taken if no activation has to be gathered.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from sambasim.compiler.sharding.layouts import WHOLE, Layout, cut, fits
from sambasim.compiler.sharding.rules import EVEN_IF_WHOLE, RULES
from sambasim.compiler.sharding.sharder import Found, Sharder
from sambasim.ir.graph import Graph, Node, Ref, SectionKind
from sambasim.ir.operators import OPERATORS, OperatorKind
from sambasim.ir.program import Program
from sambasim.ir.types import SymbolKind

_JOINED = (1, 3, 2)
"""How many tensors the columns of a weight may join: one; query, key and value; gate and value."""

_CUT_KINDS = (SymbolKind.PARAMETER, SymbolKind.BUFFER)


@dataclass(frozen=True, slots=True)
class Product:
    """A forward product of the activation `operand` with the parameter `weight`, whose columns lie along `dim`."""

    weight: str
    operand: str
    dim: int


def propagate(program: Program, graph: Graph, axis: str, ranks: int, at_rest: Mapping[str, Layout]) -> Found:
    return Sharder(graph, program.symbols, axis, ranks, at_rest, RULES, EVEN_IF_WHOLE).run()


def find_plan(program: Program, graph: Graph, axis: str, ranks: int) -> Mapping[str, Layout]:
    """The layouts at rest of the parameters and buffers that are cut, by symbol; none if no trial was taken."""
    plan: dict[str, Layout] = {}
    for group in _groups(graph, program):
        if any(one.weight in plan for one in group):
            continue
        for outer in _JOINED:
            columns = {one.weight: cut(one.dim, outer) for one in group}
            if not all(fits(program.symbols[name].whole.shape, layout, ranks) for name, layout in columns.items()):
                continue
            trial = _settled(program, graph, axis, ranks, {**plan, **columns})
            if trial is not None:
                plan = trial
                break
    return plan


def _settled(
    program: Program, graph: Graph, axis: str, ranks: int, plan: dict[str, Layout]
) -> dict[str, Layout] | None:
    """`plan` with all that is cut wherever it is read; None if activations would have to be gathered."""
    while True:
        found = propagate(program, graph, axis, ranks, plan)
        added = {
            name: layout
            for name in graph.inputs
            if name not in plan and program.symbols[name].kind in _CUT_KINDS
            for layout in _only(found.wanted[name])
        }
        if not added:
            return None if any(node.operator == "comm.all_gather" for node in found.graph.nodes) else plan
        plan = {**plan, **added}


def _only(layouts: set[Layout]) -> Iterator[Layout]:
    if len(layouts) == 1 and WHOLE not in layouts:
        yield from layouts


def _groups(graph: Graph, program: Program) -> Sequence[Sequence[Product]]:
    """The forward products with a parameter, those of one activation together, in the order of execution."""
    made = {name: node for node in graph.nodes for name in node.results if name is not None}
    groups: dict[str, list[Product]] = {}
    for section in graph.sections:
        if section.kind is SectionKind.FWD:
            for node in graph.section_nodes(section):
                for product in _products(node, made, program):
                    groups.setdefault(product.operand, []).append(product)
    return list(groups.values())


def _products(node: Node, made: Mapping[str, Node], program: Program) -> Iterator[Product]:
    if node.operator in ("aten.mm.default", "aten.addmm.default"):
        operand, weight = node.args[-2:]
    elif node.operator == "aten.convolution.default":
        operand, weight = node.args[:2]
    elif node.operator == "aten.embedding.default":
        weight, operand = node.args[:2]
    else:
        return
    if not (isinstance(operand, Ref) and isinstance(weight, Ref)):
        return
    dim, name = (0 if node.operator in ("aten.convolution.default", "aten.embedding.default") else 1), weight.name
    producer = made.get(name)
    if producer is not None and producer.operator == "aten.t.default" and isinstance(producer.args[0], Ref):
        dim, name = 0, producer.args[0].name
    if name in program.symbols and program.symbols[name].kind is SymbolKind.PARAMETER:
        yield Product(name, _root(operand.name, made), dim)


def _root(name: str, made: Mapping[str, Node]) -> str:
    """The value that `name` is a view of."""
    while name in made and OPERATORS[made[name].operator].kind is OperatorKind.VIEW:
        (operand,) = [one for one in made[name].args if isinstance(one, Ref)][:1]
        name = operand.name
    return name
