"""The sharding rules: for each operator, what a rank computes when operands are cut or partial.

Most are dimension maps (see `maps`): those `by_first` are functions of `a`, the axes of the first operand, and of the
other arguments. The others are functions that emit nodes. Views become `reshape`, because a part need not lie in memory
as its view would. Where classes or a vocabulary are cut: Shoeybi et al., Megatron-LM, arXiv:1909.08053.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache

from sambasim.compiler.sharding.maps import broadcast, by_first, by_map, follow, inserted, letters, whole, without
from sambasim.compiler.sharding.sharder import PARTIAL, WHOLE, Layout, Rule, Sharder, cut, number, refs, through_view
from sambasim.ir.graph import Argument, Node, Ref, TorchConstant
from sambasim.ir.mesh import TENSOR
from sambasim.ir.operators import OPERATORS, OperatorKind
from sambasim.ir.types import TensorType

_NOT_BY_ELEMENT = ("glu", "glu_backward", "addr", "cross", "linalg_cross", "isin", "prelu")
"""Operators of the kind pointwise that combine elements along a dimension."""

_NEVER = -100  # A class that the loss ignores: torch's default, too

_MEAN, _SUM = 1, 2  # of torch's reductions

_SUMS = ("aten.add.Tensor", "aten.sub.Tensor")
_LINEAR = ("aten.neg.default", "aten.mul.Scalar", "aten.div.Scalar", "aten.mul.Tensor", "aten.div.Tensor")


def pointwise(s: Sharder, node: Node) -> str | None:
    """One result, element by element; operands are broadcast."""
    if len(node.results) != 1 or node.results[0] is None or any(isinstance(argument, tuple) for argument in node.args):
        return None
    result, shapes = s.type(node.results[0]).shape, tuple(map(s.shape, node.args))
    if not _are_broadcast(shapes, result):
        return None
    operands = ",".join(broadcast(shape, letters(result)) for shape in shapes)
    is_linear = node.operator in (_LINEAR if len(refs(node.args)) == 1 else _SUMS)
    return f"{operands}{'=>' if is_linear else '->'}{letters(result)}"


@cache
def _are_broadcast(shapes: tuple[tuple[int, ...], ...], result: tuple[int, ...]) -> bool:
    rank = max(map(len, shapes))
    filled = [(1,) * (rank - len(shape)) + shape for shape in shapes]
    return result == tuple(next((size for size in sizes if size != 1), 1) for sizes in zip(*filled, strict=True))


def copy(s: Sharder, node: Node) -> str:
    """The sum of truncated terms is not the truncated sum."""
    a, cast = letters(s.shape(node.args[0])), dict(node.kwargs).get("dtype")
    truncates = isinstance(cast, TorchConstant) and "float" not in cast.name
    return f"{a}->{a}" if truncates else f"{a}=>{a}"


def pooling(s: Sharder, node: Node) -> str | None:
    """Over one to three dimensions; also its backward."""
    dimensions = next((int(digit) for digit in "123" if f"{digit}d" in node.operator), 0)
    axes = "ncXYZ"[: dimensions + 2]
    alike = {len(s.shape(argument)) for argument in refs(node.args)} == {len(axes)}
    return f"{axes},...->{axes},..." if alike else None


def transpose(a: str, one: int = -2, other: int = -1) -> str:
    swapped = list(a)
    swapped[one], swapped[other] = a[other], a[one]
    return f"{a}=>{''.join(swapped)}"


def squeeze(a: str, dims: int | Sequence[int]) -> str:
    among = [dims] if isinstance(dims, int) else dims
    return f"{a}=>{without(a, [dim for dim in among if a[dim] == '1'])}"


def softmax(a: str, *rest: object) -> str:
    """Also its backward, which has the result before the axis."""
    x = whole(a, next(argument for argument in rest if isinstance(argument, int)))
    return f"{x},...->{x},..."


def layer_norm(a: str, rows: Sequence[int], *_: object) -> str:
    x = whole(a, range(-len(rows), 0))
    return f"{x}->{x},..."


def layer_norm_backward(a: str, _: object, rows: Sequence[int], *__: object) -> str:
    x = whole(a, range(-len(rows), 0))
    return f"{x},{x},,{x}~,{x}~->{x},R,..."


def batch_norm(s: Sharder, node: Node) -> str:
    """By channel; also its backward, of the gradient and x."""
    a = letters(s.shape(node.args[0]))
    x = whole(a, [dim for dim in range(len(a)) if dim != 1])
    given = f"{x},{x}" if "backward" in node.operator else x
    return f"{given},{a[1]}~,...->{x},{a[1]},..."


def product(s: Sharder, node: Node) -> str | None:
    """`a [..., m, k]` by `b [..., k, n]`, with equal leading dimensions; and perhaps a bias for each column."""
    *bias, a, b = node.args
    leading = s.shape(a)[:-2]
    if len(s.shape(a)) < 2 or len(s.shape(b)) < 2 or s.shape(b)[:-2] != leading:
        return None
    if bias and (node.kwargs or len(s.shape(bias[0])) != 1):
        return None
    rest = letters(leading)
    return f"{'n+,' * len(bias)}{rest}mk,{rest}kn->{rest}mn"


def attention(s: Sharder, node: Node) -> str | None:
    """By sample or by head; without dropout, which would draw otherwise. Query heads that share a key head stay
    together. A mask, the fourth operand or a keyword, is cut where it is not broadcast."""
    if len(s.shape(node.args[0])) != 4 or any(isinstance(argument, float) and argument > 0 for argument in node.args):
        return None
    axes = "bhXY"
    operands = [axes[: len(s.shape(argument))] for argument in node.args]
    if node.operator == "aten.scaled_dot_product_attention.default":
        operands[3:] = [f"{broadcast(s.shape(argument), axes)}~" for argument in node.args[3:]]
    operands += [f"{name}={broadcast(s.shape(value), axes)}" for name, value in node.kwargs]
    return f"{','.join(operands)}->{axes},..."


def convolution(s: Sharder, node: Node) -> str | None:
    """By sample or by channel."""
    space = _space(s, node, *node.args[:2])
    return space and f"ni{space},oi{space},o+->no{space}"


def convolution_backward(s: Sharder, node: Node) -> str | None:
    space = _space(s, node, *node.args[1:3])
    return space and f"no{space},ni{space},oi{space},#2->ni{space},oi{space},o/i"


def _space(s: Sharder, node: Node, x: Argument, weight: Argument) -> str | None:
    """The axes of space. None with groups, transposed, or of one sample: a plain convolution has the channels of its
    weight, after the samples."""
    shape, of_weight = s.shape(x), s.shape(weight)
    is_plain = len(shape) == len(of_weight) and shape[1] == of_weight[1]
    is_odd = any(argument is True for argument in node.args[3:8])
    return "XYZ"[: len(shape) - 2] if is_plain and not is_odd else None


def view(s: Sharder, node: Node) -> bool:
    """Any new shape."""
    operand, after = node.args[0], s.type(node.results[0] or "").shape
    layout: Layout | None = s.layout(operand)
    if layout is not None and layout.kind == "cut":
        layout = through_view(s.shape(operand), after, layout, s.ranks)
    if layout is not None:
        args = [s.as_is(operand), s.part_shape(after, layout)]
        s.emit(node, args, [layout], operator="aten.reshape.default", kwargs=())
    return layout is not None


def split(s: Sharder, node: Node) -> bool:
    """Along another dimension than the cut one, any split; along that, only into the `outer` tensors joined there."""
    operand, size = node.args[:2]
    shape, layout = s.shape(operand), s.layout(operand)
    at = (number(node.args[2]) if len(node.args) > 2 else 0) % len(shape)
    if layout != cut(at, layout.outer):
        return follow(s, node, f"{letters(shape)}=>{letters(shape)},...")
    if not isinstance(size, int) or shape[at] != size * layout.outer:
        return False
    s.emit(node, [s.as_is(operand), size // s.ranks, *node.args[2:]], [cut(at)] * len(node.results))
    return True


def cat(s: Sharder, node: Node) -> bool:
    """Along another dimension than the cut one, any tensors. Along the cut one, only tensors of equal shape: the
    result has `outer` of them. PyTorch ignores tensors of shape [0], as transformers' first cache of keys is."""
    operands = tuple(argument for argument in refs(node.args[0]) if s.shape(argument) != (0,))
    shape = s.type(node.results[0] or "").shape
    at = (number(node.args[1]) if len(node.args) > 1 else 0) % len(shape)
    found = next((layout for layout in map(s.layout, operands) if layout.kind == "cut"), None)
    if found is None or found.dim != at:
        return follow(s, replace(node, args=(operands, *node.args[1:])), f"{letters(shape)}=>{letters(shape)}")
    if found.outer > 1 or len({s.shape(operand) for operand in operands}) > 1:
        return False
    s.emit(node, [s.to(operands, found), *node.args[1:]], [cut(at, len(operands))])
    return True


