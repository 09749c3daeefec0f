"""The session in one process: call shapes of public apps, sections, weights of host and device, bindings, refusals."""

from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from sambasim import samba
from sambasim.errors import DataError, ModelError, OptionError
from sambasim.pef import read
from sambasim.samba.session import session
from sambasim.samba.utils import trace_graph
from tests.samba.conftest import make_logreg, make_net
from tests.samba.harness import (
    BATCH,
    MOMENTUM,
    Layer,
    Load,
    LogReg,
    Made,
    Net,
    PefOf,
    Plainly,
    batch_of,
    compiled,
    equal,
    imported,
    layer_batch,
    net_batch,
    parsed,
    refused,
    same_weights,
    with_sgd,
)

RUNS = [
    "session.run(input_tensors=[a, b], output_tensors=X, data_parallel=False, data_parallel_mode='normal')",
    "session.run((a, b), X)",
    "model.run(a, b)",
    "model.run([a, b])",
    "model.run(a, b, None)",
    "session.run(input_tensors=[a, b], output_tensors=X, hyperparam_dict={'lr': 0.5})",
    "model.run([a, b], hyperparam_dict={'lr': 0.5})",
]
"""Call shapes of the census."""


def test_a_whole_step(app: None, load: Load) -> None:
    model, _ = load(make_logreg, batch_of())
    plainly = Plainly(model)
    batches = [[tensor.torch() for tensor in batch_of(number)] for number, _ in enumerate(RUNS)]
    for call, (a, b) in zip(RUNS, samba.SambaLoader(batches, ["image", "label"]), strict=True):
        names = {"session": samba.session, "model": model, "a": a, "b": b, "X": model.output_tensors}
        outputs = eval(call, names)
        assert all(map(equal, outputs, plainly.step((a, b), lr=0.5 if "lr" in call else None))), call
    samba.session.to_cpu(model)
    assert same_weights(model, plainly.model)


def test_outputs_are_tensors_to_calculate_with(net: Made) -> None:
    model, _ = net
    gold_losses, gold_outputs = model(*map(samba.to_torch, net_batch()))
    losses, outputs = session.run(net_batch(), model.output_tensors)
    assert isinstance(losses, samba.SambaTensor)
    assert torch.equal(losses.torch(), gold_losses)
    assert torch.equal(outputs.torch(), gold_outputs)
    assert losses.mean().item() == gold_losses.mean().item()
    assert outputs.numpy().shape == (BATCH, 3)
    names, traced = ["net__loss", "net__outputs__0"], model.output_tensors
    for wanted, expected in (None, names), (traced, names), ([*traced], names), (traced[1], names[1:]):
        results = session.run(net_batch(), wanted, section_types=["fwd"])
        assert isinstance(results, tuple)
        assert [one.sn_name for one in results] == expected


def test_hyperparameters_hold_from_the_step_on(net: Made, capsys: pytest.CaptureFixture[str]) -> None:
    model, _ = net
    before = model.first.weight.detach().clone()
    session.run(net_batch(), hyperparam_dict={"lr": 0.0})
    capsys.readouterr()
    for _ in range(2):
        session.run(net_batch(), hyperparam_dict={"learning_rate": 0.1})
    notice, where, remedy = capsys.readouterr().err.splitlines()
    what = "hyperparam_dict has learning_rate, which no optimizer of this PEF takes: it is left out"
    assert notice == f"notice: AP04: {what}"
    assert where.startswith(f"  where: {__file__}:")
    assert where.endswith(': session.run(net_batch(), hyperparam_dict={"learning_rate": 0.1})')
    assert remedy == "  try:   it takes lr"
    session.to_cpu(model)
    assert torch.equal(model.first.weight, before), "the rate is still zero"


X, TARGET = net_batch()


def test_inputs_bind_by_name_and_then_by_place(net: Made) -> None:
    turned, _ = session.run([TARGET, X], section_types=["FWD"])
    plain, _ = session.run(samba.to_torch([X, TARGET]), section_types=["FWD"])
    assert torch.equal(turned, plain)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (net_batch(size=3), "AP01: x has 3 samples, and the PEF takes 4 at a time: it is the end of the data"),
        (net_batch(size=5), "AP01: x has 5 samples, and the PEF takes 4 at a time"),
        ([torch.ones(4, 3), TARGET], r"x has the shape \(4, 3\), and the PEF was compiled for \(4, 5\)"),
        ([X], "the input target of the PEF has no tensor"),
        ([X, TARGET, torch.zeros(4)], "a tensor fits no place, and Net.forward was compiled with the inputs x, target"),
        ([samba.SambaTensor(X, name="images")], "a tensor is called images, and Net.forward was compiled"),
        ([X, TARGET.float()], "target is float32, and the PEF was compiled for int64"),
    ],
)
def test_a_batch_that_does_not_fit_is_refused(net: Made, wrong: Any, words: str) -> None:
    with pytest.raises(DataError, match=words):
        session.run(wrong)


