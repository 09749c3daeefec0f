"""SambaFlow's names on a PyTorch model: `model.name`, `parameter.sn_name`, and `model.run` of older apps."""

from functools import partial
from typing import Any, TypeVar

from torch import Tensor, nn

from sambasim.compiler.names import GRADIENT_SUFFIX, UniqueNames, loss_name, symbol_name
from sambasim.errors import ModelError
from sambasim.samba import context
from sambasim.samba.checks.keywords import checks_keywords_beside
from sambasim.samba.request import unwrapped
from sambasim.samba.session import session

M = TypeVar("M", bound=nn.Module)


@checks_keywords_beside("samba.from_torch_model_", ())
def from_torch_model_(model: M, parent_module_prefix: str | None = None) -> M:
    """Names `model` and its parameters, in place, and returns it.

    `model.name` is the lower-cased name of its class (`"logreg"`), behind `parent_module_prefix` and `__` if that is
    given; a parameter's `sn_name` is the symbol that a PEF has for it (`"logreg__lin_layer__weight"`). A parameter that
    has several paths is named by the first. `model.run(inputs, …)` is `session.run` for this model, unless its class
    has a `run` of its own, or it is part of another model.
    Raises ModelError if it is no model, or has a tensor or module `name`.
    """
    if not isinstance(model, nn.Module):
        raise ModelError(
            f"this must be an nn.Module, and it is of type {type(model).__name__}",
            remedy="samba.from_torch_tensor(tensor, name=…) for a tensor",
        )
    own = type(unwrapped(model)).__name__.lower()
    prefix = own if parent_module_prefix is None else f"{parent_module_prefix}__{own}"
    try:
        model.name = prefix  # type: ignore[assignment]  # torch says that attributes are tensors and modules
    except (AttributeError, TypeError) as error:
        raise ModelError(
            f"the model {type(model).__name__} has something called name, where SambaFlow keeps its own name",
            remedy="give that parameter, buffer, module or property another name",
        ) from error
    names = UniqueNames()
    names.take(loss_name(prefix), GRADIENT_SUFFIX)  # no parameter gets the name of the loss
    for path, parameter in unwrapped(model).named_parameters():
        symbol = names.take(symbol_name(prefix, path), GRADIENT_SUFFIX)
        parameter.sn_name = symbol  # type: ignore[attr-defined]  # SambaFlow's name, which torch does not know
    if parent_module_prefix is None:
        add_old_methods(model)
    return model


def add_old_methods(model: nn.Module) -> None:
    """What old apps call on a model: `run`, which is `session.run`; `cpu` and `write_host_params`, which also bring the
    weights from the device. A method that the model's own class has stays as it is."""
    for name, method in (("run", _run), ("cpu", _cpu), ("write_host_params", _write_host_params)):
        is_free = not hasattr(model, name) or getattr(type(model), name, None) is getattr(nn.Module, name, method)
        if is_free and name not in {**vars(model), **model._modules, **model._parameters, **model._buffers}:
            vars(model)[name] = partial(method, model)


def _run(model: nn.Module, *inputs: Any, **options: Any) -> Any:
    """`session.run`, with the inputs as one sequence or one by one. It has no keyword for sync, so the command line
    says whether and how gradients are synced. Raises OptionError where `model` is not what the session has loaded."""
    session.program(model)
    if "inputs" in options:
        inputs = (options.pop("inputs"),)
    typed = context.current().arguments
    for flag in ("data_parallel", "reduce_on_rdu"):
        options.setdefault(flag, bool(getattr(typed, flag, False)))
    if len(inputs) > 1 and all(isinstance(one, Tensor) for one in inputs):
        return session.run(inputs, **options)
    return session.run(*inputs, **options)


def _cpu(model: M) -> M:
    """nn.Module.cpu, after `session.to_cpu` if the session has loaded `model`."""
    _write_host_params(model)
    return nn.Module.cpu(model)


def _write_host_params(model: nn.Module) -> None:
    """`session.to_cpu`, if the session has loaded `model`."""
    if session.machine is not None and session.machine.model is unwrapped(model):
        session.to_cpu(model)