def dropout(s: Sharder, node: Node) -> bool:
    """Draws the mask of the whole value, so that every rank drops what an unsharded run drops."""
    x, p, training = node.args
    layout = s.layout(x)
    if layout.kind != "cut" or training is False or not isinstance(p, float) or p >= 1 or None in node.results:
        return False
    (first, second), whole, bools = node.results, s.type_like(x), s.type_like(x, dtype="bool")
    like = s.new(node, "like", "aten.zeros.default", (whole.shape,), whole, dtype=TorchConstant("dtype", whole.dtype))
    _, mask = s.new_values(node, ("drawn", "mask"), node.operator, (like, p, True), (whole, bools), WHOLE)
    how = (("axis", TENSOR), ("dim", layout.dim), ("outer", layout.outer))
    s.emit_result(node, second, "comm.shard", (mask,), layout, how)
    kept = s.new(node, "kept", "aten.mul.Tensor", (s.as_is(x), Ref(second or "")), whole, layout)
    s.emit_result(node, first, "aten.mul.Scalar", (kept, 1 / (1 - p)), layout)
    return True


def embedding(s: Sharder, node: Node) -> bool:
    """Cuts the vocabulary (each rank looks up its own rows, the others add zeros), the vectors, or the batch."""
    weight, words = node.args[:2]
    if s.layout(weight) != cut(0):
        batch = letters(s.shape(words))
        return follow(s, node, f"Vz,{batch}->{batch}z", "z*")
    own, absent = _own_words(s, node, words, s.shape(weight)[0])
    found = s.new(node, "own", node.operator, [s.as_is(weight), own], s.type(node.results[0] or ""), PARTIAL)
    s.emit(node, [found, absent, 0], [PARTIAL], operator="aten.masked_fill.Scalar", kwargs=())
    return True


