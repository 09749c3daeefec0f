"""Tensors that no module has: constants of the program, or refused with the line that reads them."""

from collections.abc import Callable
from concurrent.futures import Future
from functools import lru_cache, partial
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Normal

from sambasim.compiler.capture.tensors import stored_in
from sambasim.compiler.capture.trace import capture
from sambasim.errors import CaptureError
from tests.compiler.test_build import Net, built, constants
from tests.support.compiled import Made, net_options

SCALE = torch.tensor([1.0, 2.0, 3.0])
LAYERS = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
WEIGHT = torch.ones(3, 3, requires_grad=True)


class Scattered(Net):
    """Reads a global tensor, and tensors in a list and in a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = [torch.tensor([2.0, 2.0, 3.0]), torch.tensor([3.0, 2.0, 3.0])]
        self.named = {"scale": [torch.tensor([4.0, 2.0, 3.0])]}
        self.scales_1 = torch.tensor([5.0, 2.0, 3.0])

    def loss_of(self, y: Tensor) -> Tensor:
        return super().loss_of(y * SCALE * self.scales[1] * self.named["scale"][0] * self.scales_1)


class Asked(Scattered):
    """A distribution asks for values, and so the model is captured as Python runs it."""

    def loss_of(self, y: Tensor) -> Tensor:
        likelihood: Tensor = Normal(y.mean(), SCALE).log_prob(self.scales[0])  # type: ignore[no-untyped-call]  # torch's
        return super().loss_of(y) - likelihood.mean()


def test_tensors_that_no_module_has_are_constants_also_where_values_are_asked_for() -> None:
    found = constants(built(Scattered()))
    assert found["scattered__SCALE"] == [1.0, 2.0, 3.0]
    assert found["scattered__named_scale_0"] == [4.0, 2.0, 3.0]
    # Of scales[1] and scales_1.
    assert sorted(found[f"scattered__scales_1{end}"] for end in ("", "_1")) == [[3.0, 2.0, 3.0], [5.0, 2.0, 3.0]]
    asked = constants(built(Asked())).values()
    assert sorted(asked) == [[number, 2.0, 3.0] for number in (1.0, 2.0, 3.0, 4.0, 5.0)]


class Kept(Net):
    """Reads a tensor of its own that `keep` has put into a list, or calls a layer that is there."""

    table: Tensor

    def __init__(self, keep: Callable[["Kept"], Tensor | nn.Module]) -> None:
        super().__init__()
        self.register_buffer("table", torch.ones(3, 3))
        self.kept = [keep(self)]

    def loss_of(self, y: Tensor) -> Tensor:
        kept = self.kept[0]
        return super().loss_of(kept(y) if isinstance(kept, nn.Module) else y @ kept)


def test_a_tensor_of_the_model_in_a_list_is_that_tensor() -> None:
    for keep in (lambda net: net.lin.weight, lambda net: net.table):
        assert constants(built(Kept(keep))) == {}


class Added(Scattered):
    def loss_of(self, y: Tensor) -> Tensor:
        return super().loss_of(y + self.scales[0].add_(1))


def _of_closure(layer: nn.Module) -> type[Net]:
    class Closed(Net):
        def loss_of(self, y: Tensor) -> Tensor:
            return super().loss_of(layer(y))

    return Closed


class Outside(Net):
    def loss_of(self, y: Tensor) -> Tensor:
        return super().loss_of(LAYERS(y))


class ByDefault(Net):
    def loss_of(self, y: Tensor, layer: nn.Module = LAYERS) -> Tensor:
        return super().loss_of(layer(y))


class OfTensors(Net):
    def loss_of(self, y: Tensor) -> Tensor:
        return super().loss_of(y @ WEIGHT)


class Holder:
    layers: ClassVar[list[nn.Module]] = [LAYERS]


class OfClass(Net):
    layers = LAYERS

    def loss_of(self, y: Tensor) -> Tensor:
        return super().loss_of(self.layers(y))


class OfHolder(Net):
    def __init__(self) -> None:
        super().__init__()
        self.holder = Holder()

    def loss_of(self, y: Tensor) -> Tensor:
        return super().loss_of(self.holder.layers[0](y))


CALL = partial(lambda layer, y: layer(y), LAYERS)
PARALLEL = nn.DataParallel(LAYERS)


class OfPartial(Net):
    def loss_of(self, y: Tensor) -> Tensor:
        return super().loss_of(CALL(y))


class OfParallel(Net):
    def loss_of(self, y: Tensor) -> Tensor:
        return super().loss_of(PARALLEL(y))


@lru_cache
def cached(number: int) -> nn.Module:
    return LAYERS[number]


class OfCache(Net):
    def loss_of(self, y: Tensor) -> Tensor:
        return super().loss_of(cached(1)(cached(0)(y)))


NORM = nn.BatchNorm1d(3).eval()


class OfNorm(Net):
    def loss_of(self, y: Tensor) -> Tensor:
        return super().loss_of(NORM(y))


FUTURE: Future[nn.Module] = Future()


class OfFuture(Net):
    """Where no search for what a call may change arrives."""

    def loss_of(self, y: Tensor) -> Tensor:
        return super().loss_of(FUTURE.result()(y))


@pytest.mark.parametrize(
    ("build", "holder", "weight"),
    [
        (Outside, "the parameters of LAYERS", LAYERS[0].weight),
        (ByDefault, "the parameters of default 0 of loss_of at test_constants.py:", LAYERS[0].weight),
        (_of_closure(LAYERS), "the parameters of layer of loss_of at test_constants.py:", LAYERS[0].weight),
        (lambda: Kept(lambda net: LAYERS), "the parameters of model.kept[0]", LAYERS[0].weight),
        (lambda: Kept(lambda net: WEIGHT), "the tensor model.kept[0]", WEIGHT),
        (OfTensors, "the tensor WEIGHT", WEIGHT),
        (OfClass, "the parameters of OfClass.layers (", LAYERS[0].weight),
        (OfHolder, "the parameters of Holder.layers[0] (", LAYERS[0].weight),
        (OfPartial, "the parameters of CALL[0] (", LAYERS[0].weight),
        (OfParallel, "the parameters of PARALLEL (", LAYERS[0].weight),
        (OfCache, "the parameters of cached(0) (", LAYERS[0].weight),
        (OfNorm, "the parameters of NORM (", NORM.weight),
        (OfFuture, "a parameter (", LAYERS[0].weight),
    ],
)
@pytest.mark.parametrize("inference", [False, True])
def test_what_could_train_and_is_none_of_the_models_is_a_constant_and_told_once(
    build: Callable[[], Net], holder: str, weight: Tensor, inference: bool
) -> None:
    if not FUTURE.done():
        FUTURE.set_result(LAYERS)
    _ = cached(0), cached(1)
    optimizer = None if inference else {"name": "sgd"}
    options = net_options(Path("out"), inference=inference, optimizer=optimizer, training={"batch_size": 4})
    made = built(build(), options=options)
    assert weight.tolist() in constants(made).values()
    (told,) = made.notices
    assert told.startswith(f"forward() uses {holder}")
    assert told.count("(test_constants.py:") == 1
    assert weight.grad is None
    assert "does not train" in told


def test_a_frozen_layer_outside_of_the_model_is_constants() -> None:
    layer = nn.Linear(3, 3).requires_grad_(False)
    made = built(_of_closure(layer)())
    assert layer.weight.tolist() in constants(made).values()
    assert made.notices == ()


VIEW = "a view of the {} that was kept from before: the graph would not see it change"


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: Kept(lambda net: net.lin.weight.detach()[:2].view(3, 2)), VIEW.format("parameter lin.weight")),
        (lambda: Kept(lambda net: net.table[:1].view(3, 1)), VIEW.format("buffer table")),
        (
            lambda: Kept(lambda net: torch.ones(3, 1).expand(3, 3)),
            r"the constant kept_0 is not contiguous: its strides are \(1, 0\)",
        ),
        (lambda: Kept(lambda net: torch.ones(3, 3).to_sparse()), "a sparse tensor, where a PEF has dense ones"),
        (Added, "a tensor that is changed in place, and is no buffer of the model"),
    ],
)
def test_what_would_not_be_what_the_model_reads_is_refused_with_its_line(build: Callable[[], Net], words: str) -> None:
    with pytest.raises(CaptureError, match=words) as caught:
        built(build())
    assert str(caught.value.where).partition(": ")[2].startswith("return super().loss_of(")
    assert "reasons" not in caught.value.what


def test_in_bf16_a_constant_that_forward_makes_is_rounded() -> None:
    model = Made(lambda net, x: x * torch.tensor([0.5, 2.0, 1.0])).eval()
    with stored_in(torch.bfloat16, model):
        captured = capture(model, [torch.ones(2, 3, dtype=torch.bfloat16)], narrow=True)
    value, _ = captured.outputs[0]
    assert value.meta["val"].dtype is torch.bfloat16
