"""Tensors of a model as a trace sees them: those of its modules, made contiguous, and those that no module has, of
globals, lists and dictionaries."""

import contextlib
import re
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from sambasim.errors import CaptureError
from sambasim.ir.types import DTYPE_BYTES

_STRIDED = "_sambasim_strided"
"""The attribute of a tensor that `made_contiguous` has replaced the data of: what it had before."""


@contextlib.contextmanager
def made_contiguous(model: nn.Module) -> Iterator[None]:
    """While this is active, parameters and buffers of `model` are contiguous, as they are in device memory: so a graph
    is captured for the strides with which it runs. Afterwards they have their own memory again.

    Those that share memory with another tensor of the model stay as they are: the compiler has to see that they do.
    """
    own = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    strided = {key: tensor.data for key, tensor in own.items() if not tensor.is_contiguous()}
    for key in list(strided):
        if any(share_memory(own[key], other) for other in own.values() if other is not own[key]):
            del strided[key]
    try:
        for key, data in strided.items():
            setattr(own[key], _STRIDED, data)
            own[key].data = data.contiguous()
        yield
    finally:
        for key, data in strided.items():
            own[key].data = data
            vars(own[key]).pop(_STRIDED, None)


def own_name(path: str) -> str:
    """Without what torch puts before the name of a global, `G____import_net___`, and before that of a tensor in a list
    or dictionary of the model, `L__self___model_`."""
    if path.startswith("G_"):
        return path.rpartition("___")[2]
    return re.sub("__+", "_", re.sub("^(L__)?self___(model_)?", "", path))


def model_tensor(value: Tensor, tensors: Mapping[str, Tensor]) -> str | None:
    """The path of the tensor of the model that `value` is, in the same place and form; None if it is none of them."""
    return next((path for path, tensor in tensors.items() if _place(tensor) == _place(value)), None)


def check_constant(path: str, value: Tensor, tensors: Mapping[str, Tensor], where: str | None) -> None:
    """Raises CaptureError for a constant that a PEF cannot hold: its values would not be those that the model reads.

    tensors: those of the model, by path
    where: the line that reads it
    """
    name, dtype = own_name(path), str(value.dtype).removeprefix("torch.")
    if value.layout is not torch.strided or dtype not in DTYPE_BYTES:
        form = "sparse" if value.layout is not torch.strided else dtype
        raise CaptureError(
            f"the constant {name} is {form}, which a PEF cannot hold",
            where=where,
            remedy=f"make it a dense tensor of one of {', '.join(DTYPE_BYTES)}",
        )
    if not value.is_contiguous():
        raise CaptureError(
            f"the constant {name} is not contiguous: its strides are {value.stride()}",
            where=where,
            remedy="make it so by .contiguous()",
        )
    memory = {path: getattr(tensor, _STRIDED, tensor) for path, tensor in tensors.items()}
    shown = next((path for path, tensor in memory.items() if share_memory(value, tensor)), None)
    if shown is not None:
        kind = "parameter" if isinstance(tensors[shown], nn.Parameter) else "buffer"
        raise CaptureError(
            f"{name} is a view of the {kind} {shown} that was kept from before: the graph would not see it change",
            where=where,
            remedy=f"take the view in forward(), of self.{shown}",
        )


def check_rounded(path: str, value: Tensor, where: str | None) -> None:
    """Raises CaptureError for a constant whose type is not what everything has with --dtype bf16.

    where: the line that reads it
    """
    if value.is_floating_point() and value.dtype is not torch.bfloat16:
        dtype = str(value.dtype).removeprefix("torch.")
        # "lifted_tensor" is torch's word for a tensor whose list or dictionary it does not know.
        what = "a constant" if "lifted_tensor" in path else f"the constant {own_name(path)}"
        raise CaptureError(
            f"{what} is {dtype}, and with --dtype bf16 only what a module has is rounded",
            where=where,
            remedy="make it an attribute of a module, or a tensor of torch.bfloat16",
        )


def share_memory(one: Tensor, other: Tensor) -> bool:
    """Whether the bytes from the first to the last element of two tensors overlap. Contiguous neighbours in one storage
    do not."""
    if any(tensor.layout is not torch.strided or not tensor.numel() for tensor in (one, other)):
        return False
    (memory, start), (other_memory, other_start) = address(one), address(other)
    return memory == other_memory and start < other_start + _extent(other) and other_start < start + _extent(one)


def _extent(tensor: Tensor) -> int:
    """Bytes from the first element to the end of the last, of a tensor that has elements."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return int(last + 1) * tensor.element_size()


def address(tensor: Tensor) -> tuple[int, int]:
    """Which memory a tensor begins in, and at which byte of it. All real tensors lie in one; each storage of a fake one
    is a memory of its own."""
    storage = tensor.untyped_storage()
    if isinstance(tensor, FakeTensor):
        return int(storage._cdata), int(tensor.storage_offset()) * tensor.element_size()
    return 0, tensor.data_ptr()


def _place(tensor: Tensor) -> tuple[object, ...]:
    if tensor.layout is not torch.strided or not tensor.numel():
        return (id(tensor),)
    return address(tensor), tensor.shape, tensor.stride(), tensor.dtype
