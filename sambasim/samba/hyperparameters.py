"""The `hyperparam_dict` of `session.run`: hyperparameters of optimizers, and dropout rates."""

import difflib
import math
from collections.abc import Mapping
from dataclasses import replace
from numbers import Real

from torch import Tensor

from sambasim.errors import OptionError
from sambasim.ir.graph import Graph, Node, Ref
from sambasim.samba.device import Machine
from sambasim.samba.findings import app_error
from sambasim.samba.keywords import OTHER_WORDS, nearest
from sambasim.samba.process import report_here

ALL_DROPOUTS = "p"
"""The name of the rate of all dropouts."""

_ELEMENTS, _CHANNELS = "aten.native_dropout.default", "aten.bernoulli.p"
_BACKWARD = "aten.native_dropout_backward.default"


class Hyperparameters:
    """The hyperparameters and dropout rates of a loaded PEF."""

    def __init__(self, machine: Machine) -> None:
        program = machine.program
        self._machine = machine
        self._arguments = {argument.name for argument in program.runtime_arguments}
        self._of_optimizers = {name.partition("__")[2] for name in self._arguments if "__" in name}
        self.rates = () if program.training is None else rate_names(program.training)
        """The names of the dropout rates."""
        self.given: dict[str, float] = {}
        """The hyperparameters that were given so far."""
        self._rates: dict[str, float] = {}
        self._rates_changed = False
        self._last: Mapping[str, object] = {}

    def take(self, given: Mapping[str, object]) -> None:
        """Takes `given` from now on, and dropout rates from the next forward on. Ignores unknown names, with a notice.

        Raises OptionError for a value out of range, a misspelt name, and momentum if the PEF has no state for it.
        """
        if given == self._last:
            return
        if not isinstance(given, Mapping):
            what = f"AP04: hyperparam_dict is of type {type(given).__name__}"
            raise app_error(OptionError, what, 'hyperparam_dict={"lr": 0.1}')
        if self._machine.program.training is None:
            what = "session.run is given hyperparameters, and this PEF predicts: nothing is trained"
            remedy = "compile and run without --inference, and give trace_graph the optimizers"
            report_here("AP07", what, remedy)
            return
        numbers = {name: _number(name, value) for name, value in self._known(given).items()}
        self._take_rates({name: value for name, value in numbers.items() if name not in self._of_optimizers})
        self._take_for_optimizers({name: value for name, value in numbers.items() if name in self._of_optimizers})
        self._last = {**given} if not any(isinstance(value, Tensor) for value in given.values()) else {}

    def begin_forward(self) -> None:
        """Applies dropout rates that were given since the last forward."""
        training = self._machine.program.training
        if self._rates_changed and training is not None:
            self._machine.replica.run_graph(with_rates(training, self._rates))
            self._rates_changed = False

    def _known(self, given: Mapping[str, object]) -> Mapping[str, object]:
        known: dict[str, object] = {}
        takes = {*self._of_optimizers, *((ALL_DROPOUTS, *self.rates) if self.rates else ())}
        for name, value in given.items():
            if name in takes:
                known[name] = value
            elif name == "betas" and "beta1" in self._of_optimizers and isinstance(value, tuple | list):
                known |= dict(zip(("beta1", "beta2"), value, strict=False))
            elif difflib.get_close_matches(name, takes, n=1, cutoff=0.8):
                what = f"AP04: hyperparam_dict has {name}, which no optimizer of this PEF takes"
                raise app_error(OptionError, what, nearest(name, sorted(takes)))
            else:
                instead = sorted(word for word in takes if "__" not in word)  # without rates of single dropouts
                if OTHER_WORDS.get(name) in takes - given.keys():
                    instead = [OTHER_WORDS[name]]
                what = f"hyperparam_dict has {name}, which no optimizer of this PEF takes: it is left out"
                remedy = f"names that it takes: {', '.join(instead)}"
                report_here("AP04", what, remedy, notice_only=True)
        return known

    def _take_rates(self, rates: Mapping[str, float]) -> None:
        high = next((name for name, rate in rates.items() if rate >= 1), None)
        if high is not None:
            what = f"AP04: {high} in hyperparam_dict is {rates[high]:g}, and a dropout rate is below 1"
            raise app_error(OptionError, what, f'hyperparam_dict={{"{high}": 0.1}}')
        before = {} if ALL_DROPOUTS in rates else self._rates  # the rate of all replaces single rates
        now = {**before, **rates}
        if now != self._rates:
            self._rates, self._rates_changed = now, True

    def _take_for_optimizers(self, numbers: Mapping[str, float]) -> None:
        changed = {name: value for name, value in numbers.items() if self.given.get(name) != value}
        for index, optimizer in enumerate(self._machine.program.optimizers):
            taken = {name: value for name, value in changed.items() if f"{optimizer.name}__{name}" in self._arguments}
            if taken.get("momentum") and not optimizer.states:
                what = "momentum cannot be turned on: the PEF was compiled without it"
                raise app_error(OptionError, what, "compile with momentum above 0")
            if taken:
                self._machine.replica.change(index, taken)
        if changed:
            self.given = {**self.given, **changed}


