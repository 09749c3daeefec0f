"""Behaviours of a session that no other test has: refusals, notices, hyperparameters."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from sambasim import samba
from sambasim.errors import DataError, OptionError
from sambasim.samba.session import session
from sambasim.samba.utils import trace_graph

BATCH = 4


class Normed(nn.Module):
    """Features `[batch, 3]` to the loss of each sample, the one output."""

    output_tensors: tuple[samba.SambaTensor, ...]

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.norm = nn.BatchNorm1d(2)

    def forward(self, x: Tensor) -> Tensor:
        normed: Tensor = self.norm(self.linear(x))
        return normed.square().mean(1)


def _model() -> tuple[Normed, samba.optim.SGD]:
    torch.manual_seed(0)
    model = Normed()
    samba.from_torch_model_(model)
    return model, samba.optim.SGD(model.parameters(), lr=0.1)


def _inputs(batch_dim: int = 0) -> list[samba.SambaTensor]:
    values = torch.randn(BATCH, 3, generator=torch.Generator().manual_seed(1))
    return [samba.from_torch_tensor(values, name="x", batch_dim=batch_dim)]


@pytest.fixture(scope="module")
def pef(tmp_path_factory: pytest.TempPathFactory) -> str:
    model, optimizer = _model()
    config = {"output_folder": str(tmp_path_factory.mktemp("out"))}
    return session.compile(model, _inputs(), optimizer, name="normed", config_dict=config)


def test_batches_along_another_axis_are_refused(tmp_path: Path) -> None:
    model, optimizer = _model()
    with pytest.raises(DataError, match="the batch of x is along axis 1, but a replica's batch must come first"):
        session.compile(model, _inputs(batch_dim=1), optimizer, config_dict={"output_folder": str(tmp_path)})


def test_an_optimizer_of_torch_is_refused_with_ours() -> None:
    model, _ = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(OptionError, match=r"SGD cannot be compiled") as caught:
        session.compile(model, _inputs(), optimizer)  # type: ignore[arg-type]  # the mistake
    assert "samba.optim.SGD" in str(caught.value.remedy)


@torch.compile
def _halved(x: Tensor) -> Tensor:
    return x / 2


class Compiled(nn.Module):
    """A function and a layer that the app has given to torch.compile."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.linear.compile()

    def forward(self, x: Tensor) -> Tensor:
        return _halved(self.linear(x)).square().mean(1)


def test_what_is_given_to_torch_compile_is_captured_as_it_is_written(tmp_path: Path) -> None:
    model = Compiled()
    optimizer = samba.optim.SGD(model.parameters(), lr=0.1)
    samba.from_torch_model_(model)
    pef = session.compile(model, _inputs(), optimizer, "net", config_dict={"output_folder": str(tmp_path)})
    outputs = trace_graph(model, _inputs(), optimizer, pef=pef)
    (x,) = _inputs()
    expected = (torch.nn.functional.linear(x.torch(), model.linear.weight, model.linear.bias) / 2).square().mean(1)
    (found,) = session.run(_inputs(), outputs)
    assert torch.equal(found.torch(), expected)


def test_one_output_is_a_tuple_of_one_too(pef: str) -> None:
    model, optimizer = _model()
    outputs = trace_graph(model, _inputs(), optimizer, pef=pef)
    assert isinstance(outputs, tuple)
    assert len(outputs) == 1
    assert model.output_tensors is outputs
    for wanted in (None, outputs, list(outputs), outputs[0]):
        found = session.run(_inputs(), wanted, section_types=["FWD"])
        assert isinstance(found, tuple)
        assert [tensor.sn_name for tensor in found] == ["normed__loss"]


@pytest.mark.usefixtures("loaded")
def test_momentum_that_was_not_compiled_cannot_be_turned_on() -> None:
    with pytest.raises(OptionError, match="momentum") as caught:
        session.run(_inputs(), hyperparam_dict={"momentum": 0.9})
    assert caught.value.remedy == "compile with momentum above 0"


@pytest.mark.usefixtures("loaded")
def test_a_forward_alone_changes_the_statistics_of_batch_norm() -> None:
    session.run(_inputs(), section_types=["FWD"])
    assert session.buffer_dict["normed__norm__num_batches_tracked"] == 1
    assert session.buffer_dict["normed__norm__running_mean"].any()


@pytest.fixture
def loaded(pef: str) -> None:
    model, optimizer = _model()
    trace_graph(model, _inputs(), optimizer, pef=pef)


@pytest.mark.parametrize(
    ("value", "words", "remedy"),
    [
        ([0.1], "AP04: lr in hyperparam_dict is [0.1]", 'hyperparam_dict={"lr": …[0]}: one number, not a list'),
        ("0.1", "AP04: lr in hyperparam_dict is '0.1'", "give lr as one number, 0 or more"),
        (float("nan"), "AP04: lr in hyperparam_dict is nan", "give lr as one number, 0 or more"),
    ],
)
@pytest.mark.usefixtures("loaded")
def test_what_is_no_number_is_refused_with_its_line(value: object, words: str, remedy: str) -> None:
    with pytest.raises(OptionError) as caught:
        session.run(_inputs(), hyperparam_dict={"lr": value})
    assert caught.value.what == words
    assert caught.value.remedy == remedy
    assert "session.run(_inputs(), hyperparam_dict=" in str(caught.value.where)


@pytest.mark.usefixtures("loaded")
def test_a_tensor_of_one_number_is_one() -> None:
    rate, machine = torch.tensor(0.25), session._loaded().machine
    for number in (0.25, 0.5):  # a scheduler changes it in place
        rate.fill_(number)
        session.run(_inputs(), hyperparam_dict={"lr": rate})
        assert machine.replica.hyperparameters[0]["lr"] == number


@pytest.mark.usefixtures("loaded")
def test_a_name_that_is_nearly_a_known_one_is_refused() -> None:
    with pytest.raises(OptionError) as caught:
        session.run(_inputs(), hyperparam_dict={"momentun": 0.9})
    assert caught.value.what == "AP04: hyperparam_dict has momentun, which no optimizer of this PEF takes"
    assert "momentum" in str(caught.value.remedy)
