"""Which parameters are cut: found by trial, or said by name.

A trial cuts the weights of all products that read one activation in their columns, and propagates that. What every node
then reads in one cut layout is cut at rest: the rows of the product where the parts meet, biases, running statistics.
The trial is taken if no activation has to be gathered for it. Repeated layers are tried together, and one by one if
that is refused.
"""

import re
from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from itertools import chain, product

from torch import nn

from sambasim.compiler.sharding.rules import EVEN_IF_WHOLE, RULES
from sambasim.compiler.sharding.sharder import WHOLE, Layout, Sharder, cut, fits
from sambasim.ir.dataflow import gathers, is_view
from sambasim.ir.graph import Graph, Node, Ref, SectionKind
from sambasim.ir.mesh import TENSOR
from sambasim.ir.program import Program
from sambasim.ir.types import SymbolKind
from sambasim.options.compile import TENSOR_STYLES, plan_entry
from sambasim.options.problem import Problem, did_you_mean, nearest
from sambasim.units import format_bytes

JOINED = (1, 3, 2)  # how many tensors the columns of a weight may join: one; query, key and value; gate and value

_PRODUCTS: Mapping[str, tuple[int, int, int, int]] = {
    **dict.fromkeys(("aten.mm.default", "aten.addmm.default"), (-2, -1, 1, 0)),
    **{f"aten.{name}.default": (0, 1, 0, 1) for name in ("linear", "convolution", "conv1d", "conv2d")},
    "aten.embedding.default": (1, 0, 1, 0),
}
"""By operator: the positions of operand and weight, and the dimensions of the columns and rows of the weight."""

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


def propagate(program: Program, graph: Graph, ranks: int, at_rest: Mapping[str, Layout]) -> Sharder:
    return Sharder(graph, program.symbols, ranks, at_rest, RULES, EVEN_IF_WHOLE).run()


_ENOUGH = 2
"""After so many layers that were refused alone, those of the same kind between them and the last one are not tried."""


def find_plan(program: Program, ranks: int, start: Plan | None = None) -> Plan:
    """`start`, or nothing, with all trials that gather no more than it."""
    plan, whole = start or Plan(), dict[str, str]()
    by_operand: dict[str, list[Product]] = {}  # those of one activation are cut together
    for use in products(program):
        by_operand.setdefault(use.operand, []).append(use)
    alike: dict[Hashable, list[list[Product]]] = defaultdict(list)  # groups of the same products in different layers
    layer_of: list[Hashable] = []
    for group in by_operand.values():
        layer_of.append(tuple((general(p.module), p.rows, p.is_table, program.symbols[p.weight].type) for p in group))
        alike[layer_of[-1]].append(group)
    refused: dict[Hashable, list[str]] = defaultdict(list)  # why, by layer and what was cut then in any layer
    for group, layer in zip(by_operand.values(), layer_of, strict=True):
        layers = alike[layer]
        for tried in (layers, [group]) if len(layers) > 1 and group is layers[0] else ([group],):
            cutting = list(chain(*tried))
            if any(use.weight in plan.layouts for use in cutting):
                continue
            before = refused[layer, frozenset(re.sub(r"\d+", "*", name) for name in plan.layouts), len(tried)]
            why = before[-1] if before else None
            if len(before) < _ENOUGH or group is layers[-1]:
                plan, why = _tried(program, ranks, plan, cutting)
            if why is not None:
                before.append(why)
                whole |= {use.weight: why for use in cutting}
    return replace(plan, whole={name: why for name, why in whole.items() if name not in plan.layouts})


