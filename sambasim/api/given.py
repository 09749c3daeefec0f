"""Converts what a script gives, tensors, data sets, losses and optimizers of torch, to data sets and options."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.data import DataLoader, TensorDataset

from sambasim.api.optimizers import options_of_optimizer
from sambasim.commands.torch_optimizers import is_of_a_library
from sambasim.compiler.capture.step import NAMED_LOSSES, Loss, first_tensor
from sambasim.data.batches import Batch, values_of
from sambasim.data.datasets import ArraysDataset
from sambasim.errors import DataError, ModelError, OptionError
from sambasim.options.training import LOSS_ARGUMENTS

_MODULES: Mapping[type[nn.Module], str] = {
    nn.CrossEntropyLoss: "cross_entropy",
    nn.NLLLoss: "nll",
    nn.MSELoss: "mse",
    nn.L1Loss: "l1",
    nn.SmoothL1Loss: "smooth_l1",
    nn.HuberLoss: "huber",
    nn.BCEWithLogitsLoss: "bce_with_logits",
    nn.KLDivLoss: "kl_div",
}


_version: Callable[[Tensor], int] = vars(torch._C.TensorBase)["_version"].__get__
"""How often a tensor was changed in place. A capture refuses `tensor._version`, as a model's may mean something."""


def batch_of(example: object) -> Batch:
    """A batch of tensors: one, several by position, or by name. Raises DataError for values without a common first
    axis."""
    _tensors(dict(values_of(example)), "the example")
    batch: Batch = _each(example, torch.as_tensor)
    return batch


def size_of(batch: Batch) -> int:
    return next(len(value) for _, value in values_of(batch) if isinstance(value, Tensor))


def first_samples(batch: Batch, count: int) -> Batch:
    first: Batch = _each(batch, lambda tensor: tensor[:count])
    return first


def _each(value: Any, change: Callable[[Any], Any]) -> Any:
    """`value` with `change` of each tensor inside of dicts, tuples and lists."""
    if isinstance(value, Mapping):
        return {name: _each(inner, change) for name, inner in value.items()}
    if isinstance(value, tuple | list):
        changed = [_each(inner, change) for inner in value]
        return type(value)(*changed) if hasattr(value, "_fields") else type(value)(changed)
    return change(value)


def _tensors(given: Mapping[Any, object], what: str) -> dict[str, Tensor]:
    """The values as tensors. Raises DataError for other values, and if they differ in their number of samples."""
    tensors: dict[str, Tensor] = {}
    for name, value in given.items():
        with suppress(TypeError, ValueError):  # an array of objects
            if isinstance(value, Tensor | np.ndarray | np.generic | int | float):
                tensors[str(name)] = torch.as_tensor(value).detach()
        if str(name) not in tensors:
            raise DataError(
                f"{name} of {what} is of type {type(value).__name__}, which is no tensor",
                remedy="give tensors or arrays of numbers, side by side in one tuple or dict",
            )
    sizes = {name: len(tensor) if tensor.ndim else 0 for name, tensor in tensors.items()}
    if not sizes or 0 in sizes.values() or len(set(sizes.values())) > 1:
        counts = ", ".join(f"{name} has {size or 'none'}" for name, size in sizes.items()) or "there is none"
        raise DataError(
            f"the first axis of every value of {what} must be the samples: {counts}",
            remedy="give (x, target) or {name: tensor}, with as many samples in each",
        )
    return tensors


_ARRAY = (Tensor, np.ndarray)


def data_of(data: object) -> object:
    """`data` as a data function returns it: tensors and arrays become a data set. Raises DataError for a DataLoader, a
    class, and arrays that differ in their number of samples."""
    if isinstance(data, DataLoader):
        raise DataError(
            "data is a DataLoader, and sambasim makes the batches itself",
            remedy="data=loader.dataset; the batch size is that of the example when the model was compiled",
        )
    if isinstance(data, type):
        raise DataError(f"data is the class {data.__name__}", remedy=f"give an instance: data={data.__name__}(…)")
    are_arrays = isinstance(data, tuple | list) and bool(data) and all(isinstance(array, _ARRAY) for array in data)
    if isinstance(data, list) and are_arrays and len({(str(array.dtype), array.shape[1:]) for array in data}) > 1:
        data = tuple(data)  # samples would be alike
    if isinstance(data, tuple) and are_arrays:
        return TensorDataset(*_tensors(dict(values_of(data)), "data").values())
    if isinstance(data, tuple) and len(data) == 2:
        return tuple(map(data_of, data))
    if isinstance(data, Mapping):
        return ArraysDataset(_tensors(data, "data"))
    return TensorDataset(*_tensors({"the array": data}, "data").values()) if isinstance(data, _ARRAY) else data


