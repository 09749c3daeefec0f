"""Kernels of PyTorch that take their operands on trust, and what must hold before they are called.

Torch's own callers (autograd above all) give them what another kernel has made. Given anything else, they read or write
where they should not, or divide by zero: the process dies, or worse. Rows were found by giving operators operands at
random under a checking allocator, or in the source of a kernel, which says what it needs. Shapes are looked at here;
operands whose values a kernel trusts (indices, above all) are in `saved_operands`.
"""

from collections.abc import Callable, Iterator, Mapping
from math import prod
from typing import TypeAlias

from sambasim.ir.graph import Ref
from sambasim.runtime.call import Call
from sambasim.runtime.saved_operands import SAVED

Check = Callable[[Call], Iterator[str]]

_FLOATS = frozenset({"float16", "bfloat16", "float32", "float64"})
Shape: TypeAlias = tuple[int, ...]


def hazard(call: Call) -> str | None:
    """What is wrong with giving its operands to `call`'s kernel; None if nothing is."""
    for table in (CHECKS, SAVED):
        check = table.get(call.node.operator)
        fault = next(check(call), None) if check is not None else None
        if fault is not None:
            return fault
    return None


def _must_be(call: Call, wanted: Mapping[str, Shape]) -> Iterator[str]:
    """Each named operand has its shape; it may be None where the schema allows it."""
    for name, shape in wanted.items():
        found = call.shape(name)
        if found is None and call.given.get(name) is not None:
            yield f"{name} is a number, and its kernel takes a tensor"
        if found is not None and found != shape:
            yield f"{name} is {list(found)}, and its kernel takes {list(shape)} on trust"


def _shape(call: Call, name: str) -> Shape:
    return call.shape(name) or ()


def _whole(call: Call, name: str) -> int:
    value = call.given.get(name)
    return value if isinstance(value, int) else 0


def _of_channels(*names: str) -> Check:
    def check(call: Call) -> Iterator[str]:
        data = _shape(call, "input")
        if len(data) < 2:
            yield f"its input is {list(data)}, without channels"
            return
        yield from _must_be(call, dict.fromkeys(names, (data[1],)))
        if "grad_out" in call.given:
            yield from _must_be(call, {"grad_out": data})

    return check


_STATISTICS = ("weight", "bias", "running_mean", "running_var", "save_mean", "save_invstd")


def _layer_norm_backward(call: Call) -> Iterator[str]:
    data, normalized = _shape(call, "input"), call.given["normalized_shape"]
    inner = normalized if isinstance(normalized, tuple) else (normalized,)
    outer = data[: len(data) - len(inner)]
    if data[len(outer) :] != inner:
        yield f"its input is {list(data)}, and {list(inner)} is normalized"
    yield from _must_be(call, {"grad_out": data, "weight": data[len(outer) :], "bias": data[len(outer) :]})
    for name in ("mean", "rstd"):
        found = call.shape(name)
        if found is not None and prod(found) != prod(outer):
            yield f"{name} is {list(found)}, and its kernel takes {prod(outer)} numbers on trust"


def _group_norm(call: Call) -> Iterator[str]:
    data = _shape(call, "input")
    samples, channels, inner = (_whole(call, name) for name in ("N", "C", "HxW"))
    groups = _whole(call, "group")
    if min(samples, channels, inner, groups) < 1 or channels % groups or len(data) < 2:
        yield f"{channels} channels in {groups} groups of {samples} samples"
        return
    if data[:2] != (samples, channels) or prod(data) != samples * channels * inner:
        yield f"its input is {list(data)}, and {samples} × {channels} × {inner} is said"
    yield from _must_be(call, {"grad_out": data, "weight": (channels,), "bias": (channels,)})
    for name in ("mean", "rstd"):
        found = call.shape(name)
        if found is not None and prod(found) != samples * groups:
            yield f"{name} is {list(found)}, and its kernel takes {samples * groups} numbers on trust"