def _number(name: str, value: object) -> float:
    number = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
    if isinstance(number, Real) and math.isfinite(float(number)) and float(number) >= 0:
        return float(number)
    remedy = f"give {name} as one number, 0 or more"
    if isinstance(number, list | tuple) and len(number) == 1:
        remedy = f'hyperparam_dict={{"{name}": …[0]}}: one number, not a {type(number).__name__}'
    shown = repr(number) if isinstance(number, Real | str | list | tuple) else f"a {type(number).__name__}"
    raise app_error(OptionError, f"AP04: {name} in hyperparam_dict is {shown}", remedy)


def rate_names(graph: Graph) -> tuple[str, ...]:
    """The name of each dropout's rate: `net__drop__dropout_p`, or `…__dropout2d_p`."""
    return tuple(name for node in graph.nodes if (name := _rate_name(graph, node)) is not None)


def with_rates(graph: Graph, rates: Mapping[str, float]) -> Graph:
    """`graph` with `rates`, each at least 0 and below 1, by the name of a dropout or for `ALL_DROPOUTS`."""
    kept: dict[str, float] = {}  # by mask: the share that is kept
    products: dict[str, float] = {}  # of a mask, where a tensor is cut over chips
    nodes = []
    for node in graph.nodes:
        name = _rate_name(graph, node)
        rate = None if name is None else rates.get(name, rates.get(ALL_DROPOUTS))
        first = node.args[0] if node.args else None
        if rate is not None and node.operator == _ELEMENTS:
            node = replace(node, args=(node.args[0], rate, *node.args[2:]))
            kept |= {result: 1 - rate for result in node.results[1:] if result is not None}
        elif rate is not None:
            node = replace(node, args=(node.args[0], 1 - rate, *node.args[2:]))
            kept |= {result: 1 - rate for result in node.results if result is not None}
        elif node.operator == _BACKWARD and isinstance(node.args[1], Ref) and node.args[1].name in kept:
            node = replace(node, args=(*node.args[:2], 1 / kept[node.args[1].name]))
        elif node.operator == "comm.shard" and isinstance(first, Ref) and first.name in kept:
            kept |= {result: kept[first.name] for result in node.results if result is not None}
        elif node.operator == "aten.mul.Tensor" and isinstance(node.args[1], Ref) and node.args[1].name in kept:
            products |= {result: kept[node.args[1].name] for result in node.results if result is not None}
        elif node.operator == "aten.mul.Scalar" and isinstance(first, Ref) and first.name in products:
            node = replace(node, args=(first, 1 / products[first.name]))
        elif node.operator.startswith("aten.div.") and isinstance(first, Ref) and first.name in kept:
            node = replace(node, args=(first, kept[first.name], *node.args[2:]))
        nodes.append(node)
    return replace(graph, nodes=tuple(nodes))


def _rate_name(graph: Graph, node: Node) -> str | None:
    owner = node.name.removesuffix("__drawn").rpartition("__")
    if node.operator == _ELEMENTS:
        return f"{owner[0]}__{owner[2].replace('native_dropout', 'dropout')}_p"
    if node.operator == _CHANNELS and node.results[0] is not None:
        # In dropout of channels, the only reader divides the result by its share.
        readers = [one for one in graph.nodes if Ref(node.results[0]) in one.args]
        if [(one.operator[:9], one.args[1:2]) for one in readers] == [("aten.div.", node.args[1:2])]:
            dimensions = len(graph.values[node.results[0]].shape) - 2
            return f"{owner[0]}__{owner[2].replace('bernoulli', f'dropout{dimensions}d')}_p"
    return None
