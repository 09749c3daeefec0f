"""Apps in bf16: either sync has the bits of a plain loop in bf16, and the device is within 3e-3 of PyTorch in bf16.

3e-3 is the vendor's tolerance. Against PyTorch in fp32, three apps allow more in their own `test`, because PyTorch in
bf16 is as far from it.
"""

import copy
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn

from sambasim import samba
from sambasim.quickstart.digits import digits
from sambasim.samba.session import session
from sambasim.samba.utils import assert_close, trace_graph
from tests.apps import plain
from tests.apps.support import DATA_PARALLEL, DEVICE, SCRIPTS, App, Example, differences
from tests.support.whole import whole, whole_case

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
        """Update the parameters by these gradients, one for each."""
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


def test_two_replicas_train_as_a_plain_loop_in_bf16_does_by_either_sync(bf16: App) -> None:
    expected = _plainly(bf16, 2, torch.bfloat16, WideSGD)
    host = bf16.weights(2, "--data-parallel")
    assert differences(host, expected) == []
    assert differences(bf16.weights(2, *DEVICE), expected) == []
    in_fp32 = _plainly(bf16, 2, torch.float32, _padded_sgd)
    assert differences(host, in_fp32) == list(host)
    assert abs(_held_out_loss(host) - _held_out_loss(in_fp32)) < 0.02


@whole
def test_four_replicas_have_the_same_bits_by_either_sync(bf16: App) -> None:
    assert differences(bf16.weights(4, "--data-parallel"), bf16.weights(4, *DEVICE)) == []


@whole
@pytest.mark.parametrize("np", [2, 4])
def test_stochastic_rounding_has_the_same_bits_by_either_sync(np: int, bf16: App, rounding: App) -> None:
    host = rounding.weights(np, "--data-parallel")
    assert differences(host, rounding.weights(np, *DEVICE)) == []
    assert differences(host, bf16.weights(np, *DEVICE)) == list(host)


Made = tuple[nn.Module, list[Tensor]]


def _feed_forward(module: ModuleType) -> Made:
    return module.FeedForward(64, 128, 10), [torch.rand(32, 64), torch.randint(10, (32,))]


def _gpt(module: ModuleType) -> Made:
    tokens, targets = torch.randint(len(module.ALPHABET), (2, 4, 32))
    return module.GPT(32, 1), [tokens, targets]


def _bert(module: ModuleType) -> Made:
    """Without dropout: PyTorch draws other numbers for other types."""
    config = replace(module.BertConfig.from_file(str(SCRIPTS / "bert_tiny.json")), hidden_dropout_prob=0.0)
    words, length, hidden = config.vocab_size, 64, 12
    sizes = [(words, length), (length, hidden), (words, hidden)]
    return module.BertForMaskedLM(config), [torch.randint(high, (16, places)) for high, places in sizes]


@pytest.mark.parametrize(
    ("name", "make"), [("feed_forward", _feed_forward), whole_case("gpt", _gpt), whole_case("bert_mlm", _bert)]
)
def test_the_device_computes_what_pytorch_does_in_bf16(
    name: str, make: Callable[[ModuleType], Made], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = App(Example(name, ""), tmp_path).module()
    monkeypatch.setitem(sys.modules, module.__name__, module)
    torch.manual_seed(256)
    model, batch = make(module)
    narrow = copy.deepcopy(model).bfloat16()
    samba.from_torch_model_(model)
    optimizer = samba.optim.SGD(model.parameters(), lr=0.1)
    config = {"output_folder": str(tmp_path), "dtype": "bf16"}
    pef = session.compile(model, batch, optimizer, name, config_dict=config)
    trace_graph(model, batch, optimizer, pef=pef)
    loss, predicted = session.run(batch, section_types=["FWD", "BCKWD"])
    narrow_loss, gold = narrow(*[one.bfloat16() if one.is_floating_point() else one for one in batch])
    narrow_loss.mean().backward()
    assert torch.equal(samba.to_torch(predicted), gold)
    # A loss is float32 on the device, and PyTorch would round it to three digits.
    assert_close(loss, model(*batch)[0], "loss")
    names = {path: symbol.name for symbol in session.program(model).symbols.values() for path in symbol.torch_names}
    for path, parameter in narrow.named_parameters():
        (gradient,) = session.get_tensors_by_name([f"{names[path]}__grad"])
        assert_close(gradient, parameter.grad, f"gradient of {path}")
