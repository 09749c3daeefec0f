"""Models: `from_torch_model_` sets SambaFlow's names and methods, `install_attributes` those of all tensors;
`lazy_param` and `materialize` give memory later."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from sambasim.compiler.capture.tensors import held_by
from sambasim.compiler.capture.trial import with_values
from sambasim.compiler.names import UniqueNames, loss_name, symbol_name
from sambasim.errors import ModelError, OptionError
from sambasim.ir.types import GRADIENT_SUFFIX
from sambasim.samba.device import Machine
from sambasim.samba.notices import checks_keywords, say_once
from sambasim.samba.process import app_error, current, type_error
from sambasim.samba.request import unwrapped
from sambasim.samba.session import session
from sambasim.samba.tensor import MATERIALIZER, SambaTensor, made_by, no_data, of_shape

__all__ = ["lazy_param", "materialize"]

M = TypeVar("M", bound=nn.Module)


@checks_keywords("samba.from_torch_model_")
def from_torch_model_(model: M, parent_module_prefix: str | None = None) -> M:
    """Names `model` and its parameters, in place, and returns it. `model.name` is the lower-case name of its class
    (`"logreg"`), after `parent_module_prefix` and `__`; a parameter's `sn_name` is its symbol in a PEF
    (`"logreg__lin_layer__weight"`). A model that is no part also gets `run`. Raises ModelError if it is no model, or
    has a tensor or module `name`."""
    if not isinstance(model, nn.Module):
        raise type_error(ModelError, "an nn.Module is needed", model, "samba.from_torch_tensor(tensor, name=…)")
    prefix = type(unwrapped(model)).__name__.lower()
    if parent_module_prefix is not None:
        prefix = f"{parent_module_prefix}__{prefix}"
    try:
        model.name = prefix  # type: ignore[assignment]  # torch declares attributes as tensors and modules
    except (AttributeError, TypeError) as error:
        what = f"the model {type(model).__name__} has an attribute name, which SambaFlow sets"
        raise ModelError(what, remedy="give that parameter, buffer, module or property another name") from error
    names = UniqueNames()
    names.take(loss_name(prefix), GRADIENT_SUFFIX)  # so that no parameter has the name of the loss
    for held in held_by(unwrapped(model)):
        if held.is_parameter:
            vars(held.tensor)["sn_name"] = names.take(symbol_name(prefix, held.name), GRADIENT_SUFFIX)
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
    """`session.run`, with the inputs as one sequence or one by one, and sync as the command line says."""
    session.loaded(model)
    if "inputs" in options:
        inputs = (options.pop("inputs"),)
    for flag in ("data_parallel", "reduce_on_rdu"):
        options.setdefault(flag, bool(current().flag(flag)))
    one_by_one = isinstance(next(iter(inputs), None), Tensor) and all(isinstance(one, Tensor | None) for one in inputs)
    return session.run(inputs, **options) if one_by_one else session.run(*inputs, **options)


def _write_host_params(model: nn.Module) -> None:
    if session.machine is not None and session.machine.model is unwrapped(model):
        session.to_cpu(model)


def _cpu(model: M) -> M:
    _write_host_params(model)
    return nn.Module.cpu(model)


Part = TypeVar("Part", nn.Module, SambaTensor, nn.Parameter)


@checks_keywords()
@contextmanager
def lazy_param(quantized: bool = False) -> Iterator[None]:
    """Within it, parameters and random tensors that a model makes are lazy: they have a shape and a dtype on torch's
    device `meta`, and no random number is drawn. Tensors that a constructor computes, and parameters of them, have
    their values. `quantized` has no effect."""
    if quantized:
        say_once("lazy_param(quantized=True)", "parameters keep the dtype that the model gives them")
    kept = nn.Parameter.__new__

    def new(cls: type, data: Tensor | None = None, requires_grad: bool = True) -> nn.Parameter:
        is_lazy = data is not None and getattr(data, _UNIFORM, None) == data._version
        return kept(cls, data.to("meta") if data is not None and is_lazy else data, requires_grad)

    with with_values([(nn.Parameter, "__new__", new)]), _Lazy():
        yield


_UNIFORM = "_sambasim_uniform"  # the version of a tensor that is filled as it is made, mostly to be set later
_RANDOM = {torch.normal, torch.rand, torch.randint, torch.randn, torch.randperm}
_UNSET = {torch.empty, torch.empty_permuted, torch.empty_strided, *_RANDOM}


class _Lazy(TorchFunctionMode):
    """Makes unset and random tensors lazy, and marks those of one value, which are lazy once they are parameters."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = dict(kwargs or {})
        if func in _UNSET and options.get("device") is None:
            options["device"] = "meta"
        made = func(*args, **options)
        if func in (torch.zeros, torch.ones, torch.full):
            setattr(made, _UNIFORM, made._version)
        return made


