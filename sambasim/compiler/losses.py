"""The losses that a config can name, twice: as a mean for training, and one for each sample for evaluation."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.nn import functional

from sambasim.compiler.step import Loss
from sambasim.data.user_code import load_object
from sambasim.errors import ModelError, OptionError

_NAMED: Mapping[str, Callable[..., Tensor]] = {
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
    """`loss(outputs, target) -> mean`: a named loss of torch, or the callable at `module:name`.

    Raises OptionError for a name that is neither.
    """
    if ":" in name:
        return _users_loss(name, args)
    function, arguments = _named(name), _arguments(args)
    # kl_div's "mean" divides by elements, and torch itself warns that it is not the divergence; batchmean is.
    reduction = "batchmean" if name == "kl_div" else "mean"
    return lambda outputs, target: function(outputs, target, reduction=reduction, **arguments)


def per_sample_loss(name: str, args: Mapping[str, object]) -> Loss | None:
    """`loss(outputs, target) -> float[batch]`: the mean of each sample's own elements; None for a user's callable.

    Exactly: of cross_entropy and nll with class indices as target, a sample's loss is the sum over its counted elements
    (those whose target is not `ignore_index`, -100 unless it is given) divided by their number, and 0 if it has none.
    `weight` multiplies the elements, and is not in the divisor. kl_div is the sum over a sample's elements; every other
    loss is their mean. An evaluation takes the mean over all samples, and a sample that has no counted element is one
    of them, with a loss of 0. So the mean over samples equals the training loss unless `weight` is given, or samples
    differ in how many of their elements are counted: the training loss divides by all counted elements of a batch.
    """
    if ":" in name:
        return None
    function, arguments = _named(name), _arguments(args)
    given = args.get("ignore_index")
    ignored = given if isinstance(given, int) else _IGNORED_BY_TORCH

    def loss(outputs: Tensor, target: Tensor) -> Tensor:
        elements = function(outputs, target, reduction="none", **arguments).reshape(outputs.shape[0], -1)
        # A sample of one element needs no divisor: its loss is already 0 if it is not counted.
        if name in _WITH_CLASSES and not target.is_floating_point() and elements.shape[1] > 1:
            counted = target.reshape(elements.shape).ne(ignored)
            return elements.sum(1) / counted.sum(1).clamp(min=1)
        return elements.sum(1) if name == "kl_div" else elements.mean(1)

    return loss


def _named(name: str) -> Callable[..., Tensor]:
    if name not in _NAMED:
        raise OptionError(f"there is no loss called {name!r}", remedy=f"loss.name takes one of {', '.join(_NAMED)}")
    return _NAMED[name]


def _arguments(args: Mapping[str, object]) -> dict[str, object]:
    """Lists, such as class weights, become tensors."""
    return {key: torch.tensor(value) if isinstance(value, (list, tuple)) else value for key, value in args.items()}


def _users_loss(target: str, args: Mapping[str, object]) -> Loss:
    found = load_object(target, "loss")
    if isinstance(found, type):
        found = found(**args)
        args = {}
    if not callable(found):
        raise ModelError(f"the loss {target} is not callable")
    function: Callable[..., Tensor] = found
    return lambda outputs, target: function(outputs, target, **args)
