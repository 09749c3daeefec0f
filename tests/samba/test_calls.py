"""Calls of the session as public apps have them, right and wrong, in one process: gradients that the app sets, dropout
rates, prediction with a training PEF, what is refused or has no effect, and devices and jobs that are not there."""

import io
import re
from argparse import Namespace
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from sambasim import samba
from sambasim.errors import DataError, LaunchError, MachineError, OptionError
from sambasim.ir.types import Symbol, SymbolKind, TensorType
from sambasim.samba import process
from sambasim.samba.ending import translated
from sambasim.samba.inputs import fitting
from sambasim.samba.session import session
from sambasim.samba.utils import trace_graph
from tests.samba.harness import BATCH, Layer, Load, PefOf, compiled, equal, named_batch, net_batch, refused, with_sgd


class Dropping(nn.Module):
    """Features [batch, 6], classes [batch] and perhaps one factor for each sample to the outputs and the loss."""

    output_tensors: Any

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
        return outputs, nn.functional.cross_entropy(outputs, torch.autograd.Variable(target))


make_dropping = partial(with_sgd, Dropping)


def _inputs(number: int = 0) -> list[Any]:
    x, target = named_batch(number, BATCH, x=6, target=3)
    return [x.requires_grad_(), target]


@pytest.fixture
def pef(pef_of: PefOf) -> str:
    return pef_of(make_dropping, [*_inputs(), None])


@pytest.fixture
def model(load: Load, pef: str, capsys: pytest.CaptureFixture[str]) -> Dropping:
    """Loaded."""
    loaded: Dropping = load(make_dropping, [*_inputs(), None])[0]
    capsys.readouterr()
    return loaded


def _eager(model: nn.Module, inputs: list[Any]) -> Any:
    """What PyTorch makes of plain tensors, in evaluation mode."""
    mode = model.training
    result = model.eval()(*map(samba.to_torch, inputs))
    model.train(mode)
    return result


def _forward(inputs: Any) -> tuple[Tensor, ...]:
    """The outputs without dropout, as plain tensors of their own."""
    outputs = session.run(inputs, hyperparam_dict={"p": 0.0}, section_types=["FWD"])
    return tuple(output.torch().clone() for output in outputs)


def _on_device(name: str) -> Tensor:
    return session.get_tensors_by_name([name])[0].torch()


def test_a_loss_that_is_not_finite_is_told_once(model: Dropping, capsys: pytest.CaptureFixture[str]) -> None:
    x, target = _inputs()
    session.run([x, target])
    assert capsys.readouterr().err == ""
    for _ in range(2):
        session.run([x / 0, target])
    notice, where, remedy = capsys.readouterr().err.splitlines()
    assert notice == "notice: AP08: dropping__loss is nan in forward 2"
    assert where.endswith(": session.run([x / 0, target])")
    assert remedy.startswith("  try:   a smaller learning rate, max_grad_norm= for the optimizer, or inputs")


def test_dropout_rates_are_set_at_run_time(model: Dropping) -> None:
    names = session.get_dropout_rate_argin_names()
    assert names == ("dropping__drop__dropout_p", "dropping__planes__dropout2d_p")
    inputs = _inputs()
    weight: Any = model.first.weight
    outputs, loss = _eager(model, inputs)
    (gradient,) = torch.autograd.grad(loss, [model.first.weight])

    def runs_as_evaluated(**rates: float) -> bool:
        outputs_now, _ = session.run(inputs, hyperparam_dict=rates, section_types=["FWD", "BCKWD"])
        same = torch.equal(outputs_now, outputs)
        if same:
            assert equal(weight.sn_grad, gradient), "the backward has the rates of its forward"
        session.run(section_types=["OPT"], hyperparam_dict={"lr": 0.0})
        return same

    assert runs_as_evaluated(p=0.0)
    assert runs_as_evaluated(), "a rate holds until another is given"
    assert not runs_as_evaluated(p=0.5)
    assert not runs_as_evaluated(**{names[0]: 0.0}), "one name is one dropout"
    assert runs_as_evaluated(**dict.fromkeys(names, 0.0))
    assert not runs_as_evaluated(**{names[0]: 0.9})
    assert runs_as_evaluated(p=0.0), "the rate for all takes the place of single ones"
    session.run(inputs, section_types=["FWD"])
    session.run(section_types=["bckwd", "opt"], hyperparam_dict={"p": 0.5, "lr": 0.0})
    assert equal(weight.sn_grad, gradient), "the backward has the rates of its forward"
    assert not runs_as_evaluated(), "a rate that a backward was given holds from the next forward on"
    with pytest.raises(OptionError, match=r"AP04: p in hyperparam_dict is 1\.5, and a dropout rate is at most 1"):
        session.run(inputs, hyperparam_dict={"p": 1.5})


