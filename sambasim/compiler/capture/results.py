"""What a model or a loss function returns: tensors in dicts, dataclasses, tuples and lists; some of them are losses."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor

from sambasim.data.batches import flat
from sambasim.errors import ModelError


def fields_of(result: object) -> Mapping[Any, object]:
    """What the model returns by name, or by position where it has no names."""
    if isinstance(result, Mapping):
        return result
    if is_dataclass(result):
        return {field.name: getattr(result, field.name) for field in fields(result)}
    values = tuple(result) if isinstance(result, tuple | list) else ()
    return dict(zip(getattr(result, "_fields", range(len(values))), values, strict=True))


def named_loss(result: object) -> dict[str, Tensor]:
    """The loss by its name, in a dictionary, a dataclass or a NamedTuple, or the sum of losses and their count."""
    own = fields_of(result)
    names = ("loss",) if "loss" in own else ("loss_sum", "count")
    found = {name: tensor for name in names if isinstance(tensor := own.get(name), Tensor)}
    return found if len(found) == len(names) else {}


def by_position(given: object) -> list[Tensor]:
    """What a loss function returns without the names of `named_loss`: a mean, or a sum and a count."""
    first: list[Any] = [given]
    if isinstance(given, tuple) and 1 <= len(alone := [item for item in given if not fields_of(item)]) <= 2:
        first = alone
    for other in first:
        if not isinstance(other, Tensor):
            what = f"the loss function returns a {type(other).__name__}, not a tensor"
            remedy = "return the mean loss as a tensor of shape (), without .item()"
            if isinstance(other, Mapping | tuple | list):
                remedy = 'return {"loss": …, …}, with the one to train and others to log'
            raise ModelError(what, remedy=remedy)
    return first


def named_in(value: object, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """The tensors in what a model or a loss returns, in order, with dotted names: without one where there is only a
    position at the top."""
    if isinstance(value, Tensor):
        yield name, value
    for key, item in fields_of(value).items():
        yield from named_in(item, f"{name}.{key}" if name else "" if isinstance(key, int) else str(key))


def tensors_in(result: object) -> list[Tensor]:
    return [tensor for _, tensor in named_in(result)]


def scalars_in(result: object) -> dict[str, Tensor]:
    """Those without axes that have a name."""
    return {name: tensor for name, tensor in named_in(result) if name and tensor.ndim == 0}


def is_in(tensors: Iterable[Tensor], tensor: Tensor) -> bool:
    return any(tensor is one for one in tensors)


def check_one_loss(result: object, batch_size: int) -> None:
    """Raises ModelError for several losses, none of which is called "loss", such as those of torchvision's detectors:
    numbers with a gradient, which those of a batch of one sample may be without being losses."""
    named = fields_of(result)
    if isinstance(named.get("loss"), Mapping | tuple | list):
        kind = type(named["loss"]).__name__
        raise ModelError(f'the model returns a {kind} as "loss"', remedy='add them up, and return the sum as "loss"')
    numbers = [
        name
        for top, value in named.items()
        for name, part in flat(value, f"output {top}" if isinstance(top, int) else str(top))
        if isinstance(part, Tensor) and part.requires_grad
        if part.ndim == 0 or (part.numel() == 1 and batch_size > 1)
    ]
    if not ({"loss", "loss_sum"} & named.keys()) and len(numbers) > 1:
        remedy = 'call the one to train "loss"; of parts, that is their sum'
        if isinstance(next(iter(named)), int):
            remedy = 'return {"loss": …, "recon": …, "kl": …}, of parts "loss" is the sum, which logs the others; '
            remedy += "detached values of a tuple are outputs, and not logged"
        raise ModelError(f"the model returns several losses: {', '.join(numbers)}", remedy=remedy)
