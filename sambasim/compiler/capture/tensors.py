"""Tensors of a model: their names, which of them a PEF can hold, which share memory, and constants that no module
has."""

import contextlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import combinations

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.parameter import is_lazy

from sambasim.compiler.capture.names import user_line
from sambasim.data.user_code import summary
from sambasim.errors import CaptureError, ModelError
from sambasim.ir.types import DTYPE_BYTES

REAL_NUMBERS = "compute with the real and the imaginary part as two real tensors"
_NO_HOOK = "write what it does to the gradient as operators of forward(), or leave it out"
_HOOK_IN_FORWARD = "register it in forward(), on a view to compute with: w = self.weight.view_as(self.weight)"

_STRIDED = "_sambasim_strided"
"""The attribute of a tensor that `made_contiguous` has replaced the data of: what it had before."""


@dataclass(frozen=True, slots=True)
class Held:
    """A parameter or buffer of a model: its `names` in `state_dict()`, and the `paths` at which modules have it. State-
    dict hooks, and classes with methods of their own, make them differ."""

    tensor: Tensor
    names: tuple[str, ...]
    paths: tuple[str, ...]

    @property
    def name(self) -> str:
        """What the user knows it by."""
        return (*self.names, *self.paths)[0]

    @property
    def is_parameter(self) -> bool:
        return isinstance(self.tensor, nn.Parameter)

    def __str__(self) -> str:
        return f"the {'parameter' if self.is_parameter else 'buffer'} {self.name}"


def held_by(model: nn.Module) -> tuple[Held, ...]:
    """The parameters and buffers of `model`, each once. Raises ModelError if its `state_dict()` fails."""
    members = (nn.Module.named_parameters, nn.Module.named_buffers)  # a class may have others of these names
    found = [pair for each in members for pair in each(model, remove_duplicate=False)]
    tensors = {id(tensor): tensor for _, tensor in found}
    at_place = {_place(tensor): key for key, tensor in reversed(tensors.items())}
    names, paths = defaultdict[object, list[str]](list), defaultdict[object, list[str]](list)
    for path, tensor in found:
        paths[id(tensor)].append(path)
    for name, entry in entries_of(model).items():
        if isinstance(entry, Tensor):  # a hook may have detached it
            names[id(entry) if id(entry) in tensors else at_place.get(_place(entry))].append(name)
    return tuple(Held(tensor, tuple(names[key]), tuple(paths[key])) for key, tensor in tensors.items())


def entries_of(model: nn.Module) -> Mapping[str, object]:
    """The `state_dict()` of `model`, with the tensors themselves where it can. Raises ModelError if it fails."""
    try:
        try:
            return dict(model.state_dict(keep_vars=True))
        except TypeError:  # one of the model's own may have no arguments
            return dict(model.state_dict())
    except Exception as error:
        raise ModelError(f"state_dict() of the model fails: {summary(error)}", where=user_line(error)) from error


def dtype_name(tensor: Tensor) -> str:
    """`float32`, and not `torch.float32`."""
    return str(tensor.dtype).removeprefix("torch.")


def check_model(model: nn.Module, *, training: bool, replicas: bool) -> None:
    """Raises one ModelError that names every module and tensor of `model` that a PEF cannot hold, or not train, or not
    on several `replicas`."""
    held = held_by(model)
    problems = [*_storage_problems(held), *(_training_problems(model, held, replicas) if training else ())]
    if len(problems) == 1:
        raise ModelError(problems[0][0], remedy=problems[0][1])
    if problems:
        lines = "\n    ".join(what for what, _ in problems)
        remedies = "\n         ".join(dict.fromkeys(remedy for _, remedy in problems))
        raise ModelError(f"the model has {len(problems)} things that a PEF cannot hold:\n    {lines}", remedy=remedies)


