"""Data of an app: inputs bound to a model or a PEF by name or position, SambaLoader, and which outputs are losses."""

import ast
import inspect
import re
import textwrap
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial, wraps
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils.data.distributed import DistributedSampler

from sambasim.compiler.capture.step import Example, Fixed, by_place
from sambasim.data.batches import each_value, flat, same
from sambasim.errors import DataError, ModelError, one_line
from sambasim.ir.program import Program
from sambasim.ir.types import Symbol, SymbolKind
from sambasim.samba.notices import checks_keywords
from sambasim.samba.process import app_error, current, report_here, type_error
from sambasim.samba.tensor import SambaTensor, from_torch_tensor, host_values, to_torch
from sambasim.units import counted

__all__ = ["SambaLoader"]

Inputs: TypeAlias = Iterable[Any] | Mapping[str, Any]


def check_on_host(name: str, tensor: Tensor) -> None:
    """Raises DataError for an input that is not on the CPU, and WeightsError for a lazy one."""
    if not tensor.is_cpu:
        host_values(tensor, name)
        what = f"{name} is on the device {tensor.device}, and must be on the CPU"
        raise app_error(DataError, what, f"{name}.cpu(), or leave it on the CPU: session.run copies it to the device")


def name_of(tensor: object) -> str | None:
    return tensor.sn_name if isinstance(tensor, SambaTensor) else None


def repeatable(inputs: Inputs, called: str = "inputs") -> Inputs:
    """`inputs`, with one tensor, `dict.values()` and generators as a list."""
    if isinstance(inputs, list | tuple | Mapping):
        return inputs
    if not isinstance(inputs, Iterable):
        remedy = "give a list or tuple of tensors, or a dictionary of tensors by name"
        raise type_error(DataError, f"{called} must be tensors", inputs, remedy)
    return [inputs] if isinstance(inputs, Tensor) else [*inputs]


def example_of(model: nn.Module, inputs: Inputs) -> Example:
    """`inputs` as plain tensors by name, and how `forward` is called with them. A tensor without a name has that of its
    argument of `forward`. An argument that is None takes its default, if it has one. Raises ModelError for inputs that
    `forward` does not take; DataError for two of one name, and for no tensor."""
    signature, by_keyword = inspect.signature(model.forward), isinstance(inputs, Mapping)
    tensors, called = dict[str, Tensor](), dict[str, object]()

    def taken(one: Any, path: str) -> int | None:
        if one is None:
            return None
        name = path if by_keyword else name_of(one) or path
        if name in tensors:
            raise app_error(DataError, f"two inputs are called {name}", "give each a name= of its own")
        tensors[name] = _tensor(name, one)
        return len(tensors) - 1

    given = inputs if isinstance(inputs, Mapping) else by_place(model, inputs)
    names = {place: name_of(one) for place, one in given.items() if one is not None and not by_keyword}
    own = {place: name if name in signature.parameters else place for place, name in names.items()}
    for place, name in own.items():
        if name != place:
            meant = [one if one in own.values() else "None" for one in signature.parameters]
            what = f"the tensor named {name} is given in the place of {place} of {type(model).__name__}.forward"
            report_here("AP04", what, f"inputs are bound by place: ({', '.join(meant)})", notice_only=True)
    for place, one in given.items():
        parameter = signature.parameters.get(place)
        if one is None and parameter is not None and parameter.default is not parameter.empty:
            called[place] = Fixed(parameter.default)
        elif one is not None or parameter is not None or not by_keyword:
            called[place] = each_value(one, taken, place)
    try:
        signature.bind(**called) if by_keyword else signature.bind(*called.values())
    except TypeError as error:
        takes = f"{type(model).__name__}.forward takes {', '.join(signature.parameters)}"
        what = f"{counted(len(called), 'input')} given, and {takes}: {error}"
        remedy = "give as many inputs as forward takes, in its order; or a dictionary by its arguments"
        raise app_error(ModelError, what, remedy) from None
    return Example(tensors, by_keyword, called)