def _own(s: Sharder, node: Node, ids: Argument, size: int) -> tuple[Ref, Ref]:
    """`ids`, from 0 up to `size`, as positions in this rank's part; and which are of other ranks, with a last dimension
    of 1. Every id is also looked up in a table of zeros, which raises at run time outside the vocabulary."""
    part, bools, index = size // s.ranks, s.type_like(ids, dtype="bool"), TensorType("int64", ())
    row = TensorType("float32", (*bools.shape, 1))
    position = s.new(node, "position", "comm.index", (), index, axis=TENSOR)
    first = s.new(node, "first", "aten.mul.Scalar", (position, part))
    local = s.new(node, "local", "aten.sub.Tensor", (s.whole(ids), first))
    below = s.new(node, "below", "aten.lt.Scalar", (local, 0), bools)
    above = s.new(node, "above", "aten.ge.Scalar", (local, part), bools)
    outside = s.new(node, "outside", "aten.logical_or.default", (below, above))
    zeros = s.new(node, "zeros", "aten.zeros.default", ((size, 1),), TensorType("float32", (size, 1)))
    known = s.new(node, "known", "aten.embedding.default", (zeros, s.whole(ids)), row)
    column = s.new(node, "column", "aten.unsqueeze.default", (outside, -1), TensorType("bool", row.shape))
    return local, s.new(node, "absent", "aten.logical_or.default", (column, known))


def _own_words(s: Sharder, node: Node, words: Argument, size: int) -> Sequence[Ref]:
    """As `_own`, with 0 for words of other ranks. The backward finds both by the name of `words`."""
    key = ("words", str(words), str(size))
    if key not in s.notes:
        local, absent = _own(s, node, words, size)
        others = s.new(node, "others", "aten.squeeze.dim", (absent, -1), s.type_like(words, dtype="bool"))
        own = s.new(node, "own_words", "aten.masked_fill.Scalar", (local, others, 0))
        s.notes[key] = (own.name, absent.name)
    return [Ref(name) for name in s.notes[key]]


