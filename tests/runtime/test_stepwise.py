"""A replica driven section by section, the times of its sections, and its parameters of which it keeps slices only."""

from collections.abc import Set
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any
from unittest.mock import Mock, call

import pytest
import torch
from torch import Tensor, nn

from sambasim.compiler.capture.step import Example
from sambasim.compiler.update import Update
from sambasim.errors import OptionError
from sambasim.ir.graph import Section, SectionKind
from sambasim.ir.types import SymbolKind
from sambasim.pef import map_weights, read
from sambasim.runtime.engine.executor import tangent_of
from sambasim.runtime.machine.communicator import single_rank
from sambasim.runtime.run.setup import Engine, Team
from sambasim.runtime.run.stepwise import STEP, StepwiseReplica
from sambasim.runtime.transports.connect import Way
from sambasim.runtime.watch import observer
from sambasim.samba.inputs import losses_among, named_loss
from tests.pef.samples import sample_program
from tests.support.compiled import Made, compile_model, net_options

FWD, BCKWD, OPT = SectionKind.FWD, SectionKind.BCKWD, SectionKind.OPT
ADAM = {"lr": 1e-2, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.0}
ADAM |= {"amsgrad": False, "maximize": False}
SGD = {"lr": 0.1, "momentum": 0.9, "dampening": 0.0, "nesterov": False, "weight_decay": 0.0, "maximize": False}


