"""Compares PEFs, and tensors by name, bit by bit: a NaN equals a NaN of the same bits, and -0.0 differs from 0.0."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import zip_longest

import torch
from torch import Tensor

from sambasim.ir.graph import Graph, Node
from sambasim.ir.printer import format_node, numbered, numbered_output, numbers
from sambasim.ir.program import Program
from sambasim.pef import PefDocument
from sambasim.report.compare import (
    Fact,
    PefsCompared,
    TensorDifference,
    TensorsCompared,
    differing_facts,
    tensor_difference,
)
from sambasim.units import counted

Tensors = Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]

_PIECE_ELEMENTS = 1 << 20
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

_TINY = torch.finfo(torch.float64).tiny
_WITH_ULPS = (torch.float32, torch.float16, torch.bfloat16)


def compare_tensors(a: Tensors, b: Tensors) -> tuple[int, tuple[TensorDifference, ...]]:
    """The number of common tensors, and the differences: in the order of `a`, then tensors that only `b` has."""
    ours, theirs = dict(a), dict(b)
    differences = [_compare_one(name, tensor, theirs.get(name)) for name, tensor in ours.items()]
    differences += [_compare_one(name, None, tensor) for name, tensor in theirs.items() if name not in ours]
    return len(ours.keys() & theirs.keys()), tuple(one for one in differences if one is not None)


def compare_files(
    kind: str, a: str, b: str, tensors: tuple[Tensors, Tensors], facts: tuple[Fact, ...] = ()
) -> TensorsCompared:
    common, differences = compare_tensors(*tensors)
    return TensorsCompared.model_validate(
        {
            "kind": kind,
            "a": a,
            "b": b,
            "equal": not differences and not facts,
            "verdict": _tensors_verdict(common, differences, facts),
            "tensors": common,
            "facts": facts,
            "differences": differences,
        }
    )


def _tensors_verdict(common: int, differences: tuple[TensorDifference, ...], facts: tuple[Fact, ...]) -> str:
    if differences:
        first = differences[0]
        rest = f"; {len(differences) - 1} more differ" if len(differences) > 1 else ""
        return f"they first differ in {first.name}: {tensor_difference(first)}{rest}"
    if facts:
        return f"{counted(common, 'tensor')} equal, but not: " + ", ".join(
            f"{one.name} {one.a} and {one.b}" for one in facts
        )
    return f"equal: {counted(common, 'tensor')}"


def _compare_one(name: str, a: Tensor | None, b: Tensor | None) -> TensorDifference | None:
    type_a, type_b = _type_of(a), _type_of(b)
    if a is None or b is None:
        return TensorDifference(name=name, why="only in A" if b is None else "only in B", type_a=type_a, type_b=type_b)
    if type_a != type_b:
        return TensorDifference(name=name, why="type", type_a=type_a, type_b=type_b)
    return _compare_values(name, type_a, a.detach().contiguous().reshape(-1), b.detach().contiguous().reshape(-1))


def _type_of(tensor: Tensor | None) -> str | None:
    """As `TensorType` is printed: `float32[3, 8]`."""
    return None if tensor is None else f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _compare_values(name: str, type_: str | None, a: Tensor, b: Tensor) -> TensorDifference | None:
    differing = not_finite = 0
    absolute: float | None = None
    relative: float | None = None
    ulps = 0 if a.dtype in _WITH_ULPS else None
    for start in range(0, a.numel(), _PIECE_ELEMENTS):
        ours, theirs = a[start : start + _PIECE_ELEMENTS], b[start : start + _PIECE_ELEMENTS]
        other = _bits(ours) != _bits(theirs)
        if not bool(other.any()):
            continue
        ours, theirs = ours[other], theirs[other]
        one, another = ours.double(), theirs.double()
        finite = torch.isfinite(one) & torch.isfinite(another)
        differing += ours.numel()
        not_finite += int((~finite).sum())
        one, another = one[finite], another[finite]
        if not one.numel():
            continue
        distance = (one - another).abs()
        size = torch.maximum(one.abs(), another.abs()).clamp(min=_TINY)
        absolute = max(absolute or 0.0, float(distance.max()))
        relative = max(relative or 0.0, float((distance / size).max()))
        if ulps is not None:
            ulps = max(ulps, int((_in_order(ours[finite]) - _in_order(theirs[finite])).abs().max()))
    if not differing:
        return None
    return TensorDifference(
        name=name,
        why="values",
        type_a=type_,
        type_b=type_,
        differing=differing,
        elements=a.numel(),
        largest_absolute=absolute,
        largest_relative=relative,
        largest_ulps=None if absolute is None else ulps,
        differing_not_finite=not_finite,
    )


def _bits(tensor: Tensor) -> Tensor:
    return tensor.view(_BITS[tensor.element_size()])


def _in_order(tensor: Tensor) -> Tensor:
    """Integers that differ by 1 for neighbouring floating point numbers; 0.0 and -0.0 have the same one."""
    bits = _bits(tensor)
    wide = bits.long()
    return torch.where(wide < 0, torch.iinfo(bits.dtype).min - wide, wide)


_Weights = Callable[[], Mapping[str, Tensor]]


def compare_pefs(
    a: tuple[str, PefDocument], b: tuple[str, PefDocument], weights: tuple[_Weights, _Weights]
) -> PefsCompared:
    """Compare two PEFs, each given with its path. `weights` reads their weights; it is called only if they differ."""
    (_, ours), (_, theirs), (our_weights, their_weights) = a, b, weights
    same_weights = ours.weights_sha256 == theirs.weights_sha256
    tensors, differences = (0, ()) if same_weights else compare_tensors(our_weights(), their_weights())
    options = differing_facts(_options(ours), _options(theirs))
    symbols = tuple(_symbols(ours.program, theirs.program))
    graphs = tuple(_graphs(ours.program, theirs.program))
    equal = ours.digest == theirs.digest
    rest = f", and {len(options) - 1} more" if len(options) > 1 else ""
    found = [f"the options: {one.name} {one.a} and {one.b}{rest}" for one in options]
    found += [*symbols, *graphs]
    found += [f"the weights, first {one.name}: {tensor_difference(one)}" for one in differences]
    if equal:
        verdict = f"equal: both are {ours.program.name}, digest {ours.digest}"
    else:
        verdict = f"they differ in {found[0]}" if found else "they differ only in layout or metadata"
    return PefsCompared(
        a=a[0],
        b=b[0],
        equal=equal,
        verdict=verdict,
        options=options,
        symbols=symbols,
        graphs=graphs,
        tensors=tensors,
        weights=differences,
    )


def _options(document: PefDocument) -> Mapping[str, object]:
    program = document.program
    return {
        "name": program.name,
        "batch size": program.batch_size,
        "replicas, at least": program.world_size,
        **dict(_leaves("compile", document.compile_options)),
        **dict(_leaves("", document.training_defaults)),
        **dict(_leaves("data", document.data_source)),
        **dict(_leaves("metadata", document.metadata)),
        **{f"argument {one.name}": one.default for one in program.runtime_arguments},
        "optimizers": ", ".join(f"{one.name} ({', '.join(one.states) or 'stateless'})" for one in program.optimizers),
        "gradient groups": ", ".join(str(group.numel) for group in program.groups),
    }


def _leaves(name: str, value: object) -> Iterator[tuple[str, object]]:
    if isinstance(value, Mapping):
        for key, below in value.items():
            yield from _leaves(f"{name}.{key}" if name else str(key), below)
    else:
        yield name, value


def _symbols(a: Program, b: Program) -> Iterator[str]:
    for name in dict.fromkeys((*a.symbols, *b.symbols)):
        one, other = a.symbols.get(name), b.symbols.get(name)
        if one is None and other is not None:
            yield f"the symbols: only B has the {other.kind} {name}, {other.type}"
        elif one is not None and other is None:
            yield f"the symbols: only A has the {one.kind} {name}, {one.type}"
        elif one and other and (one.kind, one.type) != (other.kind, other.type):
            yield f"the symbols: {name} is {one.kind} {one.type} in A, and {other.kind} {other.type} in B"


def _graphs(a: Program, b: Program) -> Iterator[str]:
    for name in ("training", "evaluation", "single"):
        one, other = getattr(a, name), getattr(b, name)
        if one is None and other is None:
            continue
        if one is None or other is None:
            yield f"the graphs: only {'B' if one is None else 'A'} has one for {name}"
        elif (found := _first_difference(one, other)) is not None:
            yield f"the {name} graph: {found}"


def _first_difference(a: Graph, b: Graph) -> str | None:
    places = numbers(a), numbers(b)
    for position, (one, other) in enumerate(zip_longest(a.nodes, b.nodes)):
        if numbered(one, places[0]) != numbered(other, places[1]):
            where = f"operator {position}{_section(a, b, position)}"
            return f"{where}\n  A: {_node_text(a, one)}\n  B: {_node_text(b, other)}"
    for left, right in zip_longest(a.outputs, b.outputs):
        if numbered_output(left, places[0]) != numbered_output(right, places[1]):
            return f"{(left or right).symbol} is a different value"
    cuts = [[(section.kind, section.start, section.stop) for section in graph.sections] for graph in (a, b)]
    for number, (left_cut, right_cut) in enumerate(zip_longest(*cuts)):
        if left_cut != right_cut:
            return f"the sections differ from section {number} on: {len(cuts[0])} sections in A, {len(cuts[1])} in B"
    return None


def _section(a: Graph, b: Graph, position: int) -> str:
    for graph in (a, b):
        for section in graph.sections:
            if section.start <= position < section.stop:
                return f", section {section.index} {section.kind} {section.name}"
    return ""


def _node_text(graph: Graph, node: Node | None) -> str:
    if node is None:
        return "no operator"
    line = format_node(graph, node)
    return f"`{line.partition('  # ')[0]}`" + (f" from {node.source}" if node.source else "")