def test_calls_that_cannot_mean_what_was_meant_are_refused(net: Made, load: Any) -> None:
    ours: Any = session
    (model, optimizer), run = net, partial(ours.run, net_batch())
    of_another = load(partial(with_sgd, LogReg), batch_of())[0].output_tensors
    load(make_net, net_batch())
    for kind, words, call in (
        (OptionError, "section_types has 'FORWARD'", lambda: run(section_types=["FORWARD"])),
        (OptionError, "section_types has None, which is no type", lambda: run(section_types=[None])),
        (OptionError, "section_types must be a list of words, not int", lambda: run(section_types=1)),
        (DataError, "output_tensors must hold tensors, not str", lambda: run(["loss"])),
        (OptionError, "AP04: a key of hyperparam_dict must be a word, not int", lambda: run(hyperparam_dict={1: 0.1})),
        (DataError, "a gradient must be a tensor or a number, not str", lambda: run(grad_of_outputs=["1"])),
        (OptionError, "there is no forward whose backward could be run", lambda: run(section_types=["BCKWD"])),
        (OptionError, "section_types must be a list of words, not the word 'FWD'", lambda: run(section_types="FWD")),
        (DataError, "output_tensors must be tensors, not int", lambda: run(0)),
        (OptionError, "are of another model than the Net traced last", lambda: run(of_another)),
        (OptionError, "names must be a list of words, not the word 'x'", lambda: session.get_tensors_by_name("x")),
        (AttributeError, r"samba\.session has no tocpu; similar names: to_cpu", lambda: ours.tocpu(model)),
        (OptionError, "trace_graph needs a PEF", lambda: trace_graph(model, net_batch(), optimizer)),
    ):
        with pytest.raises(kind, match=words):
            call()


@pytest.mark.parametrize(
    ("change", "bound", "words"),
    [
        (lambda model: model.first.weight.register_hook(torch.neg), 1.0, "has a gradient hook"),
        (lambda model: setattr(model.second.bias, "data", model.first.bias.data[:3]), 1.0, "are two tensors in the"),
        (lambda model: None, 0.5, "the optimizers have different max_grad_norm"),
    ],
)
def test_what_a_compile_refuses_a_run_refuses_too(net_pef: str, change: Any, bound: float, words: str) -> None:
    model, _ = make_net()
    change(model)
    layers = (model.first, 1.0), (model.second, bound)
    optimizers = [samba.optim.SGD(layer.parameters(), lr=0.1, max_grad_norm=norm) for layer, norm in layers]
    with pytest.raises((ModelError, OptionError), match=words):
        trace_graph(model, net_batch(), optimizers, pef=net_pef)


def test_a_compile_refuses() -> None:
    x, ours = layer_batch(), samba.optim.SGD
    for kind, words, remedy, wrong, optimizer in (
        (DataError, "the batch of x is along axis 1, but a replica's", "transpose", layer_batch(batch_dim=1), ours),
        (OptionError, "SGD cannot be compiled", "samba.optim.SGD", x, torch.optim.SGD),
        (ModelError, "mat1 and mat2 shapes cannot be multiplied", "", [samba.randn(4, 7, name="x")], ours),
        (ModelError, "SGD does not update linear.bias", "freeze", x, lambda p, lr: ours([next(p)], lr)),
    ):  # fmt: skip
        model = samba.from_torch_model_(Layer())
        optimizers: Any = optimizer(model.parameters(), lr=0.1)
        with pytest.raises(kind, match=words) as caught:
            session.compile(model, wrong, optimizers)
        assert caught.value.remedy
        assert remedy in caught.value.remedy
        assert "Traceback" not in str(caught.value)
        assert "mat1" not in words or f"{Path(__file__).parent}/" in str(caught.value.where)


