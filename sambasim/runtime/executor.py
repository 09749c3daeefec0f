"""Run a graph's forward and backward sections against one replica's device memory.

Sections are flat lists of instructions over registers. Symbols sit in their registers for good, as views of device
memory; activations come and go. A gradient is stored in its place in the group as soon as it is complete: written by
the first micro-step of an accumulation, added to by the others.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sambasim.errors import SambasimError
from sambasim.ir.graph import Graph, Node, Output, SectionKind
from sambasim.ir.program import Program
from sambasim.ir.types import SymbolKind
from sambasim.pef.operands import operands_error
from sambasim.runtime.instructions import Instruction, RegisterFile, Registers, lower
from sambasim.runtime.operator_failure import operator_error

_DIFFERENTIATING = (SectionKind.FWD, SectionKind.BCKWD)


@dataclass(frozen=True, slots=True)
class LoweredSection:
    """One section, ready to run: an instruction for each of its nodes."""

    index: int
    kind: SectionKind
    instructions: tuple[Instruction, ...]
    nodes: tuple[Node, ...]


class Executable:
    """One graph bound to tensors. `tensor_of` gives the tensor of every symbol that the graph reads or keeps."""

    def __init__(self, graph: Graph, program: Program, tensor_of: Callable[[str], Tensor]) -> None:
        self._program = program
        self._graph = graph
        self._tensor_of = tensor_of
        self._registers = RegisterFile()
        kinds = {name: symbol.kind for name, symbol in program.symbols.items()}
        tangents = [name for name in graph.inputs if kinds[name] is SymbolKind.TANGENT]
        self._tangent = self._registers.value(tangents[0]) if tangents else None
        for name in graph.inputs:
            number = self._registers.value(name)
            if kinds[name] is not SymbolKind.TANGENT:
                self._registers.initial[number] = tensor_of(name)
        computed = set(graph.values)
        gradients = [o for o in graph.outputs if kinds[o.symbol] is SymbolKind.GRADIENT]
        self._buffers = [(o, tensor_of(o.symbol)) for o in graph.outputs if kinds[o.symbol] is SymbolKind.BUFFER]
        self._handed_out = [o for o in graph.outputs if kinds[o.symbol] is SymbolKind.OUTPUT]
        # A gradient may be an input itself (of a bare parameter that is the loss, say): then no node completes it.
        self._late = [(o, tensor_of(o.symbol)) for o in gradients if o.value not in computed]
        self._sections = self._lower([o for o in gradients if o.value in computed], tensor_of)
        self._live: Registers = []

    @property
    def sections(self) -> Sequence[LoweredSection]:
        return self._sections

    def begin(self, tangent: Tensor | None = None) -> None:
        """Get ready for one pass through the sections, which starts its backward from `tangent`."""
        self._live = self._registers.initial.copy()
        if self._tangent is not None:
            self._live[self._tangent] = tangent

    def run_section(self, section: LoweredSection, *, accumulate: bool = False) -> None:
        """Run one section; with `accumulate`, add to the gradients instead of overwriting them.

        Raises DataError if an operator fails on the values of the inputs, MachineError if memory runs out, and PefError
        if an operator returns a list of another length than its node states.
        """
        registers = self._live
        for instruction in section.instructions:
            try:
                value = instruction.function(*instruction.load(registers))
            except Exception as error:
                raise self._failure(section, instruction, error) from error
            if not instruction.single:
                if not _unpack(value, instruction.results, registers):
                    raise self._misfit(section, instruction)
            elif (only := instruction.results[0]) is not None:
                registers[only] = value
            for number, destination in instruction.stores:
                _store(registers[number], destination, accumulate)
            for number in instruction.frees:
                registers[number] = None

    def _failure(self, section: LoweredSection, instruction: Instruction, error: Exception) -> SambasimError:
        inputs = [self._program.symbols[name] for name in self._graph.inputs]
        inputs = [symbol for symbol in inputs if symbol.kind is SymbolKind.INPUT]
        tensors = {symbol.name: self._tensor_of(symbol.name) for symbol in inputs}
        return operator_error(_node_of(section, instruction), error, inputs, tensors)

    def _misfit(self, section: LoweredSection, instruction: Instruction) -> SambasimError:
        node = _node_of(section, instruction)
        return operands_error(node, f"{node.operator} does not return the {len(node.results)} tensors that are stated")

    def finish(self, *, accumulate: bool = False) -> dict[str, Tensor]:
        """End the pass: keep the changed buffers, and hand out the outputs by symbol."""
        for output, destination in self._late:
            _store(self._value(output), destination, accumulate)
        outputs = {output.symbol: self._detached(output) for output in self._handed_out}
        for output, destination in self._buffers:
            destination.copy_(self._value(output))
        self._live = []
        return outputs

    def run(
        self,
        tangent: Tensor | None = None,
        *,
        accumulate: bool = False,
        section_done: Callable[[int], None] = lambda count: None,
    ) -> dict[str, Tensor]:
        """All sections in order; returns the outputs by symbol. `section_done` is told how many have been run."""
        self.begin(tangent)
        for count, section in enumerate(self._sections, start=1):
            self.run_section(section, accumulate=accumulate)
            section_done(count)
        return self.finish(accumulate=accumulate)

    def _lower(self, gradients: Sequence[Output], tensor_of: Callable[[str], Tensor]) -> tuple[LoweredSection, ...]:
        stores: dict[str, list[Tensor]] = {}
        for output in gradients:
            stores.setdefault(output.value, []).append(tensor_of(output.symbol))
        graph = self._graph
        chosen = [section for section in graph.sections if section.kind in _DIFFERENTIATING]
        nodes = [node for section in chosen for node in graph.section_nodes(section)]
        # Gradients are stored at once, so the graph's end needs only what it hands out and the changed buffers.
        keep = {output.value for output in self._handed_out} | {output.value for output, _ in self._buffers}
        instructions = lower(nodes, self._registers, stores, keep)
        lowered, start = [], 0
        for section in chosen:
            count = section.stop - section.start
            part = slice(start, start + count)
            lowered.append(LoweredSection(section.index, section.kind, tuple(instructions[part]), tuple(nodes[part])))
            start += count
        return tuple(lowered)

    def _value(self, output: Output) -> Tensor:
        value = self._live[self._registers.value(output.value)]
        if not isinstance(value, Tensor):
            raise TypeError(f"{output.value} is {type(value).__name__}")
        return value

    def _detached(self, output: Output) -> Tensor:
        """The output's value; a copy where it is a symbol itself, which the next step will overwrite."""
        value = self._value(output)
        return value if output.value in self._graph.values else value.clone()


