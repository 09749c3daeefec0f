"""Sharding rules where classes or the vocabulary are cut: embeddings, softmax over classes, and the loss of classes.

Source of the scheme: Shoeybi et al., Megatron-LM, arXiv:1909.08053.
"""

from collections.abc import Mapping

from sambasim.compiler.sharding.layouts import PARTIAL, WHOLE, cut
from sambasim.compiler.sharding.rules_products import cut_at
from sambasim.compiler.sharding.sharder import Rule, Sharder, dtype_of, number, one_of
from sambasim.ir.graph import Argument, Node, Ref
from sambasim.ir.types import TensorType

_NEVER = -100
"""A class that the loss ignores: torch's default, too."""


def embedding(s: Sharder, node: Node) -> bool:
    """Cuts the vocabulary (each rank looks up its own rows, the others add zeros), the vectors, or the batch."""
    weight, words = node.args[:2]
    of_weight, result = s.layout(weight), node.results[0] or ""
    if cut_at(of_weight, 0) and of_weight.outer == 1:
        own, absent = _own_words(s, node, words, s.shape(weight)[0])
        found = s.new(node, "own", node.operator, [s.as_is(weight), own], s.type(result), PARTIAL)
        s.emit(node, [found, absent, 0], [PARTIAL], operator="aten.masked_fill.Scalar", kwargs=())
    elif cut_at(of_weight, 1):
        rank = len(s.shape(words))
        s.emit(node, [s.as_is(weight), s.whole(words), *node.args[2:]], [of_weight.moved(rank)])
    elif s.layout(words).kind == "cut":
        s.emit(node, [s.whole(weight), s.as_is(words), *node.args[2:]], [s.layout(words)])
    else:
        return False
    return True


def _own(s: Sharder, node: Node, ids: Argument, size: int) -> tuple[Ref, Ref]:
    """`ids`, from 0 up to `size`, as positions in this rank's part; and which are of other ranks, with a last dimension
    of 1. An id outside the vocabulary must raise at run time, as in the whole program: every id is also looked up in a
    table of zeros."""
    part, type_ = size // s.ranks, s.type_like(ids, None)
    bools, row = TensorType("bool", type_.shape), (*type_.shape, 1)
    first = s.new(node, "first", "aten.mul.Scalar", (s.position(node), part), TensorType("int64", ()))
    local = s.new(node, "local", "aten.sub.Tensor", (s.whole(ids), first), type_)
    below = s.new(node, "below", "aten.lt.Scalar", (local, 0), bools)
    above = s.new(node, "above", "aten.ge.Scalar", (local, part), bools)
    outside = s.new(node, "outside", "aten.logical_or.default", (below, above), bools)
    zeros = s.new(node, "zeros", "aten.zeros.default", ((size, 1),), TensorType("float32", (size, 1)))
    known = s.new(node, "known", "aten.embedding.default", (zeros, s.whole(ids)), TensorType("float32", row))
    column = s.new(node, "column", "aten.unsqueeze.default", (outside, -1), TensorType("bool", row))
    absent = s.new(node, "absent", "aten.logical_or.default", (column, known), TensorType("bool", row))
    return local, absent


def _own_words(s: Sharder, node: Node, words: Argument, size: int) -> tuple[Ref, Ref]:
    """As `_own`, with 0 for words of other ranks. The backward finds both by the name of `words`."""
    key = _words_key(words, size)
    if key not in s.notes:
        local, absent = _own(s, node, words, size)
        others = s.new(node, "others", "aten.squeeze.dim", (absent, -1), s.type_like(words, None, "bool"))
        own = s.new(node, "own_words", "aten.masked_fill.Scalar", (local, others, 0), s.type_like(words, None))
        s.notes[key] = (own.name, absent.name)
    own_name, absent_name = s.notes[key]
    return Ref(own_name), Ref(absent_name)


def _words_key(words: Argument, size: Argument) -> tuple[str, ...]:
    return ("words", words.name if isinstance(words, Ref) else "", str(size))


