"""The session in one process: call shapes of public apps, sections, weights of host and device, bindings, refusals."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sambasim import samba
from sambasim.errors import DataError, ModelError, OptionError, PefError
from sambasim.pef import read
from sambasim.samba import trace
from sambasim.samba.session import session
from sambasim.samba.utils import trace_graph
from tests.samba.harness import BATCH, Load, Made, Net, PefOf, compiled, net_batch, seeded


class Convolution(nn.Module):
    """A loss for each sample."""

    output_tensors: tuple[samba.SambaTensor, ...]

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.head = nn.Linear(64, 1)

    def forward(self, x: Tensor) -> Tensor:
        losses: Tensor = self.head(torch.relu(self.conv(x)).flatten(1)).square().squeeze(1)
        return losses


def _model() -> Net:
    model: Net = samba.from_torch_model_(seeded(Net))
    return model


def _made() -> Made:
    model = _model()
    return model, _adam(model)


def _batch(number: int = 0, size: int = BATCH) -> Any:
    return net_batch(samba, number, size)


@pytest.fixture
def loaded(load: Load) -> Made:
    return load(_made, _batch())


@pytest.fixture
def pef(pef_of: PefOf) -> str:
    return pef_of(_made, _batch())


def _adam(model: Net) -> samba.optim.AdamW:
    return samba.optim.AdamW(model.parameters(), lr=0.01)


def test_outputs_are_tensors_to_calculate_with(loaded: Made) -> None:
    model, _ = loaded
    gold_losses, gold_outputs = model(*(samba.to_torch(tensor) for tensor in _batch()))
    losses, outputs = samba.session.run(_batch(), model.output_tensors)
    assert isinstance(losses, samba.SambaTensor)
    assert torch.equal(losses.torch(), gold_losses)
    assert torch.equal(outputs.torch(), gold_outputs)
    assert losses.mean().item() == gold_losses.mean().item()
    assert outputs.numpy().shape == (BATCH, 3)
    alone = samba.session.run(_batch(), model.output_tensors[1], section_types=["fwd"])
    assert isinstance(alone, tuple)
    assert len(alone) == 1
    assert alone[0].sn_name == "net__outputs__0"


def test_the_backward_starts_from_sn_grad(loaded: Made) -> None:
    model, _ = loaded
    losses, _ = samba.session.run(_batch(), model.output_tensors, section_types=["FWD", "BCKWD"])
    (mean,) = samba.session.get_tensors_by_name(["net__second__bias__grad"])
    gold, *_ = torch.autograd.grad(model(*_batch())[0].mean(), [model.second.bias])
    torch.testing.assert_close(mean.torch(), gold.as_subclass(Tensor))
    samba.session.run(section_types=["OPT"])
    for scale in (torch.tensor([0.0, 0.0, 8.0, 0.0]), torch.full((BATCH,), 0.0)):
        samba.session.to_device(model)
        losses, _ = samba.session.run(_batch(), model.output_tensors, section_types=["FWD"])
        losses.sn_grad = scale
        samba.session.run(section_types=["BCKWD"])
        (scaled,) = samba.session.get_tensors_by_name(["net__second__bias__grad"])
        gold, *_ = torch.autograd.grad(model(*_batch())[0], [model.second.bias], scale)
        torch.testing.assert_close(scaled.torch(), gold.as_subclass(Tensor))
        samba.session.run(section_types=["OPT"])
    losses.sn_grad = torch.ones(2)
    with pytest.raises(DataError, match=r"sn_grad of net__loss has the shape \(2,\), and the output \(4,\)"):
        samba.session.run(_batch())


def test_hyperparameters_hold_from_the_step_on(loaded: Made, capsys: pytest.CaptureFixture[str]) -> None:
    model, _ = loaded
    samba.session.run(_batch(), hyperparam_dict={"lr": 0.0, "weight_decay": 0.0})
    before = model.first.weight.detach().clone()
    samba.session.to_cpu(model)
    assert torch.equal(model.first.weight, before)
    capsys.readouterr()
    for _ in range(2):
        samba.session.run(_batch(), hyperparam_dict={"learning_rate": 0.1})
    notice, where, remedy = capsys.readouterr().err.splitlines()
    what = "hyperparam_dict has learning_rate, which no optimizer of this PEF takes: it is left out"
    assert notice == f"notice: AP04: {what}"
    assert where.startswith(f"  where: {__file__}:")
    assert where.endswith(': samba.session.run(_batch(), hyperparam_dict={"learning_rate": 0.1})')
    assert remedy == "  try:   it takes lr"
    samba.session.to_cpu(model)
    assert torch.equal(model.first.weight, before), "the rate is still zero"


def test_inputs_bind_by_name_and_then_by_place(loaded: Made) -> None:
    x, target = _batch()
    turned, _ = samba.session.run([target, x], section_types=["FWD"])
    plain, _ = samba.session.run([samba.to_torch(x), samba.to_torch(target)], section_types=["FWD"])
    assert torch.equal(turned, plain)


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        (lambda: _batch(size=3), "AP01: x has 3 samples, and the PEF takes 4 at a time: it is the end of the data"),
        (lambda: _batch(size=5), "AP01: x has 5 samples, and the PEF takes 4 at a time"),
        (lambda: [torch.ones(4, 3), _batch()[1]], r"x has the shape \(4, 3\), and the PEF was compiled for \(4, 5\)"),
        (lambda: _batch()[:1], "the input target of the PEF has no tensor"),
        (lambda: (*_batch(), torch.zeros(4)), "3 tensors are given, and the PEF has 2 inputs: x, target"),
        (lambda: [samba.SambaTensor(_batch()[0], name="images")], "a tensor is called images, and Net was compiled"),
        (lambda: [_batch()[0], _batch()[1].float()], "target is float32, and the PEF was compiled for int64"),
    ],
)
def test_a_batch_that_does_not_fit_is_refused(loaded: Made, inputs: object, words: str) -> None:
    assert callable(inputs)
    with pytest.raises(DataError, match=words):
        samba.session.run(inputs())


@pytest.mark.parametrize(
    ("kinds", "words"),
    [(["FORWARD"], "section_types has 'FORWARD'"), (["BCKWD"], "there is no forward whose backward could be run")],
)
@pytest.mark.usefixtures("loaded")
def test_sections_that_cannot_be_run_are_refused(kinds: list[str], words: str) -> None:
    with pytest.raises(OptionError, match=words):
        samba.session.run(_batch(), section_types=kinds)


def _hook(model: Net) -> None:
    model.first.weight.register_hook(torch.neg)  # type: ignore[no-untyped-call]  # torch's, untyped


def _share(model: Net) -> None:
    model.second.bias.data = model.first.bias.data[:3]


@pytest.mark.parametrize(
    ("change", "words"), [(_hook, "has a gradient hook"), (_share, "are two tensors in the same memory")]
)
def test_what_a_compile_refuses_a_run_refuses_too(pef: str, change: Callable[[Net], None], words: str) -> None:
    model = _model()
    change(model)
    with pytest.raises(ModelError, match=words):
        trace_graph(model, _batch(), _adam(model), pef=pef)


def test_optimizers_that_clip_by_different_norms_are_refused_by_a_run_too(tmp_path: Path) -> None:
    model = _model()

    def optimizers(bound: float) -> list[samba.optim.SGD | samba.optim.AdamW]:
        layers = (model.first, 1.0), (model.second, bound)
        return [samba.optim.SGD(layer.parameters(), lr=0.1, max_grad_norm=norm) for layer, norm in layers]

    pef = compiled((model, optimizers(1.0)), _batch(), tmp_path)
    trace_graph(model, _batch(), optimizers(1.0), pef=pef)
    with pytest.raises(OptionError, match="the optimizers have different max_grad_norm"):
        trace_graph(model, _batch(), optimizers(0.5), pef=pef)


class Dropping(Net):
    def forward(self, x: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        loss, outputs = super().forward(x, target)
        return nn.functional.dropout(loss, 0.5, self.training), outputs


def test_a_model_in_evaluation_mode_is_noticed_where_it_matters(
    tmp_path: Path, loaded: Made, capsys: pytest.CaptureFixture[str]
) -> None:
    loaded[0].eval()
    samba.session.run(_batch())
    assert capsys.readouterr().err == ""
    model = Dropping()
    pef = compiled((model, _adam(model)), _batch(), tmp_path)
    trace_graph(model, _batch(), _adam(model), pef=pef)
    capsys.readouterr()
    samba.session.run(_batch())
    assert capsys.readouterr().err == ""
    model.eval()
    for _ in range(2):
        samba.session.run(_batch())
    notice, where = capsys.readouterr().err.splitlines()
    why = "a training PEF runs in training mode; --inference predicts with it"
    assert notice == f"notice: model.eval() has no effect: {why}"
    assert where.endswith(": samba.session.run(_batch())")


def test_a_model_that_does_what_was_compiled_is_not_captured_again(pef: str, monkeypatch: pytest.MonkeyPatch) -> None:
    captured = []

    def capture(document: object, asked: object, weights: object) -> None:
        captured.append(asked)

    monkeypatch.setattr(trace, "capture_and_compare", capture)
    model = _model()
    trace_graph(model, _batch(), _adam(model), pef=pef)
    assert not captured
    monkeypatch.setattr(model, "forward", lambda x, target: Net.forward(model, 2 * x, target))
    trace_graph(model, _batch(), _adam(model), pef=pef)
    assert len(captured) == 1


def test_a_pef_with_a_group_for_each_parameter_is_traced_likewise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = _model()
    pef = compiled((model, _adam(model)), _batch(), tmp_path, gradient_groups="parameter")
    assert len(read(Path(pef)).program.groups) == len(list(model.parameters()))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))  # of another machine, so the graphs themselves are compared
    trace_graph(model, _batch(), _adam(model), pef=pef)
    samba.session.run(_batch(), model.output_tensors)


def test_parameters_that_are_not_contiguous_keep_their_strides_on_the_host(tmp_path: Path) -> None:
    """And train to the bits of contiguous ones."""

    def trained(form: torch.memory_format, folder: Path, *, traced_as: torch.memory_format) -> Mapping[str, Tensor]:
        def made(form: torch.memory_format) -> Convolution:
            torch.manual_seed(0)
            model = Convolution()
            model.conv.weight.data = model.conv.weight.data.to(memory_format=form)
            samba.from_torch_model_(model)
            return model

        def optimizer(model: nn.Module) -> samba.optim.SGD:
            return samba.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

        images = samba.from_torch_tensor(
            torch.randn(BATCH, 3, 6, 6, generator=torch.Generator().manual_seed(1)), name="x"
        )
        model = made(form)
        pef = session.compile(model, (images,), optimizer(model), config_dict={"output_folder": str(folder)})
        model = made(traced_as)
        host = optimizer(model)
        trace_graph(model, (images,), host, pef=pef)
        strides = model.conv.weight.stride()
        for _ in range(3):
            samba.session.run((images,), model.output_tensors)
        samba.session.to_cpu(model)
        assert model.conv.weight.stride() == strides
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        host.step()  # with the state that came from the device
        return model.state_dict()

    plain, last = torch.contiguous_format, torch.channels_last
    expected = trained(plain, tmp_path / "plain", traced_as=plain)
    for traced_as in (last, plain):
        actual = trained(last, tmp_path / "last", traced_as=traced_as)
        assert all(torch.equal(tensor, expected[name]) for name, tensor in actual.items())


def test_several_optimizers_and_groups_train_together(tmp_path: Path) -> None:
    model = _model()
    optimizers: list[samba.optim.SGD | samba.optim.AdamW] = [
        samba.optim.SGD(model.first.parameters(), lr=0.0),
        samba.optim.AdamW([{"params": [model.second.weight], "lr": 0.1}, {"params": [model.second.bias], "lr": 0.0}]),
    ]
    pef = compiled((model, optimizers), _batch(), tmp_path)
    trace_graph(model, _batch(), optimizers, pef=pef)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    samba.session.run(_batch())
    samba.session.to_cpu(model)
    changed = [name for name, parameter in model.named_parameters() if not torch.equal(parameter, before[name])]
    assert changed == ["second.weight"]


class Masked(nn.Module):
    """With a tensor that is in no state_dict."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 3)
        self.mask = torch.tensor([1.0, 0.0, -2.0])

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        outputs = self.linear(x) * self.mask
        return outputs.square().mean(), self.linear.weight.view(-1)


