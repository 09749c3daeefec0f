"""Losses of all kinds: each trains as an eager loop, or is refused at compile with what to type."""

import re
from collections import namedtuple
from collections.abc import Callable
from dataclasses import make_dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrize

import sambasim as ss
from tests.api.conftest import IN_ORDER, batches, compiled, eager, sgd
from tests.support.compiled import Made

pytestmark = pytest.mark.usefixtures("one_thread")

X = torch.randn(64, 3, generator=torch.Generator().manual_seed(1))
NUMBERS = X.sum(1, keepdim=True).tanh()
CLASSES = (X.sum(1).abs() * 2).long().clamp(max=4)
BATCH, STEPS = 8, 6


def net(width: int = 1) -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, width))


def pef_of(folder: Path, model: nn.Module, y: Tensor, loss: Any, **options: Any) -> ss.Pef:
    return compiled(folder, model, (X[:BATCH], y[:BATCH]), loss=loss, optimizer=sgd(model), **options)


def losses(pef: ss.Pef, y: Tensor) -> list[float]:
    assert str(pef.checked) == "2 steps equal to eager PyTorch, bit for bit (1 thread, torch 2.13.0)"
    return ss.run(pef, (X, y), quiet=True, steps=STEPS, **IN_ORDER).losses


def expected(model: nn.Module, loss: Callable[[Any, Tensor], Tensor], y: Tensor) -> list[float]:
    return eager(model, sgd(model), batches(X, y, STEPS, BATCH), loss)


def _hooked(loss: nn.Module) -> nn.Module:
    loss.register_forward_hook(lambda module, given, value: value * 3)
    return loss


def _patched(loss: nn.Module) -> nn.Module:
    loss.forward = lambda outputs, target: (outputs - target).abs().mean() * 2
    return loss


class Huge(nn.MSELoss):
    """A forward of its own, with the class of torch above it."""

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        return super().forward(input, target) * 100


def _parametrized() -> nn.Module:
    loss = Made(lambda own, x, y: ((x - y).square() * own.weight).mean(), weight=torch.tensor([2.5]))
    parametrize.register_parametrization(loss, "weight", nn.Tanh())
    return loss


def _perceptual() -> nn.Module:
    """By the activations of a network that nothing trains."""
    torch.manual_seed(5)
    frozen = nn.Sequential(nn.Linear(1, 4), nn.Tanh()).requires_grad_(False)
    return Made(lambda own, x, y: F.mse_loss(own.net(x), own.net(y)), net=frozen)


@pytest.mark.parametrize(
    ("loss", "y", "name"),
    [
        (_hooked(nn.MSELoss()), NUMBERS, None),
        (_patched(nn.MSELoss()), NUMBERS, None),
        (Huge(), NUMBERS, None),
        (_parametrized(), NUMBERS, None),
        (_perceptual(), NUMBERS, None),
        (nn.HuberLoss(delta=0.2), NUMBERS, "huber"),
        (nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 1.0, 0.5, 3.0])), CLASSES, "cross_entropy"),
        (nn.CrossEntropyLoss(label_smoothing=0.1, ignore_index=2), CLASSES, "cross_entropy"),
        (F.cross_entropy, CLASSES, "cross_entropy"),
        (partial(F.cross_entropy, label_smoothing=0.2), CLASSES, None),
        (lambda outputs, y: (outputs.softmax(1)[:, 1] - y).square().mean(), CLASSES, None),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_loss_object_is_taken_as_it_is(loss: Any, y: Tensor, name: str | None, folder: Path) -> None:
    width = 5 if y is CLASSES else 1
    pef = pef_of(folder, net(width), y, loss)
    stored: Any = pef.document.training_defaults["loss"]
    assert (stored and stored["name"]) == name
    assert losses(pef, y) == pytest.approx(expected(net(width), loss, y), rel=1e-6 if y is CLASSES else 0, abs=0)


def _centered(loss: Any, outputs: Tensor, target: Tensor) -> Any:
    loss.mean.mul_(0.9).add_(0.1 * target.mean())
    return (outputs - target + loss.mean).square().mean()


def _assigned(loss: Any, outputs: Tensor, target: Tensor) -> Any:
    loss.mean = 0.9 * loss.mean + 0.1 * target.mean()
    return (outputs - target + loss.mean).square().mean()


class WithLoss(nn.Module):
    """What the remedy says: the loss is a submodule of the model."""

    def __init__(self, net: nn.Module, loss: nn.Module) -> None:
        super().__init__()
        self.net, self.loss = net, loss

    def forward(self, x: Tensor, target: Tensor) -> Any:
        return self.loss(self.net(x), target)


