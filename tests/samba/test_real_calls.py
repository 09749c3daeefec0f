"""Calls of the session as public apps have them, in one process: losses at any place, gradients that the app sets,
dropout rates, prediction with a training PEF, and the older names."""

from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sambasim import samba
from sambasim.errors import DataError, OptionError
from sambasim.ir.types import Symbol, SymbolKind, TensorType
from sambasim.samba import context, loaded, machine, notices
from sambasim.samba.checks import unfetched
from sambasim.samba.checks.findings import Reporter
from sambasim.samba.inputs import bind
from sambasim.samba.session import session
from sambasim.samba.utils import trace_graph

BATCH = 4


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
        h = self.drop(torch.relu(self.first(x)))
        outputs = self.second(self.planes(h.view(-1, 2, 2, 2)).flatten(1))
        if factor is not None:
            outputs = outputs * factor
        loss = nn.functional.cross_entropy(outputs, torch.autograd.Variable(target))
        return outputs, loss


def _made() -> tuple[Net, samba.optim.SGD]:
    torch.manual_seed(0)
    model = Net()
    samba.from_torch_model_(model)
    return model, samba.optim.SGD(model.parameters(), lr=0.1)


def _inputs(number: int = 0) -> list[samba.SambaTensor]:
    generator = torch.Generator().manual_seed(number)
    x = samba.from_torch_tensor(torch.randn(BATCH, 6, generator=generator), name="x", batch_dim=0)
    x.requires_grad_()
    return [x, samba.from_torch_tensor(torch.randint(3, (BATCH,), generator=generator), name="target", batch_dim=0)]


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


@pytest.fixture(scope="module")
def pef(tmp_path_factory: pytest.TempPathFactory) -> str:
    model, optimizer = _made()
    return session.compile(
        model, [*_inputs(), None], optimizer, "net", config_dict={"output_folder": str(tmp_path_factory.mktemp("out"))}
    )


@pytest.fixture(autouse=True)
def reporter(monkeypatch: pytest.MonkeyPatch) -> Iterator[Reporter]:
    """What the checks of this test tell; each test is a process that was told nothing yet."""
    told = Reporter()
    monkeypatch.setattr(notices, "_SAID", set())
    for module in (loaded, unfetched, machine):
        monkeypatch.setattr(module, "reporter", told)
    yield told
    session.reset()


@pytest.fixture
def net(pef: str, capsys: pytest.CaptureFixture[str]) -> Net:
    """Loaded."""
    model, optimizer = _made()
    trace_graph(model, [*_inputs(), None], optimizer, pef=pef)
    capsys.readouterr()
    return model


def test_a_loss_that_is_not_finite_is_told_once(net: Net, capsys: pytest.CaptureFixture[str]) -> None:
    session.run(_inputs())
    assert capsys.readouterr().err == ""
    x, target = _inputs()
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
    inputs = _inputs()
    outputs, loss = _eager(net, inputs)
    (gradient,) = torch.autograd.grad(loss, [net.first.weight])

    def runs_as_evaluated(**rates: float) -> bool:
        found, _ = session.run(inputs, hyperparam_dict=rates, section_types=["FWD", "BCKWD"])
        same = torch.equal(found, outputs)
        if same:
            on_device = session.device_gradient(net.first.weight)
            assert on_device is not None
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
    on_device = session.device_gradient(net.first.weight)
    assert on_device is not None
    torch.testing.assert_close(on_device, gradient, msg="the backward has the rates of its forward")
    assert not runs_as_evaluated(), "a rate that a backward was given holds from the next forward on"
    with pytest.raises(OptionError, match="AP04: p in hyperparam_dict is 1, and a dropout rate is below 1"):
        session.run(inputs, hyperparam_dict={"p": 1.0})


def test_an_input_that_requires_a_gradient_has_the_bits_of_eager_pytorch(net: Net, pef: str) -> None:
    inputs, traced = _inputs(1), _inputs()
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
    config = {"output_folder": str(tmp_path), "inference": True}
    model, _ = _made()
    predicting = session.compile(model.eval(), _inputs(), None, "forward", config_dict=config)
    found = []
    for path in (pef, predicting):
        model, _ = _made()
        trace_graph(model, _inputs(), None, pef=path)
        found.append(session.run(_inputs(5)))
        assert all(
            torch.equal(one, expected) for one, expected in zip(found[-1], _eager(model, _inputs(5)), strict=True)
        )
        with pytest.raises(OptionError, match="has no BCKWD"):
            session.run(_inputs(), section_types=["FWD", "BCKWD"])
    assert [one.sn_name for one in found[0]] == [one.sn_name for one in found[1]]
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def _typed(monkeypatch: pytest.MonkeyPatch, **flags: object) -> None:
    """The command line of a run has these flags."""
    typed = Namespace(command="run", **flags)
    monkeypatch.setattr(context, "_OF_THIS_PROCESS", context.Context(command="run", arguments=typed))


