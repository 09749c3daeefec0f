"""The model and its loss as one callable of plain tensors, `(inputs…) -> (loss, outputs…)`. Every output but the loss
is detached: the backward starts from the loss alone."""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor, nn

from sambasim.compiler.capture.losses import Loss, misfit, of_numbers, tensors_in
from sambasim.compiler.capture.names import forward_line, user_line
from sambasim.compiler.capture.trial import as_written
from sambasim.data.batches import flat
from sambasim.data.user_code import summary
from sambasim.errors import ModelError, SambasimError

Losses = Callable[[Sequence[Tensor]], tuple[int, ...]]
"""Which of a model's outputs are losses."""

TARGET = "target"
"""The name of the loss's second operand, where the config names the loss."""


class _Step(nn.Module):
    """`arguments`: the names of inputs in place of the tensors of each argument of the model, for a model that takes
    tensors in dicts, tuples or lists; None where each input is an argument."""

    def __init__(
        self,
        model: nn.Module,
        names: Sequence[str],
        loss: Loss | None,
        by_keyword: bool,
        arguments: Mapping[str, object] | None = None,
    ) -> None:
        super().__init__()
        self.model = model
        self.names = tuple(names)
        self.by_keyword = by_keyword
        self.arguments = arguments
        self.loss = loss

    def _call(self, inputs: Sequence[Tensor]) -> tuple[object, tuple[Tensor, ...]]:
        """What the model returns, and the tensors in it."""
        given: dict[str, object] = dict(zip(self.names[: len(inputs)], inputs, strict=True))
        if self.arguments is not None:
            given = {name: _filled(value, given) for name, value in self.arguments.items()}
        result = self.model(**given) if self.by_keyword else self.model(*given.values())
        tensors = tensors_in(result)
        if not tensors:
            kind = "None" if result is None else f"a {type(result).__name__} without a tensor in it"
            raise ModelError(
                f"the model returns {kind}",
                where=forward_line(self.model),
                remedy="return a loss, (loss, outputs…), or outputs with the loss named: --loss cross_entropy",
            )
        return result, tuple(tensors)


class TrainingStep(_Step):
    """What one training step differentiates. `losses`, as for SambaFlow apps, says which of the outputs, whose order is
    kept, are losses, of any shape."""

    def __init__(
        self,
        model: nn.Module,
        names: Sequence[str],
        loss: Loss | None,
        by_keyword: bool,
        losses: Losses | None = None,
        arguments: Mapping[str, object] | None = None,
    ) -> None:
        super().__init__(model, names, loss, by_keyword, arguments)
        self.losses = losses

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        if self.losses is not None:
            _, tensors = self._call(inputs)
            losses = self.losses(tensors)
            # A backward cannot start from a view of what is returned before it, as a loss of samples may be.
            if len(losses) > 1 or (losses[0] > 0 and tensors[losses[0]].ndim > 0):
                tensors = tuple(tensor.clone() for tensor in tensors)
            return tuple(tensor if index in losses else tensor.detach() for index, tensor in enumerate(tensors))
        if self.loss is None:
            result, tensors = self._call(inputs)
            _check_one_loss(result, len(inputs[0]) if inputs[0].ndim else 1)
            loss, *outputs = loss_first(result, tensors)
        else:
            result, tensors = self._call(inputs[:-1])
            loss, outputs = self.loss(result, inputs[-1]), list(tensors)
        if not isinstance(loss, Tensor):
            raise ModelError(
                f"the loss function returns a {type(loss).__name__}, not a tensor",
                remedy="return the mean loss as a tensor of shape (), without .item()",
            )
        return (loss, *(output.detach() for output in outputs))


class EvaluationStep(_Step):
    """`(inputs…) -> (loss, outputs…)` in evaluation mode; with a named loss, one loss for each sample."""

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        if self.loss is None:
            return _without_gradients(loss_first(*self._call(inputs)))
        result, outputs = self._call(inputs[:-1])
        return _without_gradients((self.loss(result, inputs[-1]), *outputs))


