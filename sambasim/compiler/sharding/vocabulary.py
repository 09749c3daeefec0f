"""The sharding rules where classes or a vocabulary are cut: embeddings, log_softmax and nll_loss. Source: Shoeybi et
al., Megatron-LM, arXiv:1909.08053."""

from collections.abc import Sequence

from sambasim.compiler.sharding.maps import follow, letters
from sambasim.compiler.sharding.sharder import PARTIAL, WHOLE, Layout, Sharder, cut, number
from sambasim.ir.graph import Argument, Node, Ref, TorchConstant
from sambasim.ir.mesh import TENSOR
from sambasim.ir.types import TensorType

_NEVER = -100
"""A class that the loss ignores: torch's default, too."""

_MEAN, _SUM = 1, 2  # of torch's reductions


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
    of 1. An id outside the vocabulary must raise at run time, as in the whole program: every id is also looked up in a
    table of zeros."""
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
    key = _words_key(words, size)
    if key not in s.notes:
        local, absent = _own(s, node, words, size)
        others = s.new(node, "others", "aten.squeeze.dim", (absent, -1), s.type_like(words, dtype="bool"))
        own = s.new(node, "own_words", "aten.masked_fill.Scalar", (local, others, 0))
        s.notes[key] = (own.name, absent.name)
    return [Ref(name) for name in s.notes[key]]


def _words_key(words: Argument, size: Argument) -> tuple[str, ...]:
    return ("words", words.name if isinstance(words, Ref) else "", str(size))


def embedding_backward(s: Sharder, node: Node) -> bool:
    """Of a table that is cut as in the forward."""
    gradient, words, size, padding, scales = node.args
    if _words_key(words, size) not in s.notes or padding != -1 or scales is not False:
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
    largest = _over_ranks(s, node, "largest", "aten.amax.default", own, layout, "max")
    shifted = s.new(node, "shifted", "aten.sub.Tensor", (own, largest), at=layout)
    powers = s.new(node, "powers", "aten.exp.default", (shifted,), at=layout)
    log = s.new(node, "log", "aten.log.default", (_over_ranks(s, node, "total", _ADDED, powers, layout),))
    s.emit(node, [shifted, log], [layout], operator="aten.sub.Tensor", kwargs=())
    return True


_ADDED = "aten.sum.dim_IntList"


def _over_ranks(s: Sharder, node: Node, what: str, operator: str, x: Argument, layout: Layout, op: str = "sum") -> Ref:
    """What `operator` and then `op` make of `x` along the dimension that is cut, which then has a size of 1."""
    row = tuple(1 if dim == layout.dim else size for dim, size in enumerate(s.shape(x)))
    own = s.new(node, what, operator, (x, (layout.dim,), True), s.type_like(x, row), PARTIAL)
    return s.reduced(own, op)


def log_softmax_backward(s: Sharder, node: Node) -> bool:
    gradient, result, dim = node.args[:3]
    layout = next((one for one in map(s.layout, (gradient, result)) if one.kind == "cut"), WHOLE)
    shape = s.shape(result)
    if layout.kind != "cut" or layout.dim != number(dim) % len(shape):
        return follow(s, node, f"{letters(shape)},...->{letters(shape)}")
    own, powers_of = s.to(gradient, layout), s.to(result, layout)
    total = _over_ranks(s, node, "total", _ADDED, own, layout)
    powers = s.new(node, "powers", "aten.exp.default", (powers_of,), at=layout)
    share = s.new(node, "share", "aten.mul.Tensor", (powers, total), at=layout)
    s.emit(node, [own, share], [layout], operator="aten.sub.Tensor", kwargs=())
    return True


def nll_loss(s: Sharder, node: Node) -> bool:
    """The mean over samples, of classes that are cut: each rank adds up the samples of its classes."""
    x, target, weight, reduction, ignored = node.args
    if not _is_mean_over_cut_classes(s, x, weight, reduction):
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


def _is_mean_over_cut_classes(s: Sharder, x: Argument, weight: Argument, reduction: Argument) -> bool:
    return s.layout(x) == cut(1) and len(s.shape(x)) == 2 and weight is None and reduction == _MEAN


def _own_classes(s: Sharder, node: Node, target: Argument, classes: int, ignored: int) -> Ref:
    """The targets as positions in this rank's part of the classes; those of other ranks, and ignored ones, never
    count."""
    key = ("classes", target.name if isinstance(target, Ref) else "", str(classes), str(ignored))
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
    if not _is_mean_over_cut_classes(s, x, weight, reduction):
        return False
    own = _own_classes(s, node, target, s.shape(x)[1], number(ignored))
    s.emit(node, (s.whole(gradient), s.as_is(x), own, None, _MEAN, _NEVER, s.whole(count)), [s.layout(x)])
    return True