def materialize(lazy: Part) -> Part:
    """Gives lazy parameters and buffers memory on the host and their initial values, in place; returns `lazy`. Calls
    `reset_parameters` of each layer with lazy tensors, inner layers first; of a layer without tensors of its own only
    if all below it is lazy. Then calls the `materializer` of each SambaParameter; or that of a single one, or of a lazy
    SambaTensor. What else a constructor does, by `nn.init` or `apply`, is not repeated. Raises ModelError for a layer
    with lazy tensors that has no `reset_parameters`, and WeightsError for a lazy tensor without a materializer."""
    if isinstance(lazy, Tensor):
        if lazy.is_meta:
            if MATERIALIZER not in vars(lazy):
                raise no_data(lazy, vars(lazy).get("sn_name"))
            real = _with_memory(lazy)
            _fill(real)
            torch.utils.swap_tensors(lazy, real)  # type: ignore[no-untyped-call]  # torch's, untyped
        return lazy
    if not hasattr(type(lazy), "__enter__"):
        # `with` finds these methods in the class only, and materialize must return the model itself.
        type(lazy).__enter__ = lambda model: model  # type: ignore[attr-defined]  # a new method of the app's class
        type(lazy).__exit__ = lambda model, *error: None  # type: ignore[attr-defined]  # likewise
    lazy_modules, resets = [], []
    for path, module in _parts_first(lazy, "", set()):
        lazy_tensors = [tensor for tensor in _own_tensors(module).values() if tensor.is_meta]
        below = [parameter.is_meta for parameter in module.parameters()]
        if lazy_tensors or (below and all(below)):
            lazy_modules.append(module)
            # torch has two names for the method.
            reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
            if reset is not None:
                resets.append(reset)
            elif not all(MATERIALIZER in vars(tensor) for tensor in lazy_tensors):
                remedy = "give the class a method reset_parameters that fills its parameters and buffers, or make it "
                remedy += "outside lazy_param, or load_state_dict(…, assign=True) first"
                what = f"{path or type(lazy).__name__} is a lazy {type(module).__name__}, which has no reset_parameters"
                raise app_error(ModelError, what, remedy)
    made: dict[int, Tensor] = {}  # parameters that two layers share stay shared
    given = [tensor for layer in lazy_modules for tensor in _give_memory(layer, made)]
    for reset in resets:
        reset()
    for tensor in given:
        if MATERIALIZER in vars(tensor):
            _fill(tensor)
    return lazy


def _fill(tensor: Tensor) -> None:
    """Gives `tensor` the values of its materializer."""
    materializer = vars(tensor).pop(MATERIALIZER)
    made = made_by(materializer, lambda: SambaTensor(tensor.detach(), name=vars(tensor).get("sn_name")))
    with torch.no_grad():
        tensor.copy_(of_shape(tensor, made))


def _parts_first(module: nn.Module, path: str, seen: set[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """Each module once, after its parts: MultiheadAttention changes the initial values of its Linear."""
    if module in seen:
        return
    seen.add(module)
    for name, part in module.named_children():  # `Module.apply` would call a part's own method of that name
        yield from _parts_first(part, f"{path}.{name}" if path else name, seen)
    yield path, module


def _own_tensors(module: nn.Module) -> dict[str, Tensor]:
    own = {**module._parameters, **module._buffers}
    return {name: tensor for name, tensor in own.items() if tensor is not None}


def _give_memory(module: nn.Module, made: dict[int, Tensor]) -> Iterator[Tensor]:
    """Replaces the lazy tensors of the layer by unset ones with memory, which it yields."""
    for name, tensor in _own_tensors(module).items():
        if tensor.is_meta:
            if id(tensor) not in made:
                made[id(tensor)] = _with_memory(tensor)
            # By setattr, because an LSTM also keeps a list of its weights.
            setattr(module, name, made[id(tensor)])
            yield made[id(tensor)]


def _with_memory(lazy: Tensor) -> Tensor:
    """An unset tensor of this shape with its attributes: sn_name and the materializer."""
    is_real = lazy.is_floating_point() or lazy.is_complex()
    # NaN, so that what no reset sets shows in the loss; 0 in integers, and for a materializer.
    real = torch.full_like(lazy, torch.nan if is_real and MATERIALIZER not in vars(lazy) else 0, device="cpu")
    if isinstance(lazy, nn.Parameter):
        real = nn.Parameter(real, lazy.requires_grad)
    vars(real).update(vars(lazy))
    return real


def install_attributes() -> None:
    """Gives `torch.Tensor`, and so parameters, SambaFlow's attributes."""
    on_outputs = "set sn_grad on an output: from it, session.run computes the gradients"
    on_host = "param.data.copy_(…), and then samba.session.to_device(model)"
    tensor: Any = Tensor
    tensor.torch = tensor.torch_tensor = lambda tensor: tensor
    tensor.sn_grad = _attribute("sn_grad", Machine.gradient, lambda _: None, lambda _, given: given, on_outputs)
    tensor.sn_data = _attribute("sn_data", Machine.value, Tensor.detach, of_shape, on_host)
    tensor.sn_name = None


def _attribute(
    name: str,
    on_device: Callable[[Machine, Tensor], Tensor | None],
    otherwise: Callable[[Tensor], Tensor | None],
    checked: Callable[[Tensor, Any], Tensor | None],
    remedy: str,
) -> property:
    """Of a tensor of the loaded model the value `on_device`, which cannot be assigned; of another tensor what the app
    assigned, once it is `checked`, or `otherwise`."""
    key = f"_assigned_{name}"

    def value(tensor: Tensor) -> Tensor | None:
        of_machine = None if session.machine is None else on_device(session.machine, tensor)
        assigned: Tensor | None = vars(tensor).get(key) if of_machine is None else of_machine
        return otherwise(tensor) if assigned is None else assigned

    def assign(tensor: Tensor, given: Any) -> None:
        if session.machine is not None and session.machine.value(tensor) is not None:
            what = f"{name} of a parameter or buffer of the loaded model is on the device, and cannot be assigned"
            raise app_error(OptionError, what, remedy)
        vars(tensor)[key] = checked(tensor, given)

    return property(value, assign)
