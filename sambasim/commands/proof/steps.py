"""One step of a PEF and of eager PyTorch on the same batch, compared."""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from sambasim.commands.proof.batches import Batch
from sambasim.commands.proof.beside import Beside, Trained
from sambasim.commands.proof.differences import Comparison, GraphValues, first_wrong, largest
from sambasim.commands.proof.played import Played, seed_of
from sambasim.errors import CaptureError
from sambasim.ir.graph import Graph, Node, Output, SourceLine
from sambasim.ir.program import Program
from sambasim.ir.types import SymbolKind

_REPORT = "please report it, with the model"
_KEEP = (
    f"keep what changes from call to call in a buffer: self.register_buffer(name, tensor); if nothing does, {_REPORT}"
)
"""The remedy of a difference that the first step does not have."""

_OF_ALL = 0.25
"""Of the largest number of all gradients, what a gradient whose terms cancel is made of."""


T = TypeVar("T")


class NotForEager(Exception):
    """PyTorch itself cannot run a step on this batch."""


def called(program: Program, symbol: str) -> str:
    """What the user calls a symbol: `the gradient of fc.weight`."""
    one = program.symbols[symbol]
    if symbol == program.loss:
        return "the loss"
    if one.kind is SymbolKind.GRADIENT:
        parameter = next((m.parameter for group in program.groups for m in group.members if m.gradient == symbol), "")
        return f"the gradient of {called(program, parameter).removeprefix('the parameter ')}" if parameter else symbol
    return f"the {one.kind} {(*one.torch_names, symbol)[0]}"


class Steps:
    """The steps of `graph`, the training or the evaluation graph, which `eager` does too."""

    def __init__(self, graph: Graph, played: Played, eager: Beside, weights: Mapping[str, Tensor]) -> None:
        self._graph = graph
        self._program = program = played.program
        self._played = played
        self._eager = eager
        self._weights = weights
        self.comparison = Comparison(program, graph)
        self._of_kind: dict[SymbolKind, list[Output]] = {kind: [] for kind in SymbolKind}
        for output in graph.outputs:
            self._of_kind[program.symbols[output.symbol].kind].append(output)
        self._members = [member for group in program.groups for member in group.members]

    def evaluate(self, number: int, batches: Sequence[Batch]) -> None:
        """Compare the outputs of the evaluation graph. Raises NotForEager, and CaptureError for a difference."""
        request = batches[0], seed_of(number, 0, 0)
        ours, theirs = self._both(lambda: self._played.evaluate(*request), "evaluate", *request)
        self._compare_outputs(ours, theirs, " in evaluation")
        self._raise(number, None)

    def train(self, number: int, batches: Sequence[Batch]) -> None:
        """Compare the outputs, buffers and gradients of a training step and, in the first one, what the optimizer makes
        of the parameters. `batches`: of each micro-batch of each chip. Raises as `evaluate`. Later steps have the
        parameters of the first update, or of their own if ranks exchange gradients in it."""
        program, played = self._program, self._played
        request = [batches[chip :: program.chips] for chip in range(program.chips)], number
        theirs: Trained
        outputs, theirs = self._both(lambda: played.forward_and_backward(*request), "train", *request)
        for chip in range(program.chips):
            where = f" of chip {chip}" if program.chips > 1 else ""
            for ours, of_pass in zip(outputs[chip], theirs.outputs[chip], strict=True):
                self._compare_outputs(ours, of_pass, where)
            for output in self._of_kind[SymbolKind.BUFFER]:
                buffer, now = theirs.buffers[chip][output.symbol], played.read(output.symbol, chip)
                self.comparison.add(called(program, output.symbol) + where, output.value, now, buffer)
        updates = played.updates and (number == 0 or program.ranks_of_replica > 1)
        if updates:
            played.update()
        self._compare_gradients()
        if theirs.others:
            what = f"{called(program, theirs.others[0])} has a gradient in eager PyTorch, and none in the PEF"
            raise CaptureError(what, remedy=_REPORT)
        self._raise(number, batches[0])
        if updates and number == 0:
            self._compare_update()
        self._eager.is_behind = updates

    def _both(self, play: Callable[[], T], what: str, *request: object) -> tuple[T, Any]:
        """What the PEF and eager PyTorch give, which compute at the same time."""
        self._eager.begin(self._played, what, *request)
        try:
            ours = play()
        except Exception:
            self._played.forget()
            if self._eager.end() is None:
                raise NotForEager from None
            raise
        theirs = self._eager.end()
        if theirs is None:
            raise NotForEager
        return ours, theirs

    def _compare_outputs(self, ours: Mapping[str, Tensor], theirs: Sequence[Tensor], where: str) -> None:
        for output, other in zip(self._of_kind[SymbolKind.OUTPUT], theirs, strict=False):
            self.comparison.add(called(self._program, output.symbol) + where, output.value, ours[output.symbol], other)

    def _compare_gradients(self) -> None:
        values = {output.symbol: output.value for output in self._of_kind[SymbolKind.GRADIENT]}

        @cache
        def scale() -> float:
            return max(map(largest, self._eager.shared.values()), default=0.0) * _OF_ALL

        for member in self._members:
            name, other = member.gradient, self._eager.shared[member.parameter]
            self.comparison.add(called(self._program, name), values[name], self._played.read(name), other, scale)

    def _compare_update(self) -> None:
        shared = self._eager.shared
        for member in self._members:  # the optimizers are compared, and not what rounding does to gradients
            shared[member.parameter].copy_(self._played.read(member.gradient))
        if not self._eager.ask(self._played, "update"):
            return
        for name, theirs in shared.items():
            said = f"{called(self._program, name)} after a step of the optimizer"
            self.comparison.add_update(said, self._weights[name], self._played.read(name), theirs)
        self._raise(0, None)

    def _raise(self, number: int, batch: Batch | None) -> None:
        """Raises CaptureError if a step has differed by more than rounding, on `batch`."""
        difference = self.comparison.end_step()
        if difference is None:
            return
        where = f"in step {number + 1} {difference.name}"
        what = f"{where} differs from eager PyTorch by {difference.size:.1e} of its largest number"
        line = difference.source
        if batch is not None and self._program.ranks_of_replica == 1:
            wrong = self._first_wrong(difference.value, batch)
            if wrong is not None:
                what += f": {wrong.operator} gives a result that eager PyTorch has nowhere"
                line = wrong.source or line
        raise CaptureError(
            f"the graph does not compute what the model does: {what}",
            where=_found(line) if line else None,
            remedy=_KEEP if number else _REPORT,
        )

    def _first_wrong(self, value: str, batch: Batch) -> Node | None:
        """The node because of which `value` differs, in another step on `batch`."""
        ours = GraphValues()
        played = Played(self._program, self._weights, ours)
        self._eager.is_behind = True
        theirs = self._eager.ask(played, "values", batch)
        played.forward_and_backward([[batch]], 0)
        return None if theirs is None else first_wrong(self._graph, value, ours.keys, theirs)


def _found(line: SourceLine) -> str:
    """`line` as other errors have it: a PEF names files relative to the folders from which Python imports."""
    folders = (Path(folder) for folder in (*sys.path, ""))
    files = ((folder / line.file).absolute() for folder in folders)
    return str(replace(line, file=str(next((file for file in files if file.exists()), line.file))))
