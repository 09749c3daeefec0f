"""An app in bf16: either sync has the bits of a plain loop in bf16, and its loss is near that of fp32."""

import math
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn

from sambasim.quickstart.digits import digits
from tests.apps import plain
from tests.apps.support import DATA_PARALLEL, DEVICE, App, Example, differences
from tests.support.whole import whole

BATCH, EPOCHS, RATE, MOMENTUM = 32, 2, 0.1, 0.9

EXAMPLE = Example("logistic_regression", "held out: accuracy", batch_size=BATCH, rounds=EPOCHS)


@pytest.fixture(scope="module")
def bf16(tmp_path_factory: pytest.TempPathFactory) -> App:
    app = App(EXAMPLE, tmp_path_factory.mktemp("bf16"))
    app.compile(*DATA_PARALLEL, "--dtype", "bf16")
    return app


@pytest.fixture(scope="module")
def rounding(tmp_path_factory: pytest.TempPathFactory) -> App:
    app = App(EXAMPLE, tmp_path_factory.mktemp("rounding"))
    app.compile(*DATA_PARALLEL, "--dtype", "bf16", "--enable-stoc-rounding")
    return app


class WideSGD:
    """torch's fused SGD in float32, on parameters and momenta that are rounded to bf16 after each step; padded as in
    `plain.PaddedOptimizer`."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters = parameters
        self._momenta: list[Tensor | None] = [None] * len(parameters)

    def step(self, gradients: Sequence[Tensor]) -> None:
        for number, (parameter, gradient) in enumerate(zip(self.parameters, gradients, strict=True)):
            padding = (0, -parameter.numel() % plain.ALIGNMENT_ELEMENTS)
            wide = nn.Parameter(nn.functional.pad(parameter.detach().flatten(), padding).float())
            wide.grad = nn.functional.pad(gradient.flatten(), padding).float()
            optimizer = torch.optim.SGD([wide], lr=RATE, momentum=MOMENTUM, fused=True)
            momentum = self._momenta[number]
            if momentum is not None:
                optimizer.state[wide]["momentum_buffer"] = momentum.float()
            optimizer.step()
            self._momenta[number] = optimizer.state[wide]["momentum_buffer"].bfloat16()
            parameter.data.copy_(wide.detach()[: parameter.numel()].view_as(parameter))


def _padded_sgd(parameters: Sequence[nn.Parameter]) -> plain.PaddedOptimizer:
    return plain.PaddedOptimizer(
        parameters, lambda flats: torch.optim.SGD(flats, lr=RATE, momentum=MOMENTUM, fused=True)
    )


def _plainly(
    app: App,
    replicas: int,
    dtype: torch.dtype,
    optimizer: Callable[[Sequence[nn.Parameter]], WideSGD | plain.PaddedOptimizer],
) -> dict[str, Tensor]:
    """The weights of a plain loop in which the model and its inputs are of `dtype`, and the loss is of float32."""
    module = app.module()
    torch.manual_seed(256)
    model = module.LogReg().to(dtype)
    parameters = list(model.parameters())
    samples = module.FlatDigits(digits()[0])
    shards = [plain.batches(samples, replicas, rank, BATCH) for rank in range(replicas)]
    updating = optimizer(parameters)
    for _ in range(EPOCHS * (math.ceil(len(samples) / replicas) // BATCH)):
        batches = [next(shard) for shard in shards]
        losses = [model.criterion(model.lin_layer(image.to(dtype)).float(), label) for image, label in batches]
        updating.step(plain.mean([torch.autograd.grad(loss, parameters) for loss in losses]))
    return {name: tensor.float() for name, tensor in model.state_dict().items()}


def _held_out_loss(weights: dict[str, Tensor]) -> float:
    held_out = digits()[1]
    images = torch.stack([held_out[index][0].flatten() for index in range(len(held_out))])
    labels = torch.stack([held_out[index][1] for index in range(len(held_out))])
    logits = nn.functional.linear(images, weights["lin_layer.weight"], weights["lin_layer.bias"])
    return float(nn.functional.cross_entropy(logits, labels))


@whole
def test_one_replica_trains_as_a_plain_loop_in_bf16_does(bf16: App) -> None:
    assert differences(bf16.weights(1), _plainly(bf16, 1, torch.bfloat16, WideSGD)) == []


@whole
def test_two_replicas_train_as_a_plain_loop_in_bf16_does_by_either_sync(bf16: App) -> None:
    expected = _plainly(bf16, 2, torch.bfloat16, WideSGD)
    host = bf16.weights(2, "--data-parallel")
    assert differences(host, expected) == []
    assert differences(bf16.weights(2, *DEVICE), expected) == []
    in_fp32 = _plainly(bf16, 2, torch.float32, _padded_sgd)
    assert differences(host, in_fp32) == list(host)
    assert abs(_held_out_loss(host) - _held_out_loss(in_fp32)) < 0.02


@whole
@pytest.mark.parametrize("np", [2, 4])
def test_stochastic_rounding_has_the_same_bits_by_either_sync(np: int, bf16: App, rounding: App) -> None:
    host = rounding.weights(np, "--data-parallel")
    assert differences(host, rounding.weights(np, *DEVICE)) == []
    assert differences(host, bf16.weights(np, *DEVICE)) == list(host)