def test_an_input_that_requires_a_gradient_has_the_bits_of_eager_pytorch(model: Dropping, pef: str) -> None:
    inputs, traced = _inputs(1), _inputs()
    trace_graph(model, traced, samba.optim.SGD(model.parameters(), lr=0.1), pef=pef)
    session.run(inputs, hyperparam_dict={"p": 0.0}, section_types=["FWD", "BCKWD"])
    plain = samba.to_torch(inputs[0]).detach().requires_grad_()
    _eager(model, [plain, inputs[1]])[1].backward()
    assert plain.grad is not None
    assert equal(inputs[0].sn_grad, plain.grad)
    assert inputs[1].sn_grad is None
    assert equal(traced[0].sn_grad, plain.grad), "apps read it on the tensor that they traced with, too"
    parameters: Any = model.parameters()
    assert all(equal(parameter.sn_grad, parameter.grad) for parameter in parameters)


def test_a_training_pef_predicts_as_one_for_inference(pef: str, tmp_path: Path) -> None:
    results = []
    for path in (pef, compiled((make_dropping()[0].eval(), None), _inputs(), tmp_path, inference=True)):
        model, _ = make_dropping()
        trace_graph(model, _inputs(), None, pef=path)
        results.append(session.run(_inputs(5)))
        assert all(map(torch.equal, results[-1], _eager(model, _inputs(5))))
        with pytest.raises(OptionError, match="has no BCKWD"):
            session.run(_inputs(), section_types=["FWD", "BCKWD"])
    assert [output.sn_name for output in results[0]] == [output.sn_name for output in results[1]]
    process.current().arguments = Namespace(command="run", inference=False)
    remedy = "or, to predict with this PEF, type --inference$"
    with refused(OptionError, r"^net\.pef trains, and trace_graph needs its optimizers", remedy):
        trace_graph(model, _inputs(), None, pef=pef)


def test_an_input_that_is_none_is_left_out(model: Dropping) -> None:
    x, target = _inputs()
    first, _ = _forward([x, target])
    for given in ([x, target, None], {"x": x, "target": target, "factor": None}):
        assert torch.equal(first, _forward(given)[0])


def test_tensors_are_set_and_read_by_name(model: Dropping) -> None:
    bias = torch.tensor([1.0, 2.0, 3.0])
    session.ctx.set_tensors({"dropping__second__bias": bias, "dropping__first__bias": torch.zeros(8).numpy()})
    assert torch.equal(_on_device("dropping__second__bias"), bias)
    assert not _on_device("dropping__first__bias").any()
    inputs = _inputs()
    outputs, loss = session.run(inputs, section_types=["FWD"], hyperparam_dict={"p": 0.0})
    assert torch.equal(session.get_tensors(model.output_tensors[0])[0], outputs)
    assert [one.sn_name for one in session.get_tensors(model.output_tensors)] == [outputs.sn_name, loss.sn_name]
    session.ctx.set_tensors({f"{loss.sn_name}__grad": torch.tensor(0.0)})
    session.run(section_types=["BCKWD"])
    tensors: Any = session.tensor_dict
    assert set(tensors) == {"inputs", "grads", "x", "target", outputs.sn_name, loss.sn_name}
    assert torch.equal(tensors["inputs"]["x"], inputs[0])
    names = {f"dropping__{layer}__{kind}__grad" for layer in ("first", "second") for kind in ("weight", "bias")}
    assert set(tensors["grads"]) == names
    assert not any(gradient.any() for gradient in tensors["grads"].values()), "the backward started from 0"
    shapes = r"dropping__second__bias has the shape \(3,\), and the data the shape \(1, 3\)"
    with pytest.raises(DataError, match=shapes):
        session.ctx.set_tensors({"dropping__second__bias": bias.unsqueeze(0)})
    assert torch.equal(_on_device("dropping__second__bias"), bias)
    with pytest.raises(OptionError, match="the PEF has no tensor dropping__third"):
        session.ctx.set_tensors({"dropping__third": bias})


def test_what_changes_nothing_is_taken_with_one_notice(
    model: Dropping, pef: str, capsys: pytest.CaptureFixture[str]
) -> None:
    expected, _ = _forward(_inputs())
    wrapped: Any = nn.DataParallel(model)
    trace_graph(wrapped, _inputs(), samba.optim.SGD(model.parameters(), lr=0.1), pef=pef)
    assert wrapped.output_tensors is model.output_tensors
    options: dict[str, Any] = {"hyperparam_dict": {"p": 0.0}, "num_copies": 2, "section_types": ["FWD", "GATHER"]}
    for _ in range(2):
        assert torch.equal(session.run(_inputs(), **options)[0], expected)
    session.to_cpu(wrapped)
    notices = capsys.readouterr().err.splitlines()
    why = "the model inside it is used; --data-parallel makes replicas"
    assert notices[0] == f"notice: nn.DataParallel has no effect: {why}"
    assert notices[2] == "notice: session.run(num_copies=…) has no effect: sambasim does not know this keyword"
    assert [line.startswith(f"  where: {__file__}:") for line in notices] == [False, True, False, True]