@pytest.mark.parametrize(
    ("make", "what", "trains"),
    [
        (lambda: Made(_centered, mean=torch.zeros(())), "the loss changes mean, a buffer of its own", True),
        # The model is refused for the same state.
        (lambda: Made(_assigned, mean=torch.zeros(())), "the loss changes mean, a buffer of its own", False),
        (lambda: Made(lambda own, x, y: (x * own.scale - y).square().mean(), scale=nn.Parameter(torch.ones(()))),
         "the loss has parameters to train, scale", True),
    ],
)  # fmt: skip
def test_a_loss_with_a_state_is_refused_and_trains_as_a_submodule(
    make: Callable[[], nn.Module], what: str, trains: bool, folder: Path
) -> None:
    with pytest.raises(ss.SambasimError, match=what) as error:
        pef_of(folder, net(), NUMBERS, make())
    remedy = "make the loss a submodule of the model, whose forward(x, target) returns it first"
    assert remedy in str(error.value.remedy)
    if trains:
        pef = pef_of(folder, WithLoss(net(), make()), NUMBERS, None)
        other = nn.ModuleList([net(), make()])
        assert losses(pef, NUMBERS) == eager(other[0], sgd(other), batches(X, NUMBERS, STEPS, BATCH), other[1])


Parts = make_dataclass("Parts", ["kl", "loss"])
NamedParts = namedtuple("NamedParts", "kl loss")


class Returning(nn.Module):
    def __init__(self, returned: Callable[[Tensor, Tensor, Tensor], object]) -> None:
        super().__init__()
        self.net, self.returned = net(), returned

    def forward(self, x: Tensor, target: Tensor) -> Any:
        outputs = self.net(x)
        return self.returned(outputs.square().mean(), (outputs - target).square().mean(), outputs)


@pytest.mark.parametrize(
    "returned",
    [
        lambda kl, loss, outputs: Parts(kl, loss),
        lambda kl, loss, outputs: NamedParts(kl, loss),
        lambda kl, loss, outputs: {"kl": kl, "loss": loss},
        lambda kl, loss, outputs: (loss, kl.detach(), outputs),
        lambda kl, loss, outputs: [loss, outputs],
        lambda kl, loss, outputs: (loss, {"outputs": outputs}),
    ],
)
def test_the_field_called_loss_is_trained(returned: Callable[..., object], folder: Path) -> None:
    pef = pef_of(folder, Returning(returned), NUMBERS, None)
    assert losses(pef, NUMBERS) == expected(net(), F.mse_loss, NUMBERS)


@pytest.mark.parametrize(
    ("returned", "named"),
    [
        (lambda kl, loss, outputs: {"kl": kl, "rest": loss}, "kl, rest"),
        (lambda kl, loss, outputs: {"outputs": outputs, "parts": {"a": kl, "b": loss}}, "parts.a, parts.b"),
        (lambda kl, loss, outputs: [kl, outputs, loss], "output 0, output 2"),
        (lambda kl, loss, outputs: (kl, (outputs, loss)), "output 0, output 1.1"),
    ],
)
def test_a_second_loss_without_a_name_is_refused(returned: Callable[..., object], named: str, folder: Path) -> None:
    with pytest.raises(ss.SambasimError, match=f"the model returns several losses: {named}") as error:
        pef_of(folder, Returning(returned), NUMBERS, None)
    assert '"loss"' in str(error.value.remedy)
    assert isinstance(returned(X, X, X), dict) or "detached values of a tuple are outputs, and not logged" in str(
        error.value
    )


class TakesLabels(nn.Linear):
    def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
        return super().forward(x)


def l1(outputs: Tensor, both: tuple[Tensor, Tensor]) -> Tensor:
    return (outputs - both[0]).mul(both[1]).abs().mean()


def weighted(outputs: Tensor, y: Tensor, step: Tensor, skip: Tensor | None = None, *, w: Tensor) -> Tensor:
    return l1(outputs, (y, w)) / (1 + step)


@pytest.mark.parametrize(
    ("sample", "loss", "notices"),
    [
        (lambda x, y: {"w": x, "y": y, "x": x}, weighted, []),
        (lambda x, y: {"x": x, "labels": y}, lambda outputs, labels: F.mse_loss(outputs, labels),
         ["of a sample, the loss takes labels, and not forward()"]),
        (lambda x, y: {"x": x, "target": (y, x)}, l1, []),
        (lambda x, y: {"x": x, "y": y, "w": x}, lambda outputs, rest: l1(outputs, (rest["y"], rest["w"])), []),
    ],
)  # fmt: skip
def test_a_loss_function_takes_values_of_a_dict(
    sample: Callable[[Tensor, Tensor], Any], loss: Callable[..., Tensor], notices: list[str], folder: Path
) -> None:
    pef = compiled(folder, TakesLabels(3, 3), sample(X[:BATCH], X[:BATCH].tanh()), loss=loss, optimizer="sgd", check=1)
    assert str(pef.checked).startswith("1 step equal to eager PyTorch, bit for bit")
    assert [notice for notice in pef.notices if notice.startswith("of a sample")] == notices


