"""Operators that torch also has as a Python function, which is the same kernel in less time.

`torch.ops` looks an operator's schema up and converts each operand by it; the functions that are generated for Python
know theirs, and take one to two microseconds less for each call. A row is safe where the function, given operands as
the schema has them, chooses this overload and no other: a test holds every row to that.
"""

from collections.abc import Callable, Mapping

import torch
from torch import FunctionSchema, Tensor

from sambasim.ir.graph import Node, Ref

Function = Callable[..., object]

_FUNCTIONS = """
    mm.default addmm.default bmm.default baddbmm.default
    t.default transpose.int permute.default unsqueeze.default squeeze.dim select.int
    add.Tensor sub.Tensor mul.Tensor div.Tensor neg.default exp.default log.default sqrt.default rsqrt.default
    relu.default tanh.default sigmoid.default sum.dim_IntList mean.dim
    _log_softmax.default _log_softmax_backward_data.default _softmax.default _softmax_backward_data.default
    native_layer_norm.default clone.default embedding.default native_dropout.default
"""
_METHODS = "expand.default"
_WITH_OUT = """
    mm.default addmm.default bmm.default baddbmm.default add.Tensor sub.Tensor mul.Tensor div.Tensor neg.default
    sum.dim_IntList mean.dim
"""
_TENSOR = "Tensor"


def _table(owner: object, names: str) -> dict[str, Function]:
    return {f"aten.{name}": getattr(owner, name.partition(".")[0]) for name in names.split()}


BUILTINS: Mapping[str, Function] = (
    _table(torch, _FUNCTIONS) | _table(Tensor, _METHODS) | {"aten.view.default": Tensor.reshape}
)
"""By operator: the function that takes the same operands. A view that was captured on other strides than a kernel gives
(those of LSTM's backward, say) is a copy then, and nothing but a view where it can be."""

WRITES_OUT: frozenset[str] = frozenset(f"aten.{name}" for name in _WITH_OUT.split())
"""The rows of BUILTINS with a kernel that writes its result into a tensor given as `out`, without making one first."""


def builtin(node: Node, schema: FunctionSchema) -> Function | None:
    """The quick function for `node`, whose operator has this `schema`; None where there is none.

    There is none for a node that gives a number where the schema has a tensor either: the function might take it for
    another overload.
    """
    given = dict(zip((argument.name for argument in schema.arguments), node.args, strict=False)) | dict(node.kwargs)
    tensors = [argument.name for argument in schema.arguments if str(argument.type) == _TENSOR]
    if all(isinstance(given.get(name), Ref) for name in tensors):
        return BUILTINS.get(node.operator)
    return None
