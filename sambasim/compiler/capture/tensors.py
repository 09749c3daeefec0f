"""Tensors of a model: their names, which of them a PEF can hold, which share memory, which constants are refused, and
the dtypes that a model is captured in: its own, or a narrow one for `--dtype bf16` and `fp16`. Losses then take widened
operands and give float32; functions of `ADDING` are widened and their results rounded, because their kernels round
after each addition."""

import contextlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from sambasim.compiler.capture.trial import with_values
from sambasim.data.user_code import summary, user_line
from sambasim.errors import CaptureError, ModelError
from sambasim.ir.operators import OPERATORS, OperatorKind
from sambasim.ir.types import DTYPE_BYTES
from sambasim.units import first_of

_STRIDED = "_sambasim_strided"
"""The attribute of a tensor that `as_on_device` has replaced the data of: what it had before."""


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
    pairs = [pair for each in members for pair in each(model, remove_duplicate=False)]
    tensors = {id(tensor): tensor for _, tensor in pairs}
    at_place = {_place(tensor): key for key, tensor in reversed(tensors.items())}
    names, paths = defaultdict[object, list[str]](list), defaultdict[object, list[str]](list)
    for path, tensor in pairs:
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
    """Raises one ModelError for all in `model` that a PEF cannot hold, or not train, or not on several `replicas`."""
    held = held_by(model)
    problems = [*_storage_problems(held), *(_training_problems(model, held, replicas) if training else ())]
    lines, remedies = [what for what, _ in problems], dict.fromkeys(remedy for _, remedy in problems)
    if len(lines) > 1:
        lines = [f"the model has {len(lines)} things that a PEF cannot hold:", *lines]
    if lines:
        raise ModelError("\n    ".join(lines), remedy="\n         ".join(remedies))


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
            real = "compute with the real and the imaginary part as two real tensors"
            remedy = real if tensor.is_complex() else f"use one of {', '.join(DTYPE_BYTES)}"
            yield f"{one} is {dtype_name(tensor)}, which a PEF cannot hold", remedy
        if one.is_parameter and not one.names:
            remedy = "let state_dict() and its hooks give each parameter itself under a name, not a copy"
            yield f"no entry of state_dict() is {one}, so its values could be neither saved nor loaded", remedy


def _training_problems(model: nn.Module, held: Sequence[Held], replicas: bool) -> Iterator[tuple[str, str]]:
    parameters = [tensor for tensor in held if tensor.is_parameter]
    trained = [parameter for parameter in parameters if parameter.tensor.requires_grad]
    if not parameters:
        yield "the model has no parameters to train", "compile it with --inference"
    elif not trained:
        remedy = "set requires_grad on those to train, or compile with --inference"
        yield "all parameters of the model are frozen: requires_grad is False", remedy
    listed = set(map(id, model.parameters()))
    for name in [parameter.name for parameter in trained if id(parameter.tensor) not in listed]:
        what = f"parameters() of the model leaves out {name}, which requires a gradient"
        yield what, "freeze it: requires_grad_(False)"
    for parameter in parameters:
        late = getattr(parameter.tensor, "_post_accumulate_grad_hooks", None)
        if late or getattr(parameter.tensor, "_backward_hooks", None):
            remedy = "register it in forward(), on a view to compute with: w = self.weight.view_as(self.weight)"
            if late:
                remedy = "write what it does to the gradient as operators of forward(), or leave it out"
            yield f"{parameter} has a gradient hook, which a graph does not call", remedy
    for name, module in model.named_modules():
        named = f"module {name}" if name else "model"
        if isinstance(module, nn.parallel.DistributedDataParallel):
            remedy = "compile the model inside of it with --data-parallel: the PEF's own sections sync its gradients"
            yield f"the {named} is wrapped in {type(module).__name__}", remedy
        if isinstance(module, nn.SyncBatchNorm) and replicas:
            what = f"the {named} is SyncBatchNorm, whose statistics are those of all replicas together"
            own = "nn.BatchNorm1d, 2d or 3d, with statistics of each replica's own batch"
            yield what, f"{own}; or compile for one replica, without --data-parallel and --tensor-parallel batch"