def embedding_backward(s: Sharder, node: Node) -> bool:
    """Of a table that is cut as in the forward."""
    gradient, words, size, padding, scales = node.args
    if ("words", str(words), str(size)) not in s.notes or padding != -1 or scales is not False:
        batch = letters(s.shape(words))
        return follow(s, node, f"{batch}z,{batch}~->Vz")
    own, absent = _own_words(s, node, words, number(size))
    masked = s.new(node, "own", "aten.masked_fill.Scalar", (s.whole(gradient), absent, 0))
    s.emit(node, [masked, own, number(size) // s.ranks, padding, scales], [cut(0)])
    return True


def log_softmax(s: Sharder, node: Node) -> bool:
    """Also over cut classes: the maximum and the sum of exponentials of all ranks."""
    x, dim, widens = node.args
    layout, shape = s.layout(x), s.shape(x)
    if layout.kind != "cut" or widens is True:
        return False
    if layout.dim != number(dim) % len(shape):
        return follow(s, node, f"{letters(shape)}->{letters(shape)}")
    own = s.as_is(x)
    largest = _over_ranks(s, node, "largest", own, layout, "max")
    shifted = s.new(node, "shifted", "aten.sub.Tensor", (own, largest), at=layout)
    powers = s.new(node, "powers", "aten.exp.default", (shifted,), at=layout)
    log = s.new(node, "log", "aten.log.default", (_over_ranks(s, node, "total", powers, layout),))
    s.emit(node, [shifted, log], [layout], operator="aten.sub.Tensor", kwargs=())
    return True


def _over_ranks(s: Sharder, node: Node, what: str, x: Argument, layout: Layout, op: str = "sum") -> Ref:
    """The sum or the maximum of `x` along the dimension that is cut, which then has a size of 1."""
    row = tuple(1 if dim == layout.dim else size for dim, size in enumerate(s.shape(x)))
    operator = {"sum": "aten.sum.dim_IntList", "max": "aten.amax.default"}[op]
    return s.reduced(s.new(node, what, operator, (x, (layout.dim,), True), s.type_like(x, row), PARTIAL), op)


def log_softmax_backward(s: Sharder, node: Node) -> bool:
    gradient, result, dim = node.args[:3]
    layout = next((one for one in map(s.layout, (gradient, result)) if one.kind == "cut"), WHOLE)
    shape = s.shape(result)
    if layout.kind != "cut" or layout.dim != number(dim) % len(shape):
        return follow(s, node, f"{letters(shape)},...->{letters(shape)}")
    own, powers_of = s.to(gradient, layout), s.to(result, layout)
    total = _over_ranks(s, node, "total", own, layout)
    powers = s.new(node, "powers", "aten.exp.default", (powers_of,), at=layout)
    share = s.new(node, "share", "aten.mul.Tensor", (powers, total), at=layout)
    s.emit(node, [own, share], [layout], operator="aten.sub.Tensor", kwargs=())
    return True


def nll_loss(s: Sharder, node: Node) -> bool:
    """The mean over samples, of classes that are cut: each rank adds up the samples of its classes."""
    x, target, weight, reduction, ignored = node.args
    if s.layout(x) != cut(1) or len(s.shape(x)) != 2 or weight is not None or reduction != _MEAN:
        return False
    loss, count = node.results
    type_, own = s.type_like(x, ()), _own_classes(s, node, target, s.shape(x)[1], number(ignored))
    args, names = (s.as_is(x), own, None, _SUM, _NEVER), ("own_sum", "own_count")
    sums, _ = s.new_values(node, names, node.operator, args, (type_, type_), PARTIAL)
    counted = s.new(node, "counted", "aten.ne.Scalar", (s.whole(target), ignored), s.type_like(target, dtype="bool"))
    dtype = TorchConstant("dtype", type_.dtype)
    number_of = s.new(node, "count", "aten.sum.default", (counted,), type_, dtype=dtype)
    s.emit_result(node, loss, "aten.div.Tensor", (s.whole(sums), number_of), WHOLE)
    s.emit_result(node, count, "aten.clone.default", (number_of,), WHOLE)
    return True


def _own_classes(s: Sharder, node: Node, target: Argument, classes: int, ignored: int) -> Ref:
    """The targets as positions in this rank's part of the classes. Those of other ranks, or ignored, never count."""
    key = ("classes", str(target), str(classes), str(ignored))
    if key not in s.notes:
        bools = s.type_like(target, dtype="bool")
        unwanted = s.new(node, "unwanted", "aten.eq.Scalar", (s.whole(target), ignored), bools)
        counted = s.new(node, "wanted", "aten.masked_fill.Scalar", (s.whole(target), unwanted, 0))
        local, absent = _own(s, node, counted, classes)
        outside = s.new(node, "others", "aten.squeeze.dim", (absent, -1), bools)
        never = s.new(node, "never", "aten.logical_or.default", (outside, unwanted))
        s.notes[key] = (s.new(node, "own_classes", "aten.masked_fill.Scalar", (local, never, _NEVER)).name,)
    return Ref(s.notes[key][0])


def nll_loss_backward(s: Sharder, node: Node) -> bool:
    """The gradient of this rank's classes."""
    gradient, x, target, weight, reduction, ignored, count = node.args
    if s.layout(x) != cut(1) or len(s.shape(x)) != 2 or weight is not None or reduction != _MEAN:
        return False
    own = _own_classes(s, node, target, s.shape(x)[1], number(ignored))
    s.emit(node, (s.whole(gradient), s.as_is(x), own, None, _MEAN, _NEVER, s.whole(count)), [s.layout(x)])
    return True


def _aten(names: str, rule: Rule) -> dict[str, Rule]:
    return {f"aten.{name}" if "." in name else f"aten.{name}.default": rule for name in names.split()}


def _of_kind(kind: OperatorKind, rule: Rule, without: Sequence[str]) -> dict[str, Rule]:
    names = (name for name, operator in OPERATORS.items() if operator.kind is kind)
    return {name: rule for name in names if name.split(".")[1] not in without}


RULES: Mapping[str, Rule] = {
    **_of_kind(OperatorKind.POINTWISE, by_map(pointwise), _NOT_BY_ELEMENT),
    **_of_kind(OperatorKind.POOLING, by_map(pooling), ("max_unpool2d", "max_unpool3d")),
    **_aten("clone detach alias _to_copy contiguous positive", by_map(copy)),
    # Views.
    **_aten("view reshape _unsafe_view flatten.using_ints unflatten.int", view),
    **_aten("permute", by_first(lambda a, dims: f"{a}=>{''.join(a[dim] for dim in dims)}")),
    **_aten("t numpy_T", by_first(lambda a: f"{a}=>{a[::-1]}")),
    **_aten("mT transpose.int", by_first(transpose)),
    **_aten("unsqueeze", by_first(lambda a, at: f"{a}=>{inserted(a, at)}")),
    **_aten("squeeze.dim squeeze.dims", by_first(squeeze)),
    **_aten("expand", by_first(lambda a, shape: f"{a},#0=>{'1' * (len(shape) - len(a))}{a}")),
    **_aten("select.int unbind.int", by_first(lambda a, at=0, *_: f"{whole(a, at)}=>{without(a, at)},...")),
    **_aten("slice.Tensor", by_first(lambda a, at=0, *_: f"{whole(a, at)}=>{whole(a, at)}")),
    **_aten("select_backward", by_first(lambda a, shape, at, index: f"{a},#0=>{inserted(a, at)}")),
    **_aten("slice_backward", by_first(lambda a, shape, at, *_: f"{whole(a, at)},#0=>{whole(a, at)}")),
    **_aten("split.Tensor", split),
    # Tensors that are joined, and sums.
    **_aten("cat", cat),
    **_aten("stack", by_first(lambda a, at=0: f"{a}->{inserted(a, at)}")),
    **_aten("sum", by_first(lambda a: f"{a}=>")),
    **_aten("sum.dim_IntList", by_first(lambda a, dims, keeps=False: f"{a}=>{without(a, dims or None, '1' * keeps)}")),
    **_aten(
        "mean.dim", by_first(lambda a, at, keep=0: f"{whole(a, at or None)}->{without(a, at or None, '1' * keep)}")
    ),
    # Normalizations, and random numbers.
    **_aten("softmax.int _softmax _safe_softmax _softmax_backward_data", by_first(softmax)),
    **_aten("layer_norm native_layer_norm", by_first(layer_norm)),
    **_aten("native_layer_norm_backward", by_first(layer_norm_backward)),
    **_aten("batch_norm _native_batch_norm_legit_functional native_batch_norm_backward", by_map(batch_norm)),
    **_aten("native_dropout", dropout),
    # Products.
    **_aten("mm bmm matmul addmm", by_map(product, "k*nm")),
    **_aten("linear", by_first(lambda a, *_: f"{a[:-1]}k,nk,n+->{a[:-1]}n", "kn*")),
    **_aten("convolution conv2d conv1d", by_map(convolution, "io*")),
    **_aten("convolution_backward", by_map(convolution_backward, "nio*")),
    **_aten("scaled_dot_product_attention _scaled_dot_product_flash_attention_for_cpu", by_map(attention)),
    **_aten("_scaled_dot_product_flash_attention_for_cpu_backward", by_map(attention)),
    # Classes that are cut.
    **_aten("embedding", embedding),
    **_aten("embedding_dense_backward", embedding_backward),
    **_aten("_log_softmax", log_softmax),
    **_aten("_log_softmax_backward_data", log_softmax_backward),
    **_aten("nll_loss_forward", nll_loss),
    **_aten("nll_loss_backward", nll_loss_backward),
}
"""By operator. A test says which ATen operators have a rule."""

# The rules of these are asked even if all operands are whole: the gradient of a cut table is made in parts.
EVEN_IF_WHOLE = frozenset({"aten.embedding_dense_backward.default"})
