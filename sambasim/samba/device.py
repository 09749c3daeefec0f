"""The device of a session: weights and optimizer state."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from operator import attrgetter

import torch
from torch import Tensor, nn

from sambasim.compiler.capture.tensors import held_by
from sambasim.errors import WeightsError
from sambasim.ir.program import Program, state_name
from sambasim.ir.types import Symbol, SymbolKind, gradient_name
from sambasim.pef import PefDocument
from sambasim.runtime.machine.communicator import Communicator
from sambasim.runtime.run.stepwise import StepwiseReplica
from sambasim.samba.request import Optimizer

_TORCH_STATES = {"momentum": "momentum_buffer"}
"""torch.optim's names of states, where a PEF has another."""


@dataclass(frozen=True, slots=True)
class Machine:
    """`model` and `optimizers` are on the host; `replica` has the weights of the device. `program`: as if the replica
    had one rank."""

    document: PefDocument
    program: Program
    model: nn.Module
    optimizers: Sequence[Optimizer]
    replica: StepwiseReplica

    def to_device(self) -> None:
        """Copies weights, buffers and optimizer state of the host to the device, and resets other states. Collective.

        Raises WeightsError for a tensor of another shape than in the PEF.
        """
        tensors = self._host_tensors()
        self.replica.meet()
        self.replica.forget()
        for symbol, path in self._state_dict_symbols():
            if tuple(tensors[path].shape) != symbol.type.shape:
                what = f"{path} has the shape {tuple(tensors[path].shape)}, and in the PEF {symbol.type.shape}"
                raise WeightsError(what, remedy="load a checkpoint of the model that was compiled")
            self.replica.write(symbol.name, tensors[path].detach())
        for name, parameter, state, optimizer in self._states():
            value = optimizer.state.get(parameter, {}).get(_TORCH_STATES.get(state, state))
            if isinstance(value, Tensor):
                self.replica.write(name, value)
        entries = [entry for optimizer in self.optimizers for entry in optimizer.state.values() if entry]
        # SGD counts no steps: 1 if it has momentum.
        self.replica.steps = max((int(entry.get("step", 1)) for entry in entries), default=0)
        self.replica.meet()

    def follow_first(self, communicator: Communicator) -> None:
        """Copies parameters, buffers and optimizer state of replica 0 to all replicas. Collective."""
        for symbol in self.program.symbols.values():
            if symbol.kind in (SymbolKind.PARAMETER, SymbolKind.BUFFER, SymbolKind.OPTIMIZER_STATE):
                own = self.replica.read(symbol.name) if communicator.rank == 0 else None
                self.replica.write(symbol.name, communicator.broadcast_object(own))
        self.replica.steps = communicator.broadcast_object(self.replica.steps)

    def gradient(self, tensor: Tensor) -> Tensor | None:
        """The gradient on the device of a trained parameter of the model; None for any other tensor."""
        symbol = self._symbol_of(tensor)
        if symbol is None or gradient_name(symbol.name) not in self.program.symbols:
            return None
        return self.replica.read(gradient_name(symbol.name))

    def value(self, tensor: Tensor) -> Tensor | None:
        """The value on the device of a parameter or buffer of the model; None for any other tensor."""
        symbol = self._symbol_of(tensor)
        return None if symbol is None else self.replica.read(symbol.name)

    def _symbol_of(self, tensor: Tensor) -> Symbol | None:
        named = self.program.symbols.get(str(tensor.__dict__.get("sn_name")))  # set by from_torch_model_
        if named is not None and named.torch_names:
            with suppress(AttributeError):  # most names are also paths
                if attrgetter(named.torch_names[0])(self.model) is tensor:
                    return named
        tensors = self._host_tensors()
        return next((symbol for symbol, path in self._state_dict_symbols() if tensors[path] is tensor), None)

    def note_step(self) -> None:
        """Tells torch's schedulers that there was an optimizer step."""
        for optimizer in self.optimizers:
            optimizer._opt_called = True

    def to_host(self) -> None:
        """Copies weights, buffers and optimizer state of the device to the host, in the types of the host."""
        tensors = self._host_tensors()
        states = self._states() if self.replica.steps else []
        values = [self.replica.read(name) for name, *_ in states]
        with torch.no_grad():
            for symbol, path in self._state_dict_symbols():
                tensors[path].copy_(self.replica.read(symbol.name))
        for (_, parameter, state, optimizer), value in zip(states, values, strict=True):
            entry = optimizer.state[parameter]
            entry[_TORCH_STATES.get(state, state)] = value.to(parameter.dtype)
            if state != "momentum":
                entry["step"] = torch.tensor(float(self.replica.steps))

    def _host_tensors(self) -> Mapping[str, Tensor]:
        return {name: held.tensor for held in held_by(self.model) for name in held.names}

    def _state_dict_symbols(self) -> list[tuple[Symbol, str]]:
        """The parameters and buffers of the model's state_dict, with their paths."""
        kinds = (SymbolKind.PARAMETER, SymbolKind.BUFFER)
        return [(s, s.torch_names[0]) for s in self.program.symbols.values() if s.kind in kinds and s.torch_names]

    def _states(self) -> list[tuple[str, Tensor, str, Optimizer]]:
        """Every optimizer state on the device: its symbol, its parameter on the host, its name, and its optimizer."""
        parameters = self._host_tensors()
        owner = {
            id(p): optimizer
            for optimizer in self.optimizers
            for group in optimizer.param_groups
            for p in group["params"]
        }
        symbols = self.program.symbols
        states = []
        for group in self.program.groups:
            optimizer = self.program.optimizers[group.optimizer]
            for member in group.members:
                parameter = parameters[symbols[member.parameter].torch_names[0]]
                if id(parameter) in owner:
                    states += [
                        (state_name(member.parameter, optimizer.name, state), parameter, state, owner[id(parameter)])
                        for state in optimizer.states
                    ]
        return states