def trained_by(optimizers: Sequence[torch.optim.Optimizer], model: nn.Module) -> Mapping[int, str]:
    """The names of what trains in `model`, by the ids of its tensors. Raises ModelError unless `optimizers` have each
    of them once, and none of another model."""
    held = held_by(model)
    trained = {id(one.tensor): one.name for one in held if one.tensor.requires_grad}
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    counts = Counter(id(parameter) for group in groups for parameter in group["params"])
    given = " and ".join(type(optimizer).__name__ for optimizer in optimizers)
    made = f"{type(optimizers[0]).__name__}(model.parameters(), …)"
    if left := [name for key, name in trained.items() if key not in counts]:
        remedy = f"make it from all of them, {made}, or freeze the others: parameter.requires_grad_(False)"
        raise ModelError(f"{given} does not update {first_of(left)}", remedy=remedy)
    if foreign := len(counts.keys() - {id(one.tensor) for one in held}):
        what = f"{given} updates {foreign} parameters that the model does not have"
        raise ModelError(what, remedy=f"{made}, made for this model when it is complete")
    if twice := [name for key, name in trained.items() if counts[key] > 1]:
        raise ModelError(f"{given} has {first_of(twice)} twice, and would update it twice in a step", remedy=made)
    return trained


def sparse_embeddings(model: nn.Module) -> Mapping[str, nn.Embedding | nn.EmbeddingBag]:
    """The modules whose gradients are sparse, by path."""
    modules = ((name, one) for name, one in model.named_modules() if isinstance(one, nn.Embedding | nn.EmbeddingBag))
    return {name: module for name, module in modules if module.sparse}


def as_on_device(model: nn.Module, *, ordered: bool = False) -> contextlib.AbstractContextManager[None]:
    """Parameters and buffers are dense, and if `ordered` (as they must be to be cut) in order of their axes, but for
    those that share memory with another; gradients of embeddings are dense. Afterwards they are as before."""
    held = list({id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}.values())
    strided = [tensor for tensor in held if has_gaps(tensor) or (ordered and order_to_restore(tensor))]
    alone = [tensor for tensor in strided if sum(share_memory(tensor, other) for other in held) <= 1]
    changes: list[tuple[Any, str, object]] = [(tensor, _STRIDED, tensor.data) for tensor in alone]
    changes += [(tensor, "data", tensor.data.new_empty(tensor.shape).copy_(tensor.data)) for tensor in alone]
    return with_values([*changes, *((module, "sparse", False) for module in sparse_embeddings(model).values())])


def itself(value: Tensor, held: Sequence[Held]) -> Held | None:
    """The parameter or buffer that `value` is."""
    return next((own for own in held if _place(own.tensor) == _place(value)), None)


def check_constant(path: str, value: Tensor, held: Sequence[Held], where: str | None) -> None:
    """Raises CaptureError for a constant whose values would not be those that the model reads. `held` are the tensors
    of the model; `where` is the line that reads it."""
    form = "sparse" if value.layout is not torch.strided else dtype_name(value)
    if form not in DTYPE_BYTES:
        remedy = f"make it a dense tensor of one of {', '.join(DTYPE_BYTES)}"
        what = f"is {form}, which a PEF cannot hold"
    elif not value.permute(memory_order(value)).is_contiguous():
        what, remedy = f"is not contiguous: its strides are {value.stride()}", "make it so by .contiguous()"
    else:
        base = next((own for own in held if share_memory(value, getattr(own.tensor, _STRIDED, own.tensor))), None)
        if base is None:
            return
        what = f"is a view of {base} that was kept from before: the graph would not see it change"
        raise CaptureError(f"{path} {what}", where=where, remedy=f"take the view in forward(), of self.{base.name}")
    raise CaptureError(f"the constant {path} {what}", where=where, remedy=remedy)


def memory_order(tensor: Tensor) -> tuple[int, ...]:
    """The axes of a tensor in the order in which it lies in memory, the slowest first. Operators read strides also of
    axes of length 1, which make no difference there."""
    order = tuple(sorted(range(tensor.ndim), key=lambda axis: (tensor.stride(axis), tensor.shape[axis]), reverse=True))
    permuted = tensor.permute(order)
    is_exact = permuted.stride() == torch.empty(permuted.shape, device="meta").stride()
    return order if is_exact or not tensor.is_contiguous() else tuple(range(tensor.ndim))


def order_to_restore(tensor: Tensor) -> tuple[int, ...]:
    """The same of a tensor that is contiguous in another order than that of its axes; of others ()."""
    order = memory_order(tensor) if tensor.layout is torch.strided else ()
    is_other = order != tuple(range(len(order))) and tensor.permute(order).is_contiguous()
    return order if is_other else ()


def has_gaps(tensor: Tensor) -> bool:
    """Whether the elements of a tensor are not side by side in memory, in whatever order."""
    return not tensor.is_contiguous() and not order_to_restore(tensor)


