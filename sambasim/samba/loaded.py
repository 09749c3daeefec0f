"""What a session keeps of the PEF that it has loaded: its outputs and inputs, and the names that they go by."""

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from sambasim.compiler.names import gradient_name
from sambasim.errors import OptionError
from sambasim.ir.operators import OPERATORS
from sambasim.ir.program import Program
from sambasim.ir.types import Symbol, SymbolKind
from sambasim.samba import context
from sambasim.samba.binding import bind, inputs_of
from sambasim.samba.checks.place import app_line
from sambasim.samba.checks.replicas import Checks
from sambasim.samba.hyperparameters import Hyperparameters
from sambasim.samba.machine import Machine
from sambasim.samba.request import Inputs, flat
from sambasim.samba.start import Start
from sambasim.samba.tensor import SambaTensor


class Loaded:
    """One PEF that is loaded, and what the session keeps of its runs."""

    def __init__(
        self, machine: Machine, inputs: Inputs, traced: Sequence[SambaTensor], *, loss_is_chosen: bool
    ) -> None:
        program = machine.program
        self.machine = machine
        self.traced = tuple(traced)
        self.checks = Checks(machine, context.communicator())
        self.hyperparameters = Hyperparameters(machine)
        self.wanted: Mapping[str, Symbol] = inputs_of(program)
        self.start = Start(program, [str(one.sn_name) for one in traced], loss_is_chosen=loss_is_chosen)
        self.output_gradients: dict[str, Tensor] = {}
        self.differs_in_evaluation = _trains_otherwise(program)
        names = {gradient_name(name): name for name in self.wanted}
        self.input_gradients = {gradient: name for gradient, name in names.items() if gradient in program.symbols}
        self.aliases = _output_aliases(program)
        self.accepted: object = None
        self.inputs: Mapping[str, Tensor] = bind(self.wanted, program.batch_size, machine.model, inputs)
        self.traced_inputs = samba_tensors(self.inputs, inputs)
        self.given: Mapping[str, SambaTensor] = {}
        self.gradients: dict[str, Tensor] = {}  # of inputs
        for output in traced:
            output.keep_gradients_in(self.output_gradients)
        self.outputs = {str(t.sn_name): SambaTensor(t, name=t.sn_name) for t in traced}


def samba_tensors(bound: Mapping[str, Tensor], inputs: Inputs) -> Mapping[str, SambaTensor]:
    """The SambaTensors of `inputs`, by the names that they are `bound` to."""
    return {name: one for name, one in zip(bound, flat(inputs), strict=True) if isinstance(one, SambaTensor)}


def named_tensor(now: Loaded, name: str) -> SambaTensor:
    """The tensor that an app calls `name`. Raises OptionError for a name that the PEF does not have."""
    symbol = now.machine.program.symbols.get(name)
    if symbol is None and name in now.aliases:
        name = now.aliases[name]
    if name in now.outputs:
        return now.outputs[name]
    for tensors in (now.inputs, now.gradients):
        if name in tensors:
            return SambaTensor(tensors[name], name=name)
    if symbol is None or symbol.offset is None:
        raise OptionError(
            f"the PEF has no tensor {name}",
            where=app_line(),
            remedy=f"sambasim inspect {now.machine.program.name} lists them",
        )
    return SambaTensor(now.machine.replica.read(name), name=name)


def _output_aliases(program: Program) -> Mapping[str, str]:
    """Other names of the outputs, after the operator that computes each: `net__fc__linear__outputs__0`, and the same
    without the model's prefix, as compilers write them and apps type them."""
    graph = program.training or program.evaluation
    outputs = [one for one in graph.outputs if program.symbols[one.symbol].kind is SymbolKind.OUTPUT]
    outputs = [one for one in outputs if one.value in graph.values]  # and not a parameter that the model returns
    aliases = {one.value.partition("__")[2]: one.symbol for one in outputs}
    return {**aliases, **{one.value: one.symbol for one in outputs}}


def _trains_otherwise(program: Program) -> bool:
    """Whether a training step draws what evaluation does not, or normalizes by its batch."""
    nodes = program.training.nodes if program.training is not None else ()
    return any(OPERATORS[node.operator].draws_random_numbers or "batch_norm" in node.operator for node in nodes)


def outputs_of(program: Program) -> Iterator[SambaTensor]:
    """A tensor without data for each output of what a session runs."""
    graph = program.training or program.evaluation
    of_inputs = {gradient_name(name) for name in inputs_of(program)}
    for output in graph.outputs:
        symbol = program.symbols[output.symbol]
        if symbol.kind is SymbolKind.OUTPUT and symbol.name not in of_inputs:
            batched = bool(symbol.type.shape) and symbol.type.shape[0] == program.batch_size
            yield SambaTensor(
                shape=symbol.type.shape,
                dtype=getattr(torch, symbol.type.dtype),
                name=symbol.name,
                batch_dim=0 if batched else None,
            )
