"""The operator table against the schemas and the FLOP counter of the installed torch."""

import contextlib
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from sambasim.errors import PefError
from sambasim.ir.graph import Argument, Node, Ref
from sambasim.ir.operator_flops import Operands
from sambasim.ir.operators import OPERATORS, TABLE, OperatorKind
from sambasim.ir.types import TensorType
from sambasim.optimizers import KINDS
from tests.operators import CHANGES, DEPENDS_ON_VALUES, NO_TENSOR, TORCHSCRIPT, reasons, schemas

ATEN = sorted(name for name in OPERATORS if name.startswith("aten."))
COMPOSITES = {"check.true",
    "comm.reduce_scatter", "comm.all_gather", "comm.all_reduce", "comm.broadcast", "comm.send", "comm.recv",
    "comm.shard", "comm.index", "comm.copy", "memory.release", "random.state", "random.set_state",
    "opt.square_sums", "opt.total_norm", *(f"opt.{kind}" for kind in KINDS),
}  # fmt: skip

SHAPE_MAY_DEPEND_ON_DATA = {
    "aten.index.Tensor", "aten.one_hot.default", "aten._ctc_loss.default", "aten._ctc_loss.Tensor",
}  # fmt: skip
"""Static unless the index is a mask, and unless the number of classes is missing: see `operators`, also for CTC."""


def overload(name: str) -> torch._ops.OpOverload:
    _, packet, suffix = name.split(".")
    found = getattr(getattr(torch.ops.aten, packet), suffix)
    assert isinstance(found, torch._ops.OpOverload)
    return found


def test_every_name_is_written_once_and_is_aten_or_one_of_our_composites() -> None:
    counted = Counter(name for rows in TABLE for name in rows.names)
    assert [name for name, count in counted.items() if count > 1] == []
    assert set(OPERATORS) - set(ATEN) == COMPOSITES


def test_every_row_is_a_functional_operator_of_torch() -> None:
    """`tests.operators` has examples of each reason."""
    assert schemas().keys() >= set(ATEN)
    assert [name for name in ATEN if not {CHANGES, NO_TENSOR, TORCHSCRIPT}.isdisjoint(reasons(name))] == []
    assert {name for name in ATEN if DEPENDS_ON_VALUES in reasons(name)} <= SHAPE_MAY_DEPEND_ON_DATA
    assert [name for name in ATEN if torch.Tag.data_dependent_output in overload(name).tags] == []


def test_rows_say_truly_whether_they_draw_random_numbers() -> None:
    tagged = {name for name in ATEN if torch.Tag.nondeterministic_seeded in overload(name).tags}
    assert {name for name in ATEN if OPERATORS[name].draws_random_numbers} == tagged
    of_kind_random = {name for name in ATEN if OPERATORS[name].kind is OperatorKind.RANDOM}
    with_dropout_inside = {OPERATORS[name].kind for name in tagged - of_kind_random}
    assert of_kind_random <= tagged
    assert with_dropout_inside == {OperatorKind.ATTENTION, OperatorKind.RECURRENT}


def flops(node: Node, types: Mapping[str, TensorType]) -> int:
    formula = OPERATORS[node.operator].flops
    assert formula is not None
    return formula(Operands(node, types))