def _node_of(section: LoweredSection, instruction: Instruction) -> Node:
    position = next(i for i, other in enumerate(section.instructions) if other is instruction)
    return section.nodes[position]


def _unpack(value: object, results: Sequence[int | None], registers: Registers) -> bool:
    """Whether `value` is as many tensors as there are `results`; if so, they are in their registers now."""
    if not isinstance(value, (tuple, list)) or len(value) != len(results):
        return False
    for number, tensor in zip(results, value, strict=True):
        if number is not None:
            registers[number] = tensor
    return True


def _store(value: object, destination: Tensor, accumulate: bool) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(f"a gradient is {type(value).__name__}")
    if accumulate:
        destination.add_(value)
    else:
        destination.copy_(value)


def tangent_of(program: Program, scale: float) -> Tensor | None:
    """What the backward starts from: `scale` in the type of the loss, or None for a program without a loss."""
    if program.loss is None:
        return None
    type_ = program.symbols[program.loss].type
    return torch.full(type_.shape, scale, dtype=getattr(torch, type_.dtype))


def outputs_in_order(graph: Graph, outputs: Mapping[str, Tensor]) -> list[Tensor]:
    """What a pass handed out, in the order of the graph's outputs."""
    return [outputs[output.symbol] for output in graph.outputs if output.symbol in outputs]