def _tried(program: Program, ranks: int, plan: Plan, cutting: Sequence[Product]) -> tuple[Plan, str | None]:
    """`plan` with the weights of `cutting` cut; or `plan` itself, and why not."""
    gathered: list[int] = []
    for outer in JOINED:
        columns = {use.weight: cut(use.rows if use.is_table else use.columns, outer) for use in cutting}
        if all(fits(program.symbols[name].whole.shape, layout, ranks) for name, layout in columns.items()):
            trial = settled(program, ranks, {**plan.layouts, **columns})
            if trial.gathered_bytes <= plan.gathered_bytes:
                return trial, None
            gathered.append(trial.gathered_bytes - plan.gathered_bytes)
    if not gathered:
        return plan, f"its size does not divide by {ranks}"
    return plan, f"if it were cut, {format_bytes(min(gathered))} would be gathered"


def general(module: str) -> str:
    """The pattern of a module in all layers: `layers.0.mlp.2` becomes `layers.*.mlp.2`."""
    *outer, own = module.split(".")
    return ".".join(["*" if part.isdigit() else part for part in outer] + [own])


def settled(program: Program, ranks: int, layouts: Mapping[str, Layout], kept_whole: Set[str] = frozenset()) -> Plan:
    """A plan with `layouts`, to which parameters and buffers are added that all their readers want in one cut layout,
    but for those `kept_whole`: until there are no more, because each cut may lead to others."""
    while True:
        done = propagate(program, program.leading, ranks, layouts)
        added = {
            name: layout
            for name in program.leading.inputs
            if name not in layouts and name not in kept_whole and program.symbols[name].kind in _CUT_KINDS
            if len(done.wanted[name]) == 1
            for layout in done.wanted[name] - {WHOLE}
        }
        if not added:
            return Plan(layouts, sum(gather.received_bytes for gather in gathers(done.graph, TENSOR, ranks)))
        layouts = {**layouts, **added}


def products(program: Program) -> Iterator[Product]:
    """The forward products with a parameter, in the order of execution."""
    graph = program.leading
    made = {name: node for node in graph.nodes for name in node.makes}
    for node in graph.nodes_of(SectionKind.FWD):
        if node.operator not in _PRODUCTS:
            continue
        of_operand, of_weight, columns, rows = _PRODUCTS[node.operator]
        operand, weight = node.args[of_operand], node.args[of_weight]
        if not (isinstance(operand, Ref) and isinstance(weight, Ref)):
            continue
        name, producer = weight.name, made.get(weight.name)
        if producer is not None and producer.operator == "aten.t.default" and isinstance(producer.args[0], Ref):
            columns, rows, name = 0, 1, producer.args[0].name
        if name in program.symbols and program.symbols[name].kind is SymbolKind.PARAMETER:
            is_table = node.operator == "aten.embedding.default"
            yield Product(name, _root(operand.name, made), columns, rows, node.module, is_table)


def _root(name: str, made: Mapping[str, Node]) -> str:
    """The value that `name` is a view of."""
    while name in made and is_view(made[name]):
        name = next(argument.name for argument in made[name].args if isinstance(argument, Ref))
    return name


@dataclass(slots=True)
class Named:
    """What patterns say of parameters, by symbol: the layouts of weights, and which stay whole. `columns`: for each
    pattern, the weights that are cut in columns, and along which dimension. `problems`: of patterns without effect."""

    layouts: dict[str, Layout] = field(default_factory=dict)
    whole: set[str] = field(default_factory=set)
    columns: list[Mapping[str, int]] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)


def tp_plan_of(model: nn.Module) -> Mapping[str, str]:
    """The `tp_plan` of a Hugging Face model, or of the models in it, by names of `model`."""
    plans: dict[str, Mapping[str, object]] = {}  # by the prefix of what has it
    for name, module in model.named_modules():
        plan = getattr(module, "tp_plan", None)
        if isinstance(plan, Mapping) and plan and not name.startswith(tuple(plans)):
            plans[f"{name}." if name else ""] = plan
    return {f"{prefix}{name}": str(style) for prefix, plan in plans.items() for name, style in plan.items()}


