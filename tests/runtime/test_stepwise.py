"""A replica driven section by section, and the times of its sections."""

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from sambasim.compiler.capture.step import Example
from sambasim.compiler.compile import compile_model
from sambasim.compiler.update import Update
from sambasim.errors import OptionError
from sambasim.ir.graph import Section, SectionKind
from sambasim.ir.program import Program
from sambasim.ir.types import SymbolKind
from sambasim.options.compile import CompileOptions
from sambasim.options.training import ModelOptions, OptimizerOptions, TrainingOptions
from sambasim.pef import map_weights, read
from sambasim.runtime.engine.executor import tangent_of
from sambasim.runtime.machine.communicator import single_rank
from sambasim.runtime.run.stepwise import STEP, Mode, StepwiseReplica
from sambasim.runtime.watch import observer
from sambasim.samba.inputs import losses_of

FWD, BCKWD, OPT = SectionKind.FWD, SectionKind.BCKWD, SectionKind.OPT
ADAM = {"lr": 1e-2, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.0}
SGD = {"lr": 0.1, "momentum": 0.9, "dampening": 0.0, "nesterov": False, "weight_decay": 0.0}


class Net(nn.Module):
    """Two layers with BatchNorm between them; the loss of each sample, and the outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 8)
        self.norm = nn.BatchNorm1d(8)
        self.second = nn.Linear(8, 3)

    def forward(self, x: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        outputs = self.second(torch.relu(self.norm(self.first(x))))
        return nn.functional.cross_entropy(outputs, target, reduction="none"), outputs


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two optimizers: Adam for the first layer and the norm, SGD for the second layer."""
    torch.manual_seed(0)
    model = Net()
    second = frozenset({"second.weight", "second.bias"})
    others = frozenset(name for name, _ in model.named_parameters()) - second
    options = CompileOptions(
        model=ModelOptions(target="net:Net"),
        optimizer=OptimizerOptions(name="adam"),
        training=TrainingOptions(batch_size=6),
        pef_name="net",
        output_folder=tmp_path_factory.mktemp("out"),
    )
    updates = [Update("adam", ADAM, others), Update("sgd", SGD, second)]
    inputs = _batch(0)
    return compile_model(model, Example(inputs), options, updates=updates, losses=losses_of(model)).path


