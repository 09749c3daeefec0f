"""Which operators can be called with less work: as torch's Python functions, and with gradients written in place.

The functions that torch generates for Python call the same kernels as `torch.ops`, one to two microseconds faster.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import FunctionSchema, Tensor

from sambasim.ir.dataflow import aliases_of, kind_of, readers_of
from sambasim.ir.graph import Node, Ref
from sambasim.ir.operators import OperatorKind

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
"""By operator: a function with the same operands. `reshape` for `view` copies if a kernel returns other strides than at
capture (LSTM's backward)."""

WRITES_OUT: frozenset[str] = frozenset(f"aten.{name}" for name in _WITH_OUT.split())


def builtin(node: Node, schema: FunctionSchema) -> Function | None:
    """The Python function for `node`; None if there is none, or if it might choose another overload."""
    values = dict(zip((argument.name for argument in schema.arguments), node.args, strict=False)) | dict(node.kwargs)
    tensors = [argument.name for argument in schema.arguments if str(argument.type) == _TENSOR]
    if all(isinstance(values.get(name), Ref) for name in tensors):
        return BUILTINS.get(node.operator)
    return None


@dataclass(frozen=True, slots=True)
class Route:
    """The nodes from the kernel to the gradient `value`, by position: its `maker`, and the `views` up to `value`. The
    `unread` ones are not needed once the maker writes to the destination."""

    value: str
    maker: int
    views: tuple[int, ...]
    unread: tuple[int, ...]

    @property
    def last(self) -> int:
        return self.views[-1] if self.views else self.maker


def find_routes(
    nodes: Sequence[Node], sections: Sequence[int], stored: Collection[str], keep: Collection[str]
) -> list[Route]:
    """The safe routes to the values in `stored`. `sections` gives the section of each node. Values that a later section
    or the caller reads are not safe: other ranks may overwrite a gradient once its section is done."""
    position_of = {result: position for position, node in enumerate(nodes) for result in node.results if result}
    readers = readers_of(nodes)
    routes = []
    for value in stored:
        chain = _chain(value, nodes, position_of)
        maker, last = chain[0], chain[-1]
        made = nodes[maker].results[0]
        if made is None or not _writes_out(nodes[maker]):
            continue
        aliases = aliases_of(made, nodes, readers)
        read_last = max((at for name in aliases for at in readers.get(name, ())), default=last)
        shared = not aliases.isdisjoint(keep) or any(name != value for name in aliases if name in stored)
        if shared or sections[read_last] > sections[last]:
            continue
        routes.append(Route(value, maker, tuple(chain[1:]), _unread(chain[1:], nodes, readers)))
    return routes


def _writes_out(node: Node) -> bool:
    """Whether its function takes the tensor to write to."""
    if node.operator not in WRITES_OUT:
        return False
    _, name, overload = node.operator.split(".")
    return builtin(node, getattr(getattr(torch.ops.aten, name), overload)._schema) is not None


def _chain(value: str, nodes: Sequence[Node], position_of: Mapping[str, int]) -> list[int]:
    chain = [position_of[value]]
    while (before := _viewed(nodes[chain[0]])) in position_of:
        chain.insert(0, position_of[before])
    return chain


def _viewed(node: Node) -> str:
    """The value that `node` is a view of; empty if it is not a view of one value with one result."""
    is_view = kind_of(node) is OperatorKind.VIEW and len(node.results) == 1
    read = node.reads
    return read[0] if is_view and len(read) == 1 else ""


def _unread(views: Sequence[int], nodes: Sequence[Node], readers: Mapping[str, Sequence[int]]) -> tuple[int, ...]:
    unread: list[int] = []
    for position in reversed(views):
        (result,) = nodes[position].results
        needed_by = 1 if unread else 0  # the next view, which is not needed either
        if result is None or len(readers.get(result, ())) > needed_by:
            break
        unread.append(position)
    return tuple(unread)
