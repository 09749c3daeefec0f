"""The model and its loss as one callable of plain tensors, `(inputs…) -> (loss, outputs…)`. Every output but the loss
is detached: the backward starts from the loss alone."""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from sambasim.compiler.misfits import misfit, of_numbers
from sambasim.compiler.names import forward_line, user_line
from sambasim.compiler.trial import as_written
from sambasim.data.batches import flat
from sambasim.data.user_code import load_object, summary
from sambasim.errors import ModelError, OptionError, SambasimError

Loss = Callable[[Any, Tensor], Tensor]
"""Of what the model returns, and the target."""

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
        tensors = _tensors(result)
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
                tensors = tuple(one.clone() for one in tensors)
            return tuple(one if index in losses else one.detach() for index, one in enumerate(tensors))
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
    return (loss, *(one for one in tensors if one is not loss))


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


def first_tensor(result: object) -> Any:
    """The outputs that a loss with a name takes, of all that a model returns."""
    return next(iter(_tensors(result)), result)


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


def _tensors(result: object) -> list[Tensor]:
    if isinstance(result, Tensor):
        return [result]
    if isinstance(result, Mapping):
        return [tensor for item in result.values() for tensor in _tensors(item)]
    if isinstance(result, (tuple, list)):
        return [tensor for item in result for tensor in _tensors(item)]
    if is_dataclass(result):
        return [tensor for field in fields(result) for tensor in _tensors(getattr(result, field.name))]
    return []


def loss_in(outputs: Sequence[Tensor]) -> Tensor:
    """What a TrainingStep differentiates, of its outputs: the first that is not detached, or else the first."""
    return next((output for output in outputs if output.requires_grad), outputs[0])


def forward_parameters(model: nn.Module) -> tuple[str, ...]:
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(model.forward).parameters.values()
    return tuple(parameter.name for parameter in parameters if parameter.kind in kinds)


def check_loss(value: Tensor, named: str | None, *, any_shape: bool) -> None:
    """Raises ModelError unless `value`, the loss of an eager call, can start a backward. It must be one number, unless
    `any_shape`."""
    described = (
        f"the loss {named}" if named else "the output with the loss" if any_shape else "the model's first output"
    )
    if value.numel() != 1 and not any_shape:
        remedy = "return the loss first, or name one: --loss cross_entropy"
        raise ModelError(
            f"{described} has shape {tuple(value.shape)}, but a loss is one number",
            remedy="let the function return the mean: loss.mean()" if named else remedy,
        )
    if not value.is_floating_point():
        raise ModelError(
            f"{described} is {str(value.dtype).removeprefix('torch.')}, but a loss is a floating-point number",
            remedy="compute it with floating-point operators: a count of mistakes has no gradient, cross_entropy has",
        )
    if not value.requires_grad:
        raise ModelError(
            f"{described} does not depend on any parameter that requires a gradient",
            remedy="check requires_grad, detach() and torch.no_grad() in the model, or compile with --inference",
        )


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


NAMED_LOSSES: Mapping[str, Callable[..., Tensor]] = {
    "cross_entropy": functional.cross_entropy,
    "nll": functional.nll_loss,
    "mse": functional.mse_loss,
    "l1": functional.l1_loss,
    "smooth_l1": functional.smooth_l1_loss,
    "huber": functional.huber_loss,
    "bce_with_logits": functional.binary_cross_entropy_with_logits,
    "kl_div": functional.kl_div,
}

_WITH_CLASSES = ("cross_entropy", "nll")
_IGNORED_BY_TORCH = -100


def training_loss(name: str, args: Mapping[str, object]) -> Loss:
    """`loss(result, target) -> mean`: a named loss of torch, which takes the first output, or the callable at
    `module:name`, which takes what the model returns. Raises OptionError for other names."""
    if ":" in name:
        return _users_loss(name, args)
    function, arguments = _named(name, args)
    # kl_div's "mean" divides by elements, and torch itself warns that it is not the divergence; batchmean is.
    reduction = "batchmean" if name == "kl_div" else "mean"
    return lambda result, target: function(first_tensor(result), target, reduction=reduction, **arguments)


def per_sample_loss(name: str, args: Mapping[str, object]) -> Loss | None:
    """`loss(result, target) -> float[batch]`: the mean over each sample's counted elements (for kl_div the sum); None
    for a user's callable. The mean over samples is the training loss, unless `weight` is given or samples differ in how
    many elements are counted."""
    if ":" in name:
        return None
    function, arguments = _named(name, args)
    given = args.get("ignore_index")
    ignored = given if isinstance(given, int) else _IGNORED_BY_TORCH

    def loss(result: object, target: Tensor) -> Tensor:
        outputs: Tensor = first_tensor(result)
        elements = function(outputs, target, reduction="none", **arguments).reshape(outputs.shape[0], -1)
        # A sample of one element needs no divisor: its loss is already 0 if it is not counted.
        if name in _WITH_CLASSES and not target.is_floating_point() and elements.shape[1] > 1:
            counted = target.reshape(elements.shape).ne(ignored)
            return elements.sum(1) / counted.sum(1).clamp(min=1)
        return elements.sum(1) if name == "kl_div" else elements.mean(1)

    return loss


def _named(name: str, args: Mapping[str, object]) -> tuple[Callable[..., Tensor], dict[str, object]]:
    """Torch's loss called `name`, and its arguments: lists, such as class weights, become tensors."""
    if name not in NAMED_LOSSES:
        known = ", ".join(NAMED_LOSSES)
        raise OptionError(f"there is no loss called {name!r}", remedy=f"loss.name takes one of {known}")
    tensors = {key: torch.tensor(value) for key, value in args.items() if isinstance(value, (list, tuple))}
    return NAMED_LOSSES[name], {**args, **tensors}


def _users_loss(target: str, args: Mapping[str, object]) -> Loss:
    found = load_object(target, "loss")
    if isinstance(found, type):
        found = found(**args)
        args = {}
    if not callable(found):
        raise ModelError(f"the loss {target} is not callable")
    function: Callable[..., Tensor] = found
    return lambda result, labels: function(result, labels, **args)
