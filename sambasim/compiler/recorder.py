"""What a call of a model does, line by line: each operator that PyTorch dispatches, with what it takes and gives."""

import contextlib
import functools
import hashlib
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import sambasim
from sambasim.compiler.step import is_library_file
from sambasim.pef.weights import bytes_of

_FOR_PYTHON = ("numpy", "__array__", "tolist", "__dlpack__", "__deepcopy__", "__reduce_ex__")
"""Methods of a tensor by which its values leave PyTorch, where no operator tells what becomes of them."""

_IMPORTING = "<frozen importlib._bootstrap>", "_find_and_load"
_TRACED = frozenset(
    function.__code__
    for function in (torch.compiler.is_compiling, torch.compiler.is_dynamo_compiling, torch.compiler.is_exporting)
)
"""What tells a model that it is being captured."""

_RUNNING = ("running_mean", "running_var")
"""What a batch norm writes to, though its schema does not say so."""

_INSTALLED = ("site-packages", "dist-packages")

_PLAIN = (bool, int, float, complex, str, torch.dtype, torch.device, torch.layout, torch.memory_format, type(None))


_SAMBA = f"{Path(sambasim.__file__).parent / 'samba'}/"
"""The first call of `samba.cat` runs other code than later ones; its operators tell what is computed."""


