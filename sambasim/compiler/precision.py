"""The dtypes that a model is captured in: its own, or a narrow one for `--dtype bf16` and `fp16`. Losses then take
widened operands and give float32; the operators of `ADDING` are widened and their results rounded, because their
kernels round after each addition."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from sambasim.compiler.names import own_name, read_by
from sambasim.errors import CaptureError, ModelError
from sambasim.ir.operators import OPERATORS, OperatorKind

STORED: Mapping[str, torch.dtype | None] = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
"""By `--dtype`: the type of all floating-point numbers; None leaves to each tensor the type that it has."""

_NAMES = {dtype: name for name, dtype in STORED.items()}

ADDING = frozenset(f"aten.{name}" for name in (
    "avg_pool1d.default", "avg_pool2d.default", "avg_pool3d.default", "col2im.default", "embedding.default",
    "im2col.default", "index.Tensor", "index_put.default", "layer_norm.default", "logcumsumexp.default",
    "logsumexp.default", "max_pool2d.default", "max_pool3d.default", "pad.default", "prod.default", "prod.dim_int",
    "unfold.default",
))  # fmt: skip
"""Operators that add up (or multiply) in 16 bits, forward or backward, by torch 2.13 on a CPU; one has no kernel."""

_FUNCTIONS = {name.split(".")[1] for name in ADDING} | {"fold"}  # which is col2im; unfold is im2col too

_ORIGIN = ("stack_trace", "nn_module_stack", "fwd_nn_module_stack", "from_node")


@contextlib.contextmanager
def stored_in(dtype: torch.dtype | None, model: nn.Module) -> Iterator[None]:
    """The floating-point tensors of `model` are rounded to `dtype`, and it is torch's default. Afterwards the model has
    its own tensors again."""
    if dtype is None:
        yield
        return
    own = {id(tensor): (tensor, tensor.data) for tensor in (*model.parameters(), *model.buffers())}
    rounded: dict[tuple[int, torch.dtype], Tensor] = {}
    try:
        for tensor, data in own.values():
            if data.is_floating_point():
                tensor.data = _rounded(data, dtype, rounded)
        with default_type(dtype):
            yield
    finally:
        for tensor, data in own.values():
            tensor.data = data


class Widened(TorchFunctionMode):
    """Eager calls of the operators of `ADDING` compute in float32, and their results are rounded: see `widen`."""

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        is_index = name == "__getitem__" and any(isinstance(one, Tensor) for one in tree_leaves(args[1]))
        given = tree_leaves((args, kwargs)) if is_index or name in _FUNCTIONS else []
        narrow = next((one.dtype for one in given if _is_narrow(one)), None)
        if narrow is None:
            return func(*args, **kwargs)
        args, kwargs = tree_map(lambda one: one.float() if _is_narrow(one) else one, (args, kwargs))
        return tree_map(lambda one: one.to(narrow) if _is_float(one) else one, func(*args, **kwargs))


def inputs_in(dtype: torch.dtype | None, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {
        name: tensor if dtype is None or not tensor.is_floating_point() else tensor.to(dtype)
        for name, tensor in inputs.items()
    }


def check_rounded(path: str, value: Tensor, narrow: torch.dtype, where: str | None) -> None:
    """Raises CaptureError for a constant that is not of the dtype `narrow`. `where` is the line that reads it."""
    if value.is_floating_point() and value.dtype is not narrow:
        dtype = str(value.dtype).removeprefix("torch.")
        # "lifted_tensor" is torch's word for a tensor whose list or dictionary it does not know.
        what = "a constant" if "lifted_tensor" in path else f"the constant {own_name(path)}"
        raise CaptureError(
            f"{what} is {dtype}, and with --dtype {_NAMES[narrow]} only what a module has is rounded",
            where=where,
            remedy=f"make it an attribute of a module, or a tensor of {narrow}",
        )


def widen(module: fx.GraphModule) -> None:
    """Change `module`: losses and the operators of `ADDING` take float32, and what torch's default type made narrow
    is made in float32 and rounded. The types behind a loss are not updated: trace it again. Raises CaptureError for
    torch.autocast."""
    for block in module.modules():  # those under torch.no_grad are modules of their own
        if isinstance(block, fx.GraphModule):
            _widen(block)


def _widen(module: fx.GraphModule) -> None:
    for node in list(module.graph.nodes):
        if str(node.target) == "wrap_with_autocast":
            raise CaptureError(
                "a block of forward() has settings of its own, torch.autocast, and --dtype has others",
                where=read_by(node),
                remedy="leave out one of both: torch.autocast, or --dtype, which says what all numbers are stored in",
            )
        operator = OPERATORS.get(str(node.target))
        if node.op != "call_function" or operator is None:
            continue
        if operator.kind is OperatorKind.LOSS:
            _widen_operands(node)
        elif (str(node.target) in ADDING and _widen_operands(node)) or _is_typed_by_default(node):
            with node.graph.inserting_after(node):
                rounded = _converted(node, node.meta["val"].dtype, node)
            node.replace_all_uses_with(rounded, delete_user_cb=lambda user, rounded=rounded: user is not rounded)
    module.recompile()


@contextlib.contextmanager
def default_type(dtype: torch.dtype) -> Iterator[None]:
    """Torch makes floating-point tensors of `dtype` where none is named."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _widen_operands(node: fx.Node) -> bool:
    narrow = [operand for operand in node.all_input_nodes if _is_narrow(operand.meta.get("val"))]
    for operand in narrow:
        with node.graph.inserting_before(node):
            node.replace_input_with(operand, _converted(operand, torch.float32, node))
    return bool(narrow)


def _is_typed_by_default(node: fx.Node) -> bool:
    """Whether the result is narrow only because that is torch's default: no operand is, and none is asked for."""
    operands = [operand.meta.get("val") for operand in node.all_input_nodes]
    if any(isinstance(operand, Tensor) and operand.is_floating_point() for operand in operands):
        return False
    asked_for = any(isinstance(argument, torch.dtype) for argument in (*node.args, *node.kwargs.values()))
    return _is_narrow(node.meta.get("val")) and not asked_for


def _converted(operand: fx.Node, dtype: torch.dtype, near: fx.Node) -> fx.Node:
    converted = operand.graph.call_function(torch.ops.aten.to.dtype, (operand, dtype))
    converted.meta = {key: near.meta[key] for key in _ORIGIN if key in near.meta}
    converted.meta["val"] = operand.meta["val"].to(dtype)
    return converted


def _rounded(data: Tensor, dtype: torch.dtype, rounded: dict[tuple[int, torch.dtype], Tensor]) -> Tensor:
    storage = data.untyped_storage()
    is_fake = isinstance(data, FakeTensor)
    key = storage._cdata if is_fake else storage.data_ptr(), data.dtype
    if key not in rounded and is_fake:
        rounded[key] = data.new_empty(storage.nbytes() // data.element_size(), dtype=dtype)
    elif key not in rounded:
        whole = torch.empty(0, dtype=data.dtype).set_(storage)
        rounded[key] = whole.to(dtype)
        if bool((rounded[key].isinf() & whole.isfinite()).any()):
            what = f"a parameter or buffer holds {float(whole.abs().max()):g}, which is infinite in {dtype}"
            raise ModelError(what, remedy="compile with --dtype bf16 or fp32")
    return rounded[key].as_strided(data.size(), data.stride(), data.storage_offset())


def _is_float(value: object) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _is_narrow(value: object) -> bool:
    return isinstance(value, Tensor) and value.dtype in (torch.bfloat16, torch.float16)
