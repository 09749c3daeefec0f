"""What a PEF takes of an optimizer of torch: the options of its groups. One whose step is the user's own is refused."""

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import torch.optim.optimizer as torch_optimizer
from torch import Tensor

from sambasim.compiler.capture.recording import line_of
from sambasim.errors import OptionError
from sambasim.optimizers import FORM_OF_OWN, OPTIMIZERS
from sambasim.options.base import build
from sambasim.options.training import OptimizerOptions

NOT_IN_A_PEF: Mapping[str, str] = {"differentiable": "leave it out", "initial_accumulator_value": "leave it out"}
"""Options of torch's optimizers that a PEF does not have, with remedies."""

_LIBRARIES = ("torch.", "sambasim.", "typing_extensions")


def refuse_changed_step(optimizer: torch_optimizer.Optimizer, name: str) -> None:
    """Raises OptionError if a step of `optimizer`, which users call `name`, does more or other than that of the class
    in torch: for a hook, and for a method that was replaced in the object, in a class of the user's, or in torch's."""
    hooks = {**vars(torch_optimizer), **vars(optimizer)}
    for kind in (name for name in hooks if name.endswith("_hooks")):
        for hook in hooks[kind].values():
            if not is_of_a_library(hook):
                words = kind.replace("_global_optimizer", "_step").removeprefix("_optimizer").removesuffix("s")
                what = f"{name} has a{words.replace('_', ' ')}, {_called(hook)}, which a run does not call"
                remedy = "remove it: handle.remove(); to clip gradients give max_grad_norm=1.0"
                raise OptionError(what, where=_line_of(hook), remedy=remedy)
    library = next(kind for kind in type(optimizer).__mro__ if kind.__module__.startswith(_LIBRARIES))
    for method, function in _methods(optimizer):
        if hasattr(library, method) and not is_of_a_library(function):
            what = f"{method} of {name} is not torch's, but {_called(function)}, which a run does not call"
            remedy = f"{name}(model.parameters(), …) as it is, or write its update: {FORM_OF_OWN}"
            raise OptionError(what, where=_line_of(function), remedy=remedy)


def _methods(optimizer: torch_optimizer.Optimizer) -> Iterator[tuple[str, Any]]:
    """Name and function of each method, without those of Python's protocols."""
    for attributes in (vars(optimizer), *map(vars, type(optimizer).__mro__)):
        for name, value in attributes.items():
            if callable(value) and not name.startswith("__") and not hasattr(value, "__origin__"):  # no alias of a type
                yield name, value


def is_of_a_library(function: Any) -> bool:
    """Whether torch or sambasim has written `function`, and what it wraps."""
    function = getattr(function, "__func__", function)  # of a method
    wrapped, names = getattr(function, "__wrapped__", None), getattr(function, "__globals__", {})
    return str(names.get("__name__")).startswith(_LIBRARIES) and (wrapped is None or is_of_a_library(wrapped))


def _called(function: Any) -> str:
    return getattr(function, "__qualname__", f"a {type(function).__name__}")


def _line_of(function: Any) -> str | None:
    """File, line and code where `function` begins; None if it was not written in Python."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return None if code is None else line_of(code.co_filename, code.co_firstlineno)


def options_of_group(
    kind: str, group: Mapping[str, Any], where: str, max_grad_norm: float | None = None
) -> OptimizerOptions:
    """Raises OptionError for an option that a PEF's optimizer does not have, and for values out of range."""
    for option, remedy in NOT_IN_A_PEF.items():
        if group.get(option):
            raise OptionError(f"the optimizer of a PEF does not have {option}", where=where, remedy=remedy)
    if kind == "adam" and group.get("decoupled_weight_decay"):
        remedy = f"{where.partition(',')[0].rpartition('.')[0]}.AdamW"
        raise OptionError("Adam with decoupled_weight_decay is AdamW", where=where, remedy=remedy)
    values = {field: plain_number(group[field]) for field in OPTIMIZERS[kind].defaults}
    numbers = {field: float(value) if type(value) is int else value for field, value in values.items()}
    return build(OptimizerOptions, {"name": kind, **numbers, "max_grad_norm": max_grad_norm}, where=where)


def plain_number(value: Any) -> Any:
    """A value of a group: of a tensor of one element the number, of a list a tuple."""
    if isinstance(value, tuple | list):
        return tuple(map(plain_number, value))
    return value.item() if isinstance(value, Tensor) else value