class Untold(Exception):
    """The call does what its operators do not tell."""


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own methods are untyped here and below
    """Around a call that is to be recorded. A tensor goes by its label: that of the model's tensor, of the input or of
    the result that it is, or of its bytes, if a line of the model's source made it.

    The code of the user's own files that runs is recorded too, as Python has compiled it. What is made may take
    `most_bytes`.
    Raises Untold where a branch, a shape or Python code depends on values or on whether there is a capture, where
    something is changed that the call has not made, and where it makes too much.
    """

    def __init__(self, most_bytes: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's, untyped
        self.lines: list[str] = []
        self.code: set[str] = set()
        self._bytes_left = most_bytes
        self._label_of: dict[tuple[object, ...], str] = {}
        self._is_own: dict[int, bool] = {}
        self._alive: list[Tensor] = []  # so that no other tensor gets the place of one that is gone
        self._reading = False
        self._importing = 0
        self._asks_for_tracers = False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """What torch asks; its answer would import a tracer, in seconds, to keep it from tracing this class."""
        return False

    def stand_in(self, tensor: Tensor, label: str, dtype: torch.dtype | None = None) -> Tensor:
        """What the call is given for `tensor`, in `dtype` if that is another: parameters in their own memory, which
        must not be changed, and a copy of all else."""
        given = tensor.detach() if dtype is None else tensor.detach().to(dtype)
        if isinstance(tensor, nn.Parameter):
            given = nn.Parameter(given, tensor.requires_grad)
        else:
            given = given.clone().requires_grad_(tensor.requires_grad)
        self._know(given, label, own=not isinstance(tensor, nn.Parameter))
        return given

    def label(self, tensor: Tensor) -> str:
        """The label of `tensor`."""
        place = _place(tensor)
        if place not in self._label_of:
            self._know(tensor, self.content(tensor), own=False)
        return self._label_of[place]

    def content(self, tensor: Tensor) -> str:
        """The form and the bytes of `tensor`."""
        self._reading = True
        try:
            return f"{form(tensor)} {hashlib.sha256(bytes_of(tensor)).hexdigest()}"
        finally:
            self._reading = False

    @contextlib.contextmanager
    def recorded(self) -> Iterator[None]:
        """While this is active, everything is recorded."""
        with contextlib.ExitStack() as stack:
            for name in _FOR_PYTHON:
                method = getattr(Tensor, name)
                if name in vars(Tensor):
                    stack.callback(setattr, Tensor, name, method)
                else:  # it is inherited
                    stack.callback(delattr, Tensor, name)
                setattr(Tensor, name, self._guarded(name, method))
            stack.callback(sys.setprofile, sys.getprofile())
            stack.enter_context(self)
            sys.setprofile(self._runs)
            yield
        if self._asks_for_tracers:
            raise Untold("a capture takes another way than a call")

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> object:
        kwargs = kwargs or {}
        if func.namespace == "profiler":  # of nn.DataParallel: it only names what is timed
            return func(*args, **kwargs)
        if {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & set(func.tags):
            raise Untold("values decide what is done")
        told = f"{func} {self._told(args)} {self._told(dict(kwargs))}"
        for tensor in written(func, args, kwargs, _RUNNING):
            if not self._is_own[tensor.untyped_storage()._cdata]:
                raise Untold("something is changed that the call has not made")
        result = func(*args, **kwargs)
        tensors = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        for index, tensor in enumerate(tensors):
            self._know(tensor, f"%{len(self.lines)}.{index}", own=True)
        self.lines.append(f"{told} -> {[f'{self.label(tensor)} {form(tensor)}' for tensor in tensors]}")
        return result

    def _know(self, tensor: Tensor, label: str, *, own: bool) -> None:
        place, storage = _place(tensor), tensor.untyped_storage()
        if place in self._label_of:
            return
        self._label_of[place] = label
        self._alive.append(tensor)
        if storage._cdata not in self._is_own:
            self._is_own[storage._cdata] = own
            self._bytes_left -= storage.nbytes() if own else 0
        if self._bytes_left < 0:
            raise Untold("too much is made")

    def _told(self, value: object) -> str:
        if isinstance(value, Tensor):
            return self.label(value)
        if isinstance(value, (list, tuple)):
            return f"[{', '.join(map(self._told, value))}]"
        if isinstance(value, dict):
            return f"{{{', '.join(f'{name}: {self._told(item)}' for name, item in value.items())}}}"
        if isinstance(value, _PLAIN):
            return repr(value)
        raise Untold(f"an operator takes a {type(value).__name__}")

    def _guarded(self, name: str, method: Callable[..., object]) -> Callable[..., object]:
        def guarded(tensor: Tensor, *args: object, **kwargs: object) -> object:
            if not self._reading:
                raise Untold(f"{name} gives values to Python")
            return method(tensor, *args, **kwargs)

        return guarded

    def _runs(self, frame: FrameType, event: str, argument: object) -> None:
        """What Python tells of each call and return. An import runs code too, but only in the first call of all."""
        code = frame.f_code
        if event == "call" and code in _TRACED and frame.f_back and _is_users(frame.f_back.f_code.co_filename):
            self._asks_for_tracers = True  # what is raised here, Python throws away
        if (code.co_filename, code.co_name) == _IMPORTING:
            self._importing += {"call": 1, "return": -1}.get(event, 0)
        elif event == "call" and not self._importing and _is_users(code.co_filename):
            self.code.add(_told_code(code))


def form(tensor: Tensor) -> str:
    """Type, shape and strides of `tensor`."""
    return f"{tensor.dtype} {tuple(tensor.shape)} {tensor.stride()}"


def _place(tensor: Tensor) -> tuple[object, ...]:
    """Equal for the same part of the same memory, whichever object it is in."""
    storage = tensor.untyped_storage()._cdata
    return storage, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype


def written(
    func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any], untold: Collection[str] = ()
) -> Iterator[Tensor]:
    """The tensors that a call of `func` writes to, as its schema says, and those of its arguments in `untold`."""
    for index, argument in enumerate(func._schema.arguments):
        value = args[index] if index < len(args) else kwargs.get(argument.name)
        if argument.name in untold or (argument.alias_info is not None and argument.alias_info.is_write):
            yield from (leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor))


@functools.cache
def _is_users(file: str) -> bool:
    """Whether `file` is neither of Python, torch and sambasim, nor of a package that was installed."""
    if is_library_file(file) or file.startswith(_SAMBA):
        return False
    return not any(folder in Path(file).parts for folder in _INSTALLED)


def _told_code(code: CodeType) -> str:
    """What a function does, as Python runs it: neither lines nor comments nor the names of its variables."""
    constants = [_told_constant(constant) for constant in code.co_consts]
    return hashlib.sha256(repr((code.co_name, code.co_code, constants, code.co_names)).encode()).hexdigest()


def _told_constant(constant: object) -> str:
    if isinstance(constant, CodeType):
        return _told_code(constant)
    if isinstance(constant, frozenset):
        return f"{sorted(map(repr, constant))}"
    if isinstance(constant, tuple):
        return f"{[_told_constant(one) for one in constant]}"
    return repr(constant)
