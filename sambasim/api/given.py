"""Converts tensors, data sets, losses and optimizers of torch to data sets and options. An optimizer must do in a step
what its class does."""

import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.data import TensorDataset

from sambasim.commands.torch_optimizers import Taken, is_of_a_library, options_of_group, refuse_changed_step, taken_over
from sambasim.compiler.capture.step import NAMED_LOSSES, Loss, first_tensor
from sambasim.compiler.capture.tensors import trained_by
from sambasim.data.arrays import ArraysDataset
from sambasim.data.batches import Batch, collate, each_value, is_text, values_of
from sambasim.data.datasets import Collate, collate_of
from sambasim.errors import DataError, ModelError, OptionError
from sambasim.optimizers import FORM_OF_OWN, OPTIMIZERS
from sambasim.options.grammar import LOSS_ARGUMENTS
from sambasim.options.problem import one_of

_MODULES = {f"{name.replace('_', '')}loss": name for name in LOSS_ARGUMENTS}
"""The losses by the names of torch's modules, in lower case: `bce_with_logits` is BCEWithLogitsLoss."""
_ARRAY = (Tensor, np.ndarray)

_version: Callable[[Tensor], int] = vars(torch._C.TensorBase)["_version"].__get__
"""How often a tensor was changed in place. A capture refuses `tensor._version`, as a model's may mean something."""


def batch_of(example: object) -> tuple[Batch, int]:
    """A batch of tensors, by position or by name, with texts as they are, and its size. Raises DataError without a
    common first axis."""
    values = {name: value for name, value in values_of(example) if not is_text(value)}
    first, *_ = _tensors(values, "the example").values()
    return each_value(example, lambda value, _: value if is_text(value) else torch.as_tensor(value)), len(first)


def collated(samples: object, collate_fn: Collate | str) -> object:
    """A batch of a list of samples. Raises DataError."""
    if not isinstance(samples, list):
        what = f"with collate_fn the example is a list of samples, and it is of type {type(samples).__name__}"
        remedy = "example=[dataset[index] for index in range(BATCH)]; or a batch, and no collate_fn"
        raise DataError(what, remedy=remedy)
    if isinstance(batch := collate(samples, collate_of(collate_fn)), DataError):
        raise batch
    return batch


def _tensors(given: Mapping[Any, object], what: str) -> dict[str, Tensor]:
    """The values as tensors. Raises DataError for other values, and if they differ in their number of samples."""
    tensors: dict[str, Tensor] = {}
    for name, value in given.items():
        with suppress(TypeError, ValueError):  # an array of objects
            if isinstance(value, Tensor | np.ndarray | np.generic | int | float):
                tensors[str(name)] = torch.as_tensor(value).detach()
        if str(name) not in tensors:
            remedy = "give tensors or arrays of numbers, side by side in one tuple or dict"
            raise DataError(f"{name} of {what} is of type {type(value).__name__}, which is no tensor", remedy=remedy)
    sizes = {name: len(tensor) if tensor.ndim else 0 for name, tensor in tensors.items()}
    if 0 in sizes.values() or len(set(sizes.values())) != 1:
        counts = ", ".join(f"{name} has {size or 'none'}" for name, size in sizes.items()) or "there is none"
        remedy = "give (x, target) or {name: tensor}, with as many samples in each"
        raise DataError(f"the first axis of every value of {what} must be the samples: {counts}", remedy=remedy)
    return tensors


def data_of(data: object) -> object:
    """`data` as a data function returns it: arrays become a data set. Raises DataError for what cannot."""
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


def loss_of(loss: object) -> tuple[dict[str, object] | None, Loss | None]:
    """The `[loss]` table of a loss that has a name here, which gives an accuracy too, and else a function that calls
    it. Raises OptionError for what cannot be called, ModelError for a module with parameters to train."""
    if loss is None:
        return None, None
    if isinstance(loss, str):
        return {"name": loss}, None
    kind = type(loss).__name__
    name = _MODULES.get(kind.lower()) if type(loss).__module__ == nn.MSELoss.__module__ else None
    if name is not None and getattr(loss, "reduction", "mean") == "sum":
        remedy = f"torch.nn.{kind}(), and a learning rate for the mean"
        raise OptionError(f"{kind} gives a sum, and a loss is a mean: replicas average their gradients", remedy=remedy)
    if name is not None and _is_plain(loss, name):
        args = {argument: getattr(loss, argument, None) for argument in LOSS_ARGUMENTS[name]}
        args = {name: value.tolist() if isinstance(value, Tensor) else value for name, value in args.items()}
        return {"name": name, "args": {name: value for name, value in args.items() if value is not None}}, None
    for name, function in NAMED_LOSSES.items():
        if loss is function and name != "kl_div":  # whose mean is that of elements
            return {"name": name}, None
    if isinstance(loss, type) or not callable(loss):
        remedy = "a name such as 'cross_entropy', torch.nn.CrossEntropyLoss(), or a function of result and target"
        raise OptionError(f"loss is {loss!r}, which is no loss function", remedy=remedy)
    called: Callable[..., Any] = _constant(loss) if isinstance(loss, nn.Module) else loss
    source = getattr(loss, "func", loss)  # of functools.partial
    takes_one = getattr(source, "__module__", "").startswith("torch.nn.")  # as losses with names do

    def of_result(result: object, *targets: object, **by_name: object) -> object:
        return called(first_tensor(result) if takes_one else result, *targets, **by_name)

    vars(of_result)["of_user"] = loss  # whose state a compile looks for
    return None, of_result


