"""`samba.graph.FwdGraph`: one forward graph of a PEF of several. Importing this module installs hooks that remember the
outermost calls of modules; so a graph knows its model by the outputs of the call."""

import inspect
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from sambasim.compiler.capture.step import Example, Fixed, Whole, tensors_in
from sambasim.compiler.capture.trial import is_tracing
from sambasim.data.batches import each_value
from sambasim.errors import DataError, ModelError, OptionError
from sambasim.samba.fingerprint import Request
from sambasim.samba.inputs import name_of, repeatable
from sambasim.samba.notices import checks_keywords
from sambasim.samba.process import app_error, type_error
from sambasim.samba.request import request, unwrapped
from sambasim.samba.tensor import SambaTensor, to_torch

__all__ = ["FwdGraph"]

_CALLING = "outputs = model(*inputs), and then FwdGraph(inputs, outputs, name) with these tensors"


def _place(tensor: Tensor) -> tuple[object, ...]:
    """Where the elements of a tensor lie: equal for the tensor itself and for another form of it."""
    storage = tensor.untyped_storage()
    return storage._cdata, tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.dtype


@dataclass(frozen=True, slots=True)
class _Call:
    """A call of `model`, for as long as the memory of all its `outputs` exists."""

    model: nn.Module
    args: Sequence[Any]
    keywords: Mapping[str, Any]
    outputs: Sequence[tuple[object, ...]]
    memories: Sequence[Any]


_weakly: Any = StorageWeakRef  # torch's, untyped
_calls: list[_Call] = []
_depth = 0


def _enter(model: nn.Module, args: object) -> None:
    global _depth
    _depth += 1


def _leave(model: nn.Module, args: Any, keywords: Any, result: object) -> None:
    """Also after an error, without a result."""
    global _depth
    _depth -= 1
    outputs = [] if _depth or is_tracing() else tensors_in(result)
    with suppress(RuntimeError, NotImplementedError):  # tensors of vmap, and sparse ones, have no storage
        memories: list[Any] = [_weakly(output.untyped_storage()) for output in outputs]
        _calls[:] = [call for call in _calls if not any(memory.expired() for memory in call.memories)]
        if outputs:
            _calls.append(_Call(model, args, keywords, [*map(_place, outputs)], memories))


register_module_forward_pre_hook(_enter)
register_module_forward_hook(_leave, with_kwargs=True, always_call=True)


