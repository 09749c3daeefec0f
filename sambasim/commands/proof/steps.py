"""One step of a PEF and of eager PyTorch, compared: equal, rounded, or wrong, with the first wrong operator."""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from sambasim.commands.proof.eager import Eager, Key, NotForEager, key_of
from sambasim.commands.proof.played import Batch, Played, seed_of
from sambasim.commands.proof.products import Products
from sambasim.errors import CaptureError
from sambasim.ir.graph import Graph, Node, SourceLine
from sambasim.ir.mesh import TENSOR
from sambasim.ir.program import Program
from sambasim.ir.types import SymbolKind
from sambasim.runtime.engine.instructions import reporting
from sambasim.runtime.values.operators import Function
from sambasim.runtime.watch.observer import StepObserver

_ROUNDINGS, _ROUNDINGS_OF_PARTS, _ROUNDINGS_IN_16_BITS = 16, 128, 2
"""The largest difference that is rounding, in units of the last place of the narrowest type of the graph. Products
whose operands are cut over ranks add up in another order."""

_UPDATE_ROUNDINGS = 4
"""As `docs/concepts.md` promises of an optimizer step, of the larger of a parameter and its change."""

_EPSILON = torch.finfo(torch.float32).eps

_REPORT = "please report it, with the model"
_KEEP = (
    f"keep what changes from call to call in a buffer: self.register_buffer(name, tensor); if nothing does, {_REPORT}"
)
"""The remedy of a difference that the first step does not have."""

_OF_ALL = 0.25

T = TypeVar("T")
U = TypeVar("U")


@dataclass(frozen=True, slots=True)
class Difference:
    """A difference of `size`, relative to the largest number, in `value`, which is computed at `source`."""

    name: str
    size: float
    is_rounding: bool
    value: str = ""
    source: SourceLine | None = None


def _is_close(before: Tensor, ours: Tensor, theirs: Tensor, bound: float) -> bool:
    """Whether two updates of `before` differ by at most `bound`, relative to the larger of result and change."""
    wide = torch.promote_types(ours.dtype, torch.float32)
    before, ours, theirs = before.to(wide), ours.to(wide), theirs.to(wide)
    most = torch.maximum(theirs.abs(), (theirs - before).abs_()).mul_(bound)
    return bool(((ours - theirs).abs_().le(most) | (ours.isnan() & theirs.isnan())).all())


def _apart(ours: Tensor, theirs: Tensor) -> tuple[float, float]:
    """The largest difference of two tensors, and the largest number of `theirs`. NaN equals NaN here."""
    if ours.shape != theirs.shape:
        return float("inf"), 0.0
    ours, theirs = ours.detach().double(), theirs.detach().double()
    same = (ours == theirs) | (ours.isnan() & theirs.isnan())
    size = (ours - theirs).abs().masked_fill(same, 0.0).nan_to_num(float("inf"), float("inf"))
    return float(size.max()), _largest(theirs)


def _largest(tensor: Tensor) -> float:
    """The largest finite number of `tensor`, without its sign."""
    return float(tensor.detach().double().abs().nan_to_num(0.0, 0.0).max()) if tensor.numel() else 0.0


class _GraphValues(StepObserver):
    """The keys of the results of the operators of a pass, by value."""

    def __init__(self) -> None:
        self.keys: dict[str, Key] = {}

    def bind(self, replica: int, node: Node, function: Function) -> Function:
        return reporting(node, function, lambda name, value, operands: self.keys.update({name: key_of(value)}))


def called(program: Program, symbol: str) -> str:
    """What the user calls a symbol: `the gradient of fc.weight`."""
    kind, names = program.symbols[symbol].kind, program.symbols[symbol].torch_names
    if symbol == program.loss:
        return "the loss"
    if kind is not SymbolKind.GRADIENT:
        return f"the {kind} {(*names, symbol)[0]}"
    parameter = next((m.parameter for group in program.groups for m in group.members if m.gradient == symbol), "")
    return f"the gradient of {called(program, parameter).removeprefix('the parameter ')}" if parameter else symbol


