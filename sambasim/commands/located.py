"""Where a graph goes wrong: the first operator whose result no operator of eager PyTorch has."""

from collections.abc import Callable, Mapping, Set
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sambasim.compiler.recording import digest_of
from sambasim.ir.graph import Graph, Node
from sambasim.runtime.instructions import Instruction
from sambasim.runtime.observer import StepObserver

_Key: TypeAlias = tuple[object, ...]


def _key(tensor: Tensor) -> _Key:
    """What tells a tensor from others, whatever its strides."""
    return str(tensor.dtype), tuple(tensor.shape), digest_of(tensor)


class EagerValues(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's, untyped
    """Within it, the results of all operators, in a forward and its backward."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's, untyped
        self.keys: set[_Key] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.keys.update(
            _key(one) for one in tree_leaves(result) if isinstance(one, Tensor) and one.layout is torch.strided
        )
        return result


class GraphValues(StepObserver):
    """The results of the operators of a pass, by value."""

    def __init__(self) -> None:
        self.keys: dict[str, _Key] = {}

    def bind(self, replica: int, instruction: Instruction) -> Callable[..., object]:
        function, names = instruction.function, instruction.node.results

        def noted(*operands: object, **keywords: object) -> object:
            result = function(*operands, **keywords)
            results = result if isinstance(result, tuple | list) else (result,)
            for name, value in zip(names, results, strict=False):
                if name is not None and isinstance(value, Tensor):
                    self.keys[name] = _key(value)
            return result

        return noted


def first_wrong(graph: Graph, value: str, ours: Mapping[str, _Key], theirs: Set[_Key]) -> Node | None:
    """The first node, among those that `value` depends on, whose results eager PyTorch has nowhere."""
    node_of = {name: node for node in graph.nodes for name in node.results if name is not None}
    reached, waiting = set[str](), [value]
    while waiting:
        if (name := waiting.pop()) not in reached and name in node_of:
            reached.add(name)
            waiting += node_of[name].reads
    for node in graph.nodes:
        found = [ours[name] for name in node.results if name in reached and name in ours]
        if found and theirs.isdisjoint(found):
            return node
    return None