def losses_and_outputs(net: Any, x: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    outputs = net.second(torch.relu(net.norm(net.first(x))))
    return nn.functional.cross_entropy(outputs, target, reduction="none"), outputs


def model() -> Any:
    """Two layers with BatchNorm between them; the loss of each sample, and the outputs."""
    torch.manual_seed(0)
    return Made(losses_and_outputs, first=nn.Linear(5, 8), norm=nn.BatchNorm1d(8), second=nn.Linear(8, 3))


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two optimizers: Adam for the first layer and the norm, SGD for the second layer."""
    net, second = model(), frozenset({"second.weight", "second.bias"})
    others = frozenset(name for name, _ in net.named_parameters()) - second
    options = net_options(tmp_path_factory.mktemp("out"), optimizer={"name": "adam"}, training={"batch_size": 6})
    updates = [Update("adam", ADAM, others), Update("sgd", SGD, second)]
    losses = partial(losses_among, given=(), named=named_loss(net))
    return compile_model(net, Example(batch(0)), options, updates=updates, losses=losses).path


def batch(number: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(number)
    return {"x": torch.randn(6, 5, generator=generator), "target": torch.randint(3, (6,), generator=generator)}


class Stepped:
    """A replica with the initial weights."""

    def __init__(self, path: Path) -> None:
        self.program = read(path).program
        self.replica = StepwiseReplica(self.program, single_rank("here", "no MPI"))
        for name, tensor in map_weights(path).items():
            self.replica.write(name, tensor)

    def run(self, kinds: Set[SectionKind] = STEP, number: int | None = 0, scale: float = 1.0) -> list[Tensor]:
        """Runs sections on the batch `number`; None: without inputs."""
        inputs = {} if number is None else batch(number)
        tangent = tangent_of(self.program, scale) if kinds & {BCKWD} else None
        return [*self.replica.run(kinds, inputs, tangent, Way.IN_PROCESS).values()]

    def state(self, *kinds: SymbolKind) -> dict[str, Tensor]:
        return {name: self.replica.read(name) for name, symbol in self.program.symbols.items() if symbol.kind in kinds}


@pytest.fixture
def stepped(compiled: Path) -> Stepped:
    return Stepped(compiled)


def test_parts_of_a_step_are_the_whole_step_and_what_eager_pytorch_does(compiled: Path, stepped: Stepped) -> None:
    parts = Stepped(compiled)
    net = model()
    adam = torch.optim.Adam([*net.first.parameters(), *net.norm.parameters()], lr=1e-2, fused=True)
    sgd = torch.optim.SGD(net.second.parameters(), lr=0.1, momentum=0.9, fused=True)
    kinds = (SymbolKind.PARAMETER, SymbolKind.BUFFER, SymbolKind.OPTIMIZER_STATE)
    for number in range(3):
        together, apart = stepped.run(STEP, number, 1 / 6), parts.run({FWD}, number)
        parts.run({BCKWD}, None, 1 / 6)
        parts.run({OPT}, None)
        adam.zero_grad()
        sgd.zero_grad()
        losses, logits = net(*batch(number).values())
        losses.backward(tangent_of(stepped.program, 1 / 6))
        adam.step()
        sgd.step()
        for outputs in (together, apart):
            assert [*map(torch.equal, outputs, (losses, logits))] == [True, True]
        whole, by_parts = stepped.state(*kinds), parts.state(*kinds)
        assert [name for name in whole if not torch.equal(whole[name], by_parts[name])] == []
    for name, tensor in {**dict(net.named_parameters()), **dict(net.named_buffers())}.items():
        symbol = next(symbol.name for symbol in stepped.program.symbols.values() if name in symbol.torch_names)
        torch.testing.assert_close(stepped.replica.read(symbol), tensor.detach(), rtol=1e-6, atol=1e-7)


def test_backwards_before_an_optimizer_step_add_up(compiled: Path, stepped: Stepped) -> None:
    once, (gradient, *_) = Stepped(compiled), stepped.state(SymbolKind.GRADIENT)
    once.run({FWD, BCKWD}, 0)
    stepped.run({FWD, BCKWD}, 1)
    first, second = once.replica.read(gradient), stepped.replica.read(gradient)
    stepped.run({FWD, BCKWD}, 0)
    assert first.abs().sum() > 0
    torch.testing.assert_close(stepped.replica.read(gradient), first + second)


def test_a_graph_that_is_replaced_within_a_step_changes_nothing(compiled: Path) -> None:
    """As an app does that changes a dropout rate while it accumulates."""
    once, replaced = Stepped(compiled), Stepped(compiled)
    for number in range(6):
        for stepped in (once, replaced):
            stepped.run({FWD, BCKWD}, number)
            if number % 2:
                stepped.run({OPT}, None)
        if not number % 2:
            replaced.replica.use_graph(replaced.program.step)
    ends = [stepped.state(SymbolKind.PARAMETER, SymbolKind.OPTIMIZER_STATE) for stepped in (once, replaced)]
    assert [name for name in ends[0] if not torch.equal(ends[0][name], ends[1][name])] == []


def test_a_hyperparameter_is_changed_from_the_next_step_on(stepped: Stepped) -> None:
    before = stepped.state(SymbolKind.PARAMETER)
    for index in range(2):
        stepped.replica.change(index, {"lr": 0.0})
    for rate, expected in ((0.0, set[str]()), (1.0, {"made__second__weight", "made__second__bias"})):
        stepped.replica.change(1, {"lr": rate})
        stepped.run()
        after = stepped.state(SymbolKind.PARAMETER)
        assert {name for name in before if not torch.equal(after[name], before[name])} == expected


def test_an_optimizer_needs_gradients_which_are_synced_in_one_mode(stepped: Stepped) -> None:
    with pytest.raises(OptionError, match="there are no gradients"):
        stepped.run({OPT}, None)
    stepped.run()
    with pytest.raises(OptionError, match="the sync of gradients was in-process, and is now to be host"):
        stepped.replica.run(STEP, batch(0), tangent_of(stepped.program, 1.0), Way.HOST_REPLICATED)


def test_ranks_that_take_turns_share_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sections of all add up to the time of the pass."""
    sections = [Section(index, kind, kind.lower(), index, index + 1) for index, kind in enumerate((FWD, BCKWD, OPT))]
    now = iter((0, 5, 7, 20, 21, 40, 50, 60))
    clock = observer.SectionClock()
    monkeypatch.setattr(observer, "perf_counter_ns", lambda: next(now) * 10**9)
    clock.begin(sections, ranks=2)
    for ended in (0, 1, 0, 1):
        clock.sections_end(0, sections[ended : ended + 1], began_ns=-1)
    clock.end()
    clock.sections_end(0, sections[:1], began_ns=-1)
    assert clock.passes == [{(sections[0],): 5 + 13, (sections[1],): 2 + 1, (sections[2],): 19}]


def test_parameters_of_which_a_rank_keeps_slices_are_released_also_if_an_evaluation_fails() -> None:
    program, replica = replace(sample_program(), zero=3), Mock()
    replica.memory.program, sync = program, replica.transport.sync
    with pytest.raises(KeyError), Team([replica], Way.HOST, Engine("plain")).whole_parameters():
        raise KeyError("a sample")
    released = [(call.releasing(group, "parameter"), call.releasing()()) for group in program.groups]
    assert sync.mock_calls == [call.make_whole(), *chain.from_iterable(released)]