def check_memory(held: Sequence[Held], changed: Set[str]) -> None:
    """Raises ModelError for two tensors in the same memory of which a training step changes one. `changed` are the
    paths of what changes beside the parameters."""
    by_storage: dict[int, list[Held]] = defaultdict(list)
    for tensor in held:
        if tensor.tensor.numel():
            by_storage[_storage(tensor.tensor)].append(tensor)
    for one, other in (pair for sharing in by_storage.values() for pair in combinations(sharing, 2)):
        fixed = changed.isdisjoint(one.paths + other.paths) and not (one.is_parameter or other.is_parameter)
        if not fixed and share_memory(one.tensor, other.tensor):
            remedy = f"tie them as one: model.{other.name} = model.{one.name}, without .data; or give each its own"
            if one.tensor.shape != other.tensor.shape:
                remedy = f"keep one of them, and take the part of it where it is read: self.{one.name}[0]"
            if f"{one.name}_orig" == other.name or f"{other.name}_orig" == one.name:
                remedy = "torch.nn.utils.parametrizations.spectral_norm, in place of torch.nn.utils.spectral_norm"
            raise ModelError(f"{one} and {other} are two tensors in the same memory", remedy=remedy)


def share_memory(one: Tensor, other: Tensor) -> bool:
    """Whether the bytes from first to last element of two tensors overlap. Those of neighbours in a storage do not."""
    spans = []
    for tensor in (one, other):
        if tensor.layout is not torch.strided or not tensor.numel():
            return False
        memory, start = _address(tensor)
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        spans.append((memory, start, start + int(last + 1) * tensor.element_size()))
    (memory, start, stop), (other_memory, other_start, other_stop) = spans
    return memory == other_memory and start < other_stop and other_start < stop


def _address(tensor: Tensor) -> tuple[int, int]:
    """The memory of a tensor, 0 for all real ones and the storage for a fake one, and its first byte in it."""
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return id(tensor), 0  # within torch.vmap it has no memory of its own
    if isinstance(tensor, FakeTensor):
        return _storage(tensor), int(tensor.storage_offset()) * tensor.element_size()
    return 0, tensor.data_ptr()


def _storage(tensor: Tensor) -> int:
    storage = tensor.untyped_storage()
    return int(storage._cdata if isinstance(tensor, FakeTensor) else storage.data_ptr())


def _place(tensor: Tensor) -> tuple[object, ...]:
    if is_lazy(tensor) or tensor.layout is not torch.strided or not tensor.numel():
        return (id(tensor),)
    return _address(tensor), tensor.shape, tensor.stride(), tensor.dtype


STORED: Mapping[str, torch.dtype | None] = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
"""By `--dtype`: the type of all floating-point numbers; None leaves to each tensor the type that it has."""

_NARROW = (torch.bfloat16, torch.float16)

ADDING = frozenset(f"aten.{name}" for name in (
    "avg_pool1d.default", "avg_pool2d.default", "avg_pool3d.default", "col2im.default", "embedding.default",
    "im2col.default", "index.Tensor", "index_put.default", "layer_norm.default", "logcumsumexp.default",
    "logsumexp.default", "max_pool2d.default", "max_pool3d.default", "pad.default", "prod.default", "prod.dim_int",
    "unfold.default",
))  # fmt: skip
"""Operators that add up (or multiply) in 16 bits, forward or backward, by torch 2.13 on a CPU; one has no kernel."""

_FUNCTIONS = {name.split(".")[1] for name in ADDING} | {"fold"}  # which is col2im; unfold is im2col too
_LOSSES = {name.split(".")[1].lstrip("_") for name, entry in OPERATORS.items() if entry.kind is OperatorKind.LOSS}

_VIEWING = ("unfold", "__getitem__")  # functions that may give a view, and add up in their backward alone

_TYPED = {"float", "double", "half", "type"}  # functions whose result has the type that they say


@contextlib.contextmanager
def stored_in(dtype: torch.dtype | None, model: nn.Module) -> Iterator[None]:
    """Floating-point tensors of `model` are rounded to `dtype`, torch's default type, and at the end as before."""
    if dtype is None:
        yield
        return
    rounded: dict[tuple[int, torch.dtype], Tensor] = {}
    wide = [tensor for tensor in (*model.parameters(), *model.buffers()) if tensor.is_floating_point()]
    narrowed = with_values((tensor, "data", _rounded(tensor.data, dtype, rounded)) for tensor in wide)
    with narrowed, default_type(dtype):
        yield