def _storage_problems(held: Sequence[Held]) -> Iterator[tuple[str, str]]:
    for one in held:
        tensor = one.tensor
        if is_lazy(tensor):
            remedy = "give its module the sizes: nn.Linear(…) instead of nn.LazyLinear(…)"
            yield f"{one} has no shape yet: its module is lazy", remedy
        elif tensor.device.type != "cpu":
            yield f"{one} is on the device {tensor.device}", "build the model on the CPU"
        elif tensor.layout is not torch.strided:
            yield f"{one} is a sparse tensor", "make it dense: .to_dense()"
        elif dtype_name(tensor) not in DTYPE_BYTES:
            remedy = REAL_NUMBERS if tensor.is_complex() else f"use one of {', '.join(DTYPE_BYTES)}"
            yield f"{one} is {dtype_name(tensor)}, which a PEF cannot hold", remedy
        if one.is_parameter and not one.names:
            remedy = "let state_dict() and its hooks give each parameter itself under a name, not a copy"
            yield f"no entry of state_dict() is {one}, so its values could be neither saved nor loaded", remedy


def _training_problems(model: nn.Module, held: Sequence[Held], replicas: bool) -> Iterator[tuple[str, str]]:
    parameters = [one for one in held if one.is_parameter]
    trained = [one for one in parameters if one.tensor.requires_grad]
    if not parameters:
        yield "the model has no parameters to train", "compile it with --inference"
    elif not trained:
        remedy = "set requires_grad on those to train, or compile with --inference"
        yield "all parameters of the model are frozen: requires_grad is False", remedy
    own = set(map(id, model.parameters()))
    for one in trained:
        if id(one.tensor) not in own:
            what = f"parameters() of the model leaves out {one.name}, which requires a gradient"
            yield what, "freeze it: requires_grad_(False)"
    for one in parameters:
        late = getattr(one.tensor, "_post_accumulate_grad_hooks", None)
        if late or getattr(one.tensor, "_backward_hooks", None):
            yield f"{one} has a gradient hook, which a graph does not call", _NO_HOOK if late else _HOOK_IN_FORWARD
    for name, module in model.named_modules():
        named = f"module {name}" if name else "model"
        if isinstance(module, nn.parallel.DistributedDataParallel):
            remedy = "compile the model inside of it with --data-parallel: the PEF's own sections sync its gradients"
            yield f"the {named} is wrapped in {type(module).__name__}", remedy
        if isinstance(module, nn.SyncBatchNorm) and replicas:
            remedy = (
                "nn.BatchNorm1d, 2d or 3d, with statistics of each replica's own batch; or compile for one replica, "
                "without --data-parallel and --tensor-parallel batch"
            )
            yield f"the {named} is SyncBatchNorm, whose statistics are those of all replicas together", remedy


def sparse_embeddings(model: nn.Module) -> Mapping[str, nn.Embedding | nn.EmbeddingBag]:
    """The modules whose gradients are sparse, by path."""
    modules = model.named_modules()
    return {
        name: module for name, module in modules if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse
    }


@contextlib.contextmanager
def dense_gradients(model: nn.Module) -> Iterator[None]:
    """Embeddings have dense gradients, which hold zeros for the rows that no sample reads."""
    sparse = sparse_embeddings(model).values()
    for module in sparse:
        module.sparse = False
    try:
        yield
    finally:
        for module in sparse:
            module.sparse = True


@contextlib.contextmanager
def made_contiguous(model: nn.Module) -> Iterator[None]:
    """Parameters and buffers of `model` are contiguous, as in device memory, apart from those that share memory with
    another. Afterwards they have their own memory again."""
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


def itself(value: Tensor, held: Sequence[Held]) -> Held | None:
    """The parameter or buffer that `value` is."""
    return next((one for one in held if _place(one.tensor) == _place(value)), None)


