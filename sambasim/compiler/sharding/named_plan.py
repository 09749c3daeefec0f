"""Which parameters are cut, said by name: `[parallel.tensor_plan]`, or the `tp_plan` of a Hugging Face model.

A pattern is the name of a module, or of a parameter, whose parts may have wildcards: `layers.*.mlp.up_proj`. Its style
says along which dimension a weight is cut, as in torch's `parallelize_module`: the columns of a linear layer are its
output features; those of an embedding are the elements of its vectors, and its rows are words. Of several patterns that
match a parameter, the last one holds.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from torch import nn

from sambasim.compiler.sharding.layouts import Layout, cut, fits
from sambasim.compiler.sharding.plan import JOINED, Plan, Product, general, products, settled
from sambasim.ir.graph import Graph
from sambasim.ir.program import Program
from sambasim.ir.types import SymbolKind
from sambasim.options.compile import TENSOR_STYLES, plan_entry
from sambasim.options.load import Problem, did_you_mean, nearest, show

_PACKED = 2  # gate and value


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
    found: dict[str, str] = {}
    inside: list[str] = []
    for name, module in model.named_modules():
        plan = getattr(module, "tp_plan", None)
        if isinstance(plan, Mapping) and plan and not name.startswith(tuple(inside)):
            prefix = f"{name}." if name else ""
            inside.append(prefix)
            found |= {f"{prefix}{pattern}": str(style) for pattern, style in plan.items()}
    return found


def read_names(program: Program, graph: Graph, ranks: int, styles: Mapping[str, str]) -> Named:
    """What `styles`, by pattern, say of the parameters of `program`."""
    result = Named()
    parameters = {
        path: symbol.name
        for symbol in program.symbols.values()
        if symbol.kind is SymbolKind.PARAMETER
        for path in symbol.torch_names
    }
    holds: dict[str, tuple[str, str]] = {}  # by symbol: the pattern that matches, and the name that it matches
    for pattern, style in styles.items():
        found = {name: (pattern, path) for path, name in parameters.items() if _matches(pattern, path)}
        holds |= found
        if not found:
            remedy = did_you_mean(_nearest_pattern(pattern, parameters)) or "sambasim inspect NAME --all lists names"
            result.problems.append(_problem(pattern, style, "matches no parameter", remedy))
    uses = list(products(graph, program))
    for pattern, style in styles.items():
        own = {name: path for name, (holding, path) in holds.items() if holding == pattern}
        if TENSOR_STYLES.get(style) == "whole":
            result.whole |= own.keys()
        elif own:
            _cut(result, program, ranks, pattern, style, own, uses)
    return result


def _cut(
    result: Named,
    program: Program,
    ranks: int,
    pattern: str,
    style: str,
    own: Mapping[str, str],
    uses: Iterable[Product],
) -> None:
    """Add what `pattern` says of the parameters `own`, by symbol with their names in the model."""
    by_weight = {name: [one for one in uses if one.weight == name] for name in own}
    columns: dict[str, int] = {}
    remedy = 'give it the style "replicate"'
    if style not in TENSOR_STYLES:
        what = "is a style for other weights than those of linear layers, convolutions and embeddings"
        result.problems.append(_problem(pattern, style, what, remedy))
        return
    if not any(by_weight.values()):
        what = "matches no weight of a linear layer, a convolution or an embedding"
        result.problems.append(_problem(pattern, style, what, remedy))
    for name, found in by_weight.items():
        if not found:
            continue  # a bias lies as its product is read
        module = own[name].rpartition(".")[0]
        use = next((one for one in found if one.module == module), found[0])
        which = TENSOR_STYLES[style]
        dim = use.columns if which == "columns" else use.rows
        layout = cut(dim, _PACKED if style.startswith("packed") else 1)
        shape = program.symbols[name].whole.shape
        if not fits(shape, layout, ranks):
            what = f"{own[name]} has {shape[dim]} {which}, which {ranks} chips do not divide"
            result.problems.append(_problem(pattern, style, what, f"another --n-chips, or {remedy}"))
            break
        result.layouts[name] = layout
        if which == "columns" and layout.outer == 1:
            columns[name] = dim
    result.columns.append(columns)


def plan_by_name(program: Program, graph: Graph, axis: str, ranks: int, names: Named) -> Plan:
    """The plan that `names` give, with all that follows. The columns of a pattern are taken as those of several joined
    tensors, if that gathers less."""
    layouts = names.layouts
    plan = settled(program, graph, axis, ranks, layouts, names.whole)
    for columns in names.columns:
        for outer in JOINED[1:]:
            trial = {name: cut(dim, outer) for name, dim in columns.items()}
            if plan.gathered_bytes == 0:
                return plan
            if all(fits(program.symbols[name].whole.shape, one, ranks) for name, one in trial.items()):
                joined = settled(program, graph, axis, ranks, {**layouts, **trial}, names.whole)
                if joined.gathered_bytes < plan.gathered_bytes:
                    plan, layouts = joined, {**layouts, **trial}
    return plan


def _matches(pattern: str, path: str) -> bool:
    """Whether `path`, of a parameter, or its module is what `pattern` names."""
    wanted, parts = pattern.split("."), path.split(".")
    return any(
        len(wanted) == len(names) and all(map(fnmatchcase, names, wanted)) for names in (parts, parts[:-1]) if names
    )


def _nearest_pattern(pattern: str, paths: Iterable[str]) -> str | None:
    known = dict.fromkeys(general(path.rpartition(".")[0]) for path in paths)
    longer = next((one for one in known if one.endswith(f".{general(pattern)}")), None)
    return longer or nearest(pattern, known)


def _problem(pattern: str, style: str, what: str, remedy: str) -> Problem:
    return Problem(f"parallel.{plan_entry(pattern)}", what, remedy, show(style))
