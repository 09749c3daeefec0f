"""SambaTensor: a torch tensor that knows its name and which of its dimensions counts samples.

It is a `torch.Tensor` in every respect: arithmetic, `mean()`, `backward()`, printing with a format and saving work, and
what is computed from a SambaTensor is one. Two kinds of results are told apart:

    the same tensor in another form   `x.float()`, `x.clone()`, `x.detach()` …   keeps name, batch_dim and the rest
    a new value                       `x + 1`, `x.mean()`, `x[:4]` …             has none of them
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Real
from typing import Any, TypeAlias, TypeVar, cast

import numpy as np
import torch
from torch import Tensor
from torch._C import TensorBase

from sambasim.errors import DataError, OptionError
from sambasim.samba.absent import AbsentNameError
from sambasim.samba.checks.keywords import checks_keywords_beside
from sambasim.samba.checks.place import app_line

Dtype: TypeAlias = torch.dtype  # in the class below, `torch` is a method
Outputs = TypeVar("Outputs", Tensor, tuple[Tensor, ...], list[Tensor])

_DESCRIPTION = (
    "sn_name", "batch_dim", "named_dims", "sized_dims", "region_name", "host_memory", "mem_type", "_sn_grads",
)  # fmt: skip


class SambaTensor(Tensor):
    """A tensor with a name and a batch dimension, which shares memory with the tensor that it is made from.

    sn_name       what inputs of a session are bound by; `name` is the same attribute
    batch_dim     the dimension that counts samples, or None
    named_dims    a word for each dimension, or None
    sized_dims, region_name, host_memory, mem_type
                  what an app says about the place of the tensor. They are kept for the app to read; here every tensor
                  that an app holds lies in the memory of its process.
    """

    sn_name: str | None = None
    batch_dim: int | None = None
    named_dims: tuple[str, ...] | None = None
    sized_dims: object = None
    region_name: str | None = None
    host_memory: bool = True
    mem_type: object = None
    _sn_grad: Tensor | None = None
    _sn_grads: dict[str, Tensor] | None = None
    """Of an output of a session: where the session keeps the gradients that are set on its outputs, by name."""
    _version_when_made: int | None = None

    @checks_keywords_beside("samba.SambaTensor", ())
    def __new__(
        cls,
        torch_tensor: Tensor | None = None,
        shape: Sequence[int] | None = None,
        dtype: Dtype | None = None,
        name: str | None = None,
        batch_dim: int | None = None,
        named_dims: Iterable[str] | None = None,
        sized_dims: object = None,
        materializer: Callable[[], Tensor] | None = None,
        is_complex: bool | None = None,
        region_name: str | None = None,
    ) -> "SambaTensor":
        """From a tensor, from a `materializer` that returns one and is called at once, or from a shape alone.

        A tensor made from a shape alone holds zeros, and `has_data` is False until something is written to it. With
        another `dtype` than the given tensor's, memory is not shared. Raises DataError for what cannot be a tensor, a
        shape that is not the tensor's, a dimension that it does not have, and complex numbers.
        """
        given = materializer() if torch_tensor is None and materializer is not None else torch_tensor
        if isinstance(given, tuple | list):
            raise _no_tensor(given)
        if given is None and shape is None:
            raise DataError(
                "a SambaTensor is made from a tensor or from a shape, and neither was given",
                remedy="SambaTensor(torch.zeros(4, 3)) or SambaTensor(shape=(4, 3))",
            )
        if given is None:
            with torch.inference_mode(False):  # tensors made in inference mode do not count what is written to them
                plain = torch.zeros(tuple(shape or ()), dtype=dtype)
        else:
            plain = to_torch(given) if dtype is None else to_torch(given).to(dtype)
            _check_shape(plain, shape)
        if is_complex or plain.is_complex():
            raise DataError(
                f"a SambaTensor holds real numbers, and {_called(name)} is complex",
                remedy="torch.view_as_real(tensor), whose last dimension holds the two parts",
            )
        _check_batch_dim(plain, name, batch_dim)
        tensor = plain.as_subclass(cls)
        if isinstance(given, SambaTensor):
            tensor._describe_like(given)
        if given is None:
            tensor._version_when_made = tensor._version
        tensor._describe(name, batch_dim, named_dims)
        if sized_dims is not None:
            tensor.sized_dims = sized_dims
        if region_name is not None:
            tensor.region_name = region_name
        return tensor

    def with_data(self, data: Tensor, name: str) -> "SambaTensor":
        """A tensor called `name`, of the same batch dimension and `sn_grad`, that shares memory with `data`, which is a
        plain tensor of this one's shape."""
        tensor = data.as_subclass(SambaTensor)
        tensor.sn_name, tensor.batch_dim, tensor._sn_grads = name, self.batch_dim, self._sn_grads
        return tensor

    def keep_gradients_in(self, gradients: dict[str, Tensor]) -> None:
        """An `sn_grad` that is set on this output, or on it in another form, is kept there from now on."""
        self._sn_grads = gradients

    def _describe(self, name: str | None, batch_dim: int | None, named_dims: Iterable[str] | None) -> None:
        if name is not None:
            self.sn_name = name
        if batch_dim is not None:
            self.batch_dim = batch_dim
        if named_dims is not None:
            self.named_dims = tuple(named_dims)

    def _describe_like(self, other: "SambaTensor") -> None:
        for attribute in _DESCRIPTION:
            if attribute in vars(other):
                setattr(self, attribute, getattr(other, attribute))

    def backward(self, *args: Any, **keywords: Any) -> None:
        """As torch's. Raises OptionError for what no gradient can be taken of, such as a result of the device."""
        if not self.requires_grad:
            raise OptionError(
                f"backward() of {_called(self.sn_name)}: the host has no graph of what session.run gives",
                where=app_line(),
                remedy="leave backward() and optimizer.step() out, and section_types too: session.run does both itself",
            )
        super().backward(*args, **keywords)  # type: ignore[no-untyped-call]  # torch has no types for it

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]  # torch's, untyped
        if func in _OTHER_FORMS and isinstance(result, SambaTensor) and isinstance(args[0], SambaTensor):
            result._describe_like(args[0])
        return result

    @property
    def name(self) -> str | None:
        """The same as `sn_name`."""
        return self.sn_name

    @name.setter
    def name(self, name: str | None) -> None:
        self.sn_name = name

    @property
    def sn_region_name(self) -> str | None:
        """The same as `region_name`."""
        return self.region_name

    @sn_region_name.setter
    def sn_region_name(self, name: str | None) -> None:
        self.region_name = name

    @property
    def dsts(self) -> object:
        """Not here: raises AbsentNameError."""
        raise _no_graph("dsts")

    @property
    def inputs(self) -> object:
        """Not here: raises AbsentNameError."""
        raise _no_graph("inputs")

    @property
    def has_data(self) -> bool:
        """False for a tensor that was made from a shape alone and not written to since."""
        return self._version_when_made is None or self._version != self._version_when_made

    @property
    def sn_data(self) -> Tensor:
        """The numbers as a plain tensor, outside autograd, in the same memory. Setting it copies numbers in, and raises
        DataError if their shape is another."""
        return self.torch().detach()

    @sn_data.setter
    def sn_data(self, data: Tensor) -> None:
        plain = to_torch(data)
        if plain.shape != self.shape:
            raise DataError(
                f"{_called(self.sn_name)} has the shape {tuple(self.shape)}, and the data the shape "
                f"{tuple(plain.shape)}",
                remedy="give data of the tensor's own shape",
            )
        self.torch().detach().copy_(plain)

    @property
    def sn_grad(self) -> Tensor | None:
        """The gradient at this tensor as a plain tensor. On an output of a session it is what backwards start from,
        until it is set again; a number, too, may be set."""
        return self._sn_grad if self._sn_grads is None else self._sn_grads.get(str(self.sn_name))

    @sn_grad.setter
    def sn_grad(self, gradient: Tensor | float | None) -> None:
        if isinstance(gradient, Real):
            gradient = torch.tensor(float(gradient), dtype=self.dtype)
        plain = to_torch(gradient).detach() if isinstance(gradient, Tensor) else None
        if self._sn_grads is None:
            self._sn_grad = plain
        elif plain is None:
            self._sn_grads.pop(str(self.sn_name), None)
        else:
            self._sn_grads[str(self.sn_name)] = plain

    def rdu(self) -> "SambaTensor":
        """This tensor: what an app holds is in the memory of its process, and a session sends it where it is needed."""
        return self

    def numpy(self, *, force: bool = False) -> np.ndarray[Any, Any]:
        """The numbers as an array in the same memory, also where autograd follows the tensor.

        Those of bfloat16, which numpy does not have, as a copy in float32.
        """
        plain = to_torch(self).detach()
        return (plain.float() if plain.dtype is torch.bfloat16 else plain).numpy(force=force)

    def new_empty(self, *arguments: Any, **options: Any) -> Any:
        """As torch's; `copy.deepcopy` insists that it gives a SambaTensor."""
        return super().new_empty(*arguments, **options).as_subclass(SambaTensor)

    def torch(self) -> Tensor:
        """This tensor as a plain one, in the same memory and the same autograd graph."""
        return to_torch(self)

    torch_tensor = torch

    def __format__(self, format_spec: str) -> str:
        return format(self.torch(), format_spec)

    def __repr__(self) -> str:  # type: ignore[override]  # torch has a keyword there, for tensors of its own
        name = "" if self.sn_name is None else f"name={self.sn_name!r}, "
        described = f"{name}shape={tuple(self.shape)}, dtype={self.dtype}, batch_dim={self.batch_dim}"
        return f"SambaTensor({self.sn_data!r}, {described})"