def _weight_norm(call: Call) -> Iterator[str]:
    prefix = "saved_" if "saved_v" in call.given else ""
    data, axis = _shape(call, f"{prefix}v"), _whole(call, "dim")
    ends = (0, len(data) - 1)
    if not data or 0 in data or axis not in (ends if "interface" in call.node.operator else (*ends, -1)):
        yield f"norms of {list(data)} along {axis}"
        return
    axis %= len(data)
    norms = tuple(extent if index == axis else 1 for index, extent in enumerate(data))
    wanted = {"grad_w": data, "saved_norms": norms} if prefix else {}
    if axis != -1 and _whole(call, "dim") != -1:
        yield from _must_be(call, {**wanted, f"{prefix}g": norms})
    dtypes = {
        call.dtype(name) for name in ("v", "g", "saved_v", "saved_g", "saved_norms", "grad_w") if name in call.given
    }
    if len(dtypes) > 1 or not dtypes <= _FLOATS:
        yield f"norms of {', '.join(sorted(map(str, dtypes)))}"


def _softmax_backward(call: Call) -> Iterator[str]:
    output, axis = _shape(call, "output"), _whole(call, "dim")
    if not -max(len(output), 1) <= axis < max(len(output), 1):
        yield f"axis {axis} of {list(output)}"
    yield from _must_be(call, {"grad_output": output})
    if call.dtype("output") not in _FLOATS or call.dtype("grad_output") != call.dtype("output"):
        yield f"gradients of {call.dtype('grad_output')} for {call.dtype('output')}"


def _adaptive_pool_backward(dimensions: int) -> Check:
    def check(call: Call) -> Iterator[str]:
        gradient, data = _shape(call, "grad_output"), _shape(call, "self")
        if len(data) not in (dimensions + 1, dimensions + 2) or 0 in data or 0 in gradient:
            yield f"pooling of {list(data)}"
        if gradient[:-dimensions] != data[:-dimensions] or len(gradient) != len(data):
            yield f"gradients are {list(gradient)}, and what was pooled is {list(data)}"
        if call.dtype("grad_output") != call.dtype("self"):
            yield f"gradients of {call.dtype('grad_output')} for {call.dtype('self')}"

    return check


def _cdist(call: Call) -> Iterator[str]:
    first, second = _shape(call, "x1"), _shape(call, "x2")
    if len(first) < 2 or len(first) != len(second) or (*first[:-2], first[-1]) != (*second[:-2], second[-1]):
        yield f"distances between {list(first)} and {list(second)}"
        return
    between = (*first[:-1], second[-2])
    yield from _must_be(call, {"grad": between, "cdist": between})


def _attention(call: Call) -> Iterator[str]:
    query, key, value = (_shape(call, name) for name in ("query", "key", "value"))
    if not len(query) == len(key) == len(value) == 4 or 0 in (*query, *key, *value):
        yield f"attention of {list(query)}, {list(key)} and {list(value)}"
        return
    batch, heads, length, width = query
    known = (batch, heads, key[2], width)
    mask = call.shape("attn_mask")
    if mask is not None and (
        len(mask) not in (2, 4)
        or mask[-2:] != (length, key[2])
        or any(extent not in (1, full) for extent, full in zip(mask[:-2], (batch, heads), strict=False))
    ):
        yield f"attn_mask is {list(mask)}, and its kernel takes [{batch}, {heads}, {length}, {key[2]}] on trust"
    dtypes = {call.dtype(name) for name in ("query", "key", "value", "out", "grad_out") if name in call.given}
    if len(dtypes) > 1 or not dtypes <= _FLOATS:
        yield f"attention of {', '.join(sorted(map(str, dtypes)))}"
    wanted = {"key": known, "value": known, "out": query, "grad_out": query, "logsumexp": (batch, heads, length)}
    yield from _must_be(call, {name: shape for name, shape in wanted.items() if name in call.given})
    if call.dtype("logsumexp") not in (None, "float32", "float64"):
        yield f"logsumexp is of {call.dtype('logsumexp')}"


