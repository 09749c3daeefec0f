"""The device of a session: weights, optimizer state, and the `hyperparam_dict` of `session.run`."""

import difflib
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from numbers import Real
from operator import attrgetter

import numpy as np
import torch
from torch import Tensor, nn

from sambasim.compiler.capture.tensors import held_by
from sambasim.errors import OptionError, WeightsError
from sambasim.ir.graph import Graph, Node, Ref
from sambasim.ir.program import Program
from sambasim.ir.types import Symbol, SymbolKind, gradient_name
from sambasim.optimizers import OPTIMIZERS
from sambasim.pef import PefDocument
from sambasim.runtime.machine.communicator import Communicator
from sambasim.runtime.run.stepwise import StepwiseReplica
from sambasim.samba.notices import OTHER_WORDS, nearest, say_once
from sambasim.samba.process import app_error, report_here, type_error
from sambasim.samba.request import Optimizer
from sambasim.units import first_of

DEVICE_STATE = (SymbolKind.PARAMETER, SymbolKind.BUFFER, SymbolKind.OPTIMIZER_STATE)


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
        """Copies weights, buffers and optimizer state of the host to the device; resets other states. Collective."""
        on_host = self._on_host()
        self.replica.meet()
        self.replica.forget()
        for symbol, tensor in on_host:
            if (shape := tuple(tensor.shape)) != symbol.type.shape:
                what = f"{symbol.torch_names[0]} has the shape {shape}, and in the PEF {symbol.type.shape}"
                raise WeightsError(what, remedy="load a checkpoint of the model that was compiled")
            self.replica.write(symbol.name, tensor.detach())
        for name, index, parameter, state, optimizer in self._states():
            value = optimizer.state.get(parameter, {}).get(state)
            if isinstance(value, Tensor):
                self.replica.write(name, value)
                self.replica.begun[index] = 0
        entries = [entry for optimizer in self.optimizers for entry in optimizer.state.values() if entry]
        # SGD counts no steps: 1 if it has momentum.
        self.replica.steps = max((int(entry.get("step", 1)) for entry in entries), default=0)
        self.replica.meet()

    def follow_first(self, communicator: Communicator) -> None:
        """Copies parameters, buffers and optimizer state of replica 0 to all replicas. Collective."""
        of_replicas = communicator.all_gather_object((dict(self.replica.begun), self.replica.steps))
        states = self.replica.states_of({index for begun, _ in of_replicas for index in begun})
        for name in (*self.program.names_of(SymbolKind.PARAMETER, SymbolKind.BUFFER), *states):
            own = self.replica.read(name) if communicator.rank == 0 else None
            self.replica.write(name, communicator.broadcast_object(own))
        self.replica.begun.clear()
        self.replica.begun |= of_replicas[0][0]
        self.replica.steps = of_replicas[0][1]

    def gradient(self, tensor: Tensor) -> Tensor | None:
        """The gradient on the device of a trained parameter of the model; None for any other tensor."""
        symbol = self._symbol_of(tensor)
        name = "" if symbol is None else gradient_name(symbol.name)
        return self.replica.read(name) if name in self.program.symbols else None

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
        return next((symbol for symbol, held in self._on_host() if held is tensor), None)

    def to_host(self) -> None:
        """Copies weights, buffers and optimizer state of the device to the host, in the types of the host."""
        steps, begun = self.replica.steps, self.replica.begun
        states = [one for one in self._states() if begun.get(one[1], steps + 1) <= steps]
        values = [self.replica.read(name) for name, *_ in states]
        with torch.no_grad():
            for symbol, tensor in self._on_host():
                tensor.copy_(self.replica.read(symbol.name))
        for (_, _, parameter, state, optimizer), value in zip(states, values, strict=True):
            entry = optimizer.state[parameter]
            entry[state] = value.to(parameter.dtype)
            if state != "momentum_buffer":
                entry["step"] = torch.tensor(float(steps))

    def _on_host(self) -> list[tuple[Symbol, Tensor]]:
        """Each parameter and buffer with that of the model."""
        tensors = {name: held.tensor for held in held_by(self.model) for name in held.names}
        symbols = map(self.program.symbols.__getitem__, self.program.names_of(SymbolKind.PARAMETER, SymbolKind.BUFFER))
        return [(symbol, tensors[symbol.torch_names[0]]) for symbol in symbols if symbol.torch_names]

    def _states(self) -> Iterator[tuple[str, int, Tensor, str, Optimizer]]:
        """Every optimizer state on the device: its symbol and the number of its optimizer; its parameter on the host,
        its name in torch, and its optimizer there."""
        tensors = {symbol.name: tensor for symbol, tensor in self._on_host()}
        groups = ((optimizer, group) for optimizer in self.optimizers for group in optimizer.param_groups)
        owners = {id(parameter): optimizer for optimizer, group in groups for parameter in group["params"]}
        for name, (group, member, state) in self.program.optimizer_states.items():
            if (owner := owners.get(id(tensors[member.parameter]))) is not None:
                of_torch = OPTIMIZERS[self.program.optimizers[group.optimizer].kind].states[state]
                yield name, group.optimizer, tensors[member.parameter], of_torch, owner


