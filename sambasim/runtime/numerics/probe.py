"""Looks at everything that one replica computes, and says where a loss or a gradient ceased to be finite.

Nothing is raised in the middle of a pass: what is not finite there may come to nothing. At its end, if the loss, a
gradient or a buffer is not finite, the earliest origin of that is told. A batch, and parameters that were so before the
step, come first.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sambasim.errors import InternalError, NumericsError
from sambasim.ir.graph import Section, SectionKind
from sambasim.ir.program import Program
from sambasim.ir.types import Symbol, SymbolKind
from sambasim.runtime.device import DeviceMemory
from sambasim.runtime.instructions import Instruction
from sambasim.runtime.numerics.count import Count, count
from sambasim.runtime.numerics.origins import Lineage, has_infinite_constant, is_origin

_TARGETS = (SymbolKind.GRADIENT, SymbolKind.BUFFER)
_GIVEN = (SymbolKind.INPUT, SymbolKind.PARAMETER, SymbolKind.BUFFER, SymbolKind.CONSTANT)
_MOST_SAMPLES = 5
"""Samples that are named."""


@dataclass(frozen=True, slots=True)
class _Origin:
    """What an operator made of operands between `least` and `largest`; `meant` if it has an infinite constant."""

    made: Count
    least: float
    largest: float
    meant: bool


class Probe:
    """Of replica `replica`. `samples` tells which samples of the data set the last batch has."""

    def __init__(
        self, replica: int, program: Program, memory: DeviceMemory, samples: Callable[[], Sequence[int]]
    ) -> None:
        if program.training is None:
            raise InternalError("looking at a training step that a program does not have")
        self._replica = replica
        self._program = program
        self._graph = program.training
        self._memory = memory
        self._samples = samples
        self._lineage = Lineage(program.training)
        symbols = program.symbols
        given = [symbols[name] for name in program.training.inputs]
        self._given = [symbol for symbol in given if symbol.kind in _GIVEN]
        self._targets = [out for out in program.training.outputs if symbols[out.symbol].kind in _TARGETS]
        self._changed = {out.symbol for out in program.training.outputs}
        self._seen: dict[str, Count] = {}
        self._origins: dict[str, _Origin] = {}
        self.step = 0
        """The step that was looked at last, counted from 1."""
        self._micro_step = 0

    def begin(self, step: int, micro_step: int) -> None:
        """A pass begins; both count from 0. Its batch is in place."""
        self.step, self._micro_step = step + 1, micro_step + 1
        self._origins.clear()
        self._seen = {symbol.name: count(self._memory.tensor(symbol.name)) for symbol in self._given}

    def end(self, loss: float) -> None:
        """The pass has ended, with this loss. Raises NumericsError, with where it began, if something of what came of
        the pass is not finite."""
        found = {out.value: out.symbol for out in self._graph.outputs if out.symbol == self._program.loss}
        bad = {} if torch.tensor(loss).isfinite() else found
        bad |= {out.value: out.symbol for out in self._targets if not count(self._memory.tensor(out.symbol)).finite}
        if bad:
            raise self._error(next(iter(bad.values())), self._first(bad))

    def look(self, instruction: Instruction, name: str, value: Tensor, operands: Iterable[object]) -> None:
        made = self._seen[name] = count(value)
        if made.finite:
            return
        tensors = [operand for operand in operands if isinstance(operand, Tensor) and operand.is_floating_point()]
        if is_origin(made, [count(tensor) for tensor in tensors]):
            ranges = [torch.aminmax(tensor.detach()) for tensor in tensors if tensor.numel()]
            least = min((float(one.min) for one in ranges), default=0.0)
            largest = max((float(one.max) for one in ranges), default=0.0)
            meant = not made.nan and has_infinite_constant(instruction.node)
            self._origins[name] = _Origin(made, least, largest, meant)

    def _first(self, bad: Mapping[str, str]) -> str | None:
        """The value in which it began."""
        reached = self._lineage.reached(bad, self._seen)
        given = [symbol.name for symbol in self._given if symbol.name in reached]
        origins = [name for name in self._origins if name in reached]
        # Of symbols, those with NaN come before those with infinities, which may be a mask's.
        order = {name: (self._meant(name), self._lineage.position(name), not self._seen[name].nan) for name in origins}
        order |= {name: (self._meant(name), -1, not self._seen[name].nan) for name in given}
        return min(order, key=lambda name: order[name], default=None)

    def _meant(self, name: str) -> bool:
        """Whether a value is infinite on purpose, as far as can be seen: what a model keeps and never changes is."""
        if name in self._origins:
            return self._origins[name].meant
        kept = self._program.symbols[name].kind in (SymbolKind.CONSTANT, SymbolKind.BUFFER)
        return kept and name not in self._changed and not self._seen[name].nan

    def _error(self, ended_in: str, first: str | None) -> NumericsError:
        when = f"replica {self._replica}, step {self.step}, micro-step {self._micro_step}"
        ended = f"{self._called(ended_in)} is not finite on {when}"
        if first is None:
            raise InternalError(f"{ended}, and no operator was seen to make it so")
        node = self._lineage.node(first)
        if node is None:
            return self._of_symbol(ended, self._program.symbols[first])
        origin, section = self._origins[first], self._section(self._lineage.position(first))
        module = f" of the module {node.module}" if node.module else ""
        return NumericsError(
            f"{ended}: it begins in section {section.index} ({section.kind} {section.name}), where {node.operator} "
            f"makes the tensor {first}{module}: {origin.made}, of operands from {origin.least:.6g} to "
            f"{origin.largest:.6g}",
            where=str(node.source) if node.source else f"the operator {node.operator}",
            remedy=_REMEDIES[section.kind is SectionKind.FWD],
        )

    def _of_symbol(self, ended: str, symbol: Symbol) -> NumericsError:
        found = self._seen[symbol.name]
        if symbol.kind is SymbolKind.INPUT:
            return NumericsError(
                f"{ended}: the input {symbol.name} of the batch of replica {self._replica} holds {found.word} "
                f"({self._where_in_batch(symbol)}): {found}",
                where=f"step {self.step}, micro-step {self._micro_step}",
                remedy="correct or leave out such samples, or --on-nonfinite skip to leave out steps that have some",
            )
        return NumericsError(
            f"{ended}: {self._called(symbol.name)} held {found.word} before the step: {found}",
            where=f"replica {self._replica}, {symbol.name}",
            remedy="begin with weights that are finite: --weights FILE.safetensors, or compile again",
        )

    def _where_in_batch(self, symbol: Symbol) -> str:
        """Which samples of the data set are not finite."""
        values = self._memory.tensor(symbol.name)
        whole = values.isfinite().reshape(values.shape[0], -1).all(dim=1)
        numbers = [number for number, finite in zip(self._samples(), whole.tolist(), strict=True) if not finite]
        more = f" and {len(numbers) - _MOST_SAMPLES} more" if len(numbers) > _MOST_SAMPLES else ""
        return f"sample{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers[:_MOST_SAMPLES]))}{more}"

    def _called(self, name: str) -> str:
        """A symbol, for people."""
        symbol = self._program.symbols[name]
        if name == self._program.loss:
            return "the loss"
        if symbol.kind is SymbolKind.GRADIENT:
            return f"the gradient {name}"
        known = symbol.torch_names[0] if symbol.torch_names else name
        return f"the {symbol.kind} {known}"

    def _section(self, position: int) -> Section:
        return next(section for section in self._graph.sections if section.start <= position < section.stop)


_REMEDIES = {
    True: "keep what goes in there in range, or train with a smaller --lr; --on-nonfinite skip leaves such steps out",
    False: "train with a smaller --lr, or scale the loss down: its gradient overflows where its value does not",
}
"""By whether it begins in the forward."""
