"""`samba.graph.FwdGraph`: one forward graph of a PEF of several. Importing this module has calls of models remembered,
by which a graph finds its model."""

from collections.abc import Mapping, Sequence
from typing import Any

from sambasim.compiler.capture.calls import call_with, remember_calls
from sambasim.compiler.capture.results import tensors_in
from sambasim.errors import DataError, ModelError
from sambasim.samba.fingerprint import Request
from sambasim.samba.inputs import name_of, repeatable
from sambasim.samba.notices import checks_keywords
from sambasim.samba.process import app_error, type_error
from sambasim.samba.request import request, unwrapped
from sambasim.samba.tensor import SambaTensor

_CALLING = "outputs = model(*inputs), and then FwdGraph(inputs, outputs, name) with these tensors"

remember_calls()


class FwdGraph:
    """`FwdGraph(inputs, outputs, name)`, after `outputs = model(*inputs)` in eager PyTorch. `given`: the inputs by
    name; `order`: as a list has them; `whole`: those that are one for all samples, such as a mask."""

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
        keys = {id(one): key for key, one in self.inputs.items()} if isinstance(self.inputs, Mapping) else {}
        named = [(keys.get(id(one)) or name_of(one), one) for one in tensors_in(self.inputs)]
        try:
            self.example, self.given, self.whole = call.example(named)
        except DataError as error:
            raise app_error(DataError, f"the graph {self.name}: {error.what}", error.remedy or _CALLING) from None
        self.order = [name for _, one in named if not keys for name, own in self.given.items() if own is one]

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
