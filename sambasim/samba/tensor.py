"""SambaTensor, a torch tensor with a name and a batch dimension; and SambaFlow's attributes of every torch tensor.

Results of operators are SambaTensors. Other forms of a tensor (`x.float()`, `x.clone()`, `x.detach()`) keep its name
and batch_dim; new values (`x + 1`, `x.mean()`, `x[:4]`) have none.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Real
from typing import Any, NoReturn, TypeAlias, TypeVar, cast

import numpy as np
import torch
from torch import Tensor
from torch._C import TensorBase
from torch.overrides import get_default_nowrap_functions
from torch.utils._pytree import tree_leaves, tree_map

from sambasim.compiler.capture.trial import is_tracing
from sambasim.errors import DataError, OptionError, WeightsError
from sambasim.samba.notices import AbsentNameError, checks_keywords
from sambasim.samba.process import app_error, type_error

__all__ = ["SambaTensor", "from_named_dict", "from_torch_tensor", "to_torch"]

Dtype: TypeAlias = torch.dtype  # in the class below, `torch` is a method
Materializer: TypeAlias = Callable[..., Tensor | None]
"""A function that returns a tensor; or takes the tensor to fill, and returns it, another or None."""
Outputs = TypeVar("Outputs", Tensor, tuple[Tensor, ...], list[Tensor])

MATERIALIZER = "sn_materializer"
"""The attribute of a lazy tensor with the function that makes its values."""

_DESCRIPTION = (
    "sn_name", "batch_dim", "named_dims", "sized_dims", "region_name", "host_memory", "mem_type", "_sn_grads",
)  # fmt: skip


class SambaTensor(Tensor):
    """It shares memory with the tensor that it is made from."""

    sn_name: str | None = None
    """The name by which a session binds inputs; `name` is the same attribute."""
    batch_dim: int | None = None
    """The dimension that counts samples. `named_dims` to `mem_type` are without effect, for the app to read."""
    named_dims: tuple[str, ...] | None = None
    sized_dims: object = None
    region_name: str | None = None
    host_memory: bool = True
    mem_type: object = None
    _sn_grad: Tensor | None = None
    _sn_grads: dict[str, Tensor] | None = None
    """On an output of a session, and on `float()` of it: the session's gradients of outputs, by name."""
    _version_when_made: int | None = None

    @checks_keywords("samba.SambaTensor")
    def __new__(
        cls,
        torch_tensor: Tensor | None = None,
        shape: Sequence[int] | None = None,
        dtype: Dtype | None = None,
        name: str | None = None,
        batch_dim: int | None = None,
        named_dims: Iterable[str] | None = None,
        sized_dims: object = None,
        materializer: Materializer | None = None,
        is_complex: bool | None = None,
        region_name: str | None = None,
    ) -> "SambaTensor":
        """Makes a SambaTensor from a tensor, whose memory is shared unless `dtype` is another; by the `materializer`;
        or of zeros in a `shape`, with `has_data` False until it is written to. A materializer that takes an argument is
        given such zeros to fill. Within `lazy_param` the last two have no data until `sn_data` is assigned, or
        `samba.materialize` calls the materializer. Raises DataError for what is no tensor or complex, and for another
        shape or a dimension that it does not have."""
        given = torch_tensor
        is_lazy = shape is not None and torch.empty(0).is_meta
        if given is None and materializer is not None and not is_lazy:
            given = made_by(materializer, lambda: cls(shape=shape, dtype=dtype, name=name))
        if isinstance(given, tuple | list):
            raise _no_tensor(given)
        if given is None and shape is None:
            remedy = "SambaTensor(torch.zeros(4, 3)) or SambaTensor(shape=(4, 3))"
            raise DataError("SambaTensor needs a tensor or a shape", remedy=remedy)
        if given is None:
            with torch.inference_mode(False):  # inference tensors have no version counter
                plain = torch.zeros(tuple(shape or ()), dtype=dtype, device="meta" if is_lazy else None)
        else:
            plain = to_torch(given) if dtype is None else to_torch(given).to(dtype)
            if shape is not None and tuple(shape) != tuple(plain.shape):
                what = f"the tensor has the shape {tuple(plain.shape)}, and shape= is {tuple(shape)}"
                raise DataError(what, remedy="leave out shape=, or reshape the tensor")
        if is_complex or plain.is_complex():
            what = f"a SambaTensor holds real numbers, and {_called(name)} is complex"
            raise DataError(what, remedy="torch.view_as_real(tensor), whose last dimension holds the two parts")
        if batch_dim is not None and not -plain.ndim <= batch_dim < plain.ndim:
            what = f"{_called(name)} has no dimension {batch_dim}: its shape is {tuple(plain.shape)}"
            raise DataError(what, remedy="batch_dim is the dimension of samples, mostly 0; leave it out where none is")
        tensor = plain.as_subclass(cls)
        if isinstance(given, SambaTensor):
            tensor._copy_description(given)
        elif given is None:
            tensor._version_when_made = tensor._version
        if materializer is not None and tensor.is_meta:
            vars(tensor)[MATERIALIZER] = materializer
        dims = None if named_dims is None else tuple(named_dims)
        described = zip(_DESCRIPTION, (name, batch_dim, dims, sized_dims, region_name), strict=False)
        vars(tensor).update({attribute: value for attribute, value in described if value is not None})
        return tensor

    def with_data(self, data: Tensor, name: str) -> "SambaTensor":
        """`data`, a plain tensor of this one's shape, as a SambaTensor `name` with its batch_dim and `sn_grad`."""
        tensor = data.as_subclass(SambaTensor)
        tensor.sn_name, tensor.batch_dim, tensor._sn_grads = name, self.batch_dim, self._sn_grads
        return tensor

    def _copy_description(self, other: Tensor) -> None:
        vars(self).update({name: value for name, value in vars(other).items() if name in _DESCRIPTION})

    def backward(self, *args: Any, **keywords: Any) -> None:
        """As torch's; OptionError for a tensor without a graph, such as a result of the device."""
        if not self.requires_grad:
            what = f"backward() of {_called(self.sn_name)}: the host has no autograd graph of a result of session.run"
            remedy = "leave out backward(), optimizer.step() and section_types: session.run does both itself"
            raise app_error(OptionError, what, remedy)
        super().backward(*args, **keywords)  # type: ignore[no-untyped-call]  # torch has no types for it

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if not all(issubclass(cls, one) for one in types):
            return NotImplemented  # another class of tensors may know what it means
        kwargs = kwargs or {}
        try:
            with torch._C.DisableTorchFunctionSubclass():
                result = func(*args, **kwargs)
        except (IndexError, RuntimeError, TypeError) as error:
            if func in _OF_ELEMENTS and isinstance(args[0], SambaTensor) and _is_single_output(args[0]):
                return func(args[0].reshape(1), *args[1:], **kwargs)
            if longer := _short_as_long(func, (args, kwargs)):
                return func(*longer[0], **longer[1])
            lazy = next((one for one in tree_leaves((args, kwargs)) if isinstance(one, cls) and one.is_meta), None)
            if lazy is not None and "meta" in str(error):
                raise no_data(lazy, lazy.sn_name) from error
            raise
        is_written = kwargs.get("out") is not None or any(result is one for one in args)
        if is_written or func in get_default_nowrap_functions():  # what is written to stays what it is
            return result
        result = torch._tensor._convert(result, cls)  # type: ignore[no-untyped-call]  # torch's, untyped
        if func in _OTHER_FORMS and isinstance(result, SambaTensor):
            result._copy_description((*args, *kwargs.values())[0])
        return result

    name = property(lambda self: self.sn_name, lambda self, name: setattr(self, "sn_name", name))
    sn_region_name = property(lambda self: self.region_name, lambda self, name: setattr(self, "region_name", name))

    dsts = property(lambda self: _no_graph("dsts"))
    inputs = property(lambda self: _no_graph("inputs"))

    @property
    def has_data(self) -> bool:
        """False for a tensor that was made from a shape alone and not written to since."""
        return self._version_when_made is None or self._version != self._version_when_made

    @property
    def sn_data(self) -> Tensor:
        """The detached plain tensor, in the same memory; WeightsError for a lazy tensor to which nothing was assigned.
        Assigning copies values into it, and raises DataError for another shape."""
        return host_values(self)

    @sn_data.setter
    def sn_data(self, data: Tensor) -> None:
        plain = of_shape(self, data)
        if self.is_meta:
            real = plain.detach().to(self.dtype, copy=True).as_subclass(SambaTensor)
            real._copy_description(self)
            torch.utils.swap_tensors(self, real)  # type: ignore[no-untyped-call]  # torch's, untyped
        else:
            self.torch().detach().copy_(plain)

    @property
    def sn_grad(self) -> Tensor | None:
        """The gradient as a plain tensor. On an output, backwards start from it until it is set again. A number may be
        assigned too."""
        return self._sn_grad if self._sn_grads is None else self._sn_grads.get(str(self.sn_name))

    @sn_grad.setter
    def sn_grad(self, gradient: Tensor | float | None) -> None:
        if isinstance(gradient, Real):
            gradient = torch.tensor(float(gradient), dtype=self.dtype)
        plain = to_torch(gradient).detach() if isinstance(gradient, Tensor) else None
        if self._sn_grads is None:
            self._sn_grad = plain
        elif plain is not None:
            self._sn_grads[str(self.sn_name)] = plain
        else:
            self._sn_grads.pop(str(self.sn_name), None)

    def rdu(self) -> "SambaTensor":
        """This tensor: `session.run` copies inputs to the device."""
        return self

    def numpy(self, *, force: bool = False) -> np.ndarray[Any, Any]:
        """An array in the same memory, detached; of a bfloat16 tensor a copy in float32."""
        plain = host_values(self)
        return (plain.float() if plain.dtype is torch.bfloat16 else plain).numpy(force=force)

    def new_empty(self, *arguments: Any, **options: Any) -> Any:
        """As torch's; `copy.deepcopy` requires a SambaTensor."""
        return super().new_empty(*arguments, **options).as_subclass(SambaTensor)

    def __iter__(self) -> Any:
        return Tensor.__iter__(self.reshape(1) if _is_single_output(self) else self)  # type: ignore[no-untyped-call]  # torch's

    def torch(self) -> Tensor:
        """This tensor as a plain one, in the same memory and the same autograd graph."""
        return to_torch(self)

    torch_tensor = torch

    def __format__(self, format_spec: str) -> str:
        return format(self.torch(), format_spec)

    def __repr__(self) -> str:  # type: ignore[override]  # torch's takes `tensor_contents`, for its own subclasses
        name = "" if self.sn_name is None else f"name={self.sn_name!r}, "
        described = f"{name}shape={tuple(self.shape)}, dtype={self.dtype}, batch_dim={self.batch_dim}"
        return f"SambaTensor({self.torch().detach()!r}, {described})"


