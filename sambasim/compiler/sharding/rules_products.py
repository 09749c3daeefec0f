"""Sharding rules of products: linear layers, attention, convolutions.

A product that sums over a cut dimension gives a term on each rank. A bias is added once, to the sum.
"""

from collections.abc import Mapping, Sequence

from sambasim.compiler.sharding.layouts import PARTIAL, WHOLE, Layout, cut
from sambasim.compiler.sharding.sharder import Rule, Sharder, number
from sambasim.ir.graph import Argument, Node, Ref


def product(s: Sharder, node: Node) -> bool:
    """`a [..., m, k]` by `b [..., k, n]`, with equal leading dimensions."""
    a, b = node.args[:2]
    found = _ways(s, a, b)
    if found is None:
        return False
    left, right, result = found
    s.emit(node, [s.to(a, left), s.to(b, right), *node.args[2:]], [result])
    return True


def product_and_bias(s: Sharder, node: Node) -> bool:
    """`bias + a b`, with a bias for each column."""
    bias, a, b = node.args[:3]
    found = _ways(s, a, b)
    if found is None or node.kwargs or len(s.shape(bias)) != 1:
        return False
    left, right, result = found
    if result != PARTIAL:
        of_bias = result.moved(0) if result.kind == "cut" and result.dim == 1 else WHOLE
        s.emit(node, [s.to(bias, of_bias), s.to(a, left), s.to(b, right)], [result])
        return True
    return _sum_and_bias(s, node, "aten.mm.default", [s.to(a, left), s.to(b, right)], bias)


def linear(s: Sharder, node: Node) -> bool:
    """`x [..., k]` by `weight [n, k]`, transposed, plus `bias [n]`."""
    x, weight = node.args[:2]
    bias = node.args[2] if len(node.args) > 2 else None
    last = len(s.shape(x)) - 1
    of_x, of_weight = s.layout(x), s.layout(weight)
    if of_x.kind == "cut" and of_x.dim == last:
        args = [s.as_is(x), s.to(weight, of_x.moved(1))]
        if bias is not None:
            return _sum_and_bias(s, node, node.operator, args, bias)
        s.emit(node, args, [PARTIAL])
    elif of_weight.kind == "cut" and of_weight.dim == 1:
        return _row(s, node, x, weight, bias, of_weight.moved(last))
    elif of_weight.kind == "cut":
        args = [s.whole(x), s.as_is(weight)]
        s.emit(node, args if bias is None else [*args, s.to(bias, of_weight)], [of_weight.moved(last)])
    elif of_x.kind == "cut":
        s.emit(node, [s.as_is(x), *map(s.whole, node.args[1:])], [of_x])
    else:
        return False
    return True


def _row(s: Sharder, node: Node, x: Argument, weight: Argument, bias: Argument, of_x: Layout) -> bool:
    args = [s.to(x, of_x), s.as_is(weight)]
    if bias is not None:
        return _sum_and_bias(s, node, node.operator, args, bias)
    s.emit(node, args, [PARTIAL])
    return True


def _sum_and_bias(s: Sharder, node: Node, operator: str, args: Sequence[Argument], bias: Argument) -> bool:
    type_ = s.type(node.results[0] or "")
    term = s.new(node, "term", operator, args, type_, PARTIAL)
    s.emit(node, [s.whole(term), s.whole(bias)], [WHOLE], operator="aten.add.Tensor", kwargs=())
    return True


def _ways(s: Sharder, a: Argument, b: Argument) -> tuple[Layout, Layout, Layout] | None:
    """The layouts of `a`, `b` and their product: over a cut inner dimension, else by columns, rows or leading ones."""
    of_a, of_b, rank = s.layout(a), s.layout(b), len(s.shape(a))
    if len(s.shape(b)) != rank or rank < 2 or s.shape(a)[:-2] != s.shape(b)[:-2]:
        return None
    rows, columns = rank - 2, rank - 1
    if of_a.kind == "cut" and of_a.dim == columns:
        return of_a, of_a.moved(rows), PARTIAL
    if of_b.kind == "cut" and of_b.dim == rows:
        return of_b.moved(columns), of_b, PARTIAL
    for leading in (of_a, of_b):
        if leading.kind == "cut" and leading.dim < rows:
            return leading, leading, leading
    if of_b.kind == "cut" and of_b.dim == columns:
        return WHOLE, of_b, of_b
    if of_a.kind == "cut" and of_a.dim == rows:
        return of_a, WHOLE, of_a
    return None


_MASK = "attn_mask"
_MASK_POSITION = 3  # of scaled_dot_product_attention