class Steps:
    """The steps of `graph`, the training or the evaluation graph, which `eager` does first, and their differences.
    Both compute a product of `products` once."""

    def __init__(
        self, graph: Graph, played: Played, eager: Eager, products: Products, weights: Mapping[str, Tensor]
    ) -> None:
        self._graph, self._played, self._eager, self._weights = graph, played, eager, weights
        self._products = products
        self._program = program = played.program
        self._of_kind: dict[SymbolKind, list[tuple[str, str]]] = {kind: [] for kind in SymbolKind}
        for output in graph.outputs:
            self._of_kind[program.symbols[output.symbol].kind].append((output.symbol, output.value))
        self._members = [member for group in program.groups for member in group.members]
        self._sources = {name: node.source for node in graph.nodes for name in node.makes}
        """Of each value, in the order of the graph."""
        own = [symbol.type for symbol in program.symbols.values()] + list(graph.values.values())
        types = {getattr(torch, type_.dtype, torch.float32) for type_ in own}
        epsilon = max((torch.finfo(dtype).eps for dtype in types if dtype.is_floating_point), default=_EPSILON)
        is_cut = any(axis.name == TENSOR and axis.size > 1 for axis in program.mesh)
        roundings = _ROUNDINGS_IN_16_BITS if epsilon > _EPSILON else _ROUNDINGS
        self._bound = epsilon * (_ROUNDINGS_OF_PARTS if is_cut else roundings)
        self._differences: list[Difference] = []
        self.largest: dict[str, Difference] = {}  # the largest differences of all steps, by name
        self.compared = 0  # how many tensors were compared

    def evaluate(self, number: int, batches: Sequence[Batch]) -> None:
        """Compare the outputs of the evaluation graph. Raises NotForEager, and CaptureError for a difference."""
        request = batches[0], seed_of(number, 0, 0)
        theirs, ours = self._both(lambda: self._eager.evaluate(*request), lambda: self._played.evaluate(*request))
        self._compare_outputs(ours, theirs, " in evaluation")
        self._raise(number, None)

    def train(self, number: int, batches: Sequence[Batch]) -> None:
        """Compare the outputs, buffers and gradients of a training step and, in the first one, what the optimizer makes
        of the parameters. `batches`: of each micro-batch of each chip. Raises as `evaluate`. Later steps have the
        parameters of the first update, or of their own if ranks exchange gradients in it."""
        program, played, eager = self._program, self._played, self._eager
        request = [batches[chip :: program.chips] for chip in range(program.chips)], number
        theirs, ours = self._both(lambda: eager.train(played, *request), lambda: played.forward_and_backward(*request))
        for chip, (of_chip, outputs, buffers) in enumerate(zip(ours, theirs.outputs, theirs.buffers, strict=True)):
            where = f" of chip {chip}" if program.chips > 1 else ""
            for own, of_eager in zip(of_chip, outputs, strict=True):
                self._compare_outputs(own, of_eager, where)
            for symbol, value in self._of_kind[SymbolKind.BUFFER]:
                self._add(called(program, symbol) + where, value, played.read(symbol, chip), buffers[symbol])
        updates = played.updates and (number == 0 or program.ranks_of_replica > 1)
        if updates:
            played.update()
        values, gradients = dict(self._of_kind[SymbolKind.GRADIENT]), theirs.gradients
        # Of the largest number of all gradients, what a gradient whose terms cancel is made of.
        scale = cache(lambda: max(map(_largest, gradients.values()), default=0.0) * _OF_ALL)
        for member in self._members:
            name, ours_of = member.gradient, played.read(member.gradient)
            other = gradients[member.parameter] if member.parameter in gradients else torch.zeros_like(ours_of)
            self._add(called(program, name), values[name], ours_of, other, scale)
        if theirs.others:
            what = f"{called(program, theirs.others[0])} has a gradient in eager PyTorch, and none in the PEF"
            raise CaptureError(what, remedy=_REPORT)
        self._raise(number, batches[0])
        if updates and number == 0:
            self._compare_update()
        self._eager.is_behind = updates

    def _both(self, compute: Callable[[], T], play: Callable[[], U]) -> tuple[T, U]:
        """What eager PyTorch gives, and what the PEF does."""
        with self._products.kept():
            theirs = self._eager.ask(self._played, compute)
        with self._products.taken():
            return theirs, play()

    def _compare_outputs(self, ours: Mapping[str, Tensor], theirs: Sequence[Tensor], where: str) -> None:
        for (symbol, value), other in zip(self._of_kind[SymbolKind.OUTPUT], theirs, strict=False):
            self._add(called(self._program, symbol) + where, value, ours[symbol], other)

    def _compare_update(self) -> None:
        # The optimizers are compared, and not what rounding does to gradients.
        gradients = {member.parameter: self._played.read(member.gradient) for member in self._members}
        try:
            updated = self._eager.ask(self._played, lambda: self._eager.update(gradients))
        except NotForEager:
            what = "the step of the optimizer, which the graph computes, raises an error in eager PyTorch"
            raise CaptureError(what, remedy="call the function on a parameter of the model, by itself") from None
        for name in gradients if updated else ():
            said = f"{called(self._program, name)} after a step of the optimizer"
            self._add_update(said, self._weights[name], self._played.read(name), self._eager.tensors[name])
        self._raise(0, None)

    def _add(
        self, name: str, value: str, ours: Tensor, theirs: Tensor, scale: Callable[[], float] = lambda: 0.0
    ) -> None:
        """Compare a tensor, which the graph has as `value`. `scale`: numbers of this size were added up for it."""
        self.compared += 1
        if ours.shape == theirs.shape and torch.equal(ours, theirs):
            return
        size, whole = _apart(ours, theirs)
        if size:
            source = self._sources.get(value)
            is_rounding = size <= self._bound * whole or size <= self._bound * scale()
            self._differences.append(Difference(name, size / (whole or 1), is_rounding, value, source))

    def _add_update(self, name: str, before: Tensor, ours: Tensor, theirs: Tensor) -> None:
        """Compare a parameter that both sides have updated, each with its own kernel. In 16 bits rounding is told."""
        self.compared += 1
        bound = _UPDATE_ROUNDINGS * torch.finfo(ours.dtype).eps
        if torch.equal(ours, theirs):
            return
        is_rounding = _is_close(before.detach(), ours.detach(), theirs.detach(), bound)
        if is_rounding and torch.finfo(ours.dtype).bits > 16:
            return
        size, whole = _apart(ours, theirs)
        self._differences.append(Difference(name, size / (whole or 1), is_rounding))

    def _raise(self, number: int, batch: Batch | None) -> None:
        """Raises CaptureError if a step has differed by more than rounding, on `batch`."""
        differences, self._differences = self._differences, []
        for difference in differences:
            known = self.largest.setdefault(difference.name, difference)
            self.largest[difference.name] = max(known, difference, key=lambda either: either.size)
        larger = [difference for difference in differences if not difference.is_rounding]
        if not larger:
            return
        order = {value: at for at, value in enumerate(self._sources)}
        first = min(larger, key=lambda difference: order.get(difference.value, -1))
        what = f"in step {number + 1} {first.name} differs from eager PyTorch by {first.size:.1e} of its largest number"
        line = first.source
        is_alone = self._program.ranks_of_replica == 1
        if batch is not None and is_alone and (wrong := self._first_wrong(first.value, batch)):
            what += f": {wrong.operator} gives a result that eager PyTorch has nowhere"
            line = wrong.source or line
        what, where = f"the graph does not compute what the model does: {what}", _found(line) if line else None
        raise CaptureError(what, where=where, remedy=_KEEP if number else _REPORT)

    def _first_wrong(self, value: str, batch: Batch) -> Node | None:
        """The first node below `value` whose results in another step on `batch` eager PyTorch has nowhere."""
        ours = _GraphValues()
        played = Played(self._program, self._weights, ours)
        self._eager.is_behind = True
        try:
            theirs = self._eager.ask(played, lambda: self._eager.values(batch))
        except NotForEager:
            return None
        played.forward_and_backward([[batch]], 0)
        needed = {value}
        for node in reversed(self._graph.nodes):
            if not needed.isdisjoint(node.results):
                needed.update(node.reads)
        for node in self._graph.nodes:
            keys = {ours.keys[name] for name in node.results if name in needed and name in ours.keys}
            if keys and theirs.isdisjoint(keys):
                return node
        return None


def _found(line: SourceLine) -> str:
    """`line` as other errors have it: a PEF names files relative to the folders from which Python imports."""
    files = ((Path(folder) / line.file).absolute() for folder in (*sys.path, ""))
    return str(replace(line, file=str(next((file for file in files if file.exists()), line.file))))
