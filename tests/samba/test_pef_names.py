"""Names and sections in the PEF: of apps whose `state_dict()` has other names than `named_parameters()`; and of a data
parallel compile of the reference's logistic regression, against what SambaFlow 1.14 was seen to make of it. The README
says where and why this differs: see "The PEF of a logistic regression" there."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from sambasim import samba
from sambasim.errors import PefError
from sambasim.ir.program import Program
from sambasim.ir.types import SymbolKind
from sambasim.pef import read
from sambasim.samba.utils import trace_graph
from tests.samba.harness import BATCH, Net, compiled, with_sgd

pytestmark = pytest.mark.usefixtures("one_thread")


def _wrapped() -> Net:
    torch.manual_seed(0)
    model = Net()
    model.add_module("first", checkpoint_wrapper(model.first))
    return model


def _renamed() -> Net:
    torch.manual_seed(0)
    model = Net()

    def hook(module: nn.Module, entries: dict[str, Any], *_: object) -> None:
        for name in list(entries):
            entries[f"old.{name}"] = entries.pop(name)

    model.register_state_dict_post_hook(hook)  # type: ignore[no-untyped-call]  # torch's, untyped
    return model


class Own(Net):
    """A `state_dict` without arguments."""

    def state_dict(self) -> dict[str, Any]:  # type: ignore[override]  # on purpose
        return {f"net/{name}": value for name, value in super().state_dict().items()}


def _own() -> Net:
    torch.manual_seed(0)
    return Own()


def _optimizers(model: Net, kind: Any) -> list[Any]:
    """Two parameter groups in one optimizer, and a second optimizer."""
    groups = [{"params": [model.first.weight]}, {"params": [model.first.bias], "lr": 0.3}]
    return [kind(groups, lr=0.1, momentum=0.9), kind(model.second.parameters(), lr=0.2)]


def _batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(BATCH, 5, generator=generator), torch.randint(3, (BATCH,), generator=generator)


@pytest.mark.parametrize("make", [_wrapped, _renamed, _own])
def test_an_app_trains_fetches_and_finds_its_tensors(make: Callable[[], Net], tmp_path: Path) -> None:
    model, eager = make(), make()
    samba.from_torch_model_(model)
    x, target = _batch()
    pairs = (("x", x), ("target", target))
    inputs = tuple(samba.from_torch_tensor(values, name=name, batch_dim=0) for name, values in pairs)
    optimizers = _optimizers(model, samba.optim.SGD)
    trace_graph(model, inputs, optimizers, pef=compiled((model, optimizers), inputs, tmp_path))
    for _ in range(3):
        samba.session.run(inputs, model.output_tensors)
    torch_optimizers = _optimizers(eager, torch.optim.SGD)
    for _ in range(3):
        eager.zero_grad()
        torch.autograd.backward(eager(x, target)[0].mean())
        for one in torch_optimizers:
            one.step()
    for name, parameter in model.named_parameters():
        (of_symbol,) = samba.session.get_tensors_by_name([str(parameter.sn_name)])  # type: ignore[attr-defined]  # SambaFlow's
        assert torch.equal(of_symbol.sn_data, eager.get_parameter(name))
    samba.session.to_cpu(model)
    for (name, parameter), expected in zip(model.named_parameters(), eager.parameters(), strict=True):
        assert torch.equal(parameter, expected), name
    momentum = optimizers[0].state[model.first.weight]["momentum_buffer"]
    assert torch.equal(momentum, torch_optimizers[0].state[eager.first.weight]["momentum_buffer"])


def test_a_model_with_other_names_is_another_model(tmp_path: Path) -> None:
    pefs = {}
    inputs = [samba.from_torch_tensor(one, name=name, batch_dim=0) for name, one in zip("xy", _batch(), strict=True)]
    for make in (Net, _renamed):
        model = make()
        samba.from_torch_model_(model)
        optimizers = _optimizers(model, samba.optim.SGD)
        pefs[make] = compiled((model, optimizers), inputs, tmp_path, make.__name__.lower())
    with pytest.raises(PefError, match="is of another model"):
        trace_graph(model, inputs, optimizers, pef=pefs[Net])
    trace_graph(model, inputs, optimizers, pef=pefs[_renamed])


SAMPLES, FEATURES, CLASSES = 500, 784, 10


class LogReg(nn.Module):
    """Images `[500, 784]` and labels `[500]` to `(loss, logits)`."""

    def __init__(self) -> None:
        super().__init__()
        self.lin_layer = nn.Linear(FEATURES, CLASSES)
        self.criterion = nn.CrossEntropyLoss()

    def forward(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.lin_layer(inputs)
        return self.criterion(logits, targets), logits


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Program:
    images = samba.randn(SAMPLES, FEATURES, name="image", batch_dim=0)
    labels = samba.randint(CLASSES, (SAMPLES,), name="label", batch_dim=0)
    made = with_sgd(LogReg, momentum=0.9)
    pef = compiled(made, (images, labels), tmp_path_factory.mktemp("reference"), data_parallel=True, world_size=2)
    return read(Path(pef)).program


def test_the_sections_are_one_of_each_kind_and_a_gather(program: Program) -> None:
    assert program.training is not None
    named = [(section.kind.value, section.name) for section in program.training.sections]
    assert [kind for kind, _ in named] == ["FWD", "BCKWD", "REDUCE", "OPT", "GATHER"]
    forward, backward, *_ = (name for _, name in named)
    assert forward == "logreg__lin_layer__linear"
    assert backward == "logreg__criterion__crossentropyloss_bwd"


def test_the_names_of_parameters_gradients_and_momentum_are_those_of_the_reference(program: Program) -> None:
    def names(kind: SymbolKind) -> list[str]:
        return [symbol.name for symbol in program.symbols.values() if symbol.kind is kind]

    parameters = ["logreg__lin_layer__weight", "logreg__lin_layer__bias"]
    assert names(SymbolKind.PARAMETER) == parameters
    assert names(SymbolKind.GRADIENT) == [f"{name}__grad" for name in parameters]
    assert names(SymbolKind.OPTIMIZER_STATE) == [f"{name}__sgd0__momentum" for name in parameters]


def test_the_group_and_the_reduce_buffer(program: Program) -> None:
    (group,) = [s for s in program.symbols.values() if s.kind is SymbolKind.ACCUMULATION_GROUP]
    assert re.fullmatch(r"\$OPT_dp_accum_group_[0-9a-f]{40}", group.name)
    padded = sum(-(-numel // 64) * 64 for numel in (FEATURES * CLASSES, CLASSES))
    assert group.type.numel == padded == 7_936  # there 25,088: the device pads the matrix to its own layout
    buffer = program.symbols["accum_dummy_0_reduce_buf"]
    assert buffer.kind is SymbolKind.REDUCE_BUFFER
    assert buffer.type.numel == group.type.numel + 64  # as there


def test_the_world_size_is_a_runtime_argument(program: Program) -> None:
    assert program.data_parallel
    assert program.world_size == 2
    assert "dp_scale_factor" in {argument.name for argument in program.runtime_arguments}