def attention(s: Sharder, node: Node) -> bool:
    """By sample or by head, the first two dimensions; without dropout, which would draw otherwise. Query heads that
    share a key head stay together. A mask is cut where it is not broadcast."""
    args = list(node.args)
    plain = node.operator == "aten.scaled_dot_product_attention.default"
    masks = [number for number in (_MASK_POSITION,) if plain and len(args) > number]
    tensors = [one for at, one in enumerate(args) if at not in masks]
    layout = next((s.layout(one) for one in tensors if s.layout(one).kind == "cut"), WHOLE)
    if layout.kind != "cut" or layout.dim > 1 or any(isinstance(one, float) and one > 0 for one in tensors):
        return False
    heads = {s.shape(one)[1] for one in tensors if isinstance(one, Ref) and len(s.shape(one)) == 4}
    if not heads or (layout.dim == 1 and any(count % s.ranks for count in heads)):
        return False

    def masked(mask: Argument) -> Argument:
        shape = s.shape(mask)
        at = layout.dim - (4 - len(shape))
        return s.whole(mask) if at < 0 or shape[at] == 1 else s.to(mask, cut(at))

    done = [masked(one) if at in masks else s.to(one, layout) for at, one in enumerate(args)]
    kwargs = [(name, masked(value) if name == _MASK else value) for name, value in node.kwargs]
    s.emit(node, done, [layout] * len(node.results), kwargs=kwargs)
    return True


def convolution(s: Sharder, node: Node) -> bool:
    """By sample, by output channel, or summed over input channels; without groups, not transposed."""
    x, weight, bias = node.args[:3] if len(node.args) > 2 else (*node.args, None)
    if _is_grouped(s, node, x, weight):
        return False
    of_x, of_weight = s.layout(x), s.layout(weight)
    rest = node.args[3:]
    if cut_at(of_x, 1) or cut_at(of_weight, 1):
        inner = of_x if cut_at(of_x, 1) else of_weight
        args: list[Argument] = [s.to(x, inner), s.to(weight, inner)]
        if bias is None:
            s.emit(node, [*args, None, *rest], [PARTIAL])
            return True
        type_ = s.type(node.results[0] or "")
        term = s.new(node, "term", node.operator, [*args, None, *rest], type_, PARTIAL, node.kwargs)
        size, spatial = s.shape(bias)[0], len(type_.shape) - 2
        shaped = s.new(
            node,
            "bias",
            "aten.reshape.default",
            [s.whole(bias), (size, *[1] * spatial)],
            s.type_like(bias, (size, *[1] * spatial)),
        )
        s.emit(node, [s.whole(term), shaped], [WHOLE], operator="aten.add.Tensor", kwargs=())
    elif cut_at(of_weight, 0):
        s.emit(node, [s.whole(x), s.as_is(weight), s.to(bias, of_weight), *rest], [of_weight.moved(1)])
    elif cut_at(of_x, 0):
        s.emit(node, [s.as_is(x), s.whole(weight), s.whole(bias), *rest], [of_x])
    else:
        return False
    return True


def convolution_backward(s: Sharder, node: Node) -> bool:
    gradient, x, weight = node.args[:3]
    if _is_grouped(s, node, x, weight):
        return False
    of_gradient, of_x, of_weight = map(s.layout, (gradient, x, weight))
    if cut_at(of_gradient, 0) or cut_at(of_x, 0):
        layouts = (cut(0), cut(0), WHOLE)
        results = [cut(0), PARTIAL, PARTIAL]
    elif cut_at(of_x, 1) or cut_at(of_weight, 1):
        inner = of_x if cut_at(of_x, 1) else of_weight
        layouts, results = (WHOLE, inner, inner), [inner, inner, WHOLE]
    elif cut_at(of_gradient, 1) or cut_at(of_weight, 0):
        outer = of_gradient if cut_at(of_gradient, 1) else of_weight.moved(1)
        layouts, results = (outer, WHOLE, outer.moved(0)), [PARTIAL, outer.moved(0), outer.moved(0)]
    else:
        return False
    sizes = node.args[3]
    if isinstance(sizes, tuple) and sizes and results[2].kind == "cut":
        sizes = (number(sizes[0]) // s.ranks,)
    operands = [s.to(one, layout) for one, layout in zip((gradient, x, weight), layouts, strict=True)]
    s.emit(node, [*operands, sizes, *node.args[4:]], results)
    return True


def cut_at(layout: Layout, dim: int) -> bool:
    return layout.kind == "cut" and layout.dim == dim


def _is_grouped(s: Sharder, node: Node, x: Argument, weight: Argument) -> bool:
    """Whether it has groups, or is transposed: the channels of a plain convolution are those of its weight."""
    return s.shape(x)[1] != s.shape(weight)[1] or any(one is True for one in node.args[3:8])


PRODUCT_RULES: Mapping[str, Rule] = {
    "aten.mm.default": product,
    "aten.bmm.default": product,
    "aten.matmul.default": product,
    "aten.addmm.default": product_and_bias,
    "aten.linear.default": linear,
    "aten._scaled_dot_product_flash_attention_for_cpu.default": attention,
    "aten._scaled_dot_product_flash_attention_for_cpu_backward.default": attention,
    "aten.scaled_dot_product_attention.default": attention,
    "aten.convolution.default": convolution,
    "aten.conv2d.default": convolution,
    "aten.conv1d.default": convolution,
    "aten.convolution_backward.default": convolution_backward,
}
