"""The sharding rules: for each operator, what a rank computes when operands are cut or partial.

A rule is one function; RULES says for which operators. A rule that finds no way returns False, and the node is computed
whole. Views become `reshape`, because a part need not lie in memory as its view would.
"""

from collections.abc import Callable, Mapping, Sequence

from sambasim.compiler.sharding.layouts import PARTIAL, WHOLE, Layout, cut, through_view
from sambasim.compiler.sharding.rules_losses import LOSS_RULES
from sambasim.compiler.sharding.rules_products import PRODUCT_RULES
from sambasim.compiler.sharding.sharder import Rule, Sharder, dtype_of, number, one_of
from sambasim.ir.graph import Node, Ref, TorchConstant
from sambasim.ir.operators import OPERATORS, OperatorKind


def pointwise(s: Sharder, node: Node) -> bool:
    """One result, element by element; operands are broadcast."""
    if len(node.results) != 1 or node.results[0] is None or any(isinstance(one, tuple) for one in node.args):
        return False
    shape = s.type(node.results[0]).shape
    operands = [one for one in node.args if isinstance(one, Ref)]
    if shape != _broadcast([s.shape(one) for one in operands]):
        return False
    is_linear = node.operator in (_LINEAR if len(operands) == 1 else _SUMS)
    if is_linear and all(s.layout(one) == PARTIAL for one in operands):
        s.emit(node, [s.as_is(one) for one in node.args], [PARTIAL])
        return True
    found: Layout | None = None
    for one in operands:
        layout = s.layout(one)
        if layout.kind == "cut":
            found = found or layout.moved(layout.dim + len(shape) - len(s.shape(one)))
    if found is None:
        return False
    dim, args = found.dim, []
    for argument in node.args:
        lower = len(shape) - len(s.shape(argument))
        broadcast = isinstance(argument, Ref) and (dim < lower or s.shape(argument)[dim - lower] == 1)
        args.append(s.whole(argument) if broadcast else s.to(argument, found.moved(dim - lower)))
    s.emit(node, args, [found])
    return True