ALL_DROPOUTS = "p"  # the name of the rate of all dropouts

_OF_TRAINING = {"beta1", "beta2", "max_grad_norm"}.union(*(entry.defaults for entry in OPTIMIZERS.values()))

_ELEMENTS, _CHANNELS = "aten.native_dropout.default", "aten.bernoulli.p"
_UNDRAWN = {0.0: "aten.ones_like.default", 1.0: "aten.zeros_like.default"}  # what a rate of channels keeps


class Hyperparameters:
    """The hyperparameters and dropout rates of a loaded PEF."""

    def __init__(self, machine: Machine) -> None:
        self._machine, program = machine, machine.program
        self._arguments = {argument.name for argument in program.runtime_arguments}
        self._of_optimizers = {name.partition("__")[2] for name in self._arguments if "__" in name}
        self._compiled_rates = rates_of(program.leading)
        self._takes = self._of_optimizers.union((ALL_DROPOUTS, *self._compiled_rates) if self._compiled_rates else ())
        self.given: dict[str, float] = {}  # the hyperparameters and rates that were given so far
        self._rates: dict[str, float] = {}
        self._rates_changed = False
        self._last: Mapping[str, object] = {}

    def take(self, given: Mapping[str, object]) -> None:
        """Takes `given` from now on, and dropout rates from the next forward on; unknown names give a notice."""
        if given == self._last:
            return
        if not isinstance(given, Mapping):
            raise type_error(OptionError, "AP04: hyperparam_dict is a dictionary", given, 'hyperparam_dict={"lr": 0.1}')
        if wrong := [name for name in given if not isinstance(name, str)]:
            what = "AP04: a key of hyperparam_dict must be a word"
            raise type_error(OptionError, what, wrong[0], 'hyperparam_dict={"lr": 0.1}')
        if self._machine.program.training is None and (names := [name for name in given if name in _OF_TRAINING]):
            what = f"session.run is given {', '.join(names)}, and this PEF predicts: nothing is trained"
            report_here("AP07", what, "compile and run without --inference, and give trace_graph the optimizers")
        numbers = {name: _number(name, value) for name, value in self._known(given).items()}
        self._take_rates({name: value for name, value in numbers.items() if name not in self._of_optimizers})
        self._take_for_optimizers({name: value for name, value in numbers.items() if name in self._of_optimizers})
        self._last = {**given} if all(isinstance(value, Real) for value in given.values()) else {}

    def take_from_checkpoint(self, kept: Mapping[str, float]) -> None:
        """Takes of `kept` what this PEF takes; if it trains, a notice names the rest."""
        self.take({name: value for name, value in kept.items() if name in self._takes})
        if self._machine.program.training is not None and (others := kept.keys() - self._takes):
            say_once(f"{first_of(sorted(others))} of the checkpoint", "this PEF does not take it")

    @property
    def rates(self) -> Mapping[str, float]:
        """The rate of each dropout, by its name."""
        compiled, now = self._compiled_rates, self._rates
        return {name: now.get(name, now.get(ALL_DROPOUTS, rate)) for name, rate in compiled.items()}

    def begin_forward(self) -> None:
        """Applies dropout rates that were given since the last forward."""
        if self._rates_changed:
            self._machine.replica.use_graph(with_rates(self._machine.program.leading, self._rates))
            self._rates_changed = False

    def _known(self, given: Mapping[str, object]) -> Mapping[str, object]:
        known: dict[str, object] = {}
        takes = self._takes
        for name, value in given.items():
            what = f"hyperparam_dict has {name}, which no optimizer of this PEF takes"
            if name in takes:
                known[name] = value
            elif name == "betas" and "beta1" in self._of_optimizers:
                known |= _betas(value)
            elif self._machine.program.training is None and name in _OF_TRAINING:
                continue
            elif name == "max_grad_norm":
                if _number(name, value) < math.inf:
                    what = "max_grad_norm cannot be turned on: the PEF was compiled without clipping"
                    raise app_error(OptionError, what, "give the optimizer max_grad_norm=1.0, and compile again")
            elif not self.rates and (name == ALL_DROPOUTS or "dropout" in name):
                if rate := _number(name, value):
                    what = f"{name} in hyperparam_dict is {rate:g}, and this PEF drops nothing: it is left out"
                    report_here("AP04", what, f"leave {name} out, or give it 0", notice_only=True)
            elif difflib.get_close_matches(name, takes, n=1, cutoff=0.8):
                raise app_error(OptionError, f"AP04: {what}", nearest(name, sorted(takes)))
            else:
                instead = sorted(word for word in takes if "__" not in word)  # without rates of single dropouts
                if OTHER_WORDS.get(name) in takes - given.keys():
                    instead = [OTHER_WORDS[name]]
                remedy = f"it takes {', '.join(instead)}" if instead else f"leave {name} out"
                report_here("AP04", f"{what}: it is left out", remedy, notice_only=True)
        return known

    def _take_rates(self, rates: Mapping[str, float]) -> None:
        high = next((name for name, rate in rates.items() if rate > 1), None)
        if high is not None:
            what = f"AP04: {high} in hyperparam_dict is {rates[high]:g}, and a dropout rate is at most 1"
            raise app_error(OptionError, what, f'hyperparam_dict={{"{high}": 0.1}}')
        now = {**({} if ALL_DROPOUTS in rates else self._rates), **rates}  # the rate of all replaces single rates
        if now != self._rates:
            others = {name: value for name, value in self.given.items() if name not in self._rates}
            self._rates, self._rates_changed, self.given = now, True, {**others, **now}

    def _take_for_optimizers(self, numbers: Mapping[str, float]) -> None:
        changed = {name: value for name, value in numbers.items() if self.given.get(name) != value}
        for index, optimizer in enumerate(self._machine.program.optimizers):
            taken = {
                name: bool(value) if name == "nesterov" else value
                for name, value in changed.items()
                if f"{optimizer.name}__{name}" in self._arguments
            }
            if taken:
                self._machine.replica.change(index, taken)
        self.given = {**self.given, **changed}