_OTHER_FORMS: frozenset[Callable[..., Any]] = frozenset(
    {
        Tensor.to, Tensor.type, Tensor.type_as,
        Tensor.bfloat16, Tensor.half, Tensor.float, Tensor.double,
        Tensor.bool, Tensor.char, Tensor.byte, Tensor.short, Tensor.int, Tensor.long,
        Tensor.clone, Tensor.contiguous, Tensor.detach, Tensor.pin_memory, vars(TensorBase)["data"].__get__,
        torch.clone, torch.detach,
    }
)  # fmt: skip

# A checkpoint that holds an output of a session reads back by torch.load, which refuses classes that it does not know.
torch.serialization.add_safe_globals([SambaTensor])


@checks_keywords_beside("samba.from_torch_tensor", ())
def from_torch_tensor(
    tensor: Tensor,
    name: str | None = None,
    batch_dim: int | None = None,
    named_dims: Iterable[str] | None = None,
    sized_dims: object = None,
    region_name: str | None = None,
) -> SambaTensor:
    """`tensor` as a SambaTensor that shares its memory. In a forward that is being traced, `tensor` itself.

    Raises DataError if it is no tensor, if it is complex, or if it has no dimension `batch_dim`.
    """
    if torch.compiler.is_compiling():
        return cast(SambaTensor, tensor)
    return SambaTensor(
        tensor,
        name=name,
        batch_dim=batch_dim,
        named_dims=named_dims,
        sized_dims=sized_dims,
        region_name=region_name,
    )


