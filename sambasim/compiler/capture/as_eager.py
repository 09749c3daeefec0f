"""Tracing records the operators that eager PyTorch runs, where torch's tracers would record others."""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from math import prod
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch._subclasses import fake_impls
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensorMode
from torch.nn.modules.batchnorm import _BatchNorm

from sambasim.compiler.capture.asked_values import refuse_tried
from sambasim.compiler.capture.tensors import order_to_restore
from sambasim.compiler.capture.trial import with_values

_UPSAMPLINGS = (
    *(f"upsample_{mode}" for mode in ("linear1d", "bilinear2d", "bicubic2d", "trilinear3d")),
    *(f"{kind}{axes}d" for kind in ("upsample_nearest", "_upsample_nearest_exact") for axes in (1, 2, 3)),
)
_DECOMPOSED_IN_PYTHON = (
    *("lstm.input", "gru.input", "rnn_tanh.input", "rnn_relu.input"),
    *("multi_margin_loss.default", "multilabel_margin_loss_forward.default"),
    *(f"{name}.{overload}" for name in _UPSAMPLINGS for overload in ("vec", "default")),
)
"""Operators that torch's Python kernels take apart while tracing. Those kernels lose the dropout between recurrent
layers, unroll time, change bits or are slower; without them the trace records the operator that eager PyTorch runs."""


def _mean_pooling(x: Tensor, sizes: Sequence[int]) -> Any:
    """Adaptive pooling as torch's own kernel does it, but without `as_strided`, which only orders the memory."""
    if all(size == 1 for size in sizes):
        return x.mean(tuple(range(-len(sizes), 0)), keepdim=True)
    return getattr(torch.ops.aten, f"_adaptive_avg_pool{len(sizes)}d").default(x, sizes)


def _without_vectors(kernel: OpOverload, at: int, option: object) -> Callable[..., object]:
    """The values of a decomposition. torch's own kernel computes vectors, too, whenever it is traced."""

    def values(matrix: Tensor, given: object = option, **more: object) -> object:
        return kernel(matrix, given, matrix.requires_grad and torch.is_grad_enabled(), **more)[at]

    return values


def _covariance(
    x: Tensor, *, correction: int = 1, fweights: Tensor | None = None, aweights: Tensor | None = None
) -> Tensor:
    """torch.cov as torch's own kernel computes it, which asks for the signs of weights and divisor."""
    rows = x.view(1, -1) if x.dim() < 2 else x
    given = [weight for weight in (fweights, aweights) if weight is not None]
    for weight in given:
        torch._assert_async(weight.min() >= 0, "the weights of torch.cov are not negative")
    weights = prod(given[1:], start=given[0]) if given else None
    count = rows.shape[1] if weights is None else weights.sum()
    centered = rows - ((rows if weights is None else rows * weights).sum(1) / count).unsqueeze(1)
    divisor = count - correction
    if weights is not None and aweights is not None and correction:
        divisor = count - correction * (weights * aweights).sum() / count
    product = torch.mm(centered, (centered if weights is None else centered * weights).t().conj())
    return (product / (divisor.clamp(min=0) if isinstance(divisor, Tensor) else max(divisor, 0))).squeeze()


def _check_matrix(info: Tensor, api_name: str, *, is_matrix: bool) -> None:
    """What torch.linalg does to raise an error; by torch's own way it has an order of its own in the graph."""
    refuse_tried(torch.linalg.LinAlgError)
    torch._assert_async((info == 0).all(), f"{api_name} does not work for this matrix: it is singular, say")


def _ctc_loss(
    mode: Any, operator: Any, scores: Tensor, targets: Tensor, _: object, lengths: Any, *more: object, **how: object
) -> tuple[Tensor, Tensor]:
    """The shapes of the results. The second depends on the longest target; where lengths are a tensor, and targets are
    padded, it is the most that it can be."""
    steps, samples, _ = scores.shape
    if isinstance(lengths, Tensor) and targets.dim() != 2:
        raise DynamicOutputShapeException(operator)
    longest = targets.shape[1] if isinstance(lengths, Tensor) else max(lengths, default=0)
    with mode:
        return scores.new_empty(samples), scores.new_empty(samples, steps, 2 * longest + 1)


def _grouped_products(
    mode: FakeTensorMode, operator: OpOverload, a: Tensor, b: Tensor, offs: Tensor | None = None, *others: object
) -> Tensor:
    """The shape of products by group, which torch's tracers know for bfloat16 only. If both operands have the same
    number of dimensions, there is a matrix for each group; else the rows or columns are those of all groups."""
    groups = () if a.dim() != b.dim() else a.shape[:-2] if offs is None else offs.shape
    with mode:
        return a.new_empty(*groups, a.shape[-2], b.shape[-1])


def _dense_zeros(mode: FakeTensorMode, operator: OpOverload, size: Sequence[int], **options: Any) -> Tensor:
    with mode:
        return torch.zeros(size, **options)


_ZEROS = torch.ops.aten._efficientzerotensor.default
_SHAPES = {
    torch.ops.aten._ctc_loss.Tensor: _ctc_loss,
    torch.ops.aten._ctc_loss.default: _ctc_loss,
    torch.ops.aten._grouped_mm.default: _grouped_products,
    _ZEROS: _dense_zeros,
}
"""Operators whose shapes torch's tracers refuse to know, and zeros without memory, on which they crash."""