class FwdGraph:
    """`FwdGraph(inputs, outputs, name)`, after `outputs = model(*inputs)` in eager PyTorch."""

    @checks_keywords("samba.graph.FwdGraph")
    def __init__(self, inputs: Any, outputs: Any, name: str | None = None) -> None:
        """inputs: the tensors of the call, in any form; each argument of the call may be None, a number or a word too
        outputs: what it returned, or some of its tensors
        name: by default that of the model's class, in lower case

        Raises ModelError for outputs that no call of a module returned, and DataError for inputs that are not the ones
        that it was given."""
        self.inputs, self.outputs = repeatable(inputs), outputs
        self.results = tensors_in(outputs)
        if not self.results:
            raise type_error(ModelError, "the outputs of a graph must be tensors", outputs, _CALLING)
        places = [*map(_place, self.results)]
        call = next((call for call in reversed(_calls) if {*places} <= {*call.outputs}), None)
        if call is None:
            what = f"the outputs of the graph {name or ''} are not what a call of a module returned".replace("  ", " ")
            raise app_error(ModelError, what, _CALLING)
        self.model = unwrapped(call.model)
        self.name = str(name or type(self.model).__name__.lower())
        self.positions = _positions(places, call.outputs)
        """Of `results` among all outputs of the call."""
        self.given: dict[str, Tensor] = {}
        """The inputs by name."""
        self.whole: set[str] = set()
        """The names of inputs that are one for all samples, such as a number or a mask."""
        self.example = self._example(call)

    def request(self, fields: Mapping[str, object], chips: int | None = None) -> Request:
        """The request for its program, as `request.request`."""
        tensors = [self.example.inputs[name] if name in self.whole else one for name, one in self.given.items()]
        return request(self.model, tensors, (), fields, inference=True, chips=chips, example=self.example)

    def named(self, outputs: Sequence[str]) -> dict[str, str]:
        """The names that the app has given to results, for those of `outputs`; results without one get theirs."""
        names: dict[str, str] = {}
        for result, symbol in zip(self.results, outputs, strict=True):
            own = name_of(result)
            if own is not None and own not in self.given:
                names[own] = symbol
            elif isinstance(result, SambaTensor):
                result.sn_name = symbol
        return names

    def regions(self, outputs: Sequence[str]) -> dict[str, str]:
        """By input and output, the region of those that lie in one. `outputs`: the names of `results`."""
        named = {**self.given, **dict(zip(outputs, self.results, strict=True))}
        regions = {name: getattr(tensor, "region_name", None) for name, tensor in named.items()}
        return {name: str(region) for name, region in regions.items() if region is not None}

    def _example(self, call: _Call) -> Example:
        keys = {id(one): key for key, one in self.inputs.items()} if isinstance(self.inputs, Mapping) else {}
        listed, kind = tensors_in(self.inputs), type(self.model).__name__
        plain: dict[str, Tensor] = {}
        batches = [one for one in listed if one.ndim]
        batches.sort(key=lambda one: getattr(one, "batch_dim", None) != 0)
        size = batches[0].shape[0] if batches else 1

        def taken(value: Any, path: str) -> object:
            if value is None:
                return None
            if not isinstance(value, Tensor):
                if isinstance(value, bool | int | float | str | torch.dtype):
                    return Fixed(value)
                remedy = "give tensors, numbers and words, in tuples, lists and dictionaries"
                what = f"the argument {path} of the graph {self.name} cannot be kept"
                raise type_error(DataError, what, value, remedy)
            same = [one for one in listed if one is value] or [one for one in listed if _place(one) == _place(value)]
            if not same:
                what = f"{kind} was called with {path}, which is not among the inputs of the graph {self.name}"
                raise app_error(DataError, what, _CALLING)
            own = same[0] if isinstance(same[0], SambaTensor) else value
            name = keys.get(id(same[0])) or name_of(own) or path
            if name in plain:
                raise app_error(DataError, f"two inputs are called {name}", "give each a name= of its own")
            self.given[name], plain[name] = own, to_torch(value).detach()
            if value.shape[:1] == (size,):
                return len(plain) - 1
            self.whole.add(name)
            plain[name] = plain[name].expand(size, *value.shape).contiguous()
            return Whole(len(plain) - 1)

        arguments, by_keyword = _bound(self.model, call)
        kept = {name: each_value(value, taken, name) for name, value in arguments.items()}
        used = {*map(_place, self.given.values())}
        for one in listed:
            if _place(one) not in used:
                unused = name_of(one) or "one"
                what = f"{kind} was not called with {unused} of the inputs of the graph {self.name}"
                raise app_error(DataError, what, _CALLING)
        return Example(plain, by_keyword, kept)


def _positions(places: Sequence[object], among: Sequence[object]) -> list[int]:
    """Where each of `places` is in `among`; equal ones one after another."""
    found: list[int] = []
    for place in places:
        at = [index for index, other in enumerate(among) if other == place]
        found.append(next((index for index in at if index not in found), at[0]))
    return found


def _bound(model: nn.Module, call: _Call) -> tuple[Mapping[str, Any], bool]:
    """The arguments of a call by name, and whether `forward` takes them by name."""
    signature = inspect.signature(model.forward)
    bound = signature.bind(*call.args, **call.keywords).arguments
    kinds = {name: parameter.kind for name, parameter in signature.parameters.items()}
    starred = next((name for name in bound if kinds[name] is inspect.Parameter.VAR_POSITIONAL), None)
    only_by_place = [name for name in bound if kinds[name] is inspect.Parameter.POSITIONAL_ONLY]
    if starred is None and not only_by_place:
        named = dict(bound)
        for name in [name for name in named if kinds[name] is inspect.Parameter.VAR_KEYWORD]:
            named |= named.pop(name)
        return named, True
    if call.keywords:
        what = f"{type(model).__name__}.forward was called with keywords, and takes some arguments by position only"
        raise app_error(OptionError, what, "call the model with its arguments by position")
    return {f"input_{index}": value for index, value in enumerate(call.args)}, False
