"""The pass that cuts a program's tensors over the axis tp: `--tensor-parallel weight`."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import gcd
from typing import ClassVar, NamedTuple

from sambasim.compiler.sharding.plan import Named, Plan, find_plan, general, plan_by_name, propagate, read_names
from sambasim.compiler.sharding.rules import RULES
from sambasim.compiler.sharding.sharder import WHOLE, Layout, cut, cut_of, fits, part_type
from sambasim.errors import OptionError
from sambasim.ir.graph import Graph, Node, Ref
from sambasim.ir.mesh import TENSOR, Axis
from sambasim.ir.operators import OPERATORS, OperatorKind
from sambasim.ir.program import Program
from sambasim.ir.types import GRADIENT_SUFFIX, Symbol, SymbolKind
from sambasim.ir.verify import Progress
from sambasim.options.base import one_of
from sambasim.options.explain import refusal
from sambasim.units import counted, format_bytes

_MOST_NAMES = 4
_USUAL = (2, 4, 8)
"""Numbers of chips that a remedy tries."""


@dataclass(frozen=True, slots=True)
class TensorParallel:
    """Add the axis tp with `ranks` ranks, cut what the plan says, and shard every graph. The plan is that of
    `compiled`, a program of this model, if it is given; or `styles`, by patterns of names, if a config has them; else
    it is found, and must not miss weights that the `styles_of_model` cut. `tell` gets notices. Raises OptionError if
    nothing can be cut, or for a pattern that cannot be followed."""

    title: ClassVar[str] = "cut tensors over the ranks of a replica"
    reaches: ClassVar[Progress] = Progress.CAPTURED
    ranks: int
    styles: Mapping[str, str] = field(default_factory=dict)
    styles_of_model: Mapping[str, str] = field(default_factory=dict)
    tell: Callable[[str], None] = lambda notice: None
    compiled: Program | None = None

    def __call__(self, program: Program) -> Program:
        leading = program.leading
        if self.compiled is not None:
            plan = self._as_in(self.compiled, program)
        else:
            plan = self._given(program, leading) if self.styles else self._found(program, leading)
        if left := ", ".join(_left_whole(program, leading, plan)):
            self.tell(f"whole on every rank: {left}")
        symbols = dict(program.symbols)
        for name, layout in plan.layouts.items():
            symbols[name] = self._cut(symbols[name], layout)

        def sharded(graph: Graph) -> Graph:
            found = propagate(program, graph, TENSOR, self.ranks, plan.layouts)
            given_out = {output.symbol: output.value for output in found.graph.outputs}
            for output in graph.outputs:
                symbol = symbols[output.symbol]
                if symbol.kind is SymbolKind.GRADIENT:
                    layout = plan.layouts.get(symbol.name.removesuffix(GRADIENT_SUFFIX), WHOLE)
                    symbols[symbol.name] = self._cut(symbol, layout)
                elif symbol.kind is SymbolKind.OUTPUT and graph is program.training:
                    symbols[symbol.name] = self._cut(symbol, found.layouts[given_out[output.symbol]])
            return found.graph

        mesh = (*program.mesh, Axis(TENSOR, self.ranks))
        return replace(program.map_graphs(sharded), symbols=symbols, mesh=mesh)

    def _as_in(self, compiled: Program, program: Program) -> Plan:
        """Without what does not fit `program`, which differs then."""
        cuts = {
            name: cut(cut_.dim, cut_.outer)
            for name, symbol in compiled.symbols.items()
            if symbol.kind in (SymbolKind.PARAMETER, SymbolKind.BUFFER)
            for cut_ in symbol.cuts
        }
        known = cuts.keys() & program.symbols.keys()
        fitting = {name for name in known if fits(program.symbols[name].type.shape, cuts[name], self.ranks)}
        return Plan({name: layout for name, layout in cuts.items() if name in fitting})

    def _given(self, program: Program, graph: Graph) -> Plan:
        names = read_names(program, graph, self.ranks, self.styles)
        if names.problems:
            raise refusal(names.problems)
        if not names.layouts:
            what = "parallel.tensor_plan cuts no tensor"
            raise OptionError(what, remedy='give weights the style "colwise", or leave the table out')
        return plan_by_name(program, graph, TENSOR, self.ranks, names)

    def _found(self, program: Program, graph: Graph) -> Plan:
        plan = find_plan(program, graph, TENSOR, self.ranks)
        names = read_names(program, graph, self.ranks, self.styles_of_model)
        missed = [name for name in names.layouts if name not in plan.layouts]
        if missed:
            start = plan_by_name(program, graph, TENSOR, self.ranks, names)
            plan = find_plan(program, graph, TENSOR, self.ranks, start)
        if self.styles_of_model:
            self.tell(_about_model(program, names, missed))
        undivided = _undivided_heads(program, graph, self.ranks)
        if not plan.layouts:
            raise _nothing_cut(program, graph, self.ranks, undivided)
        for heads in undivided:
            self.tell(f"whole on every rank: {heads}, which cannot be divided over {self.ranks} ranks")
        return plan

    def _cut(self, symbol: Symbol, layout: Layout) -> Symbol:
        type_ = part_type(symbol.type, layout, self.ranks)
        return replace(symbol, type=type_, cuts=cut_of(layout, TENSOR, self.ranks))


class _Heads(NamedTuple):
    """How many heads an attention has: of queries, and of keys and values, which may be fewer."""

    query: int
    key: int

    def __str__(self) -> str:
        if self.query == self.key:
            return counted(self.query, "attention head")
        return f"{counted(self.query, 'query head')} and {counted(self.key, 'key head')}"


def _undivided_heads(program: Program, graph: Graph, ranks: int) -> Mapping[_Heads, Node]:
    """Those that `ranks` does not divide, each with the first attention that has them."""
    found: dict[_Heads, Node] = {}
    for node in graph.nodes:
        if OPERATORS[node.operator].kind is OperatorKind.ATTENTION:
            names = [argument.name for argument in node.args[:3] if isinstance(argument, Ref)]
            shapes = [(graph.values.get(name) or program.symbols[name].type).shape for name in names]
            heads = [shape[1] for shape in shapes if len(shape) == 4]
            if any(number % ranks for number in heads):
                found.setdefault(_Heads(max(heads), min(heads)), node)
    return found


def _nothing_cut(program: Program, graph: Graph, ranks: int, undivided: Mapping[_Heads, Node]) -> OptionError:
    what = (
        f"no tensor of {program.name} can be cut over {ranks} ranks: no two products with only operators between them "
        "that work on parts, in sizes that divide evenly"
    )
    where, tried = None, set(_USUAL)
    for heads, node in list(undivided.items())[:1]:
        what = f"{heads} cannot be divided over {ranks} ranks, and no other tensor of {program.name} can be cut"
        where = None if node.source is None else str(node.source)
        tried |= {number for number in range(2, heads.key + 1) if gcd(*heads) % number == 0}
    possible = [str(number) for number in sorted(tried) if find_plan(program, graph, TENSOR, number).layouts]
    remedy = f"{f'--n-chips {one_of(possible)}, or ' if possible else ''}leave out --tensor-parallel"
    return OptionError(what, where=where, remedy=remedy)


def _about_model(program: Program, names: Named, missed: list[str]) -> str:
    said = "tp_plan of the model is not used: the search cuts all weights that the plan can cut"
    if not names.layouts:
        said = "tp_plan of the model is not used: it can cut no weight"
    elif missed:
        names_of = dict.fromkeys(_general_name(program.symbols[name]) for name in missed)
        said = f"tp_plan of the model is used, because the search alone leaves weights whole: {_first(list(names_of))}"
    ignored = [f"{problem.name.removeprefix('parallel.tensor_plan.')} {problem.what}" for problem in names.problems]
    return said + (f"; of it, these have no effect: {'; '.join(ignored)}" if ignored else "")


def _left_whole(program: Program, graph: Graph, plan: Plan) -> Iterator[str]:
    """The weights of several dimensions that are not cut, the largest first, and why."""
    whole: dict[str, list[Symbol]] = {}
    for name in graph.inputs:
        symbol = program.symbols[name]
        if symbol.kind is SymbolKind.PARAMETER and len(symbol.type.shape) > 1 and name not in plan.layouts:
            whole.setdefault(_general_name(symbol), []).append(symbol)
    sizes = {path: sum(symbol.type.size_bytes for symbol in symbols) for path, symbols in whole.items()}
    for path in sorted(whole, key=lambda path: -sizes[path])[:_MOST_NAMES]:
        read_by = {node.operator for node in graph.nodes if whole[path][0].name in node.reads}
        without = sorted(operator for operator in read_by if operator not in RULES)
        why = f"{without[0]} has no rule" if without else plan.whole.get(whole[path][0].name)
        yield f"{path} ({format_bytes(sizes[path])}{f': {why}' if why else ''})"
    if len(whole) > _MOST_NAMES:
        yield f"and {len(whole) - _MOST_NAMES} more"


def _general_name(symbol: Symbol) -> str:
    """Its name in the model, with `*` for the numbers of layers."""
    module, _, own = (*symbol.torch_names, symbol.name)[0].rpartition(".")
    return f"{general(module)}.{own}" if module else own


def _first(names: list[str]) -> str:
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return ", ".join(names[:_MOST_NAMES]) + more