def test_constants_are_on_the_device_and_outputs_are_not(tmp_path: Path) -> None:
    model = Masked()
    optimizer = samba.optim.SGD(model.parameters(), lr=0.1)
    inputs = _batch()[:1]
    pef = compiled((model, optimizer), inputs, tmp_path, "masked")
    trace_graph(model, inputs, optimizer, pef=pef)
    loss, weight = samba.session.run(inputs)
    assert torch.equal(loss, model(*inputs)[0])
    kept = weight.clone()
    samba.session.run(inputs)
    assert torch.equal(weight, kept), "an output that is a view of a parameter stays what it was"
    model.mask[0] = 3.0
    with pytest.raises(
        PefError, match=r"the constant masked__mask, which is read by `aten\.mul\.Tensor` from "
    ) as caught:
        trace_graph(model, inputs, optimizer, pef=pef)
    assert "outputs = self.linear(x) * self.mask, has changed since the PEF masked was" in str(caught.value)


def test_a_parameter_without_an_optimizer_is_refused(tmp_path: Path) -> None:
    model = _model()
    optimizer = samba.optim.SGD(model.first.parameters(), lr=0.1)
    with pytest.raises(ModelError, match=r"no optimizer updates second\.weight, second\.bias"):
        session.compile(model, _batch(), optimizer, config_dict={"output_folder": str(tmp_path)})


