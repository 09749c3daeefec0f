"""Run a graph's forward and backward sections against one replica's device memory.

Sections are flat lists of instructions over registers. Symbols sit in their registers for good, as views of device
memory; activations come and go. A gradient is stored in its place in the group as soon as it is complete: written by
the first micro-step of an accumulation, added to by the others. From the second pass on, kernels that can write to
that place do so (see `engine.routes`), and what they make is not copied any more.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor

from sambasim.errors import InternalError, SambasimError
from sambasim.ir.graph import Graph, Output, SectionKind
from sambasim.ir.program import Program
from sambasim.ir.types import SymbolKind
from sambasim.runtime.engine.parts import Part, by_part
from sambasim.runtime.engine.products import Products
from sambasim.runtime.engine.routes import Watch, find_routes
from sambasim.runtime.engine.straight_line import Misfit, StraightLine, add, misfit, overwrite
from sambasim.runtime.instructions import Instruction, RegisterFile, Registers, lower
from sambasim.runtime.operator_failure import operator_error

if TYPE_CHECKING:
    from sambasim.runtime.engine.inductor import Inductor  # takes seconds to import; plain runs do without


Tangent: TypeAlias = Tensor | dict[str, Tensor] | None
"""What a backward starts from: the gradient of the loss, or, by symbol, those of several outputs."""


def _unheard(count: int) -> None:
    """Nobody waits for sections."""


_DIFFERENTIATING = (SectionKind.FWD, SectionKind.BCKWD)


class Executable:
    """One graph bound to tensors. `tensor_of` gives the tensor of every symbol that the graph reads or keeps: always
    the same one, whose contents may change between passes.

    wanted: the output that a pass returns, by symbol; None for all of them
    look: gives, for each instruction, what is called in place of its function

    With `engine` inductor, the graph is compiled here, before any pass. Raises PefError for a node that this torch
    cannot carry out, and MachineError if the graph cannot be compiled.
    """

    def __init__(
        self,
        graph: Graph,
        program: Program,
        tensor_of: Callable[[str], Tensor],
        engine: "Inductor | None" = None,
        wanted: str | None = None,
        look: Callable[[Instruction], Callable[..., object]] | None = None,
    ) -> None:
        self._program = program
        self._graph = graph
        self._tensor_of = tensor_of
        self._registers = RegisterFile()
        kinds = {name: symbol.kind for name, symbol in program.symbols.items()}
        tangents = [name for name in graph.inputs if kinds[name] is SymbolKind.TANGENT]
        self._tangents = {name: self._registers.value(name) for name in tangents}
        for name in graph.inputs:
            number = self._registers.value(name)
            if kinds[name] is not SymbolKind.TANGENT:
                self._registers.initial[number] = tensor_of(name)
        computed = set(graph.values)
        gradients = [o for o in graph.outputs if kinds[o.symbol] is SymbolKind.GRADIENT]
        self._buffers = [(o, tensor_of(o.symbol)) for o in graph.outputs if kinds[o.symbol] is SymbolKind.BUFFER]
        outputs = [o for o in graph.outputs if kinds[o.symbol] is SymbolKind.OUTPUT]
        self._handed_out = [o for o in outputs if wanted in (None, o.symbol)]
        backward = (graph.section_nodes(one) for one in graph.sections if one.kind is SectionKind.BCKWD)
        late = {result for nodes in backward for node in nodes for result in node.results} | set(tangents)
        self._of_forward = [o for o in self._handed_out if o.value not in late]
        self._of_backward = [o for o in self._handed_out if o.value in late]  # gradients of inputs
        # A gradient may be an input itself (of a bare parameter that is the loss, say): then no node completes it.
        self._kept_storages = {
            tensor.untyped_storage().data_ptr() for tensor in self._registers.initial if isinstance(tensor, Tensor)
        }
        self._late = [(o, tensor_of(o.symbol)) for o in gradients if o.value not in computed]
        self._watch: Watch | None = None
        self._products = Products()
        self._forward_parts = 0
        self._parts: list[Part] = []
        self._adding: list[StraightLine] = []
        self._writing: list[StraightLine] = []
        self._look = look
        self._lower(engine, [o for o in gradients if o.value in computed])
        self._live: Registers = []

    def run(
        self,
        tangent: Tangent = None,
        *,
        accumulate: bool = False,
        section_done: Callable[[int], None] = _unheard,
    ) -> dict[str, Tensor]:
        """All sections in order, the backward starting from `tangent`; returns the outputs by symbol.

        With `accumulate`, gradients are added to those that are there instead of overwriting them. `section_done` is
        told how many sections have been run: after each, or after several that were compiled together. Raises
        DataError if an operator fails on the values of the inputs, MachineError if memory runs out, and PefError if an
        operator returns a list of another length than its node states.
        """
        self._live = self._registers.initial.copy()
        self._begin_from(tangent)
        self._run_parts(self._adding if accumulate else self._writing, section_done)
        outputs = self._outputs(self._handed_out)
        self._keep_buffers()
        self._end_pass(accumulate)
        return outputs

    def forward(self, section_done: Callable[[int], None] = _unheard) -> dict[str, Tensor]:
        """The forward sections alone; returns the outputs by symbol. `section_done` and what it raises are as in `run`.

        Buffers are changed at the end of it. Activations are kept until `backward`, or until the next pass begins.
        """
        self._live = self._registers.initial.copy()
        self._run_parts(self._writing[: self._forward_parts], section_done)
        outputs = self._outputs(self._of_forward)
        self._keep_buffers()
        return outputs

    def backward(self, tangent: Tangent, *, accumulate: bool) -> dict[str, Tensor]:
        """The backward sections, from `tangent`, of the pass whose `forward` was last; returns the gradients of inputs
        that require one, by symbol. Raises what `run` does."""
        if not self._live:
            raise InternalError("a backward without a forward before it")
        self._begin_from(tangent)
        self._run_parts((self._adding if accumulate else self._writing)[self._forward_parts :], _unheard)
        outputs = self._outputs(self._of_backward)
        self._end_pass(accumulate)
        return outputs

    @property
    def awaits_backward(self) -> bool:
        """Whether the activations of a forward are there."""
        return bool(self._live)

    def present(self, value: str) -> Tensor | None:
        """What is called `value` in the graph, while a pass is under way; None if it is not there, or not any more."""
        held = self._live[self._registers.value(value)] if self._live and self._registers.has(value) else None
        return held if isinstance(held, Tensor) else None

    def _begin_from(self, tangent: Tangent) -> None:
        for name, register in self._tangents.items():
            self._live[register] = tangent[name] if type(tangent) is dict else tangent

    def _run_parts(self, parts: Sequence[StraightLine], section_done: Callable[[int], None]) -> None:
        for part in parts:
            try:
                part(self._live)
            except Misfit as error:
                raise misfit(part.failed(error)) from error
            except Exception as error:
                raise self._failure(part.failed(error), error) from error
            section_done(part.sections)

    def _failure(self, instruction: Instruction, error: Exception) -> SambasimError:
        inputs = [self._program.symbols[name] for name in self._graph.inputs]
        inputs = [symbol for symbol in inputs if symbol.kind is SymbolKind.INPUT]
        tensors = {symbol.name: self._tensor_of(symbol.name) for symbol in inputs}
        return operator_error(instruction.node, error, inputs, tensors)

    def _outputs(self, outputs: Sequence[Output]) -> dict[str, Tensor]:
        return {output.symbol: self._detached(output) for output in outputs}

    def _keep_buffers(self) -> None:
        for output, destination in self._buffers:
            destination.copy_(self._value(output))

    def _end_pass(self, accumulate: bool) -> None:
        keep = add if accumulate else overwrite
        for output, destination in self._late:
            keep(self._value(output), destination)
        self._live = []
        if self._watch is not None and not accumulate:
            self._writing, self._adding = self._direct(self._watch), self._quicker()
            self._watch = None

    def _lower(self, engine: "Inductor | None", gradients: Sequence[Output]) -> None:
        """Make the instructions of passes that add to gradients, and of the first pass that writes them."""
        stores: dict[str, list[Tensor]] = {}
        for output in gradients:
            stores.setdefault(output.value, []).append(self._tensor_of(output.symbol))
        sections = [section for section in self._graph.sections if section.kind in _DIFFERENTIATING]
        nodes = [node for section in sections for node in self._graph.section_nodes(section)]
        sizes = [(section.kind, section.stop - section.start) for section in sections]
        forward_sections = sum(section.kind is SectionKind.FWD for section in sections)
        # Gradients are stored at once, so the graph's end needs only what it hands out and the changed buffers.
        keep = {output.value for output in self._handed_out} | {output.value for output, _ in self._buffers}
        lowered = lower(nodes, self._registers, stores, keep)
        if self._look is not None:
            lowered = [None if one is None else replace(one, function=self._look(one)) for one in lowered]
        if engine is None:
            self._parts = by_part(lowered, [(1, size) for _, size in sizes])
        else:
            self._parts = engine.lower(lowered, nodes, sizes, self._registers, stores, keep, self._tensors())
        self._adding = [StraightLine(part, accumulate=True) for part in self._parts]
        self._forward_parts = sum(part.sections <= forward_sections for part in self._parts)
        flat = [one for part in self._parts for one in part.instructions]
        part_of = [part.sections for part in self._parts for _ in part.instructions]
        single = {value: places[0] for value, places in stores.items() if len(places) == 1}
        routes = find_routes([one.node for one in flat], part_of, list(stores), keep)
        routes = [route for route in routes if route.value in single]
        watch = Watch(routes, single)
        self._watch = watch if routes else None
        told = [self._products.watched(i, one.function) for i, one in enumerate(flat)]
        watched = [replace(one, function=watch.watched(i, told[i])) for i, one in enumerate(flat)]
        self._writing = self._like(watched)

    def _tensors(self) -> dict[str, Tensor]:
        """The tensors that the graph begins from; one like the tangent in its place."""
        symbols = self._program.symbols
        tangents = {name: symbols[name].type for name in self._graph.inputs if symbols[name].kind is SymbolKind.TANGENT}
        like = {name: torch.empty(type_.shape, dtype=getattr(torch, type_.dtype)) for name, type_ in tangents.items()}
        return like | {name: self._tensor_of(name) for name in self._graph.inputs if name not in like}

    def _direct(self, watch: Watch) -> list[StraightLine]:
        """The instructions of passes in which kernels write to the places of gradients, as far as `watch` says."""
        direct: list[Instruction | None] = [one for part in self._parts for one in part.instructions]
        for position, one in enumerate(direct):
            out = watch.outs.get(position)
            quicker = self._products.quicker(position, out)
            if one is not None and quicker is not None:
                direct[position] = replace(one, function=quicker)
            elif one is not None and out is not None:
                direct[position] = replace(one, function=partial(one.function, out=out))
        for route in watch.routes:
            if route.maker in watch.outs:
                last = direct[route.last]
                direct[route.last] = None if last is None else replace(last, stores=())
                for position in route.unread:
                    direct[position] = None
        return self._like(direct)

    def _quicker(self) -> list[StraightLine]:
        """The instructions of passes that add to gradients, with the products that are quicker."""
        flat = [one for part in self._parts for one in part.instructions]
        found = [self._products.quicker(position) for position in range(len(flat))]
        quick = [
            one if function is None else replace(one, function=function)
            for one, function in zip(flat, found, strict=True)
        ]
        return self._like(quick, accumulate=True)

    def _like(self, instructions: Sequence[Instruction | None], *, accumulate: bool = False) -> list[StraightLine]:
        """Other `instructions` in the same parts; None where one of them is left out. They write gradients, or add."""
        rest, lines = iter(instructions), []
        for part in self._parts:
            kept = tuple(one for one in islice(rest, len(part.instructions)) if one is not None)
            lines.append(StraightLine(replace(part, instructions=kept), accumulate=accumulate))
        return lines

    def _value(self, output: Output) -> Tensor:
        value = self._live[self._registers.value(output.value)]
        if not isinstance(value, Tensor):
            raise TypeError(f"{output.value} is {type(value).__name__}")
        return value

    def _detached(self, output: Output) -> Tensor:
        """The output's value; a copy where it is a symbol, or a view of one, which the next step will overwrite."""
        value = self._value(output)
        return value.clone() if value.untyped_storage().data_ptr() in self._kept_storages else value


def tangent_of(program: Program, scale: float) -> Tensor | None:
    """What the backward starts from: `scale` in the type of the loss, or None for a program without a loss."""
    if program.loss is None:
        return None
    type_ = program.symbols[program.loss].type
    return torch.full(type_.shape, scale, dtype=getattr(torch, type_.dtype))


def outputs_in_order(graph: Graph, outputs: Mapping[str, Tensor]) -> list[Tensor]:
    """What a pass handed out, in the order of the graph's outputs."""
    return [outputs[output.symbol] for output in graph.outputs if output.symbol in outputs]