def check_constant(path: str, value: Tensor, held: Sequence[Held], where: str | None) -> None:
    """Raises CaptureError for a constant whose values would not be those that the model reads. `held` are the tensors
    of the model; `where` is the line that reads it."""
    dtype = dtype_name(value)
    if value.layout is not torch.strided or dtype not in DTYPE_BYTES:
        form = "sparse" if value.layout is not torch.strided else dtype
        raise CaptureError(
            f"the constant {path} is {form}, which a PEF cannot hold",
            where=where,
            remedy=f"make it a dense tensor of one of {', '.join(DTYPE_BYTES)}",
        )
    if not value.permute(memory_order(value)).is_contiguous():
        raise CaptureError(
            f"the constant {path} is not contiguous: its strides are {value.stride()}",
            where=where,
            remedy="make it so by .contiguous()",
        )
    base = next((one for one in held if share_memory(value, getattr(one.tensor, _STRIDED, one.tensor))), None)
    if base is not None:
        raise CaptureError(
            f"{path} is a view of {base} that was kept from before: the graph would not see it change",
            where=where,
            remedy=f"take the view in forward(), of self.{base.name}",
        )


def memory_order(tensor: Tensor) -> tuple[int, ...]:
    """The axes of a tensor in the order in which it lies in memory, the slowest first."""
    axes = range(tensor.ndim)
    return tuple(axes) if tensor.is_contiguous() else tuple(sorted(axes, key=tensor.stride, reverse=True))


def check_memory(held: Sequence[Held], changed: Set[str]) -> None:
    """Raises ModelError for two tensors in the same memory of which a training step changes one. `changed` are the
    paths of what changes beside the parameters."""
    by_storage: dict[int, list[Held]] = {}
    for one in held:
        if one.tensor.numel():
            storage = one.tensor.untyped_storage()
            where = storage._cdata if isinstance(one.tensor, FakeTensor) else storage.data_ptr()
            by_storage.setdefault(where, []).append(one)
    for sharing in by_storage.values():
        for one, other in combinations(sharing, 2):
            fixed = changed.isdisjoint(one.paths + other.paths) and not (one.is_parameter or other.is_parameter)
            if not fixed and share_memory(one.tensor, other.tensor):
                remedy = f"tie them as one: model.{other.name} = model.{one.name}, without .data; or give each its own"
                if one.tensor.shape != other.tensor.shape:
                    remedy = f"keep one of them, and take the part of it where it is read: self.{one.name}[0]"
                if f"{one.name}_orig" == other.name or f"{other.name}_orig" == one.name:
                    remedy = "torch.nn.utils.parametrizations.spectral_norm, in place of torch.nn.utils.spectral_norm"
                raise ModelError(f"{one} and {other} are two tensors in the same memory", remedy=remedy)


def share_memory(one: Tensor, other: Tensor) -> bool:
    """Whether the bytes from the first to the last element of two tensors overlap. Contiguous neighbours in one storage
    do not."""
    if any(tensor.layout is not torch.strided or not tensor.numel() for tensor in (one, other)):
        return False
    (memory, start), (other_memory, other_start) = _address(one), _address(other)
    return memory == other_memory and start < other_start + _extent(other) and other_start < start + _extent(one)


def _extent(tensor: Tensor) -> int:
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return int(last + 1) * tensor.element_size()


def _address(tensor: Tensor) -> tuple[int, int]:
    """The memory that a tensor is in, and its first byte in it. All real tensors are in memory 0; each storage of a
    fake one is a memory of its own."""
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return id(tensor), 0  # within torch.vmap it has no memory of its own
    if isinstance(tensor, FakeTensor):
        return int(tensor.untyped_storage()._cdata), int(tensor.storage_offset()) * tensor.element_size()
    return 0, tensor.data_ptr()


def _place(tensor: Tensor) -> tuple[object, ...]:
    if is_lazy(tensor) or tensor.layout is not torch.strided or not tensor.numel():
        return (id(tensor),)
    return _address(tensor), tensor.shape, tensor.stride(), tensor.dtype
