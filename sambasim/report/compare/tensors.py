"""Compares PEFs, and tensors by name, bit by bit: a NaN equals a NaN of the same bits, and -0.0 differs from 0.0."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from sambasim.ir.graph import Graph, Node, Output, format_node, graph_difference, symbol_differences
from sambasim.ir.program import Program
from sambasim.pef import PefDocument
from sambasim.report.compare import differing_facts, tensor_difference
from sambasim.report.tables import Row
from sambasim.units import counted

Tensors = Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_WITH_ULPS = (torch.float32, torch.float16, torch.bfloat16)


def compare_tensors(a: Tensors, b: Tensors) -> tuple[int, list[Row]]:
    """The number of common tensors, and the differences: in the order of `a`, then tensors that only `b` has."""
    ours, theirs = dict(a), dict(b)
    pairs = ((name, ours.get(name), theirs.get(name)) for name in dict.fromkeys((*ours, *theirs)))
    return len(ours.keys() & theirs.keys()), list(filter(None, (_difference_of(*pair) for pair in pairs)))


def compare_files(
    kind: Literal["weights", "checkpoints", "files"],
    a: str,
    b: str,
    tensors: tuple[Tensors, Tensors],
    facts: Sequence[Row] = (),
) -> Row:
    common, differences = compare_tensors(*tensors)
    verdict = f"equal: {counted(common, 'tensor')}"
    if differences:
        rest = f"; {len(differences) - 1} more differ" if len(differences) > 1 else ""
        verdict = f"they first differ in {differences[0].name}: {tensor_difference(differences[0])}{rest}"
    elif facts:
        apart = ", ".join(f"{fact.name} {fact.a} and {fact.b}" for fact in facts)
        verdict = f"{counted(common, 'tensor')} equal, but not: {apart}"
    equal = not differences and not facts
    return Row(kind=kind, a=a, b=b, equal=equal, verdict=verdict, tensors=common, facts=facts, differences=differences)


def _difference_of(name: str, a: Tensor | None, b: Tensor | None) -> Row | None:
    """The largest differences are over elements that are finite in both; `largest_ulps` is None for float64."""

    def type_of(tensor: Tensor | None) -> str | None:
        """As `TensorType` is printed: `float32[3, 8]`."""
        return None if tensor is None else f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"

    types = {"type_a": type_of(a), "type_b": type_of(b)}
    if a is None or b is None:
        why = "only in A" if b is None else "only in B"
    elif types["type_a"] != types["type_b"]:
        why = "type"
    else:
        values = _compare_values(*(tensor.detach().contiguous().reshape(-1) for tensor in (a, b)))
        return None if values is None else Row(name=name, why="values", **types, **values)
    largest = dict.fromkeys(("largest_absolute", "largest_relative", "largest_ulps"))
    return Row(name=name, why=why, **types, differing=0, elements=0, **largest, differing_not_finite=0)


def _compare_values(a: Tensor, b: Tensor) -> dict[str, int | float | None] | None:
    differing = not_finite = ulps = 0
    absolute, relative = None, 0.0
    for ours, theirs in zip(*(torch.split(tensor, 1 << 20) for tensor in (a, b)), strict=True):
        differs = _bits(ours) != _bits(theirs)
        if not bool(differs.any()):
            continue
        ours, theirs = ours[differs], theirs[differs]
        finite = torch.isfinite(ours.double()) & torch.isfinite(theirs.double())
        differing += ours.numel()
        not_finite += int((~finite).sum())
        ours, theirs = ours[finite], theirs[finite]
        if not ours.numel():
            continue
        distance = (ours.double() - theirs.double()).abs()
        size = torch.maximum(ours.double().abs(), theirs.double().abs()).clamp(min=torch.finfo(torch.float64).tiny)
        absolute = max(absolute or 0.0, float(distance.max()))
        relative = max(relative, float((distance / size).max()))
        if a.dtype in _WITH_ULPS:
            ulps = max(ulps, int((_in_order(ours) - _in_order(theirs)).abs().max()))
    if not differing:
        return None
    return {
        "differing": differing,
        "elements": a.numel(),
        "largest_absolute": absolute,
        "largest_relative": None if absolute is None else relative,
        "largest_ulps": None if absolute is None or a.dtype not in _WITH_ULPS else ulps,
        "differing_not_finite": not_finite,
    }


def _bits(tensor: Tensor) -> Tensor:
    return tensor.view(_BITS[tensor.element_size()])


def _in_order(tensor: Tensor) -> Tensor:
    """Integers that differ by 1 for neighbouring floating point numbers; 0.0 and -0.0 have the same one."""
    bits = _bits(tensor)
    wide = bits.long()
    return torch.where(wide < 0, torch.iinfo(bits.dtype).min - wide, wide)


_Weights = Callable[[], Mapping[str, Tensor]]


def compare_pefs(a: tuple[str, PefDocument], b: tuple[str, PefDocument], weights: tuple[_Weights, _Weights]) -> Row:
    """Compare two PEFs, each given with its path. `weights` reads their weights; it is called only if they differ."""
    (_, ours), (_, theirs) = a, b
    same_weights = ours.weights_sha256 == theirs.weights_sha256
    tensors, differences = (0, []) if same_weights else compare_tensors(*(read() for read in weights))
    options = differing_facts(_options(ours), _options(theirs))
    pairs = [(ours.program, theirs.program)]
    if ours.graphs.keys() == theirs.graphs.keys():
        pairs = [(one.program, theirs.graphs[name].program) for name, one in ours.graphs.items()]
    symbols, graphs = ([found for pair in pairs for found in differ(*pair)] for differ in (_symbols, _graphs))
    equal = ours.digest == theirs.digest
    if equal:
        verdict = f"equal: both are {ours.program.name}, digest {ours.digest}"
    elif options:
        rest = f", and {len(options) - 1} more" if len(options) > 1 else ""
        verdict = f"they differ in the options: {options[0].name} {options[0].a} and {options[0].b}{rest}"
    elif symbols or graphs:
        verdict = f"they differ in {[*symbols, *graphs][0]}"
    elif differences:
        verdict = f"they differ in the weights, first {differences[0].name}: {tensor_difference(differences[0])}"
    else:
        verdict = "they differ only in layout or metadata"
    found = {"options": options, "symbols": symbols, "graphs": graphs, "tensors": tensors, "weights": differences}
    return Row(kind="pefs", a=a[0], b=b[0], equal=equal, verdict=verdict, **found)


def _options(document: PefDocument) -> Mapping[str, object]:
    program = document.program
    tables = {"compile": document.compile_options, **document.training_defaults, "data": document.data_source}
    return {
        "name": program.name,
        **({"graphs": ", ".join(document.graphs)} if document.has_several else {}),
        "batch size": program.batch_size,
        "replicas, at least": program.world_size,
        **dict(_leaves("", tables | {"metadata": document.metadata})),
        **{f"argument {argument.name}": argument.default for argument in program.runtime_arguments},
        "optimizers": ", ".join(
            f"{rule.name} ({', '.join(rule.states) or 'stateless'})" for rule in program.optimizers
        ),
        "gradient groups": ", ".join(str(group.numel) for group in program.groups),
    }


def _leaves(name: str, value: object) -> Iterator[tuple[str, object]]:
    if isinstance(value, Mapping):
        for key, below in value.items():
            yield from _leaves(f"{name}.{key}" if name else str(key), below)
    else:
        yield name, value


def _symbols(a: Program, b: Program) -> Iterator[str]:
    for name, ours, theirs in symbol_differences(a.symbols, b.symbols):
        if ours and theirs:
            yield f"the symbols: {name} is {ours.kind} {ours.type} in A, and {theirs.kind} {theirs.type} in B"
        elif symbol := ours or theirs:
            yield f"the symbols: only {'A' if ours else 'B'} has the {symbol.kind} {name}, {symbol.type}"


def _graphs(a: Program, b: Program) -> Iterator[str]:
    for name in ("training", "evaluation", "single"):
        ours, theirs = getattr(a, name), getattr(b, name)
        if ours and theirs:
            if difference := _difference(ours, theirs):
                yield f"the {name} graph: {difference}"
        elif ours or theirs:
            yield f"the graphs: only {'A' if ours else 'B'} has one for {name}"


def _difference(a: Graph, b: Graph) -> str | None:
    match graph_difference(a, b):
        case position, (Node() | None) as ours, (Node() | None) as theirs:
            sections = (*a.sections, *b.sections)
            within = next((section for section in sections if section.start <= position < section.stop), None)
            where = f", section {within.index} {within.kind} {within.name}" if within else ""
            return f"operator {position}{where}\n  A: {_node_text(a, ours)}\n  B: {_node_text(b, theirs)}"
        case (_, Output(symbol=symbol), _) | (_, _, Output(symbol=symbol)):
            return f"{symbol} is a different value"
        case number, _, _:
            counts = f"{len(a.sections)} sections in A, {len(b.sections)} in B"
            return f"the sections differ from section {number} on: {counts}"
    return None


def _node_text(graph: Graph, node: Node | None) -> str:
    if node is None:
        return "no operator"
    line = format_node(graph, node)
    return f"`{line.partition('  # ')[0]}`" + (f" from {node.source}" if node.source else "")
