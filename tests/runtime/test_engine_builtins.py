"""The quick functions of operators are the operators."""

# What torch offers to watch a dispatch has no types.
# mypy: no-disallow-untyped-calls

from collections.abc import Mapping, Sequence

import pytest
import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from sambasim.ir.graph import Node, Ref
from sambasim.ir.operators import OPERATORS
from sambasim.runtime.engine.builtins import BUILTINS, WRITES_OUT, builtin
from sambasim.runtime.instructions import find_operator

X = torch.arange(12.0).view(3, 4) / 7 + 0.1
ROW = torch.tensor([[0.5, -1.0, 2.0, 0.25]])

OPERANDS: Mapping[str, Sequence[object]] = {
    "aten.mm.default": (X, X.t()),
    "aten.addmm.default": (X[:, :3], X, X.t()),
    "aten.bmm.default": (X[None], X.t()[None]),
    "aten.baddbmm.default": (X[None, :, :3], X[None], X.t()[None]),
    "aten.t.default": (X,),
    "aten.transpose.int": (X, 0, 1),
    "aten.permute.default": (X, [1, 0]),
    "aten.unsqueeze.default": (X, 1),
    "aten.squeeze.dim": (ROW, 0),
    "aten.select.int": (X, 0, 1),
    "aten.view.default": (X, [2, 6]),
    "aten.expand.default": (ROW, [3, 4]),
    "aten.sum.dim_IntList": (X, [0], True),
    "aten.mean.dim": (X, [0], True),
    "aten._log_softmax.default": (X, 1, False),
    "aten._softmax.default": (X, 1, False),
    "aten._log_softmax_backward_data.default": (X, X, 1, torch.float32),
    "aten._softmax_backward_data.default": (X, X, 1, torch.float32),
    "aten.native_layer_norm.default": (X, [4], None, None, 1e-5),
    "aten.embedding.default": (X, torch.tensor([0, 2]), -1, False, False),
    "aten.native_dropout.default": (X, 0.5, True),
}
"""By operator: operands as the schema has them. An operator that is not here takes X, or two of it, or a row."""

TWO = ("add", "sub", "mul", "div")


def operands(name: str) -> Sequence[object]:
    return OPERANDS.get(name, (X, ROW) if name.split(".")[1] in TWO else (X,))


class Recorder(TorchDispatchMode):
    """Writes down which overloads are reached."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(
        self,
        func: OpOverload[..., object],
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


def same(one: object, other: object) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.equal(other) and one.stride() == other.stride()
    assert isinstance(one, tuple)
    assert isinstance(other, tuple)
    return all(map(same, one, other))


@pytest.mark.parametrize("name", BUILTINS)
def test_a_quick_function_reaches_its_operator_and_gives_the_same(name: str) -> None:
    recorder = Recorder()
    torch.manual_seed(1)
    with recorder:
        quick = BUILTINS[name](*operands(name))
    torch.manual_seed(1)
    assert recorder.seen == [name]
    assert same(quick, find_operator(name)(*operands(name)))


@pytest.mark.parametrize("name", sorted(WRITES_OUT))
def test_what_is_written_out_is_what_is_returned(name: str) -> None:
    returned = BUILTINS[name](*operands(name))
    assert isinstance(returned, Tensor)
    out = torch.full_like(returned, torch.nan)
    recorder = Recorder()
    with recorder:
        assert BUILTINS[name](*operands(name), out=out) is out
    assert out.equal(returned)
    assert len(recorder.seen) == 1, "no copy"


def test_every_row_is_an_operator_of_the_table() -> None:
    assert set(OPERATORS) > set(BUILTINS) > WRITES_OUT
    assert set(OPERANDS) <= set(BUILTINS)


def test_a_number_in_the_place_of_a_tensor_is_left_to_the_operator() -> None:
    schema = find_operator("aten.mul.Tensor")._schema
    assert builtin(Node("n", "aten.mul.Tensor", (Ref("x"), Ref("y"))), schema) is torch.mul
    assert builtin(Node("n", "aten.mul.Tensor", (Ref("x"), 2.0)), schema) is None
