"""`samba.graph.FwdGraph`: one forward graph of a PEF of several. Importing this module has calls of models remembered,
by which a graph finds its model."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from sambasim.compiler.capture.calls import Call, call_with, place, remember_calls
from sambasim.compiler.capture.step import Example, Fixed, Whole, tensors_in
from sambasim.data.batches import each_value
from sambasim.errors import DataError, ModelError
from sambasim.samba.fingerprint import Request
from sambasim.samba.inputs import name_of, repeatable
from sambasim.samba.notices import checks_keywords
from sambasim.samba.process import app_error, type_error
from sambasim.samba.request import request, unwrapped
from sambasim.samba.tensor import SambaTensor, to_torch

__all__ = ["FwdGraph"]

_CALLING = "outputs = model(*inputs), and then FwdGraph(inputs, outputs, name) with these tensors"

remember_calls()


class FwdGraph:
    """`FwdGraph(inputs, outputs, name)`, after `outputs = model(*inputs)` in eager PyTorch. `given`: the inputs by
    name; `whole`: those that are one for all samples, such as a mask."""

    @checks_keywords("samba.graph.FwdGraph")
    def __init__(self, inputs: Any, outputs: Any, name: str | None = None) -> None:
        """inputs: the tensors of the call; its other arguments may be None, numbers and words
        outputs: what it returned, or some of its tensors
        name: by default that of the model's class, in lower case

        Raises ModelError for outputs that no call of a module returned, and DataError for other inputs than its own."""
        self.inputs, self.outputs = repeatable(inputs), outputs
        self._results = tensors_in(outputs)
        if not self._results:
            raise type_error(ModelError, "the outputs of a graph must be tensors", outputs, _CALLING)
        call = call_with(self._results)
        if call is None:
            what = f"the outputs of the graph {name or 'without a name'} are not what a call of a module returned"
            raise app_error(ModelError, what, _CALLING)
        self.model = unwrapped(call.model)
        self.name = str(name or type(self.model).__name__.lower())
        self.positions = call.positions(self._results)
        self.given: dict[str, Tensor] = {}
        self.whole: set[str] = set()
        self.example = self._example(call)

    def request(self, fields: Mapping[str, object], chips: int | None = None) -> Request:
        """The request for its program, as `request.request`."""
        tensors = [self.example.inputs[name] if name in self.whole else one for name, one in self.given.items()]
        return request(self.model, tensors, (), fields, inference=True, chips=chips, example=self.example)

    def aliases(self, symbols: Sequence[str]) -> dict[str, str]:
        """The symbols of outputs by the names that the app gave them; an output without a name gets its symbol's."""
        named = [(name_of(result), symbol) for result, symbol in zip(self._results, symbols, strict=True)]
        for result, (name, symbol) in zip(self._results, named, strict=True):
            if isinstance(result, SambaTensor) and (name is None or name in self.given):
                result.sn_name = symbol
        return {name: symbol for name, symbol in named if name is not None and name not in self.given}

    def regions(self, symbols: Sequence[str]) -> dict[str, str]:
        """The regions by inputs, and by the `symbols` of outputs, of those that lie in one."""
        named = {**self.given, **dict(zip(symbols, self._results, strict=True))}.items()
        return {name: one.region_name for name, one in named if isinstance(one, SambaTensor) and one.region_name}

    def _example(self, call: Call) -> Example:
        keys = {id(one): key for key, one in self.inputs.items()} if isinstance(self.inputs, Mapping) else {}
        listed, plain = tensors_in(self.inputs), dict[str, Tensor]()
        batches = sorted((one for one in listed if one.ndim), key=lambda one: getattr(one, "batch_dim", None) != 0)
        size = batches[0].shape[0] if batches else 1

        def taken(value: Any, path: str) -> object:
            if value is None:
                return None
            what = f"{type(self.model).__name__} was called with {path}"
            if isinstance(value, bool | int | float | str | torch.dtype):
                return Fixed(value)
            if not isinstance(value, Tensor):
                remedy = "give tensors, numbers and words, in tuples, lists and dictionaries"
                raise type_error(DataError, f"{what}, which a graph cannot keep", value, remedy)
            same = [one for one in listed if one is value] or [one for one in listed if place(one) == place(value)]
            if not same:
                raise app_error(DataError, f"{what}, which is not among the inputs of the graph {self.name}", _CALLING)
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

        arguments, by_keyword = call.arguments()
        return Example(plain, by_keyword, {name: each_value(value, taken, name) for name, value in arguments.items()})
