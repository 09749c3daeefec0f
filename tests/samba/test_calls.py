"""Calls of the session as public apps have them, right and wrong, in one process: gradients that the app sets, dropout
rates, prediction with a training PEF, the older names, and what is refused or has no effect."""

from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sambasim import samba
from sambasim.errors import DataError, OptionError
from sambasim.ir.types import Symbol, SymbolKind, TensorType
from sambasim.samba import process
from sambasim.samba.inputs import bind
from sambasim.samba.session import session
from sambasim.samba.utils import trace_graph
from tests.samba.harness import BATCH, Load, Made, PefOf, compiled, sn_grad, with_sgd


class Net(nn.Module):
    """Features [batch, 6], classes [batch] and perhaps one factor for each sample to the outputs and the loss."""

    output_tensors: tuple[samba.SambaTensor, ...]
    run: Callable[..., tuple[samba.SambaTensor, ...]]
    write_host_params: Callable[[], None]

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.drop = nn.Dropout(0.5)
        self.planes = nn.Dropout2d(0.25)
        self.second = nn.Linear(8, 3)

    def forward(self, x: Tensor, target: Tensor, factor: Tensor | None = None) -> tuple[Tensor, Tensor]:
        outputs = self.second(self.planes(self.drop(torch.relu(self.first(x))).view(-1, 2, 2, 2)).flatten(1))
        if factor is not None:
            outputs = outputs * factor
        loss = nn.functional.cross_entropy(outputs, torch.autograd.Variable(target))
        return outputs, loss


def _made_net() -> Made:
    return with_sgd(Net)


def _net_inputs(number: int = 0) -> list[samba.SambaTensor]:
    generator = torch.Generator().manual_seed(number)
    x = samba.from_torch_tensor(torch.randn(BATCH, 6, generator=generator), name="x", batch_dim=0)
    x.requires_grad_()
    return [x, samba.from_torch_tensor(torch.randint(3, (BATCH,), generator=generator), name="target", batch_dim=0)]


@pytest.fixture
def pef(pef_of: PefOf) -> str:
    return pef_of(_made_net, [*_net_inputs(), None])


@pytest.fixture
def net(load: Load, pef: str, capsys: pytest.CaptureFixture[str]) -> Net:
    """Loaded."""
    model: Net = load(_made_net, [*_net_inputs(), None])[0]
    capsys.readouterr()
    return model


def _eager(model: nn.Module, inputs: list[samba.SambaTensor]) -> Any:
    """What PyTorch makes of plain tensors, in evaluation mode."""
    mode = model.training
    result = model.eval()(*(samba.to_torch(tensor) for tensor in inputs))
    model.train(mode)
    return result


def _forward(inputs: Any) -> tuple[Tensor, ...]:
    """The outputs without dropout, as plain tensors of their own."""
    found = session.run(inputs, hyperparam_dict={"p": 0.0}, section_types=["FWD"])
    return tuple(one.torch().clone() for one in found)


def _on_device(name: str) -> Tensor:
    return session.get_tensors_by_name([name])[0].torch()


def test_a_loss_that_is_not_finite_is_told_once(net: Net, capsys: pytest.CaptureFixture[str]) -> None:
    session.run(_net_inputs())
    assert capsys.readouterr().err == ""
    x, target = _net_inputs()
    for _ in range(2):
        session.run([x / 0, target])
    told = capsys.readouterr().err.splitlines()
    assert told[0] == "notice: AP08: net__loss is nan in forward 2"
    assert told[1].endswith(": session.run([x / 0, target])")
    assert told[2].startswith("  try:   a smaller learning rate, max_grad_norm= for the optimizer, or inputs")
    assert len(told) == 3


