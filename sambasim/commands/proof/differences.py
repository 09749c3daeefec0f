"""How a tensor of a PEF may differ from the same of eager PyTorch: not at all, by rounding, or by more; and
the first operator that goes wrong."""

from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sambasim.compiler.capture.recording import digest_of
from sambasim.ir.graph import Graph, Node, SourceLine
from sambasim.ir.mesh import TENSOR
from sambasim.ir.program import Program
from sambasim.runtime.watch.observer import Function, StepObserver

_ROUNDINGS, _ROUNDINGS_OF_PARTS, _ROUNDINGS_IN_16_BITS = 16, 128, 2
"""The largest difference that is rounding, in units of the last place of the narrowest type of the graph. Products
whose operands are cut over ranks add up in another order."""

_UPDATE_ROUNDINGS = 4
"""As `docs/concepts.md` promises of an optimizer step, of the larger of a parameter and its change."""

_NARROW_BITS = 16

_PIECE = 1 << 16
"""Elements that are compared at a time, which fit a cache."""


@dataclass(frozen=True, slots=True)
class Difference:
    """`name`, which the graph has as `value`, differs from eager PyTorch by `size`, relative to its largest number.
    `position`: of the node that gives it, whose line is `source`."""

    name: str
    size: float
    value: str
    position: int
    source: SourceLine | None = None
    is_rounding: bool = False


class Comparison:
    """Collects the differences of a step in the values of `graph`, and the largest of all steps, by name."""

    def __init__(self, program: Program, graph: Graph) -> None:
        self._nodes = graph.nodes
        self._positions = {name: at for at, node in enumerate(graph.nodes) for name in node.results if name}
        types = [one.type.dtype for one in program.symbols.values()] + [one.dtype for one in graph.values.values()]
        self._epsilon = max(torch.finfo(dtype).eps for dtype in _floating(types))
        is_cut = any(axis.name == TENSOR and axis.size > 1 for axis in program.mesh)
        is_narrow = self._epsilon > torch.finfo(torch.float32).eps
        self._bound = self._epsilon * (
            _ROUNDINGS_OF_PARTS if is_cut else _ROUNDINGS_IN_16_BITS if is_narrow else _ROUNDINGS
        )
        self._found: list[Difference] = []
        self.largest: dict[str, Difference] = {}
        self.compared = 0
        """How many tensors were compared."""

    def end_step(self) -> Difference | None:
        """The first difference of the step, in the order of computation, that is more than rounding."""
        differences, self._found = self._found, []
        for difference in differences:
            if difference.name not in self.largest or difference.size > self.largest[difference.name].size:
                self.largest[difference.name] = difference
        larger = [difference for difference in differences if not difference.is_rounding]
        return min(larger, key=lambda difference: difference.position, default=None)

    def add(
        self, name: str, value: str, ours: Tensor, theirs: Tensor, scale: Callable[[], float] = lambda: 0.0
    ) -> None:
        """Compare a tensor, which the graph has as `value`. `scale`: numbers of this size were added up for it."""
        self.compared += 1
        if ours.shape == theirs.shape and torch.equal(ours, theirs):
            return
        size, whole = apart(ours, theirs)
        if not size:
            return
        position = self._positions.get(value, -1)
        source = self._nodes[position].source if position >= 0 else None
        is_rounding = size <= self._bound * whole or size <= self._bound * scale()
        self._found.append(Difference(name, size / whole if whole else size, value, position, source, is_rounding))

    def add_update(self, name: str, before: Tensor, ours: Tensor, theirs: Tensor) -> None:
        """Compare a parameter that both sides have updated, each with its own kernel. In 16 bits rounding is told."""
        self.compared += 1
        bound = _UPDATE_ROUNDINGS * torch.finfo(ours.dtype).eps
        flat = (tensor.detach().reshape(-1) for tensor in (before, ours, theirs))
        parts = zip(*(torch.split(tensor, _PIECE) for tensor in flat), strict=True)
        is_rounding = all(torch.equal(new, other) or _is_close(old, new, other, bound) for old, new, other in parts)
        if is_rounding and (torch.finfo(ours.dtype).bits > _NARROW_BITS or torch.equal(ours, theirs)):
            return
        size, whole = apart(ours, theirs)
        relative = size / whole if whole else size
        self._found.append(Difference(name, relative, "", len(self._nodes), is_rounding=is_rounding))


def _is_close(before: Tensor, ours: Tensor, theirs: Tensor, bound: float) -> bool:
    """Whether two updates of `before` differ by at most `bound`, relative to the larger of result and change."""
    wide = torch.promote_types(ours.dtype, torch.float32)
    before, ours, theirs = before.to(wide), ours.to(wide), theirs.to(wide)
    most = torch.maximum(theirs.abs(), (theirs - before).abs_()).mul_(bound)
    return bool(((ours - theirs).abs_().le(most) | (ours.isnan() & theirs.isnan())).all())


def apart(ours: Tensor, theirs: Tensor) -> tuple[float, float]:
    """The largest difference of two tensors, and the largest number of `theirs`. NaN equals NaN here."""
    if ours.shape != theirs.shape:
        return float("inf"), 0.0
    ours, theirs = ours.detach().double(), theirs.detach().double()
    same = (ours == theirs) | (ours.isnan() & theirs.isnan())
    size = (ours - theirs).abs().masked_fill(same, 0.0).nan_to_num(float("inf"), float("inf"))
    return float(size.max()), largest(theirs)


def largest(tensor: Tensor) -> float:
    """The largest finite number of `tensor`, without its sign."""
    if not tensor.numel():
        return 0.0
    return float(tensor.detach().double().abs().nan_to_num(0.0, 0.0).max())


def _floating(dtypes: Iterable[str]) -> Iterable[torch.dtype]:
    types = {getattr(torch, name, torch.float32) for name in dtypes}
    return [dtype for dtype in types if dtype.is_floating_point] or [torch.float32]


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
            _key(value) for value in tree_leaves(result) if isinstance(value, Tensor) and value.layout is torch.strided
        )
        return result


class GraphValues(StepObserver):
    """The results of the operators of a pass, by value."""

    def __init__(self) -> None:
        self.keys: dict[str, _Key] = {}

    def bind(self, replica: int, node: Node, function: Function) -> Function:
        names = node.results

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
        keys = [ours[name] for name in node.results if name in reached and name in ours]
        if keys and theirs.isdisjoint(keys):
            return node
    return None