class Widened(TorchFunctionMode):
    """Within it losses and the functions of `ADDING` take float32 for a narrow type, and what has the type of torch's
    default, if that is narrow, is made in float32 and rounded."""

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        leaves = tree_leaves((args, kwargs))
        if _is_typed_by_default(name, leaves):
            default = torch.get_default_dtype()
            with default_type(torch.float32):
                made = func(*args, **kwargs)
            return tree_map(lambda leaf: leaf.to(default) if _is_of(leaf, (torch.float32,)) else leaf, made)
        narrow = [leaf for leaf in leaves if _is_of(leaf, _NARROW)]
        is_index = name == "__getitem__" and any(isinstance(leaf, Tensor) for leaf in tree_leaves(args[1]))
        is_adding = name in _FUNCTIONS or is_index
        adds_backward_alone = name in _VIEWING and not any(leaf.requires_grad for leaf in narrow)
        if not narrow or "out" in kwargs or adds_backward_alone or not (is_adding or name in _LOSSES):
            return func(*args, **kwargs)
        args, kwargs = tree_map(lambda leaf: leaf.float() if _is_of(leaf, _NARROW) else leaf, (args, kwargs))
        result, dtype = func(*args, **kwargs), narrow[0].dtype
        is_rounded = is_adding and not any(isinstance(leaf, torch.dtype) for leaf in leaves)
        return tree_map(lambda leaf: leaf.to(dtype) if _is_float(leaf) else leaf, result) if is_rounded else result


def check_loss(value: Tensor, named: str | None, *, any_shape: bool, lacks_labels: bool) -> None:
    """Raises ModelError unless `value`, the loss of an eager call, can start a backward. It must be one number, unless
    `any_shape`."""
    described = "the output with the loss" if any_shape else "the model's first output"
    remedy = "check requires_grad, detach() and torch.no_grad() in the model, or compile with --inference"
    if value.numel() != 1 and not any_shape:
        what = f"has shape {tuple(value.shape)}, but a loss is one number"
        remedy = "return the loss first, or name one: --loss cross_entropy"
        if lacks_labels:
            remedy = (
                "give labels, which forward() takes, among the inputs of a sample: then it may return its loss first"
            )
        if named:
            remedy = "let the function return the mean: loss.mean()"
    elif not value.is_floating_point():
        what = f"is {dtype_name(value)}, but a loss is a floating-point number"
        remedy = "compute it with floating-point operators: a count of mistakes has no gradient, cross_entropy has"
    elif not value.requires_grad:
        what = "does not depend on any parameter that requires a gradient"
    else:
        return
    raise ModelError(f"{f'the loss {named}' if named else described} {what}", remedy=remedy)


def inputs_in(dtype: torch.dtype | None, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: one.to(dtype) if dtype and one.is_floating_point() else one for name, one in inputs.items()}


@contextlib.contextmanager
def default_type(dtype: torch.dtype) -> Iterator[None]:
    """Torch makes floating-point tensors of `dtype` where none is named."""
    with contextlib.ExitStack() as stack:
        stack.callback(torch.set_default_dtype, torch.get_default_dtype())
        torch.set_default_dtype(dtype)
        yield


def _is_typed_by_default(name: str, given: Sequence[object]) -> bool:
    """Whether a result would be narrow only because that is torch's default: no operand is, and none is asked for."""
    if torch.get_default_dtype() not in _NARROW or name in _TYPED:
        return False
    return not any(_is_float(one) or isinstance(one, torch.dtype | np.ndarray | np.generic) for one in given)


def _rounded(data: Tensor, dtype: torch.dtype, rounded: dict[tuple[int, torch.dtype], Tensor]) -> Tensor:
    """`rounded`: the memory of tensors before, which several may share."""
    storage, is_fake, key = data.untyped_storage(), isinstance(data, FakeTensor), (_storage(data), data.dtype)
    if key not in rounded and is_fake:
        rounded[key] = data.new_empty(storage.nbytes() // data.element_size(), dtype=dtype)
    elif key not in rounded:
        whole = torch.empty(0, dtype=data.dtype).set_(storage)
        rounded[key] = whole.to(dtype)
        if bool((rounded[key].isinf() & whole.isfinite()).any()):
            what = f"a parameter or buffer holds {float(whole.abs().max()):g}, which is infinite in {dtype}"
            raise ModelError(what, remedy="compile with --dtype bf16 or fp32")
    return rounded[key].as_strided(data.size(), data.stride(), data.storage_offset())


def _is_float(value: object) -> bool:
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())


def _is_of(value: object, dtypes: Sequence[torch.dtype]) -> bool:
    return isinstance(value, Tensor) and value.dtype in dtypes
