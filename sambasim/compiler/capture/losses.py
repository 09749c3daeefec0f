"""Losses by name, those of the user, and why one refuses its operands, by what can be seen of them: dtypes, shapes, and
the range of classes."""

import traceback
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional

from sambasim.data.user_code import load_object
from sambasim.errors import ModelError, OptionError

Loss = Callable[[Any, Tensor], Tensor]
"""Of what the model returns, and the target."""

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


def first_tensor(result: object) -> Any:
    """The outputs that a loss with a name takes, of all that a model returns."""
    return next(iter(tensors_in(result)), result)


def tensors_in(result: object) -> list[Tensor]:
    if isinstance(result, Tensor):
        return [result]
    if isinstance(result, Mapping):
        return [tensor for item in result.values() for tensor in tensors_in(item)]
    if isinstance(result, (tuple, list)):
        return [tensor for item in result for tensor in tensors_in(item)]
    if is_dataclass(result):
        return [tensor for field in fields(result) for tensor in tensors_in(getattr(result, field.name))]
    return []


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


_OF_CLASSES = ("cross_entropy", "nll_loss", "multi_margin_loss")
_CASTS = {torch.float32: "float()", torch.float64: "double()", torch.float16: "half()", torch.bfloat16: "bfloat16()"}


class Misfit(NamedTuple):
    what: str
    remedy: str


def misfit(error: BaseException) -> Misfit | None:
    """What does not fit, and what to type, if a loss function of `torch.nn.functional` raised `error`."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        given, name = frame.f_locals, frame.f_code.co_name
        outputs, target = given.get("input"), given.get("target")
        if frame.f_globals is vars(nn.functional) and isinstance(outputs, Tensor) and isinstance(target, Tensor):
            if name in _OF_CLASSES:
                return _of_classes(name, outputs, target, given.get("ignore_index"))
            return of_numbers(name, outputs, target)
    return None


def _of_classes(name: str, outputs: Tensor, target: Tensor, ignored: object) -> Misfit | None:
    wanted = (*outputs.shape[:1], *outputs.shape[2:]) if outputs.ndim > 1 else ()
    if target.dtype not in (torch.int64, torch.uint8):
        if target.is_floating_point() and target.shape == outputs.shape:
            return None  # probabilities
        either = f", or probabilities of shape {list(outputs.shape)}" if target.is_floating_point() else ""
        return Misfit(f"target is {_name(target)}, and {name} needs int64{either}", "y.long()")
    if target.shape != wanted:
        remedy = "give each sample one class"
        if target.numel() == prod(wanted):
            remedy = f"y.reshape({_as_batch(wanted)})"
        elif target.shape == outputs.shape[:-1]:
            remedy = "outputs.movedim(-1, 1), as classes are the second axis of outputs"
        shapes = f"the outputs have {list(outputs.shape)}, classes second, so {name} needs {list(wanted)}"
        return Misfit(f"target has shape {list(target.shape)}; {shapes}", remedy)
    if isinstance(target, FakeTensor):
        return None
    classes, counted = outputs.shape[min(outputs.ndim - 1, 1)], target[target != ignored]
    if not counted.numel() or (counted.min() >= 0 and counted.max() < classes):
        return None
    low, high = int(counted.min()), int(counted.max())
    remedy = f"labels from 0 to {classes - 1}, or a model with {high + 1} outputs"
    if low > 0 and high == classes:
        remedy = f"y - {low}, or a model with {high + 1} outputs"
    elif low < 0:
        remedy = f"labels from 0 to {classes - 1}; those to leave out: torch.nn.CrossEntropyLoss(ignore_index={low})"
    return Misfit(f"target goes from {low} to {high}, and the model has {classes} classes, 0 to {classes - 1}", remedy)


def of_numbers(name: str, outputs: Tensor, target: Tensor) -> Misfit | None:
    if outputs.dtype is not target.dtype and outputs.dtype in _CASTS:
        return Misfit(f"target is {_name(target)}, and {name} needs {_name(outputs)}", f"y.{_CASTS[outputs.dtype]}")
    if outputs.shape == target.shape:
        return None
    same = outputs.numel() == target.numel()
    remedy = f"y.reshape({_as_batch(tuple(outputs.shape))})" if same else "give both one shape"
    return Misfit(f"target has shape {list(target.shape)}, and the outputs {list(outputs.shape)}", remedy)


def _name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _as_batch(shape: tuple[int, ...]) -> str:
    """`shape` for any batch size."""
    return ", ".join(map(str, (-1, *shape[1:])))
