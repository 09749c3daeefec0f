"""What a step returns and differentiates, and one call of the model by PyTorch itself."""

from collections.abc import Callable, Sequence
from functools import partial, wraps
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from sambasim.compiler.capture.step import Example, TrainingStep, eagerly
from sambasim.compiler.capture.trial import trial
from sambasim.errors import DataError, ModelError
from sambasim.options.compile import compile_options
from sambasim.samba.inputs import losses_among, named_loss
from tests.support.compiled import compile_from_options, compile_net


def _as_it_is(forward: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(forward)
    def wrapped(*inputs: Tensor) -> Any:
        result = forward(*inputs)
        return result

    return wrapped


def _numbers(y: Tensor) -> tuple[Tensor, Tensor]:
    """Of each sample one, twice."""
    return y.mean(1), y.square().mean(1)


class Returning(nn.Module):
    """`y` has one element for each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.y = nn.Linear(4, 1)


class Number(Returning):
    def forward(self, x: Tensor) -> Any:
        return self.y(x), self.y(x).square().mean()


class NumbersByName(Returning):
    def forward(self, x: Tensor) -> Any:
        reg, loss = self.y.weight.square().sum(), self.y(x).mean()
        return reg, loss


class Nested(Returning):
    def forward(self, x: Tensor) -> Any:
        loss = self.y(x).mean()
        return (self.y(x), self.y(x).tanh()), loss


class Starred(Returning):
    def forward(self, x: Tensor) -> Any:
        several, none, loss = _numbers(self.y(x)), (), self.y(x).mean()
        return *several, loss, *none


class Decorated(Returning):
    @_as_it_is
    def forward(self, x: Tensor) -> Any:
        first, losses = _numbers(self.y(x))
        return first, losses


class Inner(Returning):
    def forward(self, x: Tensor) -> Any:
        def both(y: Tensor) -> tuple[Tensor, Tensor]:
            loss, first = y.square().mean(1), y.mean(1)
            return loss, first

        loss, first = both(self.y(x))
        return first, loss


class Lossless(Returning):
    def forward(self, x: Tensor) -> Any:
        first, lossless = _numbers(self.y(x))
        return first, lossless


class Detached(Returning):
    def forward(self, x: Tensor) -> Any:
        first, loss = _numbers(self.y(x))
        return first, loss.detach()


@pytest.mark.parametrize(
    ("kind", "by_name", "start"),
    [
        (Number, None, 1), (NumbersByName, (1, 2), 1), (Nested, (1, 2), 2), (Starred, None, 2),
        (Decorated, (1, 2), 1), (Inner, (1, 2), 1), (Lossless, None, 0), (Detached, (1, 2), 0),
    ],
)  # fmt: skip
def test_the_output_that_a_step_differentiates(
    kind: type[Returning], by_name: tuple[int, int] | None, start: int
) -> None:
    model = kind()
    assert named_loss(model) == by_name
    losses = partial(losses_among, given=(), named=by_name)
    step = TrainingStep(model, Example({"x": torch.ones(1, 4)}), None, losses)
    for batch_size in (1, 3):
        outputs = step(torch.ones(batch_size, 4))
        assert [index for index, one in enumerate(outputs) if one.requires_grad] == [start]


def test_what_is_given_to_torch_compile_runs_as_it_is_written() -> None:
    compiled: list[fx.GraphModule] = []

    def backend(graph: fx.GraphModule, inputs: Sequence[Tensor]) -> Callable[..., object]:
        compiled.append(graph)
        return graph.forward

    model = Number()
    model.compile(backend=backend)
    x = torch.ones(2, 4)
    with eagerly(model, [x]):
        model(x)
    assert compiled == []
    model(x)
    assert len(compiled) == 1


class Fixed(Number):
    """Its attributes are those of its first moments."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name != "training" and "y" in self.__dict__.get("_modules", {}):
            raise AttributeError(f"fixed: {name}")
        super().__setattr__(name, value)


@pytest.mark.parametrize("made", [Fixed, lambda: torch.compile(nn.Linear(4, 1), backend="eager")])
def test_a_trial_gives_tensors_back_to_modules_with_a_setattr_of_their_own(made: Callable[[], nn.Module]) -> None:
    model = made()
    before = dict(model.named_parameters())
    with trial(nn.Sequential(model)):
        assert dict(model.named_parameters()) == before
        next(model.modules())._parameters.clear()
    assert dict(model.named_parameters()) == before


def test_outputs_that_the_app_calls_losses() -> None:
    outputs = [torch.ones(shape, requires_grad=True) for shape in ((), (3,), (3, 2))]
    assert losses_among(outputs, (-1,), (0, 3)) == (2,)
    assert losses_among(outputs, (1, -3), None) == (1, 0)
    for index in (3, -4):
        with pytest.raises(ModelError) as caught:
            losses_among(outputs, (0, index), None)
        assert caught.value.what == f"loss_indices is [0, {index}], and the model returns 3 outputs"
        assert caught.value.remedy == "give indices from 0 to 2"


def samples(is_none: bool) -> list[object]:
    return [(torch.ones(4), None) if is_none else (torch.ones(at + 1), torch.ones(1)) for at in range(2)]


@pytest.mark.parametrize("is_none", ["true", "false"])
def test_samples_that_do_not_fit_together_are_named_at_compile(is_none: str) -> None:
    given = [f"data.source={__name__}:samples", f"data.args.is_none={is_none}", "loss.name=mse", "optimizer.name=sgd"]
    options = compile_options(None, f"{__name__}:Number", given, {"batch_size": 2})
    with pytest.raises(DataError, match=rf"of {__name__}:samples gives"):
        compile_from_options(options)


def test_classes_that_the_model_does_not_have_are_refused(tmp_path: Path) -> None:
    inputs = {"input": torch.zeros(4, 3), "target": torch.tensor([1, 2, 1, 2])}
    with pytest.raises(ModelError, match="target goes from 1 to 2, and the model has 2 classes, 0 to 1") as caught:
        compile_net(nn.Linear(3, 2), inputs, tmp_path)
    assert caught.value.remedy == "y - 1, or a model with 3 outputs"