def _batch(number: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(number)
    return {"x": torch.randn(6, 5, generator=generator), "target": torch.randint(3, (6,), generator=generator)}


def _replica(path: Path) -> tuple[Program, StepwiseReplica]:
    program = read(path).program
    replica = StepwiseReplica(program, single_rank("here", "no MPI"))
    for name, tensor in map_weights(path).items():
        replica.write(name, tensor)
    return program, replica


def _state(program: Program, replica: StepwiseReplica) -> Mapping[str, Tensor]:
    kinds = (SymbolKind.PARAMETER, SymbolKind.BUFFER, SymbolKind.OPTIMIZER_STATE)
    return {name: replica.read(name) for name, symbol in program.symbols.items() if symbol.kind in kinds}


def _assert_equal(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


def test_parts_of_a_step_are_the_whole_step(compiled: Path) -> None:
    program, whole = _replica(compiled)
    _, parts = _replica(compiled)
    tangent = tangent_of(program, 1 / 6)
    for number in range(3):
        together = whole.run(STEP, _batch(number), tangent, Mode.ALONE)
        apart = parts.run({FWD}, _batch(number), None, Mode.ALONE)
        parts.run({BCKWD}, {}, tangent, Mode.ALONE)
        parts.run({OPT}, {}, None, Mode.ALONE)
        _assert_equal(together, apart)
        _assert_equal(_state(program, whole), _state(program, parts))


def test_it_is_what_eager_pytorch_does_with_two_optimizers(compiled: Path) -> None:
    program, replica = _replica(compiled)
    torch.manual_seed(0)
    model = Net()
    adam = torch.optim.Adam([*model.first.parameters(), *model.norm.parameters()], lr=1e-2, fused=True)
    sgd = torch.optim.SGD(model.second.parameters(), lr=0.1, momentum=0.9, fused=True)
    tangent = tangent_of(program, 1 / 6)
    for number in range(3):
        outputs = replica.run(STEP, _batch(number), tangent, Mode.ALONE)
        adam.zero_grad()
        sgd.zero_grad()
        losses, logits = model(*_batch(number).values())
        losses.backward(tangent)
        adam.step()
        sgd.step()
        first, second = outputs.values()
        assert torch.equal(first, losses)
        assert torch.equal(second, logits)
    for name, tensor in {**dict(model.named_parameters()), **dict(model.named_buffers())}.items():
        symbol = next(symbol.name for symbol in program.symbols.values() if name in symbol.torch_names)
        torch.testing.assert_close(replica.read(symbol), tensor.detach(), rtol=1e-6, atol=1e-7)


def test_backwards_before_an_optimizer_step_add_up(compiled: Path) -> None:
    program, once = _replica(compiled)
    _, twice = _replica(compiled)
    gradient = next(name for name, symbol in program.symbols.items() if symbol.kind is SymbolKind.GRADIENT)
    one = tangent_of(program, 1.0)
    once.run({FWD, BCKWD}, _batch(0), one, Mode.ALONE)
    first = once.read(gradient)
    twice.run({FWD, BCKWD}, _batch(1), one, Mode.ALONE)
    second = twice.read(gradient)
    twice.run({FWD, BCKWD}, _batch(0), one, Mode.ALONE)
    assert first.abs().sum() > 0
    torch.testing.assert_close(twice.read(gradient), first + second)


def test_a_hyperparameter_is_changed_from_the_next_step_on(compiled: Path) -> None:
    program, replica = _replica(compiled)
    before = _state(program, replica)
    for index in range(2):
        replica.change(index, {"lr": 0.0})
    replica.run(STEP, _batch(0), tangent_of(program, 1.0), Mode.ALONE)
    parameters = [name for name, symbol in program.symbols.items() if symbol.kind is SymbolKind.PARAMETER]
    assert all(torch.equal(replica.read(name), before[name]) for name in parameters)
    replica.change(1, {"lr": 1.0})
    replica.run(STEP, _batch(0), tangent_of(program, 1.0), Mode.ALONE)
    changed = {name for name in parameters if not torch.equal(replica.read(name), before[name])}
    assert changed == {"net__second__weight", "net__second__bias"}


@pytest.mark.parametrize(
    ("kinds", "words"),
    [({BCKWD}, "there is no forward whose backward could be run"), ({OPT}, "there are no gradients")],
)
def test_what_is_not_there_is_refused(compiled: Path, kinds: set[SectionKind], words: str) -> None:
    program, replica = _replica(compiled)
    with pytest.raises(OptionError, match=words):
        replica.run(kinds, {}, tangent_of(program, 1.0), Mode.ALONE)


def test_gradients_are_synced_in_one_mode(compiled: Path) -> None:
    program, replica = _replica(compiled)
    replica.run(STEP, _batch(0), tangent_of(program, 1.0), Mode.ALONE)
    with pytest.raises(OptionError, match="were synced in the mode alone, and now are to be in the mode host"):
        replica.run(STEP, _batch(0), tangent_of(program, 1.0), Mode.HOST)


def test_ranks_that_take_turns_share_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sections of all add up to the time of the pass."""
    sections = [Section(index, kind, kind.lower(), index, index + 1) for index, kind in enumerate((FWD, BCKWD, OPT))]
    now = iter((0, 5, 7, 20, 21, 40))
    clock = observer.SectionClock()
    monkeypatch.setattr(observer, "perf_counter_ns", lambda: next(now) * 10**9)
    clock.begin(sections, ranks=2)
    for ended in (0, 1, 0, 1):
        clock.sections_end(0, sections[ended : ended + 1], began_ns=-1)
    clock.end()
    assert [(one.sections, one.elapsed_s) for one in clock.passes[0]] == [
        ((sections[0],), 5 + 13),
        ((sections[1],), 2 + 1),
        ((sections[2],), 19),
    ]