def unwrapped(model: nn.Module) -> nn.Module:
    """The model within `torch.compile` or `nn.DataParallel`, whose weights have other names."""
    model = getattr(model, "_orig_mod", model)
    return unwrapped(model.module) if isinstance(model, nn.DataParallel) else model


def loss_of(loss: object) -> tuple[dict[str, object] | None, Loss | None]:
    """The `[loss]` table of a loss that has a name here, which gives an accuracy too, and else a function that calls
    it. Raises OptionError for what cannot be called, ModelError for a module with parameters to train."""
    if loss is None:
        return None, None
    if isinstance(loss, str):
        return {"name": loss}, None
    name = _MODULES.get(type(loss)) if isinstance(loss, nn.Module) else None
    if name is not None and getattr(loss, "reduction", "mean") == "sum":
        raise OptionError(
            f"{type(loss).__name__} gives a sum, and a loss is a mean: replicas average their gradients",
            remedy=f"torch.nn.{type(loss).__name__}(), and a learning rate for the mean",
        )
    if name is not None and _is_plain(loss, name) and not _is_changed(loss):
        return {"name": name, "args": {argument: getattr(loss, argument) for argument in LOSS_ARGUMENTS[name]}}, None
    for name, function in NAMED_LOSSES.items():
        if loss is function and name != "kl_div":  # whose mean is that of elements
            return {"name": name}, None
    if isinstance(loss, type) or not callable(loss):
        raise OptionError(
            f"loss is {loss!r}, which is no loss function",
            remedy="a name such as 'cross_entropy', torch.nn.CrossEntropyLoss(), or a function of result and target",
        )
    called: Callable[..., Any] = loss
    if isinstance(loss, nn.Module):
        called = _constant(loss)
    source = getattr(loss, "func", loss)  # of functools.partial
    takes_one = getattr(source, "__module__", "").startswith("torch.nn.")  # as losses with names do

    return None, _UsersLoss(loss, called, takes_one)


@dataclass(frozen=True, slots=True)
class _UsersLoss:
    """`of_user`, whose state a compile looks for, as a function of what the model returns and the target."""

    of_user: object
    called: Callable[..., Tensor]
    takes_one: bool

    def __call__(self, result: object, target: Tensor) -> Tensor:
        return self.called(first_tensor(result) if self.takes_one else result, target)


def _is_plain(loss: Any, name: str) -> bool:
    """Whether its mean is that of the loss called `name`: over all elements, without weights."""
    mean = "batchmean" if name == "kl_div" else "mean"
    weights = [getattr(loss, weight_name, None) for weight_name in ("weight", "pos_weight")]
    return loss.reduction == mean and all(weight is None for weight in weights)


def _is_changed(loss: Any) -> bool:
    """Whether a call does more than its class in torch: by hooks, or by another forward."""
    hooks = [hooks for name, hooks in vars(loss).items() if name.endswith("_hooks")]
    return any(hooks) or "forward" in vars(loss) or not is_of_a_library(type(loss).forward)


def _constant(loss: nn.Module) -> Callable[..., Any]:
    """`loss`, which must hold nothing that training changes. Raises ModelError for parameters to train; a call raises
    it for a buffer that the call changes."""
    into_model = "make the loss a submodule of the model, whose forward(x, target) returns it first"
    if trained := [name for name, parameter in loss.named_parameters() if parameter.requires_grad]:
        raise ModelError(
            f"the loss has parameters to train, {', '.join(trained)}, and a run trains those of the model",
            remedy=f"{into_model}; or loss.requires_grad_(False)",
        )

    # Not the parameters themselves: a capture takes none of others.
    frozen = {name: parameter.detach() for name, parameter in loss.named_parameters()}

    def called(*given: object) -> object:
        before = {name: (buffer, _version(buffer)) for name, buffer in loss.named_buffers()}
        value: object = functional_call(loss, frozen, given)
        for name, buffer in loss.named_buffers():
            was, version = before.get(name, (None, 0))
            if was is not buffer or version != _version(buffer):
                raise ModelError(f"the loss changes {name}, a buffer of its own, in a call", remedy=into_model)
        return value

    return called


def optimizer_of(optimizer: object, model: nn.Module) -> dict[str, object]:
    """The `[optimizer]` table. Raises OptionError for what is neither a name nor an optimizer of torch."""
    if isinstance(optimizer, str):
        return {"name": optimizer}
    if isinstance(optimizer, torch.optim.Optimizer):
        return options_of_optimizer(optimizer, model).model_dump(exclude_none=True)
    raise OptionError(
        f"optimizer is of type {type(optimizer).__name__}",
        remedy="a name such as 'adamw', or torch.optim.AdamW(model.parameters(), lr=1e-3)",
    )