def test_dropout_rates_are_set_at_run_time(net: Net) -> None:
    names = session.get_dropout_rate_argin_names()
    assert names == ("net__drop__dropout_p", "net__planes__dropout2d_p")
    inputs = _net_inputs()
    outputs, loss = _eager(net, inputs)
    (gradient,) = torch.autograd.grad(loss, [net.first.weight])

    def runs_as_evaluated(**rates: float) -> bool:
        found, _ = session.run(inputs, hyperparam_dict=rates, section_types=["FWD", "BCKWD"])
        same = torch.equal(found, outputs)
        if same:
            on_device = sn_grad(net.first.weight)
            torch.testing.assert_close(on_device, gradient, msg="the backward has the rates of its forward")
        session.run(section_types=["OPT"], hyperparam_dict={"lr": 0.0})
        return same

    assert runs_as_evaluated(p=0.0)
    assert runs_as_evaluated(), "a rate holds until another is given"
    assert not runs_as_evaluated(p=0.5)
    assert not runs_as_evaluated(**dict.fromkeys(names[:1], 0.0)), "one name is one dropout"
    assert runs_as_evaluated(**dict.fromkeys(names, 0.0))
    assert not runs_as_evaluated(**{names[0]: 0.9})
    assert runs_as_evaluated(p=0.0), "the rate for all takes the place of single ones"
    session.run(inputs, section_types=["FWD"])
    session.run(section_types=["bckwd", "opt"], hyperparam_dict={"p": 0.5, "lr": 0.0})
    on_device = sn_grad(net.first.weight)
    torch.testing.assert_close(on_device, gradient, msg="the backward has the rates of its forward")
    assert not runs_as_evaluated(), "a rate that a backward was given holds from the next forward on"
    with pytest.raises(OptionError, match="AP04: p in hyperparam_dict is 1, and a dropout rate is below 1"):
        session.run(inputs, hyperparam_dict={"p": 1.0})


def test_an_input_that_requires_a_gradient_has_the_bits_of_eager_pytorch(net: Net, pef: str) -> None:
    inputs, traced = _net_inputs(1), _net_inputs()
    trace_graph(net, traced, samba.optim.SGD(net.parameters(), lr=0.1), pef=pef)
    session.run(inputs, hyperparam_dict={"p": 0.0})
    plain = samba.to_torch(inputs[0]).detach().requires_grad_()
    _eager(net, [samba.SambaTensor(plain), inputs[1]])[1].backward()
    assert plain.grad is not None
    assert inputs[0].sn_grad is not None
    assert torch.equal(inputs[0].sn_grad, plain.grad)
    assert inputs[1].sn_grad is None
    assert traced[0].sn_grad is not None, "apps read it on the tensor that they traced with, too"
    assert torch.equal(traced[0].sn_grad, plain.grad)


def test_a_training_pef_predicts_as_one_for_inference(pef: str, tmp_path: Path) -> None:
    predicting = compiled((_made_net()[0].eval(), None), _net_inputs(), tmp_path, inference=True)
    found = []
    for path in (pef, predicting):
        model, _ = _made_net()
        trace_graph(model, _net_inputs(), None, pef=path)
        found.append(session.run(_net_inputs(5)))
        assert all(map(torch.equal, found[-1], _eager(model, _net_inputs(5))))
        with pytest.raises(OptionError, match="has no BCKWD"):
            session.run(_net_inputs(), section_types=["FWD", "BCKWD"])
    assert [one.sn_name for one in found[0]] == [one.sn_name for one in found[1]]
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_a_training_pef_without_an_optimizer_is_refused_on_a_command_line_without_inference(pef: str) -> None:
    process.current().arguments = Namespace(command="run", inference=False)
    with pytest.raises(OptionError) as caught:
        trace_graph(_made_net()[0], _net_inputs(), None, pef=pef)
    assert caught.value.what == "net.pef trains, and trace_graph needs its optimizers"
    assert str(caught.value.remedy).endswith("or, to predict with this PEF, type --inference")


def test_an_input_that_is_none_is_left_out(net: Net, pef: str) -> None:
    x, target = _net_inputs()
    first, _ = _forward([x, target])
    for given in ([x, target, None], {"x": x, "target": target, "factor": None}):
        again, _ = _forward(given)
        assert torch.equal(first, again)


