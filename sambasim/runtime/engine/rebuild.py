"""From nodes of our graph to a graph of torch.fx, which inductor compiles."""

import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar, cast

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.fx.node import Argument as FxArgument

from sambasim.ir.graph import Argument, Node, Ref
from sambasim.runtime.engine.linear import LINEAR, by_onednn
from sambasim.runtime.instructions import find_operator, plain_argument, returns_one_tensor

T = TypeVar("T")
"""What stands for a value: a tensor, or a node of torch.fx."""


def fake_values(nodes: Sequence[Node], symbols: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Every value of `nodes` and every symbol as a tensor without memory: dtype, shape and strides."""
    # Inductor's cache asks for a shape environment, even where all shapes are known.
    mode = FakeTensorMode(shape_env=ShapeEnv(), static_shapes=True)
    values: dict[str, Tensor] = {name: mode.from_tensor(tensor) for name, tensor in symbols.items()}
    with mode:
        for node in nodes:
            returned = find_operator(node.operator)(*_given(node, values), **_keywords(node, values))
            several = returned if isinstance(returned, tuple | list) else [returned]
            values.update((name, value) for name, value in zip(node.results, several, strict=True) if name)
    return values


def rebuild(
    nodes: Iterable[Node], inputs: Sequence[str], outputs: Sequence[str], fakes: Mapping[str, Tensor]
) -> GraphModule:
    """A module from `inputs` to a tuple of `outputs`, with large products by oneDNN where that is faster.

    Names are numbered by position, so that equal layers give equal code and inductor's cache finds it."""
    graph = Graph()
    values: dict[str, FxArgument] = {name: graph.placeholder(f"input{i}") for i, name in enumerate(inputs)}
    for node in nodes:
        product = _product(node, fakes, values, graph)
        if product is not None:
            values.update((name, product) for name in node.results if name is not None)
            continue
        found = find_operator(node.operator)
        call = graph.call_function(found, tuple(_given(node, values)), _keywords(node, values))
        if returns_one_tensor(found._schema):
            values.update((name, call) for name in node.results if name is not None)
            continue
        for index, name in enumerate(node.results):
            if name is not None:
                values[name] = graph.call_function(operator.getitem, (call, index))
    graph.output(tuple(values[name] for name in outputs))
    return GraphModule({}, graph)


def _product(
    node: Node, fakes: Mapping[str, Tensor], values: Mapping[str, FxArgument], graph: Graph
) -> torch.fx.Node | None:
    """`node` as a product by oneDNN, if it is one that is faster there."""
    names = [argument.name for argument in node.args if isinstance(argument, Ref)]
    if node.kwargs or (node.operator, len(names)) not in (("aten.mm.default", 2), ("aten.addmm.default", 3)):
        return None
    *bias, a, b = names
    if not by_onednn(fakes[a], fakes[b].t()):
        return None
    transposed = graph.call_function(torch.ops.aten.t.default, (values[b],))
    product = graph.call_function(LINEAR, (values[a], transposed))
    # Inductor adds a bias in the pass over memory that follows. (It would put torch's own product and such a bias
    # together again.)
    return graph.call_function(torch.ops.aten.add.Tensor, (product, values[bias[0]])) if bias else product


def _given(node: Node, values: Mapping[str, T]) -> list[T]:
    return [_converted(argument, values) for argument in node.args]


def _keywords(node: Node, values: Mapping[str, T]) -> dict[str, T]:
    return {name: _converted(argument, values) for name, argument in node.kwargs}


def _converted(argument: Argument, values: Mapping[str, T]) -> T:
    """`argument` with `values` in the places of references, in the form that torch takes."""
    if isinstance(argument, Ref):
        return values[argument.name]
    if isinstance(argument, tuple):
        return cast(T, [_converted(item, values) for item in argument])
    return cast(T, plain_argument(argument))