def _fused_attention(call: Call) -> Iterator[str]:
    width, heads = _whole(call, "embed_dim"), _whole(call, "num_heads") or _whole(call, "num_head")
    if width < 1 or heads < 1 or width % heads:
        yield f"{heads} heads of a width of {width}"
    tokens = call.shape("src") or call.shape("query") or ()
    if len(tokens) != 3 or tokens[2] != width or 0 in tokens:
        yield f"tokens are {list(tokens)}, and {width} wide"
    vectors = ("proj_bias", "norm_weight_1", "norm_bias_1", "norm_weight_2", "norm_bias_2", "ffn_bias_2")
    wanted: dict[str, Shape] = {name: (width,) for name in vectors if name in call.given}
    inner = next(iter(call.shape("ffn_weight_1") or (0,)))
    if "ffn_weight_1" in call.given:
        wanted |= {"ffn_weight_1": (inner, width), "ffn_bias_1": (inner,), "ffn_weight_2": (width, inner)}
    else:
        wanted |= {"key": tokens, "value": tokens}
    wanted |= {"qkv_weight": (3 * width, width), "qkv_bias": (3 * width,), "proj_weight": (width, width)}
    yield from _must_be(call, wanted)
    if call.given.get("mask") is not None:
        yield "a mask, whose shape its kernel takes on trust"


def _recurrent_layer(call: Call) -> Iterator[str]:
    data, hidden = _shape(call, "input"), _whole(call, "hidden_size")
    if len(data) != 3 or 0 in data or not hidden >= 1 or call.given.get("mode") != 2 or call.given["batch_sizes"] != ():
        yield f"a layer of {hidden} over {list(data)}, of mode {call.given.get('mode')}"
        return
    first = 0 if "weight0" in call.given else 1
    names = [f"weight{index}" for index in range(first, first + 4)]
    cell = "cx_" if "cx_" in call.given else "cx_tmp"
    shapes = ((4 * hidden, data[2]), (4 * hidden, hidden), (4 * hidden,), (4 * hidden,))
    output = (*data[:2], hidden)
    # With one step of batch_first the layer before has swapped the first two extents already.
    state = (data[1], hidden)
    yield from _must_be(call, {**dict(zip(names, shapes, strict=True)), "hx_": state, cell: state})
    if "grad_output" in call.given:
        yield from _must_be(call, {"grad_output": output, "grad_hy": state, "grad_cy": state})
    if any(call.dtype(name) != call.dtype("input") for name in (*names, "hx_", cell)):
        yield "weights and states of several types"
    if call.dtype("input") not in ("float32", "bfloat16"):
        yield f"a layer of {call.dtype('input')}"


def _rounded_division(call: Call) -> Iterator[str]:
    # The least whole number divided by -1 has no place in its type: the processor stops.
    whole = call.dtype("self") not in _FLOATS and call.dtype("other") not in _FLOATS
    if whole and call.given.get("rounding_mode") == "trunc" and (isinstance(call.given.get("other"), Ref | bool)):
        yield "whole numbers are divided by a tensor, and rounded towards zero"
    if whole and call.given.get("rounding_mode") == "trunc" and call.given.get("other") in (0, -1):
        yield f"whole numbers are divided by {call.given.get('other')}, and rounded towards zero"


def _of_floats(*names: str) -> Check:
    def check(call: Call) -> Iterator[str]:
        yield from (f"{name} is of {call.dtype(name)}" for name in names if call.dtype(name) not in _FLOATS)

    return check


def _grid_backward(dimensions: int) -> Check:
    def check(call: Call) -> Iterator[str]:
        data, grid = _shape(call, "input"), _shape(call, "grid")
        if len(data) != dimensions + 2 or len(grid) != dimensions + 2 or 0 in data:
            yield f"samples of {list(data)} on {list(grid)}"
            return
        yield from _must_be(call, {"grad_output": (*data[:2], *grid[1:-1])})

    return check