def _broadcast(shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """The shape that operands have together."""
    rank = max(map(len, shapes))
    filled = [(1,) * (rank - len(shape)) + shape for shape in shapes]
    return tuple(next((one for one in extents if one != 1), 1) for extents in zip(*filled, strict=True))


_NOT_BY_ELEMENT = ("glu", "glu_backward", "addr", "cross", "linalg_cross", "isin", "prelu")
"""Operators of the kind pointwise that combine elements along a dimension."""

_SUMS = ("aten.add.Tensor", "aten.sub.Tensor")
_LINEAR = ("aten.neg.default", "aten.mul.Scalar", "aten.div.Scalar", "aten.mul.Tensor", "aten.div.Tensor")


def same(s: Sharder, node: Node) -> bool:
    """A copy: the result lies as its operand."""
    cast = dict(node.kwargs).get("dtype")
    if s.layout(node.args[0]) == PARTIAL and isinstance(cast, TorchConstant) and "float" not in cast.name:
        return False  # the sum of truncated terms is not the truncated sum
    s.emit(node, [s.as_is(one) for one in node.args], [s.layout(node.args[0])])
    return True


def view(s: Sharder, node: Node) -> bool:
    before, after = s.shape(node.args[0]), _result_shape(s, node)
    layout: Layout | None = s.layout(node.args[0])
    if layout is not None and layout.kind == "cut":
        layout = through_view(before, after, layout, s.ranks)
    if layout is None:
        return False
    s.emit(
        node, [s.as_is(node.args[0]), s.part_shape(after, layout)], [layout], operator="aten.reshape.default", kwargs=()
    )
    return True


def permute(s: Sharder, node: Node) -> bool:
    operand, dims = node.args[0], node.args[1]
    rank = len(s.shape(operand))
    order = [one % rank for one in dims if isinstance(one, int)] if isinstance(dims, tuple) else []
    return _moved(s, node, order.index)


def transpose(s: Sharder, node: Node) -> bool:
    rank = len(s.shape(node.args[0]))
    a, b = (number(one) % rank for one in node.args[1:3]) if len(node.args) > 2 else (0, rank - 1)
    return _moved(s, node, lambda dim: {a: b, b: a}.get(dim, dim))


def _moved(s: Sharder, node: Node, place: Callable[[int], int]) -> bool:
    layout = s.layout(node.args[0])
    if layout.kind == "cut":
        layout = layout.moved(place(layout.dim))
    s.emit(node, [s.as_is(one) for one in node.args], [layout])
    return True


def unsqueeze(s: Sharder, node: Node) -> bool:
    at = number(node.args[1]) % (len(s.shape(node.args[0])) + 1)
    return _moved(s, node, lambda dim: dim + (dim >= at))


def squeeze(s: Sharder, node: Node) -> bool:
    operand, given = node.args[0], node.args[1]
    dims = [given] if isinstance(given, int) else list(given) if isinstance(given, tuple) else []
    rank = len(s.shape(operand))
    gone = [one % rank for one in dims if isinstance(one, int) and s.shape(operand)[one] == 1]
    return _moved(s, node, lambda dim: dim - sum(one < dim for one in gone))


def expand(s: Sharder, node: Node) -> bool:
    operand, shape = node.args[0], _result_shape(s, node)
    layout = s.layout(operand)
    if layout.kind == "cut":
        layout = layout.moved(layout.dim + len(shape) - len(s.shape(operand)))
    s.emit(node, [s.as_is(operand), s.part_shape(shape, layout)], [layout])
    return True


def select(s: Sharder, node: Node) -> bool:
    at = number(node.args[1]) % len(s.shape(node.args[0]))
    if s.layout(node.args[0]) == cut(at, s.layout(node.args[0]).outer):
        return False
    return _moved(s, node, lambda dim: dim - (dim > at))


def unbind(s: Sharder, node: Node) -> bool:
    operand = node.args[0]
    at = (number(node.args[1]) if len(node.args) > 1 else 0) % len(s.shape(operand))
    layout = s.layout(operand)
    if layout.kind == "cut":
        if layout.dim == at:
            return False
        layout = layout.moved(layout.dim - (layout.dim > at))
    s.emit(node, [s.as_is(one) for one in node.args], [layout] * len(node.results))
    return True


def select_backward(s: Sharder, node: Node) -> bool:
    shape = _result_shape(s, node)
    at = number(node.args[2]) % len(shape)
    layout = s.layout(node.args[0])
    if layout.kind == "cut":
        layout = layout.moved(layout.dim + (layout.dim >= at))
    s.emit(node, [s.as_is(node.args[0]), s.part_shape(shape, layout), *node.args[2:]], [layout])
    return True


def slice_of(s: Sharder, node: Node) -> bool:
    rank = len(s.shape(node.args[0]))
    layout = s.layout(node.args[0])
    if layout.kind == "cut" and layout.dim == (number(node.args[1]) if len(node.args) > 1 else 0) % rank:
        return False
    return same(s, node)


def slice_backward(s: Sharder, node: Node) -> bool:
    shape, layout = _result_shape(s, node), s.layout(node.args[0])
    if layout.kind == "cut" and layout.dim == number(node.args[2]) % len(shape):
        return False
    s.emit(node, [s.as_is(node.args[0]), s.part_shape(shape, layout), *node.args[2:]], [layout])
    return True


def split(s: Sharder, node: Node) -> bool:
    """Along another dimension than the cut one, any split. Along the cut one, only into the `outer` tensors that are
    joined there: each result is cut."""
    operand = node.args[0]
    shape, layout = s.shape(operand), s.layout(operand)
    at = (number(node.args[2]) if len(node.args) > 2 else 0) % len(shape)
    if layout.kind != "cut" or layout.dim != at:
        s.emit(node, [s.as_is(one) for one in node.args], [layout] * len(node.results))
        return True
    if not isinstance(node.args[1], int) or shape[at] != node.args[1] * layout.outer:
        return False
    args = [s.as_is(operand), node.args[1] // s.ranks, *node.args[2:]]
    s.emit(node, args, [cut(at)] * len(node.results))
    return True


def cat(s: Sharder, node: Node) -> bool:
    """Along another dimension than the cut one, any tensors. Along the cut one, only tensors of equal shape: the
    result has `outer` of them. PyTorch ignores tensors of shape [0], as transformers' first cache of keys is."""
    given = node.args[0] if isinstance(node.args[0], tuple) else ()
    operands = tuple(one for one in given if s.shape(one) != (0,))
    shape = _result_shape(s, node)
    at = (number(node.args[1]) if len(node.args) > 1 else 0) % len(shape)
    layouts = [s.layout(one) for one in operands]
    if all(one == PARTIAL for one in layouts):
        s.emit(node, [s.to(operands, PARTIAL), *node.args[1:]], [PARTIAL])
        return True
    found = next((one for one in layouts if one.kind == "cut"), None)
    if found is None:
        return False
    result = found
    if found.dim == at:
        if found.outer > 1 or len({s.shape(one) for one in operands}) > 1:
            return False
        result = cut(at, len(operands))
    s.emit(node, [s.to(operands, found), *node.args[1:]], [result])
    return True


def stack(s: Sharder, node: Node) -> bool:
    operands = node.args[0] if isinstance(node.args[0], tuple) else ()
    at = (number(node.args[1]) if len(node.args) > 1 else 0) % len(_result_shape(s, node))
    found = next((one for one in map(s.layout, operands) if one.kind == "cut"), None)
    if found is None:
        return False
    s.emit(node, [s.to(operands, found), *node.args[1:]], [found.moved(found.dim + (found.dim >= at))])
    return True


def total(s: Sharder, node: Node) -> bool:
    """A sum over dimensions. If the cut one is among them, the result is partial: each rank has a term."""
    operand = node.args[0]
    layout, shape = s.layout(operand), s.shape(operand)
    dims = node.args[1] if len(node.args) > 1 else None
    over = (
        {one % len(shape) for one in dims if isinstance(one, int)}
        if isinstance(dims, tuple) and dims
        else set(range(len(shape)))
    )
    keeps = len(node.args) > 2 and bool(node.args[2])
    if layout.kind == "cut":
        gone = 0 if keeps else sum(one < layout.dim for one in over)
        layout = PARTIAL if layout.dim in over else layout.moved(layout.dim - gone)
    s.emit(node, [s.as_is(one) for one in node.args], [layout])
    return True


def mean(s: Sharder, node: Node) -> bool:
    """A mean over dimensions that are not cut."""
    layout, dims = s.layout(node.args[0]), node.args[1] if len(node.args) > 1 else None
    if layout.kind != "cut" or not isinstance(dims, tuple) or not dims:
        return False
    if layout.dim in {one % len(s.shape(node.args[0])) for one in dims if isinstance(one, int)}:
        return False
    return total(s, node)


def softmax(s: Sharder, node: Node) -> bool:
    """Along a dimension that is not cut; also its backward, whose second operand is the result."""
    at = next(number(one) for one in node.args[1:] if isinstance(one, int)) % len(s.shape(node.args[0]))
    return _alike(s, node, lambda layout: layout.dim != at)


def spatial(s: Sharder, node: Node) -> bool:
    """Pooling over one to three dimensions, cut in samples or channels; also its backward."""
    dimensions = next((int(digit) for digit in "123" if f"{digit}d" in node.operator), 0)
    if {len(s.shape(one)) for one in node.args if isinstance(one, Ref)} != {dimensions + 2}:
        return False
    return _alike(s, node, lambda layout: layout.dim < 2)


def layer_norm(s: Sharder, node: Node) -> bool:
    """Rows are normalized: any dimension but those of the rows may be cut."""
    shape = node.args[1]
    rows = len(shape) if isinstance(shape, tuple) else 0
    layout = s.layout(node.args[0])
    if layout.kind != "cut" or layout.dim >= len(s.shape(node.args[0])) - rows:
        return False
    s.emit(node, [s.as_is(node.args[0]), *map(s.whole, node.args[1:])], [layout] * len(node.results))
    return True


def layer_norm_backward(s: Sharder, node: Node) -> bool:
    gradient, x, shape, mean_of, deviation, weight, bias, mask = node.args
    rows = len(shape) if isinstance(shape, tuple) else 0
    layout = next((one for one in map(s.layout, (gradient, x)) if one.kind == "cut"), WHOLE)
    if layout.kind != "cut" or layout.dim >= len(s.shape(x)) - rows:
        return False
    args = [*(s.to(one, layout) for one in (gradient, x)), shape, *(s.to(one, layout) for one in (mean_of, deviation))]
    s.emit(node, [*args, s.whole(weight), s.whole(bias), mask], [layout, PARTIAL, PARTIAL])
    return True


def batch_norm(s: Sharder, node: Node) -> bool:
    """By channel: everything may be cut there."""
    layout = s.layout(node.args[0])
    if layout.kind != "cut" or layout.dim != 1:
        return False
    of_channel = layout.moved(0)
    args = [s.as_is(node.args[0]), *(s.to(one, of_channel) for one in node.args[1:])]
    s.emit(node, args, [layout, *[of_channel] * (len(node.results) - 1)])
    return True


def batch_norm_backward(s: Sharder, node: Node) -> bool:
    layout = next((one for one in map(s.layout, node.args[:2]) if one.kind == "cut"), WHOLE)
    if layout.kind != "cut" or layout.dim != 1:
        return False
    of_channel = layout.moved(0)
    args = [*(s.to(one, layout) for one in node.args[:2]), *(s.to(one, of_channel) for one in node.args[2:])]
    s.emit(node, args, [layout, *[of_channel] * (len(node.results) - 1)])
    return True


def dropout(s: Sharder, node: Node) -> bool:
    """Draws the mask of the whole value, so that every rank drops what an unsharded run drops."""
    x, p, training = node.args
    layout = s.layout(x)
    if layout.kind != "cut" or training is False or not isinstance(p, float) or p >= 1 or len(node.results) != 2:
        return False
    first, second = node.results
    if not isinstance(x, Ref) or first is None or second is None:
        return False
    whole, mask_type = s.type(x.name), s.type(second)
    like = s.new(node, "like", "aten.zeros.default", (whole.shape,), whole, kwargs=(("dtype", dtype_of(whole)),))
    _, mask = s.new_values(node, ("drawn", "mask"), "aten.native_dropout.default", (like, p, True), (whole, mask_type))
    how = (("axis", s.axis), ("dim", layout.dim), ("outer", layout.outer))
    s.emit(one_of(node, second), (mask,), [layout], operator="comm.shard", kwargs=how)
    kept = s.new(node, "kept", "aten.mul.Tensor", (s.as_is(x), Ref(second)), whole, layout)
    s.emit(one_of(node, first), (kept, 1 / (1 - p)), [layout], operator="aten.mul.Scalar", kwargs=())
    return True


def _alike(s: Sharder, node: Node, permits: Callable[[Layout], bool]) -> bool:
    """All operands and results lie like the first cut operand, if that is permitted."""
    layout = next((s.layout(one) for one in node.args if s.layout(one).kind == "cut"), WHOLE)
    if layout.kind != "cut" or not permits(layout):
        return False
    s.emit(node, [s.to(one, layout) for one in node.args], [layout] * len(node.results))
    return True


def _result_shape(s: Sharder, node: Node) -> tuple[int, ...]:
    return s.type(node.results[0] or "").shape


def _aten(names: str, rule: Rule) -> dict[str, Rule]:
    return {f"aten.{name}" if "." in name else f"aten.{name}.default": rule for name in names.split()}


RULES: Mapping[str, Rule] = {
    **{
        name: pointwise
        for name, one in OPERATORS.items()
        if one.kind is OperatorKind.POINTWISE and name.split(".")[1] not in _NOT_BY_ELEMENT
    },
    **_aten("clone detach alias _to_copy contiguous positive", same),
    **_aten("view reshape _unsafe_view flatten.using_ints unflatten.int", view),
    **_aten("permute", permute),
    **_aten("t transpose.int numpy_T mT", transpose),
    **_aten("unsqueeze", unsqueeze),
    **_aten("squeeze.dim squeeze.dims", squeeze),
    **_aten("expand", expand),
    **_aten("select.int", select),
    **_aten("unbind.int", unbind),
    **_aten("stack", stack),
    **_aten("select_backward", select_backward),
    **_aten("slice.Tensor", slice_of),
    **_aten("slice_backward", slice_backward),
    **_aten("split.Tensor", split),
    **_aten("cat", cat),
    **_aten("sum sum.dim_IntList", total),
    **_aten("mean.dim", mean),
    **_aten("softmax.int _softmax _safe_softmax _softmax_backward_data", softmax),
    **_aten("layer_norm native_layer_norm", layer_norm),
    **_aten("native_layer_norm_backward", layer_norm_backward),
    **_aten("batch_norm _native_batch_norm_legit_functional", batch_norm),
    **_aten("native_batch_norm_backward", batch_norm_backward),
    **_aten("native_dropout", dropout),
    **{name: spatial for name, one in OPERATORS.items() if one.kind is OperatorKind.POOLING and "unpool" not in name},
    **PRODUCT_RULES,
    **LOSS_RULES,
}
"""By operator. A test says which ATen operators have a rule."""

EVEN_IF_WHOLE = frozenset({"aten.embedding_dense_backward.default"})
"""Operators whose rule is asked even if all operands are whole: the gradient of a cut table is made in parts."""