def test_a_training_pef_without_an_optimizer_is_refused_on_a_command_line_without_inference(
    pef: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _typed(monkeypatch, inference=False)
    with pytest.raises(OptionError) as caught:
        trace_graph(_made()[0], _inputs(), None, pef=pef)
    assert caught.value.what == "net.pef trains, and trace_graph needs its optimizers"
    assert str(caught.value.remedy).endswith("or, to predict with this PEF, type --inference")


def test_an_input_that_is_none_is_left_out(net: Net, pef: str) -> None:
    x, target = _inputs()
    first, _ = _forward([x, target])
    for given in ([x, target, None], {"x": x, "target": target, "factor": None}):
        again, _ = _forward(given)
        assert torch.equal(first, again)


def test_tensors_are_set_and_read_by_name(net: Net) -> None:
    bias = torch.tensor([1.0, 2.0, 3.0])
    session.ctx.set_tensors({"net__second__bias": bias, "net__first__bias": torch.zeros(8).numpy()})
    assert torch.equal(_on_device("net__second__bias"), bias)
    assert not _on_device("net__first__bias").any()
    inputs = _inputs()
    outputs, loss = session.run(inputs, section_types=["FWD"], hyperparam_dict={"p": 0.0})
    assert torch.equal(session.get_tensors(net.output_tensors[0])[0], outputs)
    assert [one.sn_name for one in session.get_tensors(net.output_tensors)] == [outputs.sn_name, loss.sn_name]
    session.ctx.set_tensors({f"{loss.sn_name}__grad": torch.tensor(0.0)})
    session.run(section_types=["BCKWD"])
    found: Any = session.tensor_dict
    assert set(found) == {"inputs", "grads", "x", "target", outputs.sn_name, loss.sn_name}
    assert torch.equal(found["inputs"]["x"], inputs[0])
    assert set(found["grads"]) == {
        f"net__{layer}__{kind}__grad" for layer in ("first", "second") for kind in ("weight", "bias")
    }
    assert not any(gradient.any() for gradient in found["grads"].values()), "the backward started from 0"
    with pytest.raises(DataError, match=r"net__second__bias has the shape \(3,\), and the given data \(1, 3\)"):
        session.ctx.set_tensors({"net__second__bias": bias.unsqueeze(0)})
    assert torch.equal(_on_device("net__second__bias"), bias)
    with pytest.raises(OptionError, match="the PEF has no tensor net__third"):
        session.ctx.set_tensors({"net__third": bias})


def test_what_changes_nothing_is_taken_with_one_notice(net: Net, pef: str, capsys: pytest.CaptureFixture[str]) -> None:
    expected, _ = _forward(_inputs())
    wrapped = nn.DataParallel(net)
    trace_graph(wrapped, _inputs(), samba.optim.SGD(net.parameters(), lr=0.1), pef=pef)
    assert vars(wrapped)["output_tensors"] is net.output_tensors
    for _ in range(2):
        (found, _) = session.run(_inputs(), hyperparam_dict={"p": 0.0}, num_copies=2, section_types=["FWD", "GATHER"])  # type: ignore[call-arg]
        assert torch.equal(found, expected)
    session.to_cpu(wrapped)
    told = capsys.readouterr().err.splitlines()
    assert told[0] == (
        "notice: nn.DataParallel has no effect: the model inside it is used; --data-parallel makes replicas"
    )
    assert told[2] == ("notice: session.run(num_copies=…) has no effect: sambasim does not know this keyword")
    assert [line.startswith(f"  where: {__file__}:") for line in told] == [False, True, False, True]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_inputs_have_the_type_of_the_parameters(net: Net, pef: str, dtype: torch.dtype) -> None:
    x, target = _inputs()
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


def test_a_model_that_is_traced_again_after_training_is_told_unless_it_was_fetched(
    net: Net, pef: str, reporter: Reporter
) -> None:
    def train_and_trace_again(*, fetches: bool) -> None:
        session.run(_inputs(), hyperparam_dict={"p": 0.0})
        if fetches:
            session.to_cpu(net)
        trace_graph(net, _inputs(), samba.optim.SGD(net.parameters(), lr=0.1), pef=pef)

    train_and_trace_again(fetches=True)
    assert not reporter.findings
    train_and_trace_again(fetches=False)
    (finding,) = reporter.findings
    assert finding.words == (
        "AP06: trace_graph loads the weights of the host, and the device has trained for 1 step since"
    )