def _tensor(name: str, value: object) -> Tensor:
    if not isinstance(value, Tensor):
        remedy = f"samba.from_torch_tensor(torch.as_tensor(…), name={name!r}, batch_dim=0); or None, for its default"
        raise type_error(DataError, f"the input {name} must be a tensor", value, remedy)
    return to_torch(value)


def inputs_of(program: Program) -> Mapping[str, Symbol]:
    return {name: symbol for name, symbol in program.symbols.items() if symbol.kind is SymbolKind.INPUT}


class Binder:
    """Finds the inputs of a program in those of a run: a tensor by its name, or else by the place in `forward` that it
    has in the `example`. What has no tensor there is a constant of the program: None, a number, or a default."""

    def __init__(self, model: nn.Module, example: Example) -> None:
        self._places, self._names, self._constants = example.places(model)
        self._paths = {name: path for path, name in self._names.items()}
        self.order = [*self._paths]
        """The names of the inputs in a list of tensors alone."""
        typed = [self._names.get(place, "None" if place in self._constants else "…") for place in self._places]
        while typed[-1] == "None":
            typed.pop()
        self._forward, self._run = f"{type(model).__name__}.forward", f"session.run([{', '.join(typed)}])"

    def named(self, inputs: Inputs, kept: Collection[str] = ()) -> dict[str, Any]:
        """The tensors of `inputs`, in their order, by the names of the program. `kept`: inputs that the device has,
        which may be left out. Raises DataError for what fits no input, and for an input without a tensor."""
        if isinstance(inputs, list | tuple) and [*map(name_of, inputs)] == self.order:  # the usual case, in each step
            return dict(zip(self.order, inputs, strict=True))
        given: dict[str, Any] = {}
        for path, called, one in self._found(inputs, kept):
            name = self._names.get(path) if called is None else called if called in self._paths else None
            if name in given:
                what = f"two tensors are given for the input {name}"
                raise app_error(DataError, what, f"{self._run}, with one tensor for each input")
            if name is not None:
                given[name] = one
            elif path not in self._constants or not same(one, self._constants[path]):
                raise self._no_input(path, called, one)
        missing = [name for name in self._paths if name not in given and name not in kept]
        if missing:
            places = f"{', '.join(map(self._paths.__getitem__, missing))} of {self._forward}"
            what = f"the input {', '.join(missing)} of the PEF has no tensor: when it was compiled, {places} had one"
            raise app_error(DataError, what, f"{self._run}: each tensor with its name=, or in its place")
        return given

    def _found(self, inputs: Inputs, kept: Collection[str]) -> Sequence[tuple[str, str | None, Any]]:
        """Each value but None, after its path in the arguments of `forward`, and the name that the app gives it."""
        parts = partial(flat, whole=self._constants)
        if isinstance(inputs, Mapping):
            paths = [(path, one) for key in inputs for path, one in parts(inputs[key], str(key)) if one is not None]
            by_name = {path for path, _ in paths} <= {*self._paths}
            known = {} if by_name else {**self._names, **self._constants}
            return [(path, None if path in known else path, one) for path, one in paths]
        listed, names = [*inputs], [*map(name_of, inputs)]
        if len(listed) <= len(self.order) and all(isinstance(one, Tensor) for one in listed):  # without constants
            taken = {*names, *(kept if len(listed) < len(self.order) else ())}
            free = (self._paths[name] for name in self.order if name not in taken)
            paths = [("" if names[at] in self._paths else next(free, ""), one) for at, one in enumerate(listed)]
        else:
            places = [*self._places, *(f"input_{at}" for at in range(len(self._places), len(listed)))]
            paths = [pair for place, one in zip(places, listed, strict=False) for pair in parts(one, place)]
            paths = paths if self.order == [*self._paths] else [("", one) for _, one in paths]
        return [(path, name_of(one), one) for path, one in paths if one is not None]

    def _no_input(self, path: str, called: str | None, one: Any) -> DataError:
        constant = next((at for at in (path, called) if at in self._constants), None)
        if constant is None:
            called = "fits no place" if called is None else f"is called {called}"
            what = f"a tensor {called}, and {self._forward} was compiled with the inputs {', '.join(self.order)}"
            name = self._names.get(path)
            remedy = f"name it as when it was compiled: name={name!r}" if name else f"{self._run}, each with its name="
            return app_error(DataError, what, remedy)
        value, now = self._constants[constant], "a tensor" if isinstance(one, Tensor) else one_line(repr(one))
        was = "its default" if isinstance(value, Tensor) else one_line(repr(value))
        what = f"{constant} of {self._forward} was {was} when it was compiled, a constant of the PEF; it is {now} now"
        return app_error(DataError, what, f"{self._run}; or compile and trace it with a tensor for {constant}")


