"""`from_torch_model_`: SambaFlow's attributes of a PyTorch model, `model.name`, `parameter.sn_name`, `model.run`."""

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

    `model.name` is the lower-case name of its class (`"logreg"`), after `parent_module_prefix` and `__` if that is
    given; a parameter's `sn_name` is its symbol in a PEF (`"logreg__lin_layer__weight"`), by the first of its paths.
    `model.run(inputs, …)` is `session.run`, unless its class has a `run` or it is part of another model.
    Raises ModelError if it is no model, or has a tensor or module `name`.
    """
    if not isinstance(model, nn.Module):
        raise ModelError(
            f"an nn.Module is needed, not {type(model).__name__}",
            remedy="samba.from_torch_tensor(tensor, name=…) for a tensor",
        )
    own = type(unwrapped(model)).__name__.lower()
    prefix = own if parent_module_prefix is None else f"{parent_module_prefix}__{own}"
    try:
        model.name = prefix  # type: ignore[assignment]  # torch declares attributes as tensors and modules
    except (AttributeError, TypeError) as error:
        raise ModelError(
            f"the model {type(model).__name__} has an attribute name, which SambaFlow sets",
            remedy="give that parameter, buffer, module or property another name",
        ) from error
    names = UniqueNames()
    names.take(loss_name(prefix), GRADIENT_SUFFIX)  # so that no parameter has the name of the loss
    for path, parameter in unwrapped(model).named_parameters():
        symbol = names.take(symbol_name(prefix, path), GRADIENT_SUFFIX)
        parameter.sn_name = symbol  # type: ignore[attr-defined]  # SambaFlow's attribute
    if parent_module_prefix is None:
        add_old_methods(model)
    return model


def add_old_methods(model: nn.Module) -> None:
    """Adds methods that old apps call: `run`, which is `session.run`; `cpu` and `write_host_params`, which also fetch
    the weights from the device. Methods and attributes of the model itself stay."""
    for name, method in (("run", _run), ("cpu", _cpu), ("write_host_params", _write_host_params)):
        is_free = not hasattr(model, name) or getattr(type(model), name, None) is getattr(nn.Module, name, method)
        if is_free and name not in {**vars(model), **model._modules, **model._parameters, **model._buffers}:
            vars(model)[name] = partial(method, model)


def _run(model: nn.Module, *inputs: Any, **options: Any) -> Any:
    """`session.run`, with the inputs as one sequence or one by one. Syncs gradients as the command line says. Raises
    OptionError if `model` is not loaded."""
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