def from_named_dict(tensors: Mapping[str, Tensor]) -> dict[str, SambaTensor]:
    """Each tensor as a SambaTensor that has its key as its name, and shares its memory. Raises DataError for a value
    that is no tensor."""
    return {name: from_torch_tensor(tensor, name=name) for name, tensor in tensors.items()}


def to_torch(tensor: Outputs) -> Outputs:
    """A SambaTensor as a plain tensor, in the same memory and the same autograd graph; a plain tensor as it is; a tuple
    or list of tensors as a tuple or list of plain ones.

    Raises DataError for anything else.
    """
    if isinstance(tensor, SambaTensor):
        return tensor.as_subclass(Tensor)
    if isinstance(tensor, Tensor):
        return tensor
    if isinstance(tensor, tuple):
        return tuple(map(to_torch, tensor))
    if isinstance(tensor, list):
        return [to_torch(one) for one in tensor]
    raise _no_tensor(tensor)


def _no_tensor(value: object) -> DataError:
    remedy = "torch.as_tensor(…) makes one of numbers, lists and arrays"
    if isinstance(value, torch.nn.Module):
        remedy = "samba.from_torch_model_(model) for a model"
    elif isinstance(value, tuple) and any(isinstance(one, Tensor) for one in value):
        remedy = f"give one of them: session.run returns all {len(value)} outputs, as loss, logits = session.run(…)"
    return DataError(
        f"this must be a tensor, and it is of type {type(value).__name__}", where=app_line(), remedy=remedy
    )


def _no_graph(name: str) -> AbsentNameError:
    return AbsentNameError(
        f"a SambaTensor has no {name} here: it belongs to the graph of SambaFlow's compiler",
        where=app_line(),
        remedy="sambasim inspect lists the operators of a PEF with what they take and give",
    )


def _check_shape(tensor: Tensor, shape: Sequence[int] | None) -> None:
    if shape is not None and tuple(shape) != tuple(tensor.shape):
        raise DataError(
            f"the tensor has the shape {tuple(tensor.shape)}, and the shape {tuple(shape)} was given beside it",
            remedy="leave out shape=, or reshape the tensor",
        )


def _check_batch_dim(tensor: Tensor, name: str | None, batch_dim: int | None) -> None:
    if batch_dim is not None and not -tensor.ndim <= batch_dim < tensor.ndim:
        raise DataError(
            f"{_called(name)} has no dimension {batch_dim}: its shape is {tuple(tensor.shape)}",
            remedy="batch_dim is the dimension that counts samples, mostly 0; leave it out where none does",
        )


def _called(name: str | None) -> str:
    return "the tensor" if name is None else f"the tensor {name}"
