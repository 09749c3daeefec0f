"""How another program differs from the one in a PEF, in words, with the source lines of the model."""

from collections.abc import Iterator, Mapping
from itertools import count, zip_longest

from sambasim.ir.dataflow import is_clipped
from sambasim.ir.graph import Node, Output, format_argument, graph_difference, symbol_differences
from sambasim.ir.program import Program
from sambasim.ir.types import Symbol, SymbolKind
from sambasim.runtime.values.operators import find_operator


def differences(compiled: Program, traced: Program) -> Iterator[str]:
    """The first difference, with the source line of the model, then what may follow from it; none if both compute the
    same. Weights, names of programs and line numbers are ignored. Symbols of data parallelism, which are named by
    digests, come last."""
    parallel = (SymbolKind.ACCUMULATION_GROUP, SymbolKind.REDUCE_BUFFER)
    symbols = compiled.symbols, traced.symbols
    plain = ({name: one for name, one in named.items() if one.kind not in parallel} for named in symbols)
    yield from _of_symbols(*plain)
    if is_clipped(traced) and not is_clipped(compiled):
        yield "the optimizer has max_grad_norm, and the PEF does not clip gradients"
    match graph_difference(compiled.leading, traced.leading):
        case _, (Node() | None) as before, (Node() | None) as now:
            yield _of_one_operator(before, now) or f"the PEF has {described(before)}, and the model {described(now)}"
        case (_, Output(symbol=symbol), _) | (_, _, Output(symbol=symbol)):
            yield f"{symbol} is another value of the graph in the PEF than in the model"
        case _, _, _:
            yield "the sections are cut at other places"
    for group, other in zip_longest(compiled.groups, traced.groups):
        if group is None or other is None or group.members != other.members or group.optimizer != other.optimizer:
            yield "the optimizers update other groups of parameters"
    yield from _of_symbols(*symbols)


def _of_symbols(compiled: Mapping[str, Symbol], traced: Mapping[str, Symbol]) -> Iterator[str]:
    for name, before, now in symbol_differences(compiled, traced):
        if before and now:
            yield f"{name} is {before.kind} {before.type} in the PEF, and {now.kind} {now.type} in the model"
        elif before:
            yield f"the PEF has the {before.kind} {name}, {before.type}, and the model does not"
        elif now:
            yield f"the model has the {now.kind} {name}, {now.type}, and the PEF does not"


def _of_one_operator(compiled: Node | None, traced: Node | None) -> str | None:
    """The difference of two nodes with one operator: in its arguments, or in which results are read."""
    if compiled is None or traced is None or compiled.operator != traced.operator:
        return None
    before, now = _arguments(compiled), _arguments(traced)
    apart = [
        f"{name} is {before.get(name, 'not given')} in the PEF, and {now.get(name, 'not given')} in the model"
        for name in dict.fromkeys([*before, *now])
        if before.get(name) != now.get(name)
    ]
    if apart:
        return f"{'; '.join(apart)}: an argument of {described(traced)}"
    for number, (one, other) in enumerate(zip(compiled.results, traced.results, strict=False), start=1):
        if (one is None) != (other is None):
            reads, ignores = ("model", "PEF") if one is None else ("PEF", "model")
            return f"the {reads} reads result {number} of {described(traced)}, and the {ignores} does not"
    return None


def _arguments(node: Node) -> Mapping[str, str]:
    """The arguments by torch's names; those of a composite node by number."""
    is_torchs = node.operator.startswith("aten.")
    names = [one.name for one in find_operator(node.operator)._schema.arguments] if is_torchs else map(str, count(1))
    given = dict(zip(names, node.args, strict=False)) | dict(node.kwargs)
    return {name: format_argument(argument) for name, argument in given.items()}


def described(node: Node | None) -> str:
    if node is None:
        return "nothing more"
    module = f" in {node.module}" if node.module else ""
    return f"`{node.operator}`{module}" + (f" from {node.source}" if node.source else "")