class Call:
    """One call of an operator, as a node with the types of everything that it reads and defines."""

    def __init__(self, operator: Any, *args: object) -> None:
        self.types: dict[str, TensorType] = {}
        arguments = tuple(self._argument(argument) for argument in args)
        with FlopCounterMode(display=False) as counter:
            result = operator(*args)
        self.counted = counter.get_total_flops()
        results = result if isinstance(result, tuple) else (result,)
        names = tuple(self._name(tensor) if isinstance(tensor, Tensor) else None for tensor in results)
        self.node = Node("node", str(operator), arguments, results=names)

    def _name(self, tensor: Tensor) -> str:
        name = f"t{len(self.types)}"
        self.types[name] = TensorType(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
        return name

    def _argument(self, argument: object) -> Argument:
        if isinstance(argument, Tensor):
            return Ref(self._name(argument))
        if isinstance(argument, (tuple, list)):
            return tuple(self._argument(item) for item in argument)
        assert argument is None or isinstance(argument, (bool, int, float, str))
        return argument

    def flops(self) -> int:
        return flops(self.node, self.types)


aten = torch.ops.aten
r = torch.rand


@pytest.mark.parametrize(
    "recorded",
    [
        pytest.param(lambda: Call(aten.mm.default, r(3, 5), r(5, 7)), id="mm"),
        pytest.param(lambda: Call(aten.addmm.default, r(7), r(3, 5), r(5, 7)), id="addmm"),
        pytest.param(lambda: Call(aten.bmm.default, r(2, 3, 5), r(2, 5, 7)), id="bmm"),
        pytest.param(lambda: Call(aten.baddbmm.default, r(2, 3, 7), r(2, 3, 5), r(2, 5, 7)), id="baddbmm"),
        pytest.param(lambda: Call(aten.matmul.default, r(4, 2, 3, 5), r(5, 7)), id="matmul"),
        pytest.param(lambda: Call(aten.linear.default, r(2, 3, 5), r(7, 5), r(7)), id="linear"),
        pytest.param(lambda: Call(aten.einsum.default, "bij,bkj->bik", [r(2, 3, 5), r(2, 7, 5)]), id="einsum"),
        pytest.param(lambda: Call(aten.einsum.default, "...ij,jk", [r(4, 2, 3, 5), r(5, 7)]), id="einsum-ellipsis"),
        pytest.param(lambda: Call(aten.tensordot.default, r(2, 3, 5), r(3, 5, 7), [1, 2], [0, 1]), id="tensordot"),
        pytest.param(lambda: convolution(r(2, 4, 9, 9), r(6, 2, 3, 3), False, 2), id="convolution-groups"),
        pytest.param(lambda: convolution(r(2, 6, 5, 5), r(6, 4, 3, 3), True, 1), id="convolution-transposed"),
        pytest.param(lambda: Call(aten.conv1d.default, r(2, 4, 9), r(6, 4, 3)), id="conv1d"),
        pytest.param(lambda: Call(aten.conv_transpose2d.input, r(2, 4, 5, 5), r(4, 3, 3, 3)), id="conv_transpose2d"),
        pytest.param(lambda: convolution_backward(False), id="convolution_backward"),
        pytest.param(lambda: convolution_backward(True), id="convolution_backward-of-the-first-layer"),
        pytest.param(lambda: convolution_backward(False, transposed=True), id="convolution_backward-transposed"),
    ],
)
def test_products_count_as_torch_counts_them(recorded: Callable[[], Call]) -> None:
    one = recorded()
    assert one.counted > 0
    assert one.flops() == one.counted


def convolution(x: Tensor, weight: Tensor, transposed: bool, groups: int) -> Call:
    return Call(aten.convolution.default, x, weight, None, [2, 2], [1, 1], [1, 1], transposed, [0, 0], groups)


def convolution_backward(first: bool, transposed: bool = False) -> Call:
    small, large = r(2, 6, 5, 5), r(2, 4, 9, 9)
    given, channels = ((large, small), [4]) if transposed else ((small, large), [6])
    settings = (channels, [2, 2], [1, 1], [1, 1], transposed, [0, 0], 1, (not first, True, True))
    return Call(aten.convolution_backward.default, *given, r(6, 4, 3, 3), *settings)


def test_attention_counts_its_products() -> None:
    """torch's counter knows only the attention kernels of other devices, so its formulas are called by themselves."""
    from torch.utils.flop_counter import sdpa_backward_flop_count, sdpa_flop_count

    q, k, v = (2, 3, 8, 16), (2, 3, 6, 16), (2, 3, 6, 16)
    types = {name: TensorType("float32", shape) for name, shape in {"q": q, "k": k, "v": v, "g": q}.items()}
    forward = Node("n", "aten._scaled_dot_product_flash_attention_for_cpu.default", (Ref("q"), Ref("k"), Ref("v")))
    name = "aten._scaled_dot_product_flash_attention_for_cpu_backward.default"
    backward = Node("n", name, (Ref("g"), Ref("q"), Ref("k"), Ref("v")))
    counted = sdpa_flop_count(q, k, v)  # type: ignore[no-untyped-call]  # torch's, untyped
    counted_backward = sdpa_backward_flop_count(q, q, k, v)  # type: ignore[no-untyped-call]  # torch's, untyped
    assert flops(forward, types) == counted
    assert flops(backward, types) == counted_backward


def test_an_lstm_counts_each_weight_once_a_step() -> None:
    lstm = torch.nn.LSTM(5, 4, num_layers=2, bidirectional=True, batch_first=True)
    weights = list(lstm.parameters())
    state = [torch.zeros(4, 3, 4), torch.zeros(4, 3, 4)]
    one = Call(aten.lstm.input, r(3, 7, 5), state, weights, True, 2, 0.0, False, True, True)
    assert one.flops() == 2 * 3 * 7 * sum(weight.numel() for weight in weights if weight.ndim == 2)


def test_products_and_no_others_have_a_formula() -> None:
    kinds = {
        OperatorKind.MATMUL, OperatorKind.CONVOLUTION, OperatorKind.ATTENTION, OperatorKind.RECURRENT,
        OperatorKind.FACTORIZATION, OperatorKind.FOURIER,
    }  # fmt: skip
    assert {name for name, one in OPERATORS.items() if (one.flops is None) == (one.kind in kinds)} == set()


@pytest.mark.parametrize(
    ("node", "message"),
    [
        (Node("n7", "aten.mm.default", (3, Ref("x"))), "argument 0 of aten.mm.default is not a tensor"),
        (Node("n7", "aten.mm.default"), "argument 0 of aten.mm.default is not a tensor"),
        (Node("n7", "aten.mm.default", (Ref("scalar"),)), "is not a tensor with a dimension -1"),
        (Node("n7", "aten.einsum.default", (1, ())), "argument 0 of aten.einsum.default is not an equation"),
        (Node("n7", "aten.convolution_backward.default", (Ref("x"),) * 3), "argument 10 of aten.convolution_backward"),
        (Node("n7", "aten.convolution_backward.default", (Ref("x"),) * 3), "is not a list of 3 flags"),
        (Node("n7", "aten.tensordot.default", (Ref("x"), Ref("x"), "two")), "argument 2 of aten.tensordot.default is"),
        (Node("n7", "aten.tensordot.default", (Ref("x"), Ref("x"), "two")), "is not a list of integers"),
    ],
)
def test_a_node_with_other_arguments_is_refused(node: Node, message: str) -> None:
    types = {"x": TensorType("float32", (2, 2)), "scalar": TensorType("float32", ())}
    with pytest.raises(PefError) as caught:
        flops(node, types)
    assert message in str(caught.value)
    assert caught.value.where == "node n7"
    assert caught.value.remedy == "compile the model again"


def test_no_formula_fails_otherwise_than_by_refusing() -> None:
    """Without arguments and results, as a damaged PEF may have it, a formula counts 0 or refuses."""
    for name, operator in OPERATORS.items():
        if operator.flops is not None:
            with contextlib.suppress(PefError):
                assert operator.flops(Operands(Node("empty", name), {})) == 0, name