def test_tensors_are_set_and_read_by_name(net: Net) -> None:
    bias = torch.tensor([1.0, 2.0, 3.0])
    session.ctx.set_tensors({"net__second__bias": bias, "net__first__bias": torch.zeros(8).numpy()})
    assert torch.equal(_on_device("net__second__bias"), bias)
    assert not _on_device("net__first__bias").any()
    inputs = _net_inputs()
    outputs, loss = session.run(inputs, section_types=["FWD"], hyperparam_dict={"p": 0.0})
    assert torch.equal(session.get_tensors(net.output_tensors[0])[0], outputs)
    assert [one.sn_name for one in session.get_tensors(net.output_tensors)] == [outputs.sn_name, loss.sn_name]
    session.ctx.set_tensors({f"{loss.sn_name}__grad": torch.tensor(0.0)})
    session.run(section_types=["BCKWD"])
    found: Any = session.tensor_dict
    assert set(found) == {"inputs", "grads", "x", "target", outputs.sn_name, loss.sn_name}
    assert torch.equal(found["inputs"]["x"], inputs[0])
    names = [f"net__{layer}__{kind}__grad" for layer in ("first", "second") for kind in ("weight", "bias")]
    assert set(found["grads"]) == set(names)
    assert not any(gradient.any() for gradient in found["grads"].values()), "the backward started from 0"
    with pytest.raises(DataError, match=r"net__second__bias has the shape \(3,\), and the given data \(1, 3\)"):
        session.ctx.set_tensors({"net__second__bias": bias.unsqueeze(0)})
    assert torch.equal(_on_device("net__second__bias"), bias)
    with pytest.raises(OptionError, match="the PEF has no tensor net__third"):
        session.ctx.set_tensors({"net__third": bias})


def test_what_changes_nothing_is_taken_with_one_notice(net: Net, pef: str, capsys: pytest.CaptureFixture[str]) -> None:
    expected, _ = _forward(_net_inputs())
    wrapped = nn.DataParallel(net)
    trace_graph(wrapped, _net_inputs(), samba.optim.SGD(net.parameters(), lr=0.1), pef=pef)
    assert vars(wrapped)["output_tensors"] is net.output_tensors
    for _ in range(2):
        (found, _) = session.run(
            _net_inputs(), hyperparam_dict={"p": 0.0}, num_copies=2, section_types=["FWD", "GATHER"]
        )  # type: ignore[call-arg]  # p and num_copies, which apps give
        assert torch.equal(found, expected)
    session.to_cpu(wrapped)
    told = capsys.readouterr().err.splitlines()
    why = "the model inside it is used; --data-parallel makes replicas"
    assert told[0] == f"notice: nn.DataParallel has no effect: {why}"
    assert told[2] == "notice: session.run(num_copies=…) has no effect: sambasim does not know this keyword"
    assert [line.startswith(f"  where: {__file__}:") for line in told] == [False, True, False, True]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_inputs_have_the_type_of_the_parameters(net: Net, pef: str, dtype: torch.dtype) -> None:
    x, target = _net_inputs()
    rounded = samba.from_torch_tensor(samba.to_torch(x).detach().to(torch.bfloat16).float(), name="x")
    expected, _ = _forward([rounded, target])
    given = samba.from_torch_tensor(samba.to_torch(rounded).to(dtype), name="x")
    if dtype is torch.bfloat16:  # as the batch of a compile, too
        given.requires_grad_()
        trace_graph(net, [given, target], samba.optim.SGD(net.parameters(), lr=0.1), pef=pef)
    found, _ = _forward([given, target])
    assert found.dtype is torch.float32
    assert torch.equal(found, expected)


@pytest.mark.parametrize(
    ("wanted", "given", "fits"),
    [((1, 4, 8), (4, 1, 8), False), ((2, 4, 8), (2, 8, 4), False), ((4,), (4, 1), True), ((4, 1), (4,), True)],
)
def test_an_input_fits_if_it_differs_by_axes_of_one_element_behind_the_batch(
    wanted: tuple[int, ...], given: tuple[int, ...], fits: bool
) -> None:
    symbols = {"x": Symbol("x", SymbolKind.INPUT, TensorType("float32", wanted))}
    if fits:
        assert bind(symbols, wanted[0], nn.Identity(), [torch.ones(given)])["x"].shape == wanted
        return
    with pytest.raises(DataError) as caught:
        bind(symbols, wanted[0], nn.Identity(), [torch.ones(given)])
    assert caught.value.what == f"x has the shape {given}, and the PEF was compiled for {wanted}"


class Normed(nn.Module):
    """Features `[batch, 3]` to the loss of each sample, the one output."""

    output_tensors: tuple[samba.SambaTensor, ...]

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.norm = nn.BatchNorm1d(2)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.norm(self.linear(x))
        return result.square().mean(1)


def _made_normed() -> Made:
    return with_sgd(Normed)