def test_a_model_in_evaluation_mode_is_noticed_where_it_matters(
    model: Dropping, pef: str, net: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    net[0].eval()
    session.run(net_batch())
    trace_graph(model, _inputs(), samba.optim.SGD(model.parameters(), lr=0.1), pef=pef)
    session.run(_inputs())
    assert "model.eval()" not in capsys.readouterr().err
    model.eval()
    for _ in range(2):
        session.run(_inputs())
    notice, where = capsys.readouterr().err.splitlines()
    why = "a training PEF runs in training mode; --inference predicts with it"
    assert notice == f"notice: model.eval() has no effect: {why}"
    assert where.endswith(": session.run(_inputs())")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_inputs_have_the_type_of_the_parameters(model: Dropping, pef: str, dtype: torch.dtype) -> None:
    x, target = _inputs()
    rounded = samba.from_torch_tensor(samba.to_torch(x).detach().to(torch.bfloat16).float(), name="x")
    expected, _ = _forward([rounded, target])
    given = samba.from_torch_tensor(samba.to_torch(rounded).to(dtype), name="x")
    if dtype is torch.bfloat16:  # as the batch of a compile, too
        given.requires_grad_()
        trace_graph(model, [given, target], samba.optim.SGD(model.parameters(), lr=0.1), pef=pef)
    outputs, _ = _forward([given, target])
    assert outputs.dtype is torch.float32
    assert torch.equal(outputs, expected)


@pytest.mark.parametrize(
    ("wanted", "given", "fits"),
    [((1, 4, 8), (4, 1, 8), False), ((2, 4, 8), (2, 8, 4), False), ((4,), (4, 1), True), ((4, 1), (4,), True)],
)
def test_an_input_fits_if_it_differs_by_axes_of_one_element_behind_the_batch(
    wanted: tuple[int, ...], given: tuple[int, ...], fits: bool
) -> None:
    symbols = {"x": Symbol("x", SymbolKind.INPUT, TensorType("float32", wanted))}
    refusal = pytest.raises(
        DataError, match=re.escape(f"x has the shape {given}, and the PEF was compiled for {wanted}")
    )
    with nullcontext() if fits else refusal:
        assert fitting("x", symbols, torch.ones(given), wanted[0], ()).shape == wanted


ROWS = [torch.randn(BATCH, 3, generator=torch.Generator().manual_seed(1))]

make_normed = partial(
    with_sgd, lambda: nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2), nn.Linear(2, 1), nn.Flatten(0))
)
"""Of features [batch, 3] the loss of each sample, the one output."""


@pytest.fixture
def normed(load: Load) -> Any:
    return load(make_normed, ROWS)[0]


def test_what_is_given_to_torch_compile_is_captured_as_it_is_written(tmp_path: Path) -> None:
    x = named_batch(0, BATCH, x=6, target=3)[:1]
    model, optimizer = with_sgd(lambda: Layer(torch.compile(lambda y: (y / 2).square().mean(1))))
    model.linear.compile()
    trace_graph(model, x, optimizer, pef=compiled((model, optimizer), x, tmp_path))
    y = nn.functional.linear(x[0].torch(), model.linear.weight, model.linear.bias)
    assert equal(session.run(x)[0], (y / 2).square().mean(1))


def test_one_output_is_a_tuple_of_one_too(normed: Any) -> None:
    outputs = normed.output_tensors
    for wanted in (None, outputs, list(outputs), outputs[0]):
        results = session.run(ROWS, wanted, section_types=["FWD"])
        assert isinstance(results, tuple)
        assert [tensor.sn_name for tensor in results] == ["sequential__loss"]


def test_a_forward_alone_changes_the_statistics_of_batch_norm(normed: Any) -> None:
    session.run(ROWS, section_types=["FWD"])
    assert session.buffer_dict["sequential__1__num_batches_tracked"] == 1
    assert session.buffer_dict["sequential__1__running_mean"].any()


NUMBER = "give lr as one number, 0 or more"
MISSPELT = "AP04: hyperparam_dict has momentun, which no optimizer of this PEF takes"
NO_CLIPPING = "max_grad_norm cannot be turned on: the PEF was compiled without clipping"