_OTHER_FORMS = {
    Tensor.to, Tensor.type, Tensor.type_as,
    Tensor.bfloat16, Tensor.half, Tensor.float, Tensor.double,
    Tensor.bool, Tensor.char, Tensor.byte, Tensor.short, Tensor.int, Tensor.long,
    Tensor.clone, Tensor.contiguous, Tensor.detach, Tensor.pin_memory, vars(TensorBase)["data"].__get__,
    torch.clone, torch.detach,
}  # fmt: skip

_OF_ELEMENTS = {Tensor.__getitem__, Tensor.__setitem__, Tensor.__len__, Tensor.size}


def _is_single_output(tensor: SambaTensor) -> bool:
    """Whether it is a result of a session without dimensions: apps also take such a loss as a tensor of 1 element."""
    return tensor._sn_grads is not None and tensor.ndim == 0


def _short_as_long(function: Callable[..., Any], given: Any) -> Any:
    """Arguments by position and by keyword with int16 SambaTensors as int64, which a session computes them as and torch
    needs for indices and labels; None without any. The first of `add_`, which is written to, is left as it is."""
    written = given[0][:1] if function.__name__.endswith("_") else ()
    short = {id(one) for one in tree_leaves(given) if isinstance(one, SambaTensor) and one.dtype is torch.int16}
    short -= {id(one) for one in written}
    return tree_map(lambda one: one.long() if id(one) in short else one, given) if short else None


