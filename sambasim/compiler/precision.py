"""What a model is captured in: its own types, or bf16 for `--dtype bf16`, which is how an RDU computes by default.

In bf16, the model's tensors, its inputs and what it makes of none (a mask, a first hidden state) are bfloat16 while it
is captured, so its graph is one of bfloat16, under the same names. Torch's kernels of bfloat16 add up in float32 and
round once. Two kinds of operators are captured otherwise:

    losses              take operands that are widened to float32, and give float32: one number for a batch, in the
                        three digits of bfloat16, would tell little of how training goes
    those of `ADDING`   are widened, and their results rounded: their kernels, or those of their gradients, would
                        round after each addition, and lose a sum of many small terms
"""

import contextlib
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, fx, nn

from sambasim.ir.operators import OPERATORS, OperatorKind

STORED: Mapping[str, torch.dtype | None] = {"fp32": None, "bf16": torch.bfloat16}
"""By `--dtype`: the type of all floating-point numbers; None leaves to each tensor the type that it has."""

ADDING = frozenset(
    {
        "aten.avg_pool1d.default",
        "aten.avg_pool2d.default",
        "aten.avg_pool3d.default",
        "aten.col2im.default",
        "aten.embedding.default",
        "aten.im2col.default",
        "aten.index.Tensor",
        "aten.index_put.default",
        "aten.layer_norm.default",
        "aten.logcumsumexp.default",
        "aten.logsumexp.default",
        "aten.max_pool2d.default",
        "aten.max_pool3d.default",
        "aten.pad.default",
        "aten.prod.default",
        "aten.prod.dim_int",
        "aten.unfold.default",
    }
)
"""Operators that add up (or multiply) in bfloat16, forward or backward, by torch 2.13 on a CPU; one has no kernel."""

_WHERE_FROM = ("stack_trace", "nn_module_stack", "fwd_nn_module_stack", "from_node")
"""What torch notes of a node's place in the model's source."""


@contextlib.contextmanager
def stored_in(dtype: torch.dtype | None, model: nn.Module) -> Iterator[None]:
    """While this is active, the floating-point tensors of `model` are rounded to `dtype`, and it is torch's default.

    Tensors that shared memory share it then, too. Afterwards the model has its own tensors again, in their own memory.
    """
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


def inputs_in(dtype: torch.dtype | None, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`inputs`, those of floating-point numbers rounded to `dtype`."""
    return {
        name: tensor if dtype is None or not tensor.is_floating_point() else tensor.to(dtype)
        for name, tensor in inputs.items()
    }


def widen(module: fx.GraphModule) -> None:
    """Losses, and the operators of `ADDING`, take operands of float32 in `module` instead of narrower ones; and what it
    makes of no floating-point number, which torch's default type decided, is made in float32 and rounded.

    The recorded types of what comes behind a loss are those of before: trace it again, with float32 as the default.
    """
    for node in list(module.graph.nodes):
        operator = OPERATORS.get(str(node.target))
        if node.op != "call_function" or operator is None:
            continue
        if operator.kind is OperatorKind.LOSS:
            _widen_operands(node)
        elif (str(node.target) in ADDING and _widen_operands(node)) or _is_typed_by_default(node):
            _round_result(node)
    module.recompile()


@contextlib.contextmanager
def default_type(dtype: torch.dtype) -> Iterator[None]:
    """While this is active, torch makes floating-point tensors of `dtype` where none is named."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _widen_operands(node: fx.Node) -> bool:
    """Whether there are operands to be widened; they are."""
    narrow = [operand for operand in node.all_input_nodes if _is_narrow(operand.meta.get("val"))]
    for operand in narrow:
        with node.graph.inserting_before(node):
            node.replace_input_with(operand, _converted(operand, torch.float32, node))
    return bool(narrow)


def _is_typed_by_default(node: fx.Node) -> bool:
    """Whether the result is bfloat16 only because that is torch's default: no operand is, and none is asked for."""
    operands = [operand.meta.get("val") for operand in node.all_input_nodes]
    if any(isinstance(operand, Tensor) and operand.is_floating_point() for operand in operands):
        return False
    asked_for = any(isinstance(argument, torch.dtype) for argument in (*node.args, *node.kwargs.values()))
    return _is_narrow(node.meta.get("val")) and not asked_for


def _round_result(node: fx.Node) -> None:
    """What reads the result of `node` reads it rounded to the type that is recorded of it."""
    with node.graph.inserting_after(node):
        rounded = _converted(node, node.meta["val"].dtype, node)
    node.replace_all_uses_with(rounded, delete_user_cb=lambda user: user is not rounded)


def _converted(operand: fx.Node, dtype: torch.dtype, near: fx.Node) -> fx.Node:
    """A new node: `operand` in `dtype`, from the line of the model that made `near`."""
    converted = operand.graph.call_function(torch.ops.aten.to.dtype, (operand, dtype))
    converted.meta = {key: near.meta[key] for key in _WHERE_FROM if key in near.meta}
    converted.meta["val"] = operand.meta["val"].to(dtype)
    return converted


def _rounded(data: Tensor, dtype: torch.dtype, rounded: dict[tuple[int, torch.dtype], Tensor]) -> Tensor:
    """`data` in `dtype`; `rounded` keeps, by address and type, all of the memory that was rounded before."""
    storage = data.untyped_storage()
    key = storage.data_ptr(), data.dtype
    if key not in rounded:
        rounded[key] = torch.empty(0, dtype=data.dtype).set_(storage).to(dtype)
    return rounded[key].as_strided(data.size(), data.stride(), data.storage_offset())


def _is_narrow(value: object) -> bool:
    return isinstance(value, Tensor) and value.dtype in (torch.bfloat16, torch.float16)