def test_outputs_of_one_element_are_no_second_loss(folder: Path) -> None:
    compiled(folder, Returning(lambda kl, loss, outputs: (loss, outputs)), (X[:1], NUMBERS[:1]), optimizer="sgd")


_UP_TO_FIVE = CLASSES.clamp(1, 4) + 1
_WITHOUT = CLASSES.clone()
_WITHOUT[0] = -1


@pytest.mark.parametrize(
    ("y", "loss", "width", "what", "remedy", "corrected"),
    [
        (CLASSES.int(), "cross_entropy", 5, "target is int32, and cross_entropy needs int64", "y.long()", Tensor.long),
        (CLASSES.float(), "cross_entropy", 5, "int64, or probabilities of shape [8, 5]", "y.long()", Tensor.long),
        (_UP_TO_FIVE, "cross_entropy", 5, "target goes from 2 to 5, and the model has 5 classes, 0 to 4",
         "y - 2, or a model with 6 outputs", lambda y: y - 2),
        (CLASSES * 2, lambda outputs, y: F.cross_entropy(outputs, y), 5, "and the model has 5 classes, 0 to 4",
         "labels from 0 to 4, or a model with", lambda y: y // 2),
        (_WITHOUT, nn.CrossEntropyLoss(), 5, "target goes from -1 to", "ignore_index=-1", lambda y: y.clamp(min=0)),
        (CLASSES[:, None], "cross_entropy", 5, "shape [8, 1]; the outputs have [8, 5]", "y.reshape(-1)", Tensor.ravel),
        (CLASSES[:, None], "bce_with_logits", 1, "target is int64, and binary_cross_entropy_with_logits needs float32",
         "y.float()", Tensor.float),
        (NUMBERS[:, 0], "bce_with_logits", 1, "target has shape [8], and the outputs [8, 1]", "y.reshape(-1, 1)",
         lambda y: y.reshape(-1, 1)),
        (CLASSES[:, None], "huber", 1, "target is int64, and the loss needs float32", "y.float()", Tensor.float),
        (torch.ones(64, 3, 2), "l1", 1, "target has shape [8, 3, 2], and the outputs [8, 1]", "give both one shape",
         lambda y: y[:, :1, 0]),
    ],
)  # fmt: skip
def test_a_target_that_does_not_fit_fails_at_compile(
    y: Tensor, loss: Any, width: int, what: str, remedy: str, corrected: Callable[[Tensor], Tensor], folder: Path
) -> None:
    with pytest.raises(ss.SambasimError, match=re.escape(what)) as error:
        pef_of(folder, net(width), y, loss)
    assert remedy in str(error.value.remedy)
    assert "enlarge the model" not in str(error.value)
    assert "/sambasim/api/" not in str(error.value.where)
    pef_of(folder, net(width), corrected(y), loss, check=2 if remedy == "y.float()" else 0)


def test_classes_are_the_second_axis(folder: Path) -> None:
    texts = torch.randint(0, 5, (BATCH, 4))
    model = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 5))
    for loss in ("cross_entropy", nn.CrossEntropyLoss()):
        with pytest.raises(ss.SambasimError, match=r"classes second, so cross_entropy needs \[8, 5\]") as error:
            compiled(folder, model, (texts, texts), loss=loss)
        assert "outputs.movedim(-1, 1)" in str(error.value.remedy)
    compiled(folder, model, (texts, texts), loss=lambda outputs, y: F.cross_entropy(outputs.movedim(-1, 1), y))


def test_labels_that_a_model_itself_compares_are_explained(folder: Path) -> None:
    class Own(WithLoss):
        def forward(self, x: Tensor, labels: Tensor) -> Any:
            return F.cross_entropy(self.net(x), labels)

    with pytest.raises(ss.SambasimError, match="target goes from 2 to 5, and the model has 5 classes") as error:
        pef_of(folder, Own(net(5), nn.Identity()), _UP_TO_FIVE, None)
    assert "return F.cross_entropy(self.net(x), labels)" in str(error.value.where)


def test_a_notice_says_what_becomes_float32(folder: Path) -> None:
    example = [tensor[:BATCH].double().numpy() for tensor in (X, NUMBERS)]
    notices = compiled(folder, net(), tuple(example), loss="mse", optimizer="sgd").notices
    assert "float64 samples become float32, as the model is: input, target" in notices
    notices = compiled(folder, net().double(), tuple(example), loss="mse", optimizer="sgd").notices
    assert not any("float64" in notice for notice in notices)


def test_a_loss_that_does_not_take_one_sample_still_trains(folder: Path) -> None:
    def squeezed(outputs: Tensor, y: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(outputs.squeeze(), y)  # of one sample: a number, and y has an axis

    pef = pef_of(folder, net(), (CLASSES % 2).float(), squeezed)
    assert losses(pef, (CLASSES % 2).float()) == expected(net(), squeezed, (CLASSES % 2).float())
    assert any("cannot be captured at batch 1" in notice for notice in pef.notices)