# torch.load reads checkpoints that contain SambaTensors.
torch.serialization.add_safe_globals([SambaTensor])


def made_by(materializer: Materializer, unset: Callable[[], Tensor]) -> Tensor:
    """What a materializer makes. If it takes arguments without defaults, it is called with the tensor `unset()`, and
    may return None once that is filled. Raises DataError if it returns no tensor."""
    try:
        parameters = inspect.signature(materializer).parameters.values()
        takes_one = any(one.kind <= one.VAR_POSITIONAL and one.default is one.empty for one in parameters)
    except ValueError:  # functions and methods of torch: torch.randn_like takes a tensor, values.clone has one
        takes_one = getattr(materializer, "__self__", materializer) is None
    tensors = [unset()] if takes_one else []
    with torch.no_grad():
        made = materializer(*tensors)
    return to_torch(cast(Tensor, tensors[0] if made is None and tensors else made))


@checks_keywords("samba.from_torch_tensor")
def from_torch_tensor(
    tensor: Tensor,
    name: str | None = None,
    batch_dim: int | None = None,
    named_dims: Iterable[str] | None = None,
    sized_dims: object = None,
    region_name: str | None = None,
) -> SambaTensor:
    """`tensor` as a SambaTensor in the same memory; in a forward that is being traced, `tensor` itself. Raises
    DataError if it is no tensor, if it is complex, or if it has no dimension `batch_dim`."""
    if is_tracing():
        return cast(SambaTensor, tensor)
    return SambaTensor(tensor, None, None, name, batch_dim, named_dims, sized_dims, region_name=region_name)


