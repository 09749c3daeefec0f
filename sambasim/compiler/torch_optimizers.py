"""The options of a PEF's optimizer from an optimizer of torch."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from sambasim.errors import ModelError, OptionError
from sambasim.optimizers import OPTIMIZERS
from sambasim.options.load import build, one_of
from sambasim.options.training import OptimizerOptions

NOT_IN_A_PEF: Mapping[str, str] = {
    "amsgrad": "leave it out",
    "maximize": "leave it out, and let the model return the negated loss",
    "capturable": "leave it out: it is for graphs of another device",
    "differentiable": "leave it out",
    "initial_accumulator_value": "leave it out",
}
"""Options of torch's optimizers that a PEF does not have, with remedies."""


def options_of_optimizer(optimizer: torch.optim.Optimizer, model: nn.Module) -> OptimizerOptions:
    """The options of `optimizer`, which has one parameter group with all trained parameters of `model`. Raises
    OptionError for another class or several groups, ModelError for other parameters."""
    kinds = {entry.torch_name: kind for kind, entry in OPTIMIZERS.items() if entry.torch_name}
    kind, name = kinds.get(type(optimizer).__name__), type(optimizer).__name__
    if kind is None or not isinstance(optimizer, getattr(torch.optim, name)):
        raise OptionError(
            f"a PEF has no optimizer {name}",
            remedy=f"one of torch.optim.{one_of(kinds)}, or a name: {one_of(OPTIMIZERS)}",
        )
    if (count := len(optimizer.param_groups)) > 1:
        raise OptionError(
            f"{name} has {count} parameter groups, and a run of a PEF trains one",
            remedy=f"torch.optim.{name}(model.parameters(), …); SambaFlow apps can have several",
        )
    (group,) = optimizer.param_groups
    trained = {id(parameter): path for path, parameter in model.named_parameters() if parameter.requires_grad}
    given = {id(parameter) for parameter in group["params"]}
    if left := [path for address, path in trained.items() if address not in given]:
        raise ModelError(
            f"{name} does not update {left[0]}" + (f" and {len(left) - 1} more" if len(left) > 1 else ""),
            remedy=f"make it from all of them, torch.optim.{name}(model.parameters(), …), or freeze the others",
        )
    own = {id(parameter) for parameter in model.parameters()}
    if others := len(given - own):
        raise ModelError(
            f"{name} also updates {others} parameters that the model does not have",
            remedy=f"torch.optim.{name}(model.parameters(), …), made for this model",
        )
    return options_of_group(kind, group, f"torch.optim.{name}")


def options_of_group(
    kind: str, group: Mapping[str, Any], where: str, max_grad_norm: float | None = None
) -> OptimizerOptions:
    """The options of a parameter group. Raises OptionError for an option that a PEF's optimizer does not have, and for
    values out of range."""
    for option, remedy in NOT_IN_A_PEF.items():
        if group.get(option):
            raise OptionError(f"the optimizer of a PEF does not have {option}", where=where, remedy=remedy)
    if kind == "adam" and group.get("decoupled_weight_decay"):
        remedy = f"{where.partition(',')[0].rpartition('.')[0]}.AdamW"
        raise OptionError("Adam with decoupled_weight_decay is AdamW", where=where, remedy=remedy)
    numbers = {field: plain_number(group[field]) for field in OPTIMIZERS[kind].defaults}
    numbers = {name: float(value) if type(value) is int else value for name, value in numbers.items()}
    return build(OptimizerOptions, {"name": kind, **numbers, "max_grad_norm": max_grad_norm}, where=where)


def plain_number(value: Any) -> Any:
    """A value of a group: of a tensor of one element the number, of a list a tuple."""
    if isinstance(value, tuple | list):
        return tuple(map(plain_number, value))
    return value.item() if isinstance(value, Tensor) else value