def _betas(value: object) -> Mapping[str, object]:
    pair = value.tolist() if isinstance(value, Tensor | np.ndarray) else value
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        what = f"AP04: betas in hyperparam_dict is {pair!r}"
        raise app_error(OptionError, what, 'hyperparam_dict={"betas": (0.9, 0.999)}: two numbers')
    return {"beta1": pair[0], "beta2": pair[1]}


def _number(name: str, value: object) -> float:
    number = value.item() if isinstance(value, Tensor | np.ndarray) and math.prod(value.shape) == 1 else value
    if name == "max_grad_norm" and number in (None, math.inf):
        return math.inf
    if isinstance(number, Real) and math.isfinite(float(number)) and float(number) >= 0:
        return float(number)
    remedy = f"give {name} as one number, 0 or more"
    if isinstance(number, list | tuple) and len(number) == 1:
        remedy = f'hyperparam_dict={{"{name}": …[0]}}: one number, not a {type(number).__name__}'
    shown = repr(number) if isinstance(number, Real | str | list | tuple) else f"a {type(number).__name__}"
    raise app_error(OptionError, f"AP04: {name} in hyperparam_dict is {shown}", remedy)


def rates_of(graph: Graph) -> Mapping[str, float]:
    """The rate of each dropout by its name: `net__drop__dropout_p`, or `…__dropout2d_p`."""
    rates = dict[str, float]()
    for node in graph.nodes:
        if (name := _rate_name(graph, node)) is not None and isinstance(number := node.args[1], int | float):
            rates[name] = round(1 - number, 12) if node.operator == _CHANNELS else number
    return rates