def from_named_dict(tensors: Mapping[str, Tensor]) -> dict[str, SambaTensor]:
    """Each tensor as a SambaTensor named by its key, in the same memory."""
    return {name: from_torch_tensor(tensor, name=name) for name, tensor in tensors.items()}


def to_torch(tensor: Outputs) -> Outputs:
    """A tensor, or a tuple or list of tensors, as plain ones in the same memory and the same autograd graph. Raises
    DataError for anything else."""
    if isinstance(tensor, Tensor):
        return tensor.as_subclass(Tensor) if isinstance(tensor, SambaTensor) else tensor
    if isinstance(tensor, tuple):
        return tuple(map(to_torch, tensor))
    if isinstance(tensor, list):
        return list(map(to_torch, tensor))
    raise _no_tensor(tensor)


def host_values(tensor: Tensor, name: str | None = None) -> Tensor:
    """The detached plain tensor, in the same memory. Raises WeightsError for a lazy SambaTensor, which has no data."""
    if isinstance(tensor, SambaTensor) and tensor.is_meta:
        raise no_data(tensor, name or tensor.sn_name)
    return to_torch(tensor).detach()


def no_data(lazy: Tensor, name: str | None) -> WeightsError:
    what = f"{_called(name)} was made in lazy_param, and has no data"
    remedy = "assign its sn_data, or make it outside lazy_param"
    if MATERIALIZER in vars(lazy):
        remedy = "samba.materialize(tensor), which calls its materializer"
    return app_error(WeightsError, what, remedy)


def _no_tensor(value: object) -> DataError:
    remedy = "torch.as_tensor(…) makes one of numbers, lists and arrays"
    if isinstance(value, torch.nn.Module):
        remedy = "samba.from_torch_model_(model) for a model"
    elif isinstance(value, tuple) and any(isinstance(one, Tensor) for one in value):
        remedy = f"give one of them: session.run returns all {len(value)} outputs, as loss, logits = session.run(…)"
    return type_error(DataError, "a tensor is needed", value, remedy)


def _no_graph(name: str) -> NoReturn:
    what = f"a SambaTensor has no {name} here: it is part of SambaFlow's compiler graph"
    raise app_error(AbsentNameError, what, "sambasim inspect lists the operators of a PEF with operands and results")


def _called(name: str | None) -> str:
    return "the tensor" if name is None else f"the tensor {name}"


def of_shape(tensor: Tensor, data: Tensor) -> Tensor:
    """`data` as a plain tensor. Raises DataError for another shape than that of `tensor`."""
    plain = to_torch(data)
    if plain.shape != tensor.shape:
        shapes = f"the shape {tuple(tensor.shape)}, and the data the shape {tuple(plain.shape)}"
        what = f"{_called(tensor.sn_name if isinstance(tensor, SambaTensor) else None)} has {shapes}"
        raise app_error(DataError, what, "give data of the tensor's own shape")
    return plain