def test_a_model_that_does_what_was_compiled_is_not_captured_again(
    net_pef: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    captured: list[object] = []
    monkeypatch.setattr(
        import_module("sambasim.samba.trace"),
        "capture_and_compare",
        lambda document, asked, weights: captured.append(asked),
    )
    model, optimizer = make_net()
    trace_graph(model, net_batch(), optimizer, pef=net_pef)
    assert not captured
    monkeypatch.setattr(model, "forward", lambda x, target: Net.forward(model, 2 * x, target))
    trace_graph(model, net_batch(), optimizer, pef=net_pef)
    assert len(captured) == 1


def test_several_optimizers_and_groups_train_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with a gradient group for each parameter."""
    model, _ = make_net()
    groups = [{"params": [model.second.weight], "lr": 0.1}, {"params": [model.second.bias], "lr": 0.0}]
    optimizers = [samba.optim.SGD(model.first.parameters(), lr=0.0), samba.optim.AdamW(groups)]
    pef = compiled((model, optimizers), net_batch(), tmp_path, gradient_groups="parameter")
    assert len(read(Path(pef)).program.groups) == len(list(model.parameters()))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))  # of another machine, so the graphs themselves are compared
    trace_graph(model, net_batch(), optimizers, pef=pef)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    session.run(net_batch())
    session.to_cpu(model)
    changed = [name for name, parameter in model.named_parameters() if not torch.equal(parameter, before[name])]
    assert changed == ["second.weight"]


def _channels_last() -> Any:
    losses: Any = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 1), nn.Flatten(0))
    losses[0].weight.data = losses[0].weight.data.to(memory_format=torch.channels_last)
    return losses


def test_parameters_in_another_order_in_memory_keep_it_on_the_host(pef_of: PefOf) -> None:
    """And train to the bits of PyTorch."""
    images = torch.randn(BATCH, 3, 6, 6, generator=torch.Generator().manual_seed(1))
    make = partial(with_sgd, _channels_last, momentum=MOMENTUM)
    (model, optimizer), pef = make(), pef_of(make, [images])
    plainly, strides = Plainly(model), model[0].weight.stride()
    trace_graph(model, [images], optimizer, pef=pef)
    for _ in range(3):
        session.run([images], model.output_tensors)
        plainly.step([images])
    session.to_cpu(model)
    assert model[0].weight.stride() == strides
    assert same_weights(model, plainly.model)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()  # with the state that came from the device


def test_weights_move_between_host_and_device(net: Made) -> None:
    (model, optimizer), inputs = net, net_batch()
    plainly = Plainly(model)
    start = model.first.weight.detach().clone()
    for fetch in (lambda: session.to_cpu(model, [optimizer]), lambda: model.cpu(), lambda: model.write_host_params()):
        session.run(inputs)
        plainly.step(inputs)
        assert torch.equal(model.first.weight, start)
        on_device = model.first.weight.sn_data
        fetch()
        assert equal(model.first.weight, on_device)
        assert same_weights(model, plainly.model)
        start = on_device
    assert len(optimizer.state_dict()["state"]) == 4
    losses, _ = session.run(inputs, section_types=["FWD"])
    assert torch.equal(losses.torch(), samba.to_torch(model(*inputs)[0]))
    for send in (session.to_device, session.to_rdu):
        with torch.no_grad():
            model.first.bias.add_(1)
        send(model)
        (bias,) = session.get_tensors_by_name(["net__first__bias"])
        assert torch.equal(bias.torch(), model.first.bias)


def test_session_setup_and_reset(app: None) -> None:
    args = parsed("compile", "--pef-name=by_setup", "--output-folder=pefs")
    samba.session.setup(args)
    model, optimizer = with_sgd(LogReg)
    pef = samba.session.compile(model, batch_of(), optimizer, name="net")
    assert pef.endswith("pefs/by_setup/by_setup.pef")
    samba.session.setup(vars(args))
    samba.session.reset()
    with refused(OptionError, "no PEF is loaded"):
        samba.session.run(batch_of())


WITHOUT_EFFECT = {
    "session": ("enable_pinned_memory", "disable_graphamp", "use_static_functional"),
    "env": ("enable_conv_grad_accum_stoc", "enable_addbias_grad_accum_stoc", "disable_sgd_stoc"),
    "utils": ("fix_rdu_affinity", "create_mac_resource_report"),
}


def test_names_without_an_effect(app: None, capsys: pytest.CaptureFixture[str]) -> None:
    for owner, names in WITHOUT_EFFECT.items():
        for name in names:
            getattr(getattr(imported("samba"), owner), name)()
            assert f"{owner}.{name} has no effect" in capsys.readouterr().err
    assert samba.is_internal() is False
    with samba.patched_torch():
        assert torch.relu(torch.ones(1)) == 1