def fitting(
    name: str, wanted: Mapping[str, Symbol], given_tensor: Any, batch_size: int, whole: Collection[str]
) -> Tensor:
    """`given_tensor` as the input `name`: plain, and reshaped and detached if needed."""
    type_, tensor = wanted[name].type, _tensor(name, given_tensor)
    if tensor.requires_grad:
        tensor = tensor.detach()
    if name in whole and tuple(tensor.shape) == type_.shape[1:]:
        tensor = tensor.expand(type_.shape)
    dtype, shape, given = getattr(torch, type_.dtype), type_.shape, tuple(tensor.shape)
    if given == shape and tensor.dtype is dtype and tensor.is_cpu:
        return tensor
    check_on_host(name, given_tensor)
    if len(shape) == len(given) and shape[1:] == given[1:] and given[0] != batch_size:
        what = f"AP01: {name} has {given[0]} samples, and the PEF takes {batch_size} at a time"
        if given[0] > batch_size:
            raise app_error(DataError, what, f"-b {batch_size}, or compile again with -b {given[0]}")
        is_as_typed = current().flag("batch_size") == batch_size
        reason = "the DataLoader makes smaller ones" if is_as_typed else "-b differs from the compile"
        remedy = f"and batch_size={batch_size}" if is_as_typed else f"or -b {batch_size}"
        what += f": it is the end of the data set, or {reason}"
        raise app_error(DataError, what, f"give drop_last=True to the DataLoader; {remedy}")
    if shape[:1] == given[:1] and [n for n in shape if n != 1] == [n for n in given if n != 1]:
        tensor = tensor.reshape(shape)  # labels of [batch, 1] for [batch], for example
    elif shape != given:
        what = f"{name} has the shape {given}, and the PEF was compiled for {shape}"
        raise app_error(DataError, what, "compile again with this shape (-b: batch size), or change the DataLoader")
    given_dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype.is_floating_point is not tensor.is_floating_point():
        what = f"{name} is {given_dtype}, and the PEF was compiled for {type_.dtype}"
        raise DataError(what, remedy=f"give {name} as {type_.dtype}")
    if not dtype.is_floating_point and tensor.numel() and dtype not in (tensor.dtype, torch.int64, torch.bool):
        limits, least, most = torch.iinfo(dtype), int(tensor.min()), int(tensor.max())
        if least < limits.min or most > limits.max:
            what = f"{name} has {most if most > limits.max else least}, which {type_.dtype} cannot hold"
            raise DataError(what, remedy=f"compile with {name} as {given_dtype}")
    return tensor


