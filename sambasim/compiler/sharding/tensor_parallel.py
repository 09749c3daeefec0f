"""The pass that cuts a program's tensors over the axis tp: `--tensor-parallel weight`."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import gcd
from typing import ClassVar

from sambasim.compiler.sharding.plan import Named, Plan, find_plan, general, plan_by_name, propagate, read_names
from sambasim.compiler.sharding.rules import RULES
from sambasim.compiler.sharding.sharder import WHOLE, cut, divided, fits
from sambasim.errors import OptionError
from sambasim.ir.graph import Graph, Node, Ref
from sambasim.ir.mesh import TENSOR, Axis
from sambasim.ir.operators import OPERATORS, OperatorKind
from sambasim.ir.program import Program
from sambasim.ir.types import Symbol, SymbolKind, parameter_of
from sambasim.ir.verify import Progress
from sambasim.options.problem import one_of, refusal
from sambasim.units import counted, first_of, format_bytes

_MOST_NAMES = 4


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
        if self.compiled is not None:
            plan = self._as_in(self.compiled, program)
        else:
            plan = self._by_name(program) if self.styles else self._by_trial(program)
        if left := ", ".join(_left_whole(program, plan)):
            self.tell(f"whole on every rank: {left}")
        symbols = dict(program.symbols)
        for name, layout in plan.layouts.items():
            symbols[name] = divided(symbols[name], layout, self.ranks)

        def sharded(graph: Graph) -> Graph:
            done = propagate(program, graph, self.ranks, plan.layouts)
            for output in done.graph.outputs:
                name, kind = output.symbol, symbols[output.symbol].kind
                if kind is SymbolKind.GRADIENT:
                    symbols[name] = divided(symbols[name], plan.layouts.get(parameter_of(name), WHOLE), self.ranks)
                elif kind is SymbolKind.OUTPUT and graph is program.training:
                    symbols[name] = divided(symbols[name], done.layouts[output.value], self.ranks)
            return done.graph

        mesh = (*program.mesh, Axis(TENSOR, self.ranks))
        return replace(program.map_graphs(sharded), symbols=symbols, mesh=mesh)

    def _as_in(self, compiled: Program, program: Program) -> Plan:
        """Without what does not fit `program`, which differs then."""
        before, now = compiled.symbols, program.symbols
        names = [name for name in compiled.names_of(SymbolKind.PARAMETER, SymbolKind.BUFFER) if name in now]
        layouts = {name: cut(part.dim, part.outer) for name in names for part in before[name].cuts}
        return Plan({name: at for name, at in layouts.items() if fits(now[name].type.shape, at, self.ranks)})

    def _by_name(self, program: Program) -> Plan:
        names = read_names(program, self.ranks, self.styles)
        if names.problems:
            raise refusal(names.problems)
        if not names.layouts:
            what = "parallel.tensor_plan cuts no tensor"
            raise OptionError(what, remedy='give weights the style "colwise", or leave the table out')
        return plan_by_name(program, self.ranks, names)

    def _by_trial(self, program: Program) -> Plan:
        plan = find_plan(program, self.ranks)
        names = read_names(program, self.ranks, self.styles_of_model)
        if missed := [name for name in names.layouts if name not in plan.layouts]:
            plan = find_plan(program, self.ranks, plan_by_name(program, self.ranks, names))
        if self.styles_of_model:
            self.tell(_about_model(program, names, missed))
        undivided = _undivided_heads(program, self.ranks)
        if not plan.layouts:
            raise _nothing_cut(program, self.ranks, undivided)
        for heads in undivided:
            self.tell(f"whole on every rank: {_heads(*heads)}, which cannot be divided over {self.ranks} ranks")
        return plan


def _heads(query: int, key: int) -> str:
    """Of an attention, which may have fewer for keys and values than for queries."""
    if query == key:
        return counted(query, "attention head")
    return f"{counted(query, 'query head')} and {counted(key, 'key head')}"


def _undivided_heads(program: Program, ranks: int) -> Mapping[tuple[int, int], Node]:
    """By the numbers of query and key heads, the first attention with them."""
    undivided: dict[tuple[int, int], Node] = {}
    types = program.leading.types(program.symbols)
    for node in program.leading.nodes:
        if OPERATORS[node.operator].kind is OperatorKind.ATTENTION:
            shapes = [types[argument.name].shape for argument in node.args[:3] if isinstance(argument, Ref)]
            heads = [shape[1] for shape in shapes if len(shape) == 4]
            if any(number % ranks for number in heads):
                undivided.setdefault((max(heads), min(heads)), node)
    return undivided


def _nothing_cut(program: Program, ranks: int, undivided: Mapping[tuple[int, int], Node]) -> OptionError:
    what = (
        f"no tensor of {program.name} can be cut over {ranks} ranks: no two products with only operators between them "
        "that work on parts, in sizes that divide evenly"
    )
    where, tried = None, {2, 4, 8}
    for (query, key), node in list(undivided.items())[:1]:
        heads = _heads(query, key)
        what = f"{heads} cannot be divided over {ranks} ranks, and no other tensor of {program.name} can be cut"
        where = None if node.source is None else str(node.source)
        tried |= {number for number in range(2, key + 1) if gcd(query, key) % number == 0}
    possible = [str(number) for number in sorted(tried) if find_plan(program, number).layouts]
    remedy = f"{f'--n-chips {one_of(possible)}, or ' if possible else ''}leave out --tensor-parallel"
    return OptionError(what, where=where, remedy=remedy)


def _about_model(program: Program, names: Named, missed: list[str]) -> str:
    said = "is not used: the search cuts all weights that the plan can cut"
    if not names.layouts:
        said = "is not used: it can cut no weight"
    elif missed:
        names_of_all = list(dict.fromkeys(_general_name(program.symbols[name]) for name in missed))
        said = f"is used, because the search alone leaves weights whole: {first_of(names_of_all, _MOST_NAMES)}"
    ignored = [f"{problem.name.removeprefix('parallel.tensor_plan.')} {problem.what}" for problem in names.problems]
    without = f"; of it, these have no effect: {'; '.join(ignored)}" if ignored else ""
    return f"tp_plan of the model {said}{without}"


def _left_whole(program: Program, plan: Plan) -> Iterator[str]:
    """The weights of several dimensions that are not cut, the largest first, and why."""
    graph, whole = program.leading, dict[str, list[Symbol]]()
    for symbol in map(program.symbols.__getitem__, graph.inputs):
        if symbol.kind is SymbolKind.PARAMETER and len(symbol.type.shape) > 1 and symbol.name not in plan.layouts:
            whole.setdefault(_general_name(symbol), []).append(symbol)
    sizes = {path: sum(symbol.type.size_bytes for symbol in symbols) for path, symbols in whole.items()}
    for path in sorted(whole, key=lambda path: -sizes[path])[:_MOST_NAMES]:
        first = whole[path][0].name
        without = sorted({node.operator for node in graph.nodes if first in node.reads} - RULES.keys())
        why = f"{without[0]} has no rule" if without else plan.whole.get(first)
        yield f"{path} ({format_bytes(sizes[path])}{f': {why}' if why else ''})"
    if len(whole) > _MOST_NAMES:
        yield f"and {len(whole) - _MOST_NAMES} more"


def _general_name(symbol: Symbol) -> str:
    module, _, own = (*symbol.torch_names, symbol.name)[0].rpartition(".")
    return f"{general(module)}.{own}" if module else own
