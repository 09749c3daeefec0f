"""How values lie over the ranks of the axis tp, and how that propagates through a graph: each node by the rule of its
operator, with communication where layouts differ.

A node without a rule, and one whose rule finds no way, is computed whole on every rank.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import chain, count
from math import prod
from typing import TypeAlias

from sambasim.errors import InternalError
from sambasim.ir.graph import Argument, Graph, Node, Output, Ref, SectionKind, with_sections
from sambasim.ir.mesh import TENSOR
from sambasim.ir.types import Cut, Symbol, SymbolKind, TensorType, parameter_of


@dataclass(frozen=True, slots=True)
class Layout:
    """The placement of a value, in DTensor's terms: `whole` is Replicate, `partial` is Partial (the value is the sum of
    what the ranks have), `cut` is Shard(dim): each rank has an equal part along `dim`. With `outer` above 1, that
    dimension is a concatenation of `outer` tensors, and each rank has a part of each of them."""

    kind: str
    dim: int = 0
    outer: int = 1

    def __str__(self) -> str:
        return self.kind if self.kind != "cut" else f"cut({self.dim}{f', outer {self.outer}' * (self.outer > 1)})"


WHOLE = Layout("whole")
PARTIAL = Layout("partial")


@cache
def cut(dim: int, outer: int = 1) -> Layout:
    return Layout("cut", dim, outer)


def fits(shape: tuple[int, ...], layout: Layout, ranks: int) -> bool:
    """Whether a tensor of `shape` can have `layout`: the dimension must divide evenly into `outer` × `ranks` parts."""
    if layout.kind != "cut":
        return True
    size = shape[layout.dim] if layout.dim < len(shape) else 0
    return size > 0 and size % (layout.outer * ranks) == 0


def part_type(whole: TensorType, layout: Layout, ranks: int) -> TensorType:
    """The type of a rank's part."""
    if layout.kind != "cut":
        return whole
    sizes = (size // ranks if dim == layout.dim else size for dim, size in enumerate(whole.shape))
    return TensorType(whole.dtype, tuple(sizes))


def divided(symbol: Symbol, layout: Layout, ranks: int) -> Symbol:
    """`symbol`, which is whole, as the part that a rank has in `layout`."""
    cuts = (Cut(TENSOR, layout.dim, ranks, layout.outer),) if layout.kind == "cut" else ()
    return replace(symbol, type=part_type(symbol.type, layout, ranks), cuts=cuts)


def through_view(before: tuple[int, ...], after: tuple[int, ...], layout: Layout, ranks: int) -> Layout | None:
    """The layout of a cut tensor after a view of its elements as `after`; None if parts would not stay parts.

    In the order of elements, a cut is a number of blocks, `left`, each in `ranks` equal pieces. A dimension of `after`
    has the same pieces if its blocks are as many and its extent is divided evenly.
    """
    left = prod(before[: layout.dim]) * layout.outer
    for dim, extent in enumerate(after):
        blocks, rest = divmod(left, max(prod(after[:dim]), 1))
        found = cut(dim, blocks)
        if rest == 0 and blocks > 0 and extent > blocks and fits(after, found, ranks):
            return found
    return None


Rule: TypeAlias = Callable[["Sharder", Node], bool]
"""Emits what computes `node` from operands that are not all whole. Returns False, before anything is emitted, if it
finds no way."""

Args: TypeAlias = Sequence[Argument]
Types: TypeAlias = Sequence[TensorType]
Typed: TypeAlias = TensorType | None
Keywords: TypeAlias = Sequence[tuple[str, Argument]]


@dataclass(slots=True)
class Sharder:
    """One propagation through `graph`, and what became of it, over `ranks` ranks. `at_rest`: the layouts
    of inputs that are not whole, by symbol; `even_if_whole`: operators whose rule is asked even if all operands are;
    `layouts`: of each value of the whole program, as its node computes it; `notes`: names of values, which a forward
    rule leaves for the backward's; `wanted`: for each input, the layouts in which forward nodes read it."""

    graph: Graph
    symbols: Mapping[str, Symbol]
    ranks: int
    at_rest: Mapping[str, Layout]
    rules: Mapping[str, Rule]
    even_if_whole: frozenset[str] = frozenset()
    layouts: dict[str, Layout] = field(default_factory=dict)
    notes: dict[tuple[str, ...], tuple[str, ...]] = field(default_factory=dict)
    wanted: defaultdict[str, set[Layout]] = field(default_factory=lambda: defaultdict(set))
    _types: dict[str, TensorType] = field(default_factory=dict)  # of whole values
    _values: dict[str, TensorType] = field(default_factory=dict)  # of what a rank computes
    _nodes: list[Node] = field(default_factory=list)
    _converted: dict[tuple[str, Layout], str] = field(default_factory=dict)
    _transposed: dict[str, str] = field(default_factory=dict)  # by whole transpose: its operand
    _counts: bool = True  # whether the forward runs
    _kept: dict[str, Layout] = field(default_factory=dict)  # by value that is given out
    _fixed: set[str] = field(default_factory=set)  # of those, the ones that are more than an output

    def run(self) -> "Sharder":
        graph, symbols = self.graph, self.symbols
        self._types = {name: symbols[name].whole for name in graph.inputs} | dict(graph.values)
        self.layouts = {name: self.at_rest.get(name, WHOLE) for name in graph.inputs}
        self._kept = {out.value: self.at_rest.get(parameter_of(out.symbol), WHOLE) for out in graph.outputs}
        self._fixed = {out.value for out in graph.outputs if symbols[out.symbol].kind is not SymbolKind.OUTPUT}
        parts = []
        for section in graph.sections:
            self._nodes, self._counts = [], section.kind is SectionKind.FWD
            parts.append((section, self._nodes))
            for node in graph.section_nodes(section):
                self._shard(node)
                for name in node.results:
                    if name in self._kept:
                        self._given_out(name)  # at once: a gradient is then complete
        # An input that is given out is converted at the end of the last section.
        outputs = tuple(Output(self._given_out(output.value), output.symbol) for output in graph.outputs)
        self.graph = with_sections(replace(graph, outputs=outputs, values=self._values), parts)
        return self

    def layout(self, argument: Argument) -> Layout:
        return self.layouts[argument.name] if isinstance(argument, Ref) else WHOLE

    def shape(self, argument: Argument) -> tuple[int, ...]:
        """The shape of the whole value."""
        return self._types[argument.name].shape if isinstance(argument, Ref) else ()

    def type(self, name: str) -> TensorType:
        """Of the whole value."""
        return self._types[name]

    def type_like(self, argument: Argument, shape: Sequence[int] | None = None, dtype: str = "") -> TensorType:
        """The type of the whole value, but for its shape or its dtype."""
        own = self._types[argument.name] if isinstance(argument, Ref) else TensorType("float32", ())
        return TensorType(dtype or own.dtype, own.shape if shape is None else tuple(shape))

    def part_shape(self, shape: tuple[int, ...], layout: Layout) -> tuple[int, ...]:
        return part_type(TensorType("float32", shape), layout, self.ranks).shape

    def as_is(self, argument: Argument) -> Argument:
        """`argument`, whose value stays in the layout that it has."""
        return self.to(argument, self.layout(argument))

    def to(self, argument: Argument, layout: Layout) -> Argument:
        """The operand that has the value of `argument` in `layout`; other arguments stay."""
        if isinstance(argument, Ref):
            name = self.converted(argument.name, layout)
            return argument if name == argument.name else Ref(name)
        if isinstance(argument, tuple):
            return tuple(self.to(one, layout) for one in argument)
        return argument

    def whole(self, argument: Argument) -> Argument:
        return self.to(argument, WHOLE)

    def emit(
        self, node: Node, args: Args, layouts: Sequence[Layout], operator: str = "", kwargs: Keywords | None = None
    ) -> None:
        """Add `node` with arguments of this rank and results in `layouts`. Raises InternalError if one cannot be so."""
        for name, layout in zip(node.results, layouts, strict=True):
            if name is not None:
                self.layouts[name], type_ = layout, self._types[name]
                if layout.kind == "cut":
                    if not fits(type_.shape, layout, self.ranks):
                        raise InternalError(f"{name}, {type_}, cannot be {layout} over {self.ranks} ranks")
                    type_ = part_type(type_, layout, self.ranks)
                self._values[name] = type_
        given, keywords = tuple(args), node.kwargs if kwargs is None else tuple(kwargs)
        if given != node.args or keywords != node.kwargs or operator:
            node = replace(node, args=given, kwargs=keywords, operator=operator or node.operator)
        self._nodes.append(node)

    def emit_result(
        self, node: Node, result: str | None, operator: str, args: Args, layout: Layout, kwargs: Keywords = ()
    ) -> None:
        """Add a node that computes one result of `node`, if it is read, by another operator."""
        if result is not None:
            made = replace(node, name=result, results=(result,))
            self.emit(made, args, [layout], operator=operator, kwargs=kwargs)

    def new(
        self, node: Node, what: str, operator: str, args: Args, type_: Typed = None, at: Layout = WHOLE, **how: Argument
    ) -> Ref:
        """Add a node that belongs to `node` and has a value of its own, of the whole type `type_`: by default, that of
        the first argument. `how`: its keywords."""
        return self.new_values(node, (what,), operator, args, (type_ or self.type_like(args[0]),), at, **how)[0]

    def new_values(
        self, node: Node, of: Sequence[str], operator: str, args: Args, types: Types, at: Layout, **how: Argument
    ) -> tuple[Ref, ...]:
        """As `new`, for an operator with several results."""
        names = tuple(self._free(f"{node.name}__{what}") for what in of)
        self._types |= dict(zip(names, types, strict=True))
        self.emit(replace(node, name=names[0], results=names), args, [at] * len(names), operator, tuple(how.items()))
        return tuple(map(Ref, names))

    def reduced(self, value: Ref, op: str = "sum") -> Ref:
        """The sum, or the maximum, of what the ranks have in `value`, on all of them."""
        name, how = f"{value.name}__{op}_{TENSOR}", (("op", op), ("order", "tree"))
        return Ref(self._communicate(name, value.name, "all_reduce", how, self._values[value.name], WHOLE))

    def _shard(self, node: Node) -> None:
        operands, rule = node.reads, self.rules.get(node.operator)
        is_whole = all(self.layouts[name] == WHOLE for name in operands)
        if rule is not None and (not is_whole or node.operator in self.even_if_whole) and rule(self, node):
            return
        if is_whole and node.operator == "aten.t.default" and node.results[0] is not None:
            self._transposed[node.results[0]] = operands[0]  # whoever reads it decides how that is wanted
            self.emit(node, node.args, [WHOLE])
            return
        kwargs = [(name, self.whole(value)) for name, value in node.kwargs]
        self.emit(node, tuple(map(self.whole, node.args)), [WHOLE] * len(node.results), kwargs=kwargs)

    def converted(self, name: str, layout: Layout) -> str:
        """The value `name` in `layout`, by communication if it lies otherwise."""
        own = self.layouts[name]
        self._want(name, layout)
        if own != layout and (name, layout) not in self._converted:
            self._converted[name, layout] = self._convert(name, own, layout)
        return name if own == layout else self._converted[name, layout]

    def _want(self, name: str, layout: Layout) -> None:
        if self._counts:
            self.wanted[name].add(layout)
            if name in self._transposed:
                transposed = cut(1 - layout.dim, layout.outer) if layout.kind == "cut" else layout
                self._want(self._transposed[name], transposed)

    def _convert(self, name: str, own: Layout, layout: Layout) -> str:
        if own.kind == "cut" and layout.kind == "cut":
            return self.converted(self.converted(name, WHOLE), layout)
        operator = {
            ("partial", "whole"): "all_reduce",
            ("partial", "cut"): "reduce_scatter",
            ("cut", "whole"): "all_gather",
            ("whole", "cut"): "shard",
        }[own.kind, layout.kind]
        which = layout if layout.kind == "cut" else own
        how: Keywords = () if operator == "all_reduce" else (("dim", which.dim), ("outer", which.outer))
        if own == PARTIAL:
            how = (*how, ("op", "sum"), ("order", "tree"))
        return self._communicate(f"{name}__{operator}_{TENSOR}", name, operator, how, self._types[name], layout)

    def _communicate(self, name: str, value: str, operator: str, how: Keywords, type_: TensorType, at: Layout) -> str:
        name = self._free(name)
        self._types[name], self.layouts[name] = type_, at
        self._values[name] = part_type(type_, at, self.ranks)
        self._nodes.append(Node(name, f"comm.{operator}", (Ref(value),), (("axis", TENSOR), *how), (name,)))
        return name

    def _given_out(self, name: str) -> str:
        """What is given out for `name`: in training an output may stay cut, but no loss, gradient or buffer."""
        if self.graph.name == "training" and name not in self._fixed and self.layouts[name].kind == "cut":
            return name
        return self.converted(name, self._kept[name])

    def _free(self, name: str) -> str:
        numbered = (f"{name}_{number}" for number in count(2))
        return next(free for free in chain([name], numbered) if free not in self._types and free not in self.symbols)


def number(argument: Argument) -> int:
    """An argument that is a dimension or a size."""
    if not isinstance(argument, int):
        raise InternalError(f"{argument!r} is no whole number")
    return argument


def refs(argument: Argument) -> Sequence[Ref]:
    """The values in an argument."""
    return [part for part in (argument if isinstance(argument, tuple) else [argument]) if isinstance(part, Ref)]