def _normed_inputs(batch_dim: int = 0) -> list[samba.SambaTensor]:
    values = torch.randn(BATCH, 3, generator=torch.Generator().manual_seed(1))
    return [samba.from_torch_tensor(values, name="x", batch_dim=batch_dim)]


@pytest.fixture
def normed(load: Load) -> Normed:
    model: Normed = load(_made_normed, _normed_inputs())[0]
    return model


def test_batches_along_another_axis_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="the batch of x is along axis 1, but a replica's batch must come first"):
        compiled(_made_normed(), _normed_inputs(batch_dim=1), tmp_path)


def test_an_optimizer_of_torch_is_refused_with_ours() -> None:
    model, _ = _made_normed()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(OptionError, match=r"SGD cannot be compiled") as caught:
        session.compile(model, _normed_inputs(), optimizer)  # type: ignore[arg-type]  # the mistake
    assert "samba.optim.SGD" in str(caught.value.remedy)


class Compiled(nn.Module):
    """A function and a layer that the app has given to torch.compile."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.linear.compile()
        self.halved = torch.compile(lambda x: x / 2)

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.halved(self.linear(x)).square().mean(1)
        return loss


def test_what_is_given_to_torch_compile_is_captured_as_it_is_written(tmp_path: Path) -> None:
    model, optimizer = with_sgd(Compiled)
    pef = compiled((model, optimizer), _normed_inputs(), tmp_path)
    outputs = trace_graph(model, _normed_inputs(), optimizer, pef=pef)
    (x,) = _normed_inputs()
    expected = (torch.nn.functional.linear(x.torch(), model.linear.weight, model.linear.bias) / 2).square().mean(1)
    (found,) = session.run(_normed_inputs(), outputs)
    assert torch.equal(found.torch(), expected)


def test_one_output_is_a_tuple_of_one_too(normed: Normed) -> None:
    outputs = normed.output_tensors
    assert isinstance(outputs, tuple)
    assert len(outputs) == 1
    for wanted in (None, outputs, list(outputs), outputs[0]):
        found = session.run(_normed_inputs(), wanted, section_types=["FWD"])
        assert isinstance(found, tuple)
        assert [tensor.sn_name for tensor in found] == ["normed__loss"]


@pytest.mark.usefixtures("normed")
def test_a_forward_alone_changes_the_statistics_of_batch_norm() -> None:
    session.run(_normed_inputs(), section_types=["FWD"])
    assert session.buffer_dict["normed__norm__num_batches_tracked"] == 1
    assert session.buffer_dict["normed__norm__running_mean"].any()


@pytest.mark.parametrize(
    ("name", "value", "words", "remedy"),
    [
        ("lr", [0.1], "AP04: lr in hyperparam_dict is [0.1]", 'hyperparam_dict={"lr": …[0]}: one number, not a list'),
        ("lr", "0.1", "AP04: lr in hyperparam_dict is '0.1'", "give lr as one number, 0 or more"),
        ("lr", float("nan"), "AP04: lr in hyperparam_dict is nan", "give lr as one number, 0 or more"),
        (
            "momentun", 0.9, "AP04: hyperparam_dict has momentun, which no optimizer of this PEF takes",
            "did you mean momentum?",
        ),
        (
            "momentum", 0.9, "momentum cannot be turned on: the PEF was compiled without it",
            "compile with momentum above 0",
        ),
    ],
)  # fmt: skip
@pytest.mark.usefixtures("normed")
def test_a_wrong_hyperparameter_is_refused_with_its_line(name: str, value: object, words: str, remedy: str) -> None:
    with pytest.raises(OptionError) as caught:
        session.run(_normed_inputs(), hyperparam_dict={name: value})
    assert (caught.value.what, caught.value.remedy) == (words, remedy)
    assert "session.run(_normed_inputs(), hyperparam_dict=" in str(caught.value.where)


@pytest.mark.usefixtures("normed")
def test_a_tensor_of_one_number_is_one() -> None:
    rate, machine = torch.tensor(0.25), session.machine
    assert machine is not None
    for number in (0.25, 0.5):  # a scheduler changes it in place
        rate.fill_(number)
        session.run(_normed_inputs(), hyperparam_dict={"lr": rate})
        assert machine.replica.hyperparameters[0]["lr"] == number