def loss_first(result: object, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """`tensors`, with the one called "loss" first if the model returns a dictionary, a dataclass or a NamedTuple."""
    loss = _fields(result).get("loss")
    if not isinstance(loss, Tensor):
        return tensors
    return (loss, *(tensor for tensor in tensors if tensor is not loss))


def _fields(result: object) -> Mapping[Any, object]:
    """What the model returns by name, or by position where it has no names."""
    if isinstance(result, Mapping):
        return result
    if is_dataclass(result):
        return {field.name: getattr(result, field.name) for field in fields(result)}
    values = tuple(result) if isinstance(result, tuple | list) else ()
    return dict(zip(getattr(result, "_fields", range(len(values))), values, strict=True))


def _check_one_loss(result: object, batch_size: int) -> None:
    """Raises ModelError for several losses, none of which is called "loss", such as those of torchvision's detectors:
    numbers with a gradient, which those of a batch of one sample may be without being losses."""
    named = _fields(result)
    if isinstance(named.get("loss"), Mapping | tuple | list):
        kind = type(named["loss"]).__name__
        raise ModelError(f'the model returns a {kind} as "loss"', remedy='add them up, and return the sum as "loss"')
    numbers = [
        name
        for top, value in named.items()
        for name, one in flat(value, f"output {top}" if isinstance(top, int) else str(top))
        if isinstance(one, Tensor) and one.requires_grad and (one.ndim == 0 or (one.numel() == 1 and batch_size > 1))
    ]
    if "loss" not in named and len(numbers) > 1:
        remedy = 'call the one to train "loss"; of parts, that is their sum'
        if isinstance(next(iter(named)), int):
            remedy = 'return {"loss": …, …} with the one to train, of parts their sum; or detach() the others'
        raise ModelError(f"the model returns several losses: {', '.join(numbers)}", remedy=remedy)


def _without_gradients(outputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """A model may turn gradients on, to differentiate in its forward."""
    return tuple(output.detach() if output.requires_grad else output for output in outputs)


def _filled(names: object, given: Mapping[str, object]) -> object:
    """`names` with the tensor of each name in its place."""
    if isinstance(names, Mapping):
        return {key: _filled(one, given) for key, one in names.items()}
    if isinstance(names, tuple | list):
        kind: Any = type(names)
        tensors = [_filled(one, given) for one in names]
        return kind(*tensors) if hasattr(names, "_fields") else kind(tensors)
    return given[str(names)]


def loss_in(outputs: Sequence[Tensor]) -> Tensor:
    """What a TrainingStep differentiates, of its outputs: the first that is not detached, or else the first."""
    return next((output for output in outputs if output.requires_grad), outputs[0])


def forward_parameters(model: nn.Module) -> tuple[str, ...]:
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(model.forward).parameters.values()
    return tuple(parameter.name for parameter in parameters if parameter.kind in kinds)


_OF_ONE_VALUE = "Expected more than 1 value per channel"
"""What torch says of a batch of one sample whose picture has become one value."""


@contextmanager
def eagerly(step: nn.Module, inputs: Sequence[Tensor]) -> Iterator[None]:
    """What PyTorch raises here, where it runs `step`, becomes a ModelError with the line that failed, and what does not
    fit if a loss of torch failed."""
    try:
        with as_written():
            yield
    except SambasimError:
        raise
    except (Exception, SystemExit) as error:
        found = misfit(error)
        if found is None and "Found dtype" in str(error) and isinstance(step, TrainingStep) and step.loss is not None:
            found = of_numbers("the loss", next(step.parameters()), inputs[-1])  # a backward has no frame of the loss
        if found is not None:
            raise ModelError(found.what, where=user_line(error), remedy=found.remedy) from error
        shapes = ", ".join(f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}" for t in inputs)
        mode = "" if step.training else ", in evaluation mode"
        remedy = f"check the model against its inputs, which were {shapes}"
        if _OF_ONE_VALUE in str(error):
            remedy = "--set training.batch_size=2, as batch normalization cannot train on one value"
        raise ModelError(
            f"the model does not run on the example batch{mode}: {summary(error)}",
            where=user_line(error),
            remedy=remedy,
        ) from error