class SambaLoader:
    """`SambaLoader(DataLoader(…), ["image", "label"])`: each batch is a list of SambaTensors with these names. The
    loader is anything iterable. Its batches are sequences, named in order, or mappings, taken by name."""

    @checks_keywords("samba.SambaLoader")
    def __init__(
        self,
        torch_loader: Iterable[Any],
        names: Sequence[str],
        function_hook: Callable[[Any], Any] | None = None,
        return_original_batch: bool = False,
    ) -> None:
        """function_hook: called with each batch; the tensors of what it returns are named: `lambda batch: batch[0]`
        return_original_batch: yield pairs of the SambaTensors and the batch before the hook"""
        self.torch_loader: Any = torch_loader
        self.names = (names,) if isinstance(names, str) else tuple(names)
        self.function_hook = function_hook
        self.return_original_batch = return_original_batch

    def __len__(self) -> int:
        return len(self.torch_loader)

    def __iter__(self) -> Iterator[Any]:
        for batch in self.torch_loader:
            values = self._values(batch if self.function_hook is None else self.function_hook(batch))
            tensors = [self._tensor(value, name) for value, name in zip(values, self.names, strict=True)]
            yield (tensors, batch) if self.return_original_batch else tensors

    def _values(self, batch: object) -> Sequence[object]:
        if isinstance(batch, Mapping):
            missing = ", ".join(name for name in self.names if name not in batch)
            if missing:
                what = f"a batch has no {missing}; it has {', '.join(map(str, batch))}"
                raise app_error(DataError, what, "give SambaLoader names that the batches have")
            return [batch[name] for name in self.names]
        values = batch if isinstance(batch, list | tuple) else [batch]
        if len(values) != len(self.names):
            names = f"{counted(len(self.names), 'name')}: {', '.join(self.names)}"
            what = f"a batch has {counted(len(values), 'value')}, and SambaLoader {names}"
            raise app_error(DataError, what, "give SambaLoader one name for each value that the dataset returns")
        return values

    def _tensor(self, value: object, name: str) -> SambaTensor:
        if not isinstance(value, Tensor):
            remedy = "return numbers or tensors from the dataset, or leave it out by a collate_fn or function_hook"
            raise type_error(DataError, f"{name} of a batch must be a tensor", value, remedy)
        return from_torch_tensor(value, name, 0 if value.ndim else None)


def install_sampler_of_one_replica() -> None:
    """Makes 0 the default rank of `DistributedSampler(dataset, num_replicas=1)`. Torch would read it from the process
    group, which may be absent or larger."""
    make = DistributedSampler.__init__

    @wraps(make)
    def made(sampler: Any, dataset: Any, num_replicas: Any = None, rank: Any = None, *rest: Any, **more: Any) -> None:
        make(sampler, dataset, num_replicas, 0 if rank is None and num_replicas == 1 else rank, *rest, **more)

    DistributedSampler.__init__ = made  # type: ignore[method-assign, assignment]  # replaced on purpose


def losses_among(outputs: Sequence[Tensor], given: tuple[int, ...], named: tuple[int, int] | None) -> tuple[int, ...]:
    """The outputs of a model from which the backward starts: those at `given`; else the one of `named_loss`, if the
    counts match; else the first scalar, the first vector, or the only one with a single element; else every output that
    has a gradient. Raises ModelError for an index beyond the outputs."""
    count = len(outputs)
    if given:
        if not all(-count <= index < count for index in given):
            what = f"loss_indices is {list(given)}, and the model returns {counted(count, 'output')}"
            raise ModelError(what, remedy=f"give indices from 0 to {count - 1}")
        return tuple(index % count for index in given)
    able = tuple(index for index, one in enumerate(outputs) if one.requires_grad and one.is_floating_point())
    if named is not None and named[1] == count and named[0] in able:
        return (named[0],)
    for axes in (0, 1):
        first = next((index for index in able if outputs[index].ndim == axes), None)
        if first is not None:
            return (first,)
    single = [index for index in able if outputs[index].numel() == 1]
    return (single[0],) if len(single) == 1 else able or (0,)


def named_loss(model: nn.Module) -> tuple[int, int] | None:
    """Which element of `return a, b` in `model.forward` has a name like `loss`, and how many elements there are. None
    if no return statement has exactly one such element, or if they disagree."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(model.forward))))
    except (OSError, TypeError, SyntaxError):
        return None
    places = set()
    for elements in (value.elts for value in _returned(tree.body[0]) if isinstance(value, ast.Tuple)):
        losses = [index for index, element in enumerate(elements) if _is_called_loss(element)]
        starred = any(isinstance(element, ast.Starred) for element in elements)
        places.add((losses[0], len(elements)) if len(losses) == 1 and not starred else None)
    return places.pop() if len(places) == 1 else None


def _returned(function: ast.AST) -> Iterator[ast.expr]:
    for node in ast.iter_child_nodes(function):
        if isinstance(node, ast.Return) and node.value is not None:
            yield node.value
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef):
            yield from _returned(node)


def _is_called_loss(expression: ast.expr) -> bool:
    names = [getattr(part, "id", getattr(part, "attr", "")) for part in ast.walk(expression)]
    return any(re.search(r"(^|_)loss(es)?($|_)", name, re.IGNORECASE) for name in names)