def with_rates(graph: Graph, rates: Mapping[str, float]) -> Graph:
    """`graph` with `rates` from 0 to 1, by the name of a dropout or for `ALL_DROPOUTS`. At 0 nothing is drawn, as in
    PyTorch."""
    kept: dict[str, float] = {}  # by mask: the share that is kept
    products: dict[str, float] = {}  # of a mask, where a tensor is cut over chips
    nodes = []
    for node in graph.nodes:
        name, operator = _rate_name(graph, node), node.operator
        first, second = (*node.args, None, None)[:2]
        rate = None if name is None else rates.get(name, rates.get(ALL_DROPOUTS))
        read, other = (argument.name if isinstance(argument, Ref) else "" for argument in (first, second))
        args, results = node.args, list(node.makes)
        if rate is not None:
            args = (first, rate, rate > 0) if operator == _ELEMENTS else (first, 1 - rate, *args[2:])
            if operator == _CHANNELS and rate in _UNDRAWN:
                node, args = replace(node, operator=_UNDRAWN[rate]), (first,)
            kept |= dict.fromkeys(results if operator == _CHANNELS else filter(None, node.results[1:]), 1 - rate)
        elif operator == "aten.native_dropout_backward.default" and other in kept:
            args = (*args[:2], 1 / kept[other] if kept[other] else 0.0)
        elif operator == "comm.shard" and read in kept:
            kept |= dict.fromkeys(results, kept[read])
        elif operator == "aten.mul.Tensor" and other in kept:
            products |= dict.fromkeys(results, kept[other])
        elif operator == "aten.mul.Scalar" and read in products:
            args = (first, 1 / products[read] if products[read] else 0.0)
        elif operator.startswith("aten.div.") and read in kept:
            args = (first, kept[read] or 1.0, *args[2:])
        nodes.append(node if args is node.args else replace(node, args=args))
    return replace(graph, nodes=tuple(nodes))


def _rate_name(graph: Graph, node: Node) -> str | None:
    owner, _, operator = node.name.removesuffix("__drawn").rpartition("__")
    if node.operator == _ELEMENTS:
        return f"{owner}__{operator.replace('native_dropout', 'dropout')}_p"
    if node.operator == _CHANNELS and node.results[0] is not None:
        # In dropout of channels, the only reader divides the result by its share.
        readers = [reader for reader in graph.nodes if Ref(node.results[0]) in reader.args]
        if [(reader.operator[:9], reader.args[1:2]) for reader in readers] == [("aten.div.", node.args[1:2])]:
            dimensions = len(graph.values[node.results[0]].shape) - 2
            return f"{owner}__{operator.replace('bernoulli', f'dropout{dimensions}d')}_p"
    return None