@pytest.mark.parametrize(
    ("name", "value", "words", "remedy"),
    [
        ("lr", [0.1], "AP04: lr in hyperparam_dict is [0.1]", 'hyperparam_dict={"lr": …[0]}: one number, not a list'),
        ("lr", "0.1", "AP04: lr in hyperparam_dict is '0.1'", NUMBER),
        ("lr", float("nan"), "AP04: lr in hyperparam_dict is nan", NUMBER),
        ("momentun", 0.9, MISSPELT, "did you mean momentum?"),
        ("max_grad_norm", 0.9, NO_CLIPPING, "give the optimizer max_grad_norm=1.0, and compile again"),
        ("lr", np.ones(2), "AP04: lr in hyperparam_dict is a ndarray", NUMBER),
    ],
)  # fmt: skip
def test_a_wrong_hyperparameter_is_refused_with_its_line(
    name: str, value: object, words: str, remedy: str, normed: Any
) -> None:
    what, remedy = (f"^{re.escape(text)}$" for text in (words, remedy))
    with refused(OptionError, what, remedy, r"session\.run\(ROWS, hyperparam_dict="):
        session.run(ROWS, hyperparam_dict={name: value})


def test_a_tensor_of_one_number_is_one(normed: Any) -> None:
    rate, machine = torch.tensor(0.25), session.machine
    assert machine is not None
    for number in (0.25, 0.5):  # a scheduler changes it in place
        rate.fill_(number)
        session.run(ROWS, hyperparam_dict={"lr": rate})
        assert machine.replica.hyperparameters[0]["lr"] == number


def test_autocast_around_a_run_changes_no_bit_and_is_noticed(load: Load, capsys: pytest.CaptureFixture[str]) -> None:
    losses = []
    for autocast in (False, True):
        load(make_normed, ROWS)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            losses.append([session.run(ROWS)[0] for _ in range(2)])
    assert all(map(torch.equal, *losses))
    notice, _ = capsys.readouterr().err.splitlines()
    assert notice.startswith("notice: torch.autocast has no effect")


def test_a_batch_on_a_device_of_torch_is_refused(normed: Any, pef_of: PefOf) -> None:
    elsewhere, optimizer = [torch.ones(BATCH, 3, device="meta")], samba.optim.SGD(normed.parameters(), lr=0.1)
    for call in (
        lambda: session.run(elsewhere),
        lambda: trace_graph(normed, elsewhere, optimizer, pef=pef_of(make_normed, ROWS)),
        lambda: session.compile(normed, elsewhere, optimizer),
    ):
        with refused(DataError, "is on the device meta, and must be on the CPU", r"^input\.cpu\(\)"):
            call()


CUDA: Any = torch.cuda
torch.save(torch.ones(1), buffer := io.BytesIO())
SAVED = buffer.getvalue()


def _raise(error: Exception) -> None:
    raise error


@pytest.mark.skipif(torch.accelerator.is_available() or dist.is_initialized(), reason="what is refused is there")
@pytest.mark.parametrize(
    ("call", "kind", "what"),
    [
        (lambda: torch.ones(1).cuda(), MachineError, "device cuda"),
        (lambda: torch.cuda.set_device(0), MachineError, "device cuda"),
        (lambda: CUDA.Stream(), MachineError, "device cuda"),
        (lambda: torch.load(io.BytesIO(SAVED), map_location="cuda"), MachineError, "loads tensors to a device"),
        (lambda: torch.load(io.BytesIO(SAVED), map_location="rdu"), MachineError, "loads tensors to a device"),
        (lambda: torch.ones(1).to(0), MachineError, "that torch does not have"),
        (lambda: torch.ones(1).pin_memory(), MachineError, "that torch does not have"),
        (lambda: torch.ones(1, pin_memory=True), MachineError, "for pinned memory"),
        (lambda: torch.ones(1).to("rdu"), MachineError, "that torch does not have"),
        (lambda: _raise(RuntimeError("Found no NVIDIA driver on your system. …")), MachineError, "device cuda"),
        (lambda: _raise(RuntimeError("No CUDA GPUs are available")), MachineError, "device cuda"),
        (dist.get_rank, LaunchError, "calls torch.distributed, which is not initialised"),
        (lambda: dist.init_process_group("mpi"), LaunchError, "calls init_process_group"),
        (lambda: dist.init_process_group("gloo"), LaunchError, "calls init_process_group"),
        (lambda: _raise(ValueError("initialize the default process group twice!")), LaunchError, "calls init_process"),
        (lambda: _raise(RuntimeError("another")), RuntimeError, "another"),
    ],
)  # fmt: skip
def test_what_is_not_on_this_machine_is_told_as_such(
    monkeypatch: pytest.MonkeyPatch, call: Callable[[], object], kind: type[Exception], what: str
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(Exception) as caught:  # noqa: PT011  # each is an error of torch, of a type of its own
        call()
    told = translated(caught.value)
    assert type(told) is kind
    assert what in str(told)
    assert told is caught.value or str(getattr(told, "where", None)).startswith(f"{__file__}:")
