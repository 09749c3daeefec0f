"""Operators that torch also offers as a Python function, which calls the same kernel with less overhead.

`torch.ops` looks up the schema of an operator and converts each operand; the functions that torch generates for Python
take one to two microseconds less per call. A row is safe if the function, given operands that fit the schema, always
chooses this overload: a test checks every row.
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
"""By operator: a function with the same operands. `reshape` stands for `view`: it copies if a kernel returns other
strides than at capture (LSTM's backward), and is a view otherwise."""

WRITES_OUT: frozenset[str] = frozenset(f"aten.{name}" for name in _WITH_OUT.split())
"""The rows of BUILTINS whose kernels write directly into a tensor given as `out`."""


def builtin(node: Node, schema: FunctionSchema) -> Function | None:
    """The Python function for `node`, whose operator has this `schema`; None if there is none.

    A node that passes a number for a tensor has none: the function might choose another overload.
    """
    given = dict(zip((argument.name for argument in schema.arguments), node.args, strict=False)) | dict(node.kwargs)
    tensors = [argument.name for argument in schema.arguments if str(argument.type) == _TENSOR]
    if all(isinstance(given.get(name), Ref) for name in tensors):
        return BUILTINS.get(node.operator)
    return None