def read_names(program: Program, ranks: int, styles: Mapping[str, str]) -> Named:
    """What `styles`, by pattern, say of the parameters of `program`."""
    result, uses = Named(), list(products(program))
    parameters = [symbol for symbol in program.symbols.values() if symbol.kind is SymbolKind.PARAMETER]
    paths = {path: symbol.name for symbol in parameters for path in symbol.torch_names}
    holds: dict[str, tuple[str, str]] = {}  # by symbol: the pattern that matches, and the name that it matches
    for pattern, style in styles.items():
        matching = {name: (pattern, path) for path, name in paths.items() if _matches(pattern, path)}
        holds |= matching
        if not matching:
            known = dict.fromkeys(general(path.rpartition(".")[0]) for path in paths)
            longer = next((name for name in known if name.endswith(f".{general(pattern)}")), None)
            remedy = did_you_mean(longer or nearest(pattern, known)) or "sambasim inspect NAME --all lists names"
            result.problems.append(_problem(pattern, style, "matches no parameter", remedy))
    for pattern, style in styles.items():
        matched = {name: path for name, (holding, path) in holds.items() if holding == pattern}
        if TENSOR_STYLES.get(style) == "whole":
            result.whole |= matched.keys()
        elif matched and (problem := _cut_by_name(result, program, ranks, style, matched, uses)):
            result.problems.append(_problem(pattern, style, *problem))
    return result


def _cut_by_name(
    result: Named, program: Program, ranks: int, style: str, matched: Mapping[str, str], uses: Sequence[Product]
) -> tuple[str, str] | None:
    """Add the layouts that `style` gives to the parameters `matched`, names by symbol. Returns a problem, or None."""
    columns: dict[str, int] = {}
    remedy, which = 'give it the style "replicate"', TENSOR_STYLES.get(style)
    if which is None:
        return "is a style for other weights than those of linear layers, convolutions and embeddings", remedy
    if matched.keys().isdisjoint(use.weight for use in uses):
        return "matches no weight of a linear layer, a convolution or an embedding", remedy
    result.columns.append(columns)
    for name, path in matched.items():
        of_weight = [use for use in uses if use.weight == name]
        if not of_weight:
            continue  # a bias lies as its product is read
        use = next((one for one in of_weight if one.module == path.rpartition(".")[0]), of_weight[0])
        dim = use.columns if which == "columns" else use.rows
        layout = cut(dim, 2 if style.startswith("packed") else 1)  # gate and value are packed
        shape = program.symbols[name].whole.shape
        if not fits(shape, layout, ranks):
            what = f"{path} has {shape[dim]} {which}, which {ranks} chips do not divide"
            return what, f"another --n-chips, or {remedy}"
        result.layouts[name] = layout
        if which == "columns" and layout.outer == 1:
            columns[name] = dim
    return None


def plan_by_name(program: Program, ranks: int, names: Named) -> Plan:
    """The plan that `names` give, with all that follows. Columns are those of joined tensors, if that gathers less."""
    layouts = names.layouts
    plan = settled(program, ranks, layouts, names.whole)
    for columns, outer in product(filter(None, names.columns), JOINED[1:]):
        trial = {name: cut(dim, outer) for name, dim in columns.items()}
        if plan.gathered_bytes and all(fits(program.symbols[name].whole.shape, trial[name], ranks) for name in trial):
            joined = settled(program, ranks, {**layouts, **trial}, names.whole)
            if joined.gathered_bytes < plan.gathered_bytes:
                plan, layouts = joined, {**layouts, **trial}
    return plan


def _matches(pattern: str, path: str) -> bool:
    wanted, parts = pattern.split("."), path.split(".")
    candidates = (names for names in (parts, parts[:-1]) if names and len(names) == len(wanted))
    return any(all(map(fnmatchcase, names, wanted)) for names in candidates)


def _problem(pattern: str, style: str, what: str, remedy: str) -> Problem:
    return Problem(f"parallel.{plan_entry(pattern)}", what, remedy, style)
