"""The outermost calls of modules, so that a call is found again by the tensors that it returned. It is remembered for
as long as the memory of all its outputs exists; and none is before `remember_calls`."""

import inspect
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from traceback import walk_stack
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from sambasim.compiler.capture.results import tensors_in
from sambasim.compiler.capture.sharing import kept_address, storage_of
from sambasim.compiler.capture.step import Example, Fixed, Whole, by_place
from sambasim.compiler.capture.trial import is_tracing
from sambasim.data.batches import each_value
from sambasim.errors import DataError, ModelError

Place: TypeAlias = tuple[object, ...]


def place(tensor: Tensor) -> Place:
    """Where the elements of a tensor lie: equal for the tensor itself and for other forms of it."""
    return storage_of(tensor), tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.dtype


@dataclass(frozen=True, slots=True)
class Call:
    """A call of `model`. `outputs`: the places of the tensors that it returned."""

    model: nn.Module
    args: Sequence[Any]
    keywords: Mapping[str, Any]
    outputs: Sequence[Place]
    memories: Sequence[Any]

    def arguments(self) -> tuple[Mapping[str, Any], bool]:
        """What it was called with, by name, and whether `forward` takes it by name. Raises ModelError for keywords
        beside arguments that it takes by position only."""
        signature = inspect.signature(self.model.forward)
        named = dict(signature.bind(*self.args, **self.keywords).arguments)
        kinds = {signature.parameters[name].kind: name for name in named}
        if inspect.Parameter.VAR_KEYWORD in kinds:
            named |= named.pop(kinds[inspect.Parameter.VAR_KEYWORD])
        if kinds.keys().isdisjoint((inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.VAR_POSITIONAL)):
            return named, True
        if self.keywords:
            what = f"{type(self.model).__name__}.forward takes some arguments by position only, and got keywords beside"
            raise ModelError(what, remedy="call the model with all its arguments by position")
        return by_place(self.model, self.args), False

    def example(self, given: Sequence[tuple[str | None, Tensor]]) -> tuple[Example, dict[str, Tensor], set[str]]:
        """The call as an Example, the tensors in it by name, and the names of those that are one for all samples, such
        as a mask. `given`: all of them, or other forms of them, with their names; one without has its place's. Raises
        DataError for another argument that a graph cannot keep."""
        batches = sorted((one for _, one in given if one.ndim), key=lambda one: getattr(one, "batch_dim", None) != 0)
        size = batches[0].shape[0] if batches else 1
        inputs, named, whole = dict[str, Tensor](), dict[str, Tensor](), set[str]()

        def taken(value: Any, path: str) -> object:
            if value is None:
                return None
            what = f"{type(self.model).__name__} was called with {path}, which"
            if isinstance(value, bool | int | float | str | torch.dtype):
                return Fixed(value)
            if not isinstance(value, Tensor):
                remedy = "give tensors, numbers and words, in tuples, lists and dictionaries"
                raise DataError(f"{what} is a {type(value).__name__}, and no tensor or number", remedy=remedy)
            same = [pair for pair in given if pair[1] is value] or [
                pair for pair in given if place(pair[1]) == place(value)
            ]
            if not same:
                raise DataError(f"{what} is not among the inputs")
            name, own = same[0]
            name = name or path
            if name in inputs:
                raise DataError(f"two inputs are called {name}", remedy="give each a name= of its own")
            named[name], inputs[name] = own, value.detach().as_subclass(Tensor)
            if value.shape[:1] == (size,):
                return len(inputs) - 1
            whole.add(name)
            inputs[name] = inputs[name].expand(size, *value.shape).contiguous()
            return Whole(len(inputs) - 1)

        arguments, by_keyword = self.arguments()
        kept = {name: each_value(value, taken, name) for name, value in arguments.items()}
        return Example(inputs, by_keyword, kept), named, whole

    def positions(self, outputs: Sequence[Tensor]) -> list[int]:
        """Which of its outputs these are; equal ones one after another."""
        found: list[int] = []
        for output in map(place, outputs):
            at = [index for index, other in enumerate(self.outputs) if other == output]
            found.append(next((index for index in at if index not in found), at[0]))
        return found


_calls: list[Call] = []
_CALL = nn.Module.__call__.__code__


def call_with(outputs: Sequence[Tensor]) -> Call | None:
    """The last call that returned all these tensors, perhaps among others."""
    return next((call for call in reversed(_calls) if {*map(place, outputs)} <= {*call.outputs}), None)


@cache
def remember_calls() -> None:
    """Remember calls from now on."""
    register_module_forward_hook(_remember, with_kwargs=True)


def _remember(model: nn.Module, args: Any, keywords: Any, result: object) -> None:
    if is_tracing() or sum(frame.f_code is _CALL for frame, _ in walk_stack(None)) > 1:  # a part of another model
        return
    outputs = tensors_in(result)
    with suppress(RuntimeError):  # tensors of vmap, and sparse ones, have no storage to ask for
        memories = [*map(kept_address, outputs)]
        _calls[:] = [call for call in _calls if not any(memory.expired() for memory in call.memories)]
        if outputs:
            _calls.append(Call(model, args, keywords, [*map(place, outputs)], memories))
