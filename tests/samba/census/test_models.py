"""Models and optimizers: how apps convert them, and what a model returns."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.samba.census.support import CLASSES, FEATURES, LogReg, OnlyOut, Plainly, equal, refused, same_weights, seeded


def _compiled(samba: Any, model: Any, batch: list[Any], optimizer: Any, **options: Any) -> None:
    pef = samba.session.compile(model, batch, optimizer, name="net", **options)
    samba.utils.trace_graph(model, batch, optimizer, pef=pef)


def _step(samba: Any, model: Any, batch: list[Any]) -> Any:
    outputs = samba.session.run(input_tensors=batch, output_tensors=model.output_tensors)
    samba.session.to_cpu(model)
    return outputs


@pytest.mark.parametrize("function", ["from_torch_model_", "from_torch_"])
def test_a_model_is_converted_and_the_result_is_not_used(function: str, samba: Any, batch: list[Any]) -> None:
    model = seeded(LogReg)
    plainly = Plainly(model)
    getattr(samba, function)(model)
    _compiled(samba, model, batch, samba.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    assert equal(_step(samba, model, batch)[1], plainly.step(batch)[1])
    assert same_weights(model, plainly.model)


@pytest.mark.parametrize("order", ["from_torch_model_(model.bfloat16())", "from_torch_(model); model.bfloat16()"])
def test_a_model_in_bfloat16(order: str, samba: Any, batch: list[Any]) -> None:
    model = seeded(LogReg)
    if order.startswith("from_torch_model_"):
        samba.from_torch_model_(model.bfloat16())
    else:
        samba.from_torch_(model)
        model.bfloat16()
    gold = copy.deepcopy(model)(samba.to_torch(batch[0]).bfloat16(), samba.to_torch(batch[1]))
    _compiled(samba, model, batch, samba.optim.SGD(model.parameters(), lr=0.1))
    before = copy.deepcopy(model)
    loss, outputs = _step(samba, model, batch)
    assert outputs.dtype is torch.bfloat16
    assert equal(outputs, gold[1])
    samba.utils.assert_close(loss.float(), gold[0], "loss", threshold=3e-3)
    assert not same_weights(model, before)


def test_a_subclass_of_samba_nn_without_a_conversion(samba: Any, batch: list[Any]) -> None:
    sn = samba.nn

    class Old(sn.Module):  # type: ignore[misc, name-defined]  # it is Any here
        def __init__(self) -> None:
            super().__init__()
            self.layers = sn.Sequential(sn.Linear(FEATURES, CLASSES), sn.ReLU(inplace=True))
            self.criterion = sn.CrossEntropyLoss()

        def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            out = self.layers(x)
            return self.criterion(out, y), out

    model = seeded(Old)
    plainly = Plainly(model)
    _compiled(samba, model, batch, samba.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    _step(samba, model, batch)
    plainly.step(batch)
    assert same_weights(model, plainly.model)


OPTIMIZERS: dict[str, tuple[str, dict[str, Any]]] = {
    "SGD(params, lr=, momentum=, weight_decay=)": ("SGD", {"lr": 0.1, "momentum": 0.9, "weight_decay": 1e-4}),
    "AdamW(..., eps=)": ("AdamW", {"lr": 0.01, "betas": (0.9, 0.997), "weight_decay": 0.1, "eps": 1e-6}),
    "Adam(params, lr=, eps=)": ("Adam", {"lr": 0.01, "eps": 1e-6}),
}


@pytest.mark.parametrize("row", OPTIMIZERS)
def test_an_optimizer_steps_as_that_of_torch(row: str, samba: Any, batch: list[Any]) -> None:
    name, options = OPTIMIZERS[row]
    model = seeded(LogReg)
    plainly = Plainly(model, getattr(torch.optim, name), **options)
    samba.from_torch_model_(model)
    _compiled(samba, model, batch, getattr(samba.optim, name)(model.parameters(), **options))
    for _ in range(2):
        _step(samba, model, batch)
        plainly.step(batch)
    assert same_weights(model, plainly.model)


def test_methods_of_optimizers_around_a_run(samba: Any, batch: list[Any], trace: Callable[..., Any]) -> None:
    model, optimizer = trace()
    plainly = Plainly(model)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[2], gamma=0.1)
    optimizer.zero_grad()
    samba.session.run(batch, model.output_tensors)
    optimizer.step()
    optimizer.zero_grad()
    samba.session.to_cpu(model, optimizer)
    plainly.step(batch)
    assert same_weights(model, plainly.model)
    assert scheduler.get_last_lr() == [0.1]
    state = optimizer.state_dict()
    assert equal(state["state"][0]["momentum_buffer"], plainly.optimizer.state_dict()["state"][0]["momentum_buffer"])
    again = samba.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    again.load_state_dict(state)
    assert again.param_groups[0]["lr"] == 0.1


class Three(LogReg):
    """(loss, out, third)."""

    def forward(self, inputs: Tensor, targets: Tensor) -> Any:
        loss, out = super().forward(inputs, targets)
        return loss, out, out.softmax(1)


class OutLoss(LogReg):
    """(out, loss)."""

    def forward(self, inputs: Tensor, targets: Tensor) -> Any:
        return super().forward(inputs, targets)[::-1]


@pytest.mark.parametrize("model", [LogReg, Three, OutLoss], ids=["(loss, out)", "(loss, out, third)", "(out, loss)"])
def test_what_a_model_returns(model: type[Any], samba: Any, batch: list[Any]) -> None:
    made = seeded(model)
    plainly = Plainly(made)
    samba.from_torch_model_(made)
    _compiled(samba, made, batch, samba.optim.SGD(made.parameters(), lr=0.1, momentum=0.9))
    outputs = _step(samba, made, batch)
    if model is OutLoss:
        plainly.model.forward = lambda *inputs: model.forward(plainly.model, *inputs)[::-1]
    expected = plainly.step(batch)
    expected = expected[::-1] if model is OutLoss else expected
    assert [equal(*pair) for pair in zip(outputs, expected, strict=True)] == [True] * len(expected)
    assert same_weights(made, plainly.model)
    if model is Three:
        with pytest.raises(ValueError, match="too many values to unpack"):
            _loss, _out = outputs  # unpacked to 2, a mistake of the app


class Tuple1(OnlyOut):
    """(out,)."""

    def forward(self, inputs: Tensor) -> Any:
        return (super().forward(inputs),)


@pytest.mark.parametrize("model", [OnlyOut, Tuple1], ids=["out", "(out,)"])
def test_a_model_that_returns_out_alone(model: type[Any], samba: Any, batch: list[Any]) -> None:
    made = seeded(model)
    plainly = Plainly(made)
    samba.from_torch_model_(made)
    _compiled(samba, made, batch[:1], samba.optim.SGD(made.parameters(), lr=0.1, momentum=0.9))
    (out,) = samba.session.run(batch[:1], made.output_tensors, section_types=["fwd"])
    gradient = torch.ones(out.shape) / out.numel()
    samba.session.run(batch[:1], made.output_tensors, section_types=["bckwd", "opt"], grad_of_outputs=[gradient])
    samba.session.to_cpu(made)
    assert equal(out, plainly.step(batch[:1], gradient)[0])
    assert same_weights(made, plainly.model)


def test_a_criterion_on_the_wrong_shape_is_refused(samba: Any, batch: list[Any]) -> None:
    model = seeded(LogReg)
    images = samba.randn(4, FEATURES + 1, name="image", batch_dim=0)
    with refused("mat1 and mat2", "self.lin_layer(inputs)"):
        samba.session.compile(model, [images, batch[1]], samba.optim.SGD(model.parameters(), lr=0.1), name="net")