_COMPOSITES: dict[Any, Callable[..., object]] = {
    torch.ops.aten.adaptive_avg_pool2d.default: _mean_pooling,
    torch.ops.aten.adaptive_avg_pool3d.default: _mean_pooling,
    torch.ops.aten.linalg_svdvals.default: _without_vectors(torch.ops.aten._linalg_svd.default, 1, False),
    torch.ops.aten.linalg_eigvalsh.default: _without_vectors(torch.ops.aten._linalg_eigh.default, 0, "L"),
    torch.ops.aten.cov.default: _covariance,
}


_KEYWORD = getattr(torch.ops.aten.random, "from")
"""In the code that FX writes for a graph, its name would be a keyword, unless FX gives it a name of its own."""


def _batch_norm(layer: Any, x: Tensor) -> Tensor:
    """BatchNorm without a momentum has 1 / number of batches for one, which is a Python number in PyTorch."""
    if layer.momentum is not None or not (layer.training and layer.track_running_stats):
        return _FORWARD(layer, x)
    layer._check_input_dim(x)
    layer.num_batches_tracked.add_(1)
    momentum = layer.num_batches_tracked.double().reciprocal()
    # With this momentum the kernel gives the sum of squares that it divides by it.
    others = x.numel() / x.shape[1] - 1
    squares = torch.zeros_like(layer.running_var)
    arguments = torch.zeros_like(squares), squares, True, others, layer.eps
    result, mean, _ = torch.native_batch_norm(x, layer.weight, layer.bias, *arguments)
    for running, batch in ((layer.running_mean, mean.double()), (layer.running_var, squares.double() / others)):
        running.copy_(momentum * batch + (1 - momentum) * running.double())
    return result


_FORWARD: Callable[[Any, Tensor], Tensor] = _BatchNorm.forward


@contextlib.contextmanager
def kernels_of_eager() -> Iterator[None]:
    """While this is open, AOTAutograd traces with the kernels above, and fake tensors know their shapes."""
    composite, autograd = torch._C.DispatchKey.CompositeImplicitAutograd, torch._C.DispatchKey.Autograd
    without = [attrgetter(name)(torch.ops.aten) for name in _DECOMPOSED_IN_PYTHON]
    kernels: list[tuple[Any, Any, Callable[..., object] | None]]
    kernels = [(operator, key, None) for operator in without for key in (composite, autograd)]
    kernels += [(operator, composite, kernel) for operator, kernel in _COMPOSITES.items()]
    kernels.append((torch.ops.aten._linalg_check_errors.default, torch._C.DispatchKey.AutogradCPU, _check_matrix))
    own = [(operator, key, operator.py_kernels.get(key)) for operator, key, _ in kernels]
    is_from_torch = fx.graph._is_from_torch
    known = (fx.graph, "_is_from_torch", lambda target: target is not _KEYWORD and is_from_torch(target))
    shapes = fake_impls.op_implementations_dict
    try:
        _register(kernels)
        shapes.update(_SHAPES)
        with with_values([known, (_BatchNorm, "forward", _batch_norm)]):
            yield
    finally:
        _register(own)
        for operator in _SHAPES:
            shapes.pop(operator, None)


def _register(kernels: Iterable[tuple[Any, Any, Callable[..., object] | None]]) -> None:
    for operator, key, kernel in kernels:
        operator.py_kernels.pop(key, None)
        if kernel is not None:
            operator.py_kernels[key] = kernel
        operator._dispatch_cache.clear()


def plain_operators(graph: fx.Graph) -> None:
    """Zeros without memory become zeros, `random_` between two bounds gets a name that is no keyword, and what is made
    in another type than torch's default says so."""
    for node in graph.find_nodes(op="call_function", target=_ZEROS):
        node.target = torch.ops.aten.zeros.default
    for node in graph.find_nodes(op="call_function", target=_KEYWORD):
        if node.args[2] is not None:
            node.target = torch.ops.aten.randint_like.low_dtype
    for node in graph.nodes:
        made = node.meta.get("val")
        if node.op == "call_function" and isinstance(node.target, OpOverload) and isinstance(made, Tensor):
            names = [argument.name for argument in node.target._schema.arguments]
            by_default = "dtype" in names and not node.all_input_nodes and node.kwargs.get("dtype") is None
            if by_default and made.is_floating_point() and made.dtype is not torch.get_default_dtype():
                node.update_kwarg("dtype", made.dtype)


def drop_as_eager(graph: fx.Graph) -> None:
    """Eager PyTorch scales a dropout's mask before it multiplies a gradient by it, which in 16 bits is rounded."""
    aten = torch.ops.aten
    for node in graph.find_nodes(op="call_function", target=aten.native_dropout_backward.default):
        gradient, mask, scale = node.args
        if node.meta["val"].element_size() != 2:  # bytes
            continue
        with graph.inserting_before(node):
            cast = graph.call_function(aten._to_copy.default, (mask,), {"dtype": node.meta["val"].dtype})
            scaled = graph.call_function(aten.mul.Scalar, (cast, scale))
        for made in (cast, scaled):
            made.meta = dict(node.meta)
        node.target, node.args = aten.mul.Tensor, (gradient, scaled)


def strided_in_order(graph: fx.Graph) -> None:
    """`as_strided` of a tensor whose dimensions lie in another order in memory gets one in that order, however the
    tensor will lie there: a rank may receive it from another, or gather its parts."""
    aten = torch.ops.aten
    for node in graph.find_nodes(op="call_function", target=aten.as_strided.default):
        base = node.args[0]
        if not (order := order_to_restore(base.meta["val"])):
            continue
        with graph.inserting_before(node):
            permuted = graph.call_function(aten.permute.default, (base, order))
            ordered = graph.call_function(aten.contiguous.default, (permuted,))
        for made in (permuted, ordered):
            made.meta = {**node.meta, "val": base.meta["val"].permute(order)}
        node.update_arg(0, ordered)