def test_a_model_knows_when_it_is_traced(tmp_path: Path) -> None:
    class Asks(Net):
        def forward(self, x: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
            losses, outputs = super().forward(x, target)
            return (losses * 2 if session.tracing else losses), outputs

    model = samba.from_torch_model_(seeded(Asks))
    optimizer = samba.optim.SGD(model.parameters(), lr=0.1)
    trace_graph(model, _batch(), optimizer, pef=compiled((model, optimizer), _batch(), tmp_path))
    losses, _ = session.run(_batch(), section_types=["FWD"])
    assert not session.tracing
    assert torch.equal(losses.torch(), model(*_batch())[0].torch() * 2)


def test_weights_move_between_host_and_device(loaded: Made) -> None:
    (model, optimizer), inputs = loaded, _batch()
    start = {name: value.clone() for name, value in model.state_dict().items()}
    samba.session.run(inputs)
    assert torch.equal(model.first.weight, start["first.weight"])
    samba.session.to_cpu(model)
    assert not torch.equal(model.first.weight, start["first.weight"])
    assert len(optimizer.state_dict()["state"]) == 4
    losses, _ = samba.session.run(inputs, section_types=["FWD"])
    assert torch.equal(losses.torch(), samba.to_torch(model(*inputs)[0]))
    for send in (samba.session.to_device, samba.session.to_rdu):
        with torch.no_grad():
            model.first.bias.add_(1)
        send(model)
        (bias,) = samba.session.get_tensors_by_name(["net__first__bias"])
        assert torch.equal(bias.torch(), model.first.bias)
