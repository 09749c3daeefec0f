"""`run --debug-numerics`: where NaN and infinities begin.

A probe checks every value. If the loss, a gradient or a buffer is not finite at the end of a pass, the error names its
earliest origin. A node with an infinite constant (a mask) is intended, and named only if there is no other origin. With
a dynamic loss scale, gradients that are not finite are no error: the step is skipped.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from sambasim.errors import InternalError, NumericsError
from sambasim.ir.graph import Node, SectionKind, leaves
from sambasim.ir.mesh import Mesh
from sambasim.ir.program import LOSS_SCALE, Program
from sambasim.ir.types import Symbol, SymbolKind
from sambasim.options.schedules import LossScaleOptions
from sambasim.runtime.engine.instructions import reporting
from sambasim.runtime.record.digests import UNWRITTEN
from sambasim.runtime.run.replica import Replica
from sambasim.runtime.values.memory import DeviceMemory
from sambasim.runtime.values.operators import Function
from sambasim.runtime.watch.observer import StepObserver
from sambasim.units import first_of

_FINITE, _INFINITE, _NAN = range(3)
_GIVEN = (SymbolKind.INPUT, SymbolKind.PARAMETER, SymbolKind.BUFFER, SymbolKind.CONSTANT)
_MOST_SAMPLES = 5


class Count(NamedTuple):
    """How many of `total` elements are NaN, and how many infinite."""

    nan: int
    infinite: int
    total: int

    @property
    def kind(self) -> int:
        return _NAN if self.nan else _INFINITE if self.infinite else _FINITE

    @property
    def word(self) -> str:
        return "nan" if self.nan else "inf"

    def __str__(self) -> str:
        parts = [f"{number} {word}" for number, word in ((self.nan, "nan"), (self.infinite, "inf")) if number]
        return f"{' and '.join(parts) or 'nothing'} of {self.total} element{'s' * (self.total != 1)}"


def count(tensor: Tensor) -> Count:
    """Count the non-finite elements; integer tensors have none."""
    is_integer = not (tensor.is_floating_point() or tensor.is_complex())
    if is_integer or bool(tensor.isfinite().all()):
        return Count(0, 0, tensor.numel())
    return Count(int(tensor.isnan().sum()), int(tensor.isinf().sum()), tensor.numel())


class _Origin(NamedTuple):
    """A non-finite result: the range of its operands, and whether it is `meant`: the node has an infinite constant."""

    of: str
    meant: bool


class Probe:
    """Checks the values of one replica or rank, which errors call `who`. `samples` returns the dataset indices of the
    last batch. With `may_overflow`, gradients are not checked."""

    def __init__(
        self, who: str, program: Program, memory: DeviceMemory, samples: Callable[[], Sequence[int]], may_overflow: bool
    ) -> None:
        self._who, self._program, self._memory, self._samples = who, program, memory, samples
        self._graph = graph = program.step
        self._node_of = {name: at for at, node in enumerate(graph.nodes) for name in node.makes}
        symbols = program.symbols
        self._given = [symbols[name] for name in graph.inputs if symbols[name].kind in _GIVEN]
        kinds = (SymbolKind.BUFFER,) if may_overflow else (SymbolKind.BUFFER, SymbolKind.GRADIENT)
        self._targets = [out for out in graph.outputs if symbols[out.symbol].kind in kinds]
        self._changed = {out.symbol for out in graph.outputs}
        self._seen: dict[str, Count] = {}
        self._origins: dict[str, _Origin] = {}
        self._when = ""

    def begin(self, step: int, micro_step: int) -> None:
        """A pass begins, and its batch is in device memory. Both numbers count from 0."""
        self._when = f"step {step + 1}, micro-step {micro_step + 1}"
        self._origins.clear()
        self._seen = {symbol.name: count(self._memory.tensor(symbol.name)) for symbol in self._given}

    def end(self, loss: float) -> None:
        """The pass ended. Raises NumericsError with the origin if the loss, a gradient or a buffer is not finite."""
        losses = {out.value: out.symbol for out in self._graph.outputs if out.symbol == self._program.loss}
        bad = {} if torch.tensor(loss).isfinite() else losses
        bad |= {out.value: out.symbol for out in self._targets if count(self._memory.tensor(out.symbol)).kind}
        if bad:
            raise self._error(next(iter(bad.values())), self._first(bad))

    def check(self, node: Node, name: str, value: Tensor, operands: Iterable[object]) -> None:
        """Count what is not finite in `value`, result `name` of `node`: an origin unless operands explain that."""
        made = self._seen[name] = count(value)
        if made.kind == _FINITE:
            return
        items = [item for operand in operands for item in (operand if isinstance(operand, list) else [operand])]
        tensors = [item for item in items if isinstance(item, Tensor) and item.is_floating_point()]
        counts = [count(tensor) for tensor in tensors]
        if (made.nan and not any(operand.nan for operand in counts)) or not any(operand.kind for operand in counts):
            ranges = [torch.aminmax(tensor.detach()) for tensor in tensors if tensor.numel()]
            least = min((float(bounds.min) for bounds in ranges), default=0.0)
            largest = max((float(bounds.max) for bounds in ranges), default=0.0)
            constants = (one for one in leaves((node.args, node.kwargs)) if isinstance(one, float))
            meant = not made.nan and any(map(math.isinf, constants))
            self._origins[name] = _Origin(f"of operands from {least:.6g} to {largest:.6g}", meant)

    def _first(self, bad: Mapping[str, str]) -> str | None:
        reached = self._causes(bad)
        first = [name for name in (*self._origins, *(symbol.name for symbol in self._given)) if name in reached]
        # Symbols come first, and those with NaN before those with infinities, which may be masks.
        order = {name: (self._meant(name), self._node_of.get(name, -1), not self._seen[name].nan) for name in first}
        return min(order, key=order.__getitem__, default=None)

    def _causes(self, values: Iterable[str]) -> set[str]:
        """The non-finite values that caused `values` to be non-finite, including these."""
        causes: set[str] = set()
        waiting = list(values)
        while waiting:
            name = waiting.pop()
            if name in causes or self._kind(name) == _FINITE:
                continue
            causes.add(name)
            kinds = {operand: self._kind(operand) for operand in self._operands(name)}
            # NaN comes from NaN if there is any, else from infinities.
            worst = max(kinds.values(), default=_FINITE) if self._kind(name) == _NAN else _INFINITE
            waiting += [operand for operand, kind in kinds.items() if kind >= worst]
        return causes

    def _operands(self, name: str) -> Sequence[str]:
        return self._graph.nodes[self._node_of[name]].reads if name in self._node_of else ()

    def _kind(self, name: str) -> int:
        if name in self._seen:
            return self._seen[name].kind
        # A view that was not evaluated is like what it is a view of.
        return max((self._kind(operand) for operand in self._operands(name)), default=_FINITE)

    def _meant(self, name: str) -> bool:
        """Whether a value is probably infinite on purpose: from an infinite constant, or in an unchanged buffer."""
        if name in self._origins:
            return self._origins[name].meant
        kept = self._program.symbols[name].kind in (SymbolKind.CONSTANT, SymbolKind.BUFFER)
        return kept and name not in self._changed and not self._seen[name].nan

    def _error(self, ended_in: str, first: str | None) -> NumericsError:
        ended = f"{self._called(ended_in)} is not finite on {self._who}, {self._when}"
        if first is None:
            raise InternalError(f"{ended}, but no operator made a non-finite value")
        if first not in self._node_of:
            return self._of_symbol(ended, self._program.symbols[first])
        position, origin = self._node_of[first], self._origins[first]
        node = self._graph.nodes[position]
        section = next(candidate for candidate in self._graph.sections if candidate.start <= position < candidate.stop)
        module = f" of the module {node.module}" if node.module else ""
        begins = f"it begins in section {section.index} ({section.kind} {section.name})"
        makes = f"{node.operator} makes the tensor {first}{module}: {self._seen[first]}, {origin.of}"
        remedy = "train with a smaller --lr, or scale the loss down: its gradient overflows where its value does not"
        if section.kind is SectionKind.FWD:
            remedy = "keep what goes in there in range, or train with a smaller --lr"
            remedy += "; --on-nonfinite skip leaves such steps out"
        where = str(node.source or f"the operator {node.operator}")
        return NumericsError(f"{ended}: {begins}, where {makes}", where=where, remedy=remedy)

    def _of_symbol(self, ended: str, symbol: Symbol) -> NumericsError:
        nonfinite = self._seen[symbol.name]
        if symbol.kind is SymbolKind.INPUT:
            values = self._memory.tensor(symbol.name)
            whole = values.isfinite().reshape(values.shape[0], -1).all(dim=1)
            numbers = [
                str(number) for number, finite in zip(self._samples(), whole.tolist(), strict=True) if not finite
            ]
            samples = f"sample{'s' * (len(numbers) > 1)} {first_of(numbers, _MOST_SAMPLES)}"
            return NumericsError(
                f"{ended}: the input {symbol.name} of the batch of {self._who} holds {nonfinite.word} ({samples}): "
                f"{nonfinite}",
                where=self._when,
                remedy="correct or leave out such samples, or --on-nonfinite skip to leave out steps that have some",
            )
        return NumericsError(
            f"{ended}: {self._called(symbol.name)} held {nonfinite.word} before the step: {nonfinite}",
            where=f"{self._who}, {symbol.name}",
            remedy="begin with weights that are finite: --weights FILE.safetensors, or compile again",
        )

    def _called(self, name: str) -> str:
        return "the loss" if name == self._program.loss else f"the {_called(self._program.symbols[name])}"


def _called(symbol: Symbol) -> str:
    known = symbol.torch_names[0] if symbol.torch_names and symbol.kind is not SymbolKind.GRADIENT else symbol.name
    return f"{symbol.kind} {known}"


class Probes(StepObserver):
    """A probe for each replica of this process; `watching` sets the replicas, after instructions were bound."""

    def __init__(self, program: Program, mesh: Mesh, scaling: LossScaleOptions) -> None:
        self._program, self._mesh = program, mesh
        scaled = any(argument.name == LOSS_SCALE for argument in program.runtime_arguments)
        self._may_overflow = scaled and scaling.dynamic
        self._probes: dict[int, Probe] = {}
        self._replicas: Sequence[Replica] = ()
        self._step = 0
        # Parameters first: they are the same on all ranks, so all ranks raise the same error.
        kinds = (SymbolKind.PARAMETER, SymbolKind.OPTIMIZER_STATE)
        self._symbols = [symbol for kind in kinds for symbol in program.symbols.values() if symbol.kind is kind]

    def watching(self, replicas: Sequence[Replica]) -> "Probes":
        self._replicas = replicas
        for rank in replicas:
            if rank.shard is not None:
                who, samples = self._mesh.who(rank.rank), rank.shard.samples_of_last_batch
                self._probes[rank.rank] = Probe(who, self._program, rank.memory, samples, self._may_overflow)
        return self

    def bind(self, replica: int, node: Node, function: Function) -> Function:
        if UNWRITTEN.get(node.operator) == 0:
            return function
        return reporting(node, function, lambda name, value, read: self._probes[replica].check(node, name, value, read))

    def step_begins(self, step: int) -> None:
        self._step = step

    def pass_begins(self, replica: int, micro_step: int) -> None:
        self._probes[replica].begin(self._step, micro_step)

    def pass_ends(self, replica: int, loss: float) -> None:
        """Raises NumericsError, naming the origin, if a result of the pass is not finite."""
        self._probes[replica].end(loss)

    def step_ends(self, step: int, norm: float | None) -> None:
        """Raises NumericsError if the update made a non-finite value from finite gradients."""
        for replica in self._replicas:
            for symbol in self._symbols:
                nonfinite = count(replica.memory.tensor(symbol.name))
                if nonfinite.kind:
                    of = "" if norm is None else f"; the norm of all gradients together is {norm:.6g}"
                    raise NumericsError(
                        f"the update of step {self._step + 1} made {nonfinite.word} of the {_called(symbol)}: "
                        f"{nonfinite}, though each replica's loss and gradients are finite{of}",
                        where=f"section OPT, {symbol.name}",
                        remedy="train with a smaller --lr, or with gradients that are clipped",
                    )