def metrics_of(given: object) -> tuple[object, Mapping[str, Callable[..., object]]]:
    """Names of metrics, and the functions among what is given, by their names. Raises OptionError for equal names."""
    names, functions = list[object](), dict[str, Callable[..., object]]()
    for item in given if isinstance(given, list | tuple) else [given]:
        name = item
        if callable(item):
            called = re.sub(r"[^0-9a-zA-Z_]", "_", getattr(item, "__name__", type(item).__name__))
            if (name := f"python:{called}") in functions:
                raise OptionError(f"two metrics are called {called}", remedy="give one of them another __name__")
            functions[name] = item
        names.append(name)
    return (names if functions else given), functions


def _is_plain(loss: Any, name: str) -> bool:
    """Whether it is the mean called `name`, and a call does no more than its class in torch."""
    is_mean = loss.reduction == ("batchmean" if name == "kl_div" else "mean")
    is_weighted = name == "bce_with_logits" and loss.weight is not None
    has_hooks = any(hooks for attribute, hooks in vars(loss).items() if attribute.endswith("_hooks"))
    is_changed = has_hooks or "forward" in vars(loss) or not is_of_a_library(type(loss).forward)
    return is_mean and not is_weighted and not is_changed


def _constant(loss: nn.Module) -> Callable[..., Any]:
    """A call of `loss`. Raises ModelError for parameters to train, and in a call for a buffer that it changes."""
    into_model = "make the loss a submodule of the model, whose forward(x, target) returns it first"
    if trained := [name for name, parameter in loss.named_parameters() if parameter.requires_grad]:
        what = f"the loss has parameters to train, {', '.join(trained)}, and a run trains those of the model"
        raise ModelError(what, remedy=f"{into_model}; or loss.requires_grad_(False)")
    # Not the parameters themselves: a capture takes none of others.
    frozen = {name: parameter.detach() for name, parameter in loss.named_parameters()}

    def called(*given: object, **of_run: object) -> object:
        before = {name: (buffer, _version(buffer)) for name, buffer in loss.named_buffers()}
        value: object = functional_call(loss, frozen, given, of_run)
        for name, buffer in loss.named_buffers():
            was, version = before.get(name, (None, 0))
            if was is not buffer or version != _version(buffer):
                raise ModelError(f"the loss changes {name}, a buffer of its own, in a call", remedy=into_model)
        return value

    return called


def optimizers_in(optimizer: object) -> tuple[torch.optim.Optimizer, ...]:
    """Optimizers of torch, of one or of a list of them. Raises OptionError for anything else."""
    given = tuple(optimizer) if isinstance(optimizer, list | tuple) and optimizer else (optimizer,)
    for one in given:
        if not isinstance(one, torch.optim.Optimizer):
            remedy = "a name such as 'adamw', torch.optim.AdamW(model.parameters(), lr=1e-3), a list of optimizers, or "
            remedy += f"a function itself: {FORM_OF_OWN}"
            raise OptionError(f"optimizer is of type {type(one).__name__}", remedy=remedy)
    return given


def optimizer_of(optimizer: object, model: nn.Module) -> tuple[dict[str, object], Taken | None]:
    """The `[optimizer]` table of a name, or of optimizers of torch, whose groups have all trained parameters of
    `model`, and what their schedulers do. Raises OptionError for another class, a scheduler without an equal, and a
    step that is not torch's; ModelError for other parameters."""
    if isinstance(optimizer, str):
        return {"name": optimizer}, None
    optimizers, tables = optimizers_in(optimizer), list[tuple[dict[str, Any], list[str]]]()
    for one in optimizers:
        refuse_changed_step(one, _kind_of(one)[1])
    taken = taken_over(optimizers)
    if not (names := trained_by(optimizers, model)):
        name = " and ".join(type(one).__name__ for one in optimizers)
        raise ModelError(f"the model has no parameter for {name}", remedy="set requires_grad_(True) on what is trained")
    groups = [(one, group) for one in optimizers for group in one.param_groups]
    for (one, group), rate in zip(groups, taken.rates if taken else [group["lr"] for _, group in groups], strict=True):
        kind, full_name = _kind_of(one)
        if unknown := group.keys() - one.defaults.keys() - {"params", "param_names", "name", "initial_lr"}:
            words = one_of(sorted(unknown))
            what = f"a parameter group of {type(one).__name__} has {words}, which is no option of {full_name}"
            raise OptionError(what, remedy="leave it out: torch does not read it, and neither does a run")
        options = options_of_group(kind, {**group, "lr": rate}, full_name)
        table = options.model_dump(exclude_none=True, exclude={"groups"})
        tables.append((table, [names[id(parameter)] for parameter in group["params"] if id(parameter) in names]))
    (first, _), *others = [table for table in tables if table[1]]
    differing = [{"match": paths, **_differences(options, first)} for options, paths in others]
    return {**first, "groups": differing}, taken


def _kind_of(optimizer: torch.optim.Optimizer) -> tuple[str, str]:
    """The name of an optimizer here, and that of its class in torch."""
    kinds = {getattr(torch.optim, entry.torch_name): kind for kind, entry in OPTIMIZERS.items() if entry.torch_name}
    torchs = next((kind for kind in type(optimizer).__mro__ if kind in kinds), None)
    if torchs is None:
        names = one_of(kind.__name__ for kind in kinds)
        remedy = f"one of torch.optim.{names}, a name, {one_of(OPTIMIZERS)}, or a function of yours: {FORM_OF_OWN}"
        raise OptionError(f"a PEF has no optimizer {type(optimizer).__name__}", remedy=remedy)
    return kinds[torchs], f"torch.optim.{torchs.__name__}"


def _differences(options: Mapping[str, Any], from_: Mapping[str, Any]) -> dict[str, Any]:
    is_other = options["name"] != from_["name"]
    return {name: value for name, value in options.items() if is_other or value != from_[name]}
