"""Whether all calls of a step do the same: state that Python keeps between them, and numbers that Python draws.

A capture is one call. So the operators of several calls are recorded and compared, with their numbers, and with the
memory that they read.
"""

import contextlib
import hashlib
import random
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any, TypeGuard

import numpy as np
import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sambasim.compiler.explain import Finding, Obstacle, line_of, user_frame, where_of
from sambasim.compiler.names import is_library_file
from sambasim.pef.weights import bytes_of

_STATE = Obstacle(
    "a value that differs from call to call: Python counts, draws, or keeps something for the next call",
    'keep it in a buffer, self.register_buffer("steps", torch.zeros(())), and change that in place: self.steps.add_(1)',
)
_RANDOM = Obstacle("random numbers of Python or NumPy", "draw them by PyTorch: torch.rand(())")
_GENERATOR = Obstacle(
    "a torch.Generator of its own, whose state a graph does not keep", "leave out generator=, which draws from torch's"
)
_LIFTED = (torch.ops.aten.lift_fresh.default, torch.ops.aten.lift_fresh_copy.default)
_MOST_BYTES = 1 << 20
"""The size up to which tensors that no operator has made are compared by content."""

Place = tuple[str, int] | None
"""A file and a line of the user's, or None."""


class Calls(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own methods are untyped here and below
    """Records the operators of calls. `begin` before each of them. `fake`: no tensor holds values but constants."""

    def __init__(self, *, fake: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's, untyped
        self._fake = fake
        self._calls: list[list[tuple[str, Place]]] = []
        self._made_in: dict[int, int] = {}
        """By storage, the call whose operator has made it."""
        self._alive: list[Tensor] = []  # so that no other tensor gets the storage of one that is gone
        self._reads_old: list[Place] = []
        self._numpy = _state_of_numpy()
        self.of_generators: list[Finding] = []
        """Where numbers are drawn from a generator of the user's own."""

    def begin(self, inputs: Sequence[Tensor]) -> None:
        self._calls.append([])
        self._reads_old.clear()
        self._makes(inputs)

    def _makes(self, tensors: Iterable[object]) -> None:
        for one in tensors:
            if _is_dense(one):
                self._made_in.setdefault(_storage(one), len(self._calls))
                self._alive.append(one)

    @property
    def finding(self) -> Finding | None:
        """Where the last call did something else than the one before, or read what that one had made."""
        before, now = ([], *self._calls)[-2:]
        obstacle = _STATE if _state_of_numpy() == self._numpy else _RANDOM
        for (one, _), (other, place) in zip(before, now, strict=False):
            if one != other:
                return _found(obstacle, place)
        if len(before) != len(now):
            return _found(obstacle, max(before, now, key=len)[min(len(before), len(now))][1])
        return _found(_STATE, self._reads_old[0]) if self._reads_old else None

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> object:
        number, frame = len(self._calls), user_frame()
        place = None if frame is None else (frame.f_code.co_filename, frame.f_lineno)
        given = tree_leaves((args, kwargs or {}))
        if any(isinstance(leaf, torch.Generator) for leaf in given):
            finding = _found(_GENERATOR, place)
            self.of_generators += [finding] if finding not in self.of_generators else []
        storages = {_storage(leaf) for leaf in given if _is_dense(leaf)}
        if any(self._made_in.get(storage) == number - 1 for storage in storages):
            self._reads_old.append(place)
        self._calls[-1].append((f"{func} {[self._text(func, leaf) for leaf in given]}", place))
        result = func(*args, **(kwargs or {}))
        self._makes(leaf for leaf in tree_leaves(result) if _is_dense(leaf) and _storage(leaf) not in storages)
        return result

    def _text(self, func: OpOverload, value: object) -> str:
        if not isinstance(value, Tensor):
            return repr(value) if isinstance(value, (bool, int, float, complex, str, type(None))) else str(type(value))
        is_constant = not isinstance(value, FakeTensor) and (self._fake or func in _LIFTED)
        if is_constant and value.layout is torch.strided and value.nbytes <= _MOST_BYTES:
            with torch._C._DisableTorchDispatch():
                return hashlib.sha256(bytes_of(value)).hexdigest()
        return f"{value.dtype}{tuple(value.shape)}"


def _state_of_numpy() -> str:
    return repr(np.random.get_state(legacy=False))


def _is_dense(value: object) -> TypeGuard[Tensor]:
    return isinstance(value, Tensor) and value.layout is torch.strided


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _found(obstacle: Obstacle, place: Place) -> Finding:
    return Finding(obstacle, "" if place is None else line_of(*place))


@contextlib.contextmanager
def draws_of_python(findings: list[Finding]) -> Iterator[None]:
    """Add a finding for each line of the user's that draws random numbers of Python."""

    def profile(frame: FrameType, event: str, argument: object) -> None:
        if event == "c_call" and isinstance(getattr(argument, "__self__", None), random.Random):
            caller: FrameType | None = frame
            while caller is not None and is_library_file(caller.f_code.co_filename):
                if caller.f_globals.get("__name__", "").partition(".")[0] == "torch":
                    return
                caller = caller.f_back
            finding = None if caller is None else Finding(_RANDOM, where_of(caller))
            if finding is not None and finding not in findings:
                findings.append(finding)

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        yield
    finally:
        sys.setprofile(before)
