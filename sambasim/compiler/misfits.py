"""Why a loss of torch refuses its operands, by what can be seen of them: dtypes, shapes, and the range of classes."""

import traceback
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

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