def embedding_backward(s: Sharder, node: Node) -> bool:
    """Of a table that is cut as in the forward."""
    gradient, words, size = node.args[:3]
    padding, scales = node.args[3:5]
    rank = len(s.shape(words))
    layout = s.layout(gradient)
    if _words_key(words, size) in s.notes and padding == -1 and scales is False:
        own, absent = _own_words(s, node, words, number(size))
        type_ = s.type_like(gradient, None)
        masked = s.new(node, "own", "aten.masked_fill.Scalar", (s.whole(gradient), absent, 0), type_)
        s.emit(node, [masked, own, number(size) // s.ranks, padding, scales], [cut(0)])
    elif cut_at(layout, rank):
        s.emit(node, [s.as_is(gradient), s.whole(words), *node.args[2:]], [layout.moved(1)])
    elif layout.kind == "cut":
        s.emit(node, [s.as_is(gradient), s.to(words, layout), *node.args[2:]], [PARTIAL])
    else:
        return False
    return True


def log_softmax(s: Sharder, node: Node) -> bool:
    """Also over cut classes: the maximum and the sum of exponentials of all ranks."""
    x, dim, widens = node.args
    layout, shape = s.layout(x), s.shape(x)
    if layout.kind != "cut" or widens is True:
        return False
    at = number(dim) % len(shape)
    if layout.dim != at:
        s.emit(node, [s.as_is(x), dim, widens], [layout])
        return True
    type_ = s.type_like(x, shape)
    row = s.type_like(x, (*shape[:at], 1, *shape[at + 1 :]))
    largest = s.reduced(s.new(node, "largest", "aten.amax.default", (s.as_is(x), (at,), True), row, PARTIAL), "max")
    shifted = s.new(node, "shifted", "aten.sub.Tensor", (s.as_is(x), largest), type_, layout)
    powers = s.new(node, "powers", "aten.exp.default", (shifted,), type_, layout)
    total = s.reduced(s.new(node, "total", "aten.sum.dim_IntList", (powers, (at,), True), row, PARTIAL))
    log = s.new(node, "log", "aten.log.default", (total,), row)
    s.emit(node, [shifted, log], [layout], operator="aten.sub.Tensor", kwargs=())
    return True


def log_softmax_backward(s: Sharder, node: Node) -> bool:
    gradient, result, dim = node.args[:3]
    layout = next((one for one in map(s.layout, (gradient, result)) if one.kind == "cut"), WHOLE)
    shape = s.shape(result)
    at = number(dim) % len(shape)
    if layout.kind != "cut":
        return False
    own = [s.to(one, layout) for one in (gradient, result)]
    if layout.dim != at:
        s.emit(node, [*own, *node.args[2:]], [layout])
        return True
    type_, row = s.type_like(result, shape), s.type_like(result, (*shape[:at], 1, *shape[at + 1 :]))
    total = s.reduced(s.new(node, "total", "aten.sum.dim_IntList", (own[0], (at,), True), row, PARTIAL))
    powers = s.new(node, "powers", "aten.exp.default", (own[1],), type_, layout)
    share = s.new(node, "share", "aten.mul.Tensor", (powers, total), type_, layout)
    s.emit(node, [own[0], share], [layout], operator="aten.sub.Tensor", kwargs=())
    return True


def nll_loss(s: Sharder, node: Node) -> bool:
    """The mean over samples, of classes that are cut: each rank adds up the samples of its classes."""
    x, target, weight, reduction, ignored = node.args
    if not _is_mean_over_cut_classes(s, x, weight, reduction):
        return False
    loss, count = node.results
    type_ = s.type_like(x, ())
    own = _own_classes(s, node, target, s.shape(x)[1], number(ignored))
    sums, _ = s.new_values(
        node,
        ("own_sum", "own_count"),
        node.operator,
        (s.as_is(x), own, None, _SUM, _NEVER),
        (type_, type_),
        (PARTIAL, PARTIAL),
    )
    counted = s.new(node, "counted", "aten.ne.Scalar", (s.whole(target), ignored), s.type_like(target, None, "bool"))
    number_of = s.new(node, "count", "aten.sum.default", (counted,), type_, WHOLE, (("dtype", dtype_of(type_)),))
    if loss is not None:
        s.emit(one_of(node, loss), (s.whole(sums), number_of), [WHOLE], operator="aten.div.Tensor", kwargs=())
    if count is not None:
        s.emit(one_of(node, count), (number_of,), [WHOLE], operator="aten.clone.default", kwargs=())
    return True


_MEAN, _SUM = 1, 2  # of torch's reductions


def _is_mean_over_cut_classes(s: Sharder, x: Argument, weight: Argument, reduction: Argument) -> bool:
    layout = s.layout(x)
    cut_by_classes = cut_at(layout, 1) and layout.outer == 1 and len(s.shape(x)) == 2
    return cut_by_classes and weight is None and reduction == _MEAN


def _own_classes(s: Sharder, node: Node, target: Argument, classes: int, ignored: int) -> Ref:
    """The targets as positions in this rank's part of the classes; those of other ranks, and ignored ones, never
    count."""
    key = ("classes", target.name if isinstance(target, Ref) else "", str(classes), str(ignored))
    if key not in s.notes:
        type_, bools = s.type_like(target, None), s.type_like(target, None, "bool")
        unwanted = s.new(node, "unwanted", "aten.eq.Scalar", (s.whole(target), ignored), bools)
        counted = s.new(node, "wanted", "aten.masked_fill.Scalar", (s.whole(target), unwanted, 0), type_)
        local, absent = _own(s, node, counted, classes)
        outside = s.new(node, "others", "aten.squeeze.dim", (absent, -1), bools)
        never = s.new(node, "never", "aten.logical_or.default", (outside, unwanted), bools)
        s.notes[key] = (s.new(node, "own_classes", "aten.masked_fill.Scalar", (local, never, _NEVER), type_).name,)
    return Ref(s.notes[key][0])


def nll_loss_backward(s: Sharder, node: Node) -> bool:
    """The gradient of this rank's classes."""
    gradient, x, target, weight, reduction, ignored, count = node.args
    if not _is_mean_over_cut_classes(s, x, weight, reduction):
        return False
    own = _own_classes(s, node, target, s.shape(x)[1], number(ignored))
    args = (s.whole(gradient), s.as_is(x), own, None, _MEAN, _NEVER, s.whole(count))
    s.emit(node, args, [s.layout(x)])
    return True


LOSS_RULES: Mapping[str, Rule] = {
    "aten.embedding.default": embedding,
    "aten.embedding_dense_backward.default": embedding_backward,
    "aten._log_softmax.default": log_softmax,
    "aten._log_softmax_backward_data.default": log_softmax_backward,
    "aten.nll_loss_forward.default": nll_loss,
    "aten.nll_loss_backward.default": nll_loss_backward,
}