def _list_of_views(count: Callable[[Call, int], int]) -> Check:
    """What gives a list of views: no longer than stated, which is looked at before the list is made."""

    def check(call: Call) -> Iterator[str]:
        data, axis = _shape(call, "self"), _whole(call, "dim")
        if not -len(data) <= axis < len(data):
            yield f"axis {axis} of {list(data)}"
            return
        found = count(call, data[axis])
        if found > max(len(call.node.results), 1):
            yield f"it gives {found} results, and {len(call.node.results)} are stated"

    return check


def _pieces(call: Call, extent: int) -> int:
    size = _whole(call, "split_size")
    return -(-extent // size) if size > 0 else 1


_CHECKS: Mapping[str, Check] = {
    "_native_batch_norm_legit_functional.default": _of_channels(*_STATISTICS),
    "_native_batch_norm_legit.no_stats": _of_channels(*_STATISTICS),
    "_native_batch_norm_legit_no_training.default": _of_channels(*_STATISTICS),
    "batch_norm.default": _of_channels(*_STATISTICS),
    "instance_norm.default": _of_channels(*_STATISTICS),
    "native_batch_norm_backward.default": _of_channels(*_STATISTICS),
    "native_layer_norm_backward.default": _layer_norm_backward,
    "_fused_rms_norm_backward.default": _layer_norm_backward,
    "native_group_norm.default": _group_norm,
    "native_group_norm_backward.default": _group_norm,
    "_weight_norm.default": _weight_norm,
    "_weight_norm_interface.default": _weight_norm,
    "_weight_norm_interface_backward.default": _weight_norm,
    "_softmax_backward_data.default": _softmax_backward,
    "_log_softmax_backward_data.default": _softmax_backward,
    "_adaptive_avg_pool2d_backward.default": _adaptive_pool_backward(2),
    "_adaptive_avg_pool3d_backward.default": _adaptive_pool_backward(3),
    "adaptive_max_pool2d_backward.default": _adaptive_pool_backward(2),
    "adaptive_max_pool3d_backward.default": _adaptive_pool_backward(3),
    "_cdist_backward.default": _cdist,
    "_cdist_forward.default": _cdist,
    "_scaled_dot_product_flash_attention_for_cpu.default": _attention,
    "_scaled_dot_product_flash_attention_for_cpu_backward.default": _attention,
    "_transformer_encoder_layer_fwd.default": _fused_attention,
    "_native_multi_head_attention.default": _fused_attention,
    "mkldnn_rnn_layer.default": _recurrent_layer,
    "mkldnn_rnn_layer_backward.default": _recurrent_layer,
    "div.Tensor_mode": _rounded_division,
    "div.Scalar_mode": _rounded_division,
    "smooth_l1_loss_backward.default": _of_floats("grad_output", "self", "target"),
    "huber_loss_backward.default": _of_floats("grad_output", "self", "target"),
    "grid_sampler_2d_backward.default": _grid_backward(2),
    "grid_sampler_3d_backward.default": _grid_backward(3),
    "unbind.int": _list_of_views(lambda call, extent: extent),
    "split.Tensor": _list_of_views(_pieces),
    "unsafe_split.Tensor": _list_of_views(_pieces),
    "chunk.default": _list_of_views(lambda call, extent: min(extent, _whole(call, "chunks"))),
    "unsafe_chunk.default": _list_of_views(lambda call, extent: min(extent, _whole(call, "chunks"))),
    "tensor_split.sections": _list_of_views(lambda call, extent: _whole(call, "sections")),
}
CHECKS: Mapping[str, Check] = {f"aten.{name}": check for name, check in _CHECKS.items()}
"""By operator: what is wrong with the shapes and types of its operands."""
