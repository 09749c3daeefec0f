"""How operators are called: torch's Python functions stand for many, and products of float16 compute in float32."""

# torch.utils._python_dispatch is untyped.
# mypy: no-disallow-untyped-calls

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from sambasim.ir.graph import Argument, Node, Ref
from sambasim.ir.operators import OPERATORS
from sambasim.ir.types import TensorType
from sambasim.runtime.engine.handlers import Binding, instruction_of
from sambasim.runtime.engine.instructions import Instruction, RegisterFile, value_of
from sambasim.runtime.values.operators import BUILTINS, WRITES_OUT, find_operator

PLAIN = torch.arange(12.0).view(3, 4) / 7 + 0.1
ROW = torch.tensor([[0.5, -1.0, 2.0, 0.25]])

OPERANDS: Mapping[str, Sequence[object]] = {
    "aten.mm.default": (PLAIN, PLAIN.t()),
    "aten.addmm.default": (PLAIN[:, :3], PLAIN, PLAIN.t()),
    "aten.bmm.default": (PLAIN[None], PLAIN.t()[None]),
    "aten.baddbmm.default": (PLAIN[None, :, :3], PLAIN[None], PLAIN.t()[None]),
    "aten.t.default": (PLAIN,),
    "aten.transpose.int": (PLAIN, 0, 1),
    "aten.permute.default": (PLAIN, [1, 0]),
    "aten.unsqueeze.default": (PLAIN, 1),
    "aten.squeeze.dim": (ROW, 0),
    "aten.select.int": (PLAIN, 0, 1),
    "aten.view.default": (PLAIN, [2, 6]),
    "aten.expand.default": (ROW, [3, 4]),
    "aten.sum.dim_IntList": (PLAIN, [0], True),
    "aten.mean.dim": (PLAIN, [0], True),
    "aten._log_softmax.default": (PLAIN, 1, False),
    "aten._softmax.default": (PLAIN, 1, False),
    "aten._log_softmax_backward_data.default": (PLAIN, PLAIN, 1, torch.float32),
    "aten._softmax_backward_data.default": (PLAIN, PLAIN, 1, torch.float32),
    "aten.native_layer_norm.default": (PLAIN, [4], None, None, 1e-5),
    "aten.embedding.default": (PLAIN, torch.tensor([0, 2]), -1, False, False),
    "aten.native_dropout.default": (PLAIN, 0.5, True),
}
"""By operator: operands as the schema has them. An operator that is not here takes PLAIN, or two of it, or a row."""


def operands(name: str) -> Sequence[object]:
    return OPERANDS.get(name, (PLAIN, ROW) if name.split(".")[1] in ("add", "sub", "mul", "div") else (PLAIN,))


class Kernels(TorchDispatchMode):
    """The kernels that are called, and the dtypes that those read which are no conversions."""

    def __init__(self) -> None:
        super().__init__()
        self.called: list[str] = []
        self.read: set[torch.dtype] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.called.append(str(function))
        if function is not torch.ops.aten._to_copy.default:
            self.read |= {tensor.dtype for tensor in tensors_of((args, kwargs))}
        return function(*args, **(kwargs or {}))


def tensors_of(tree: object) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


@pytest.mark.parametrize("name", BUILTINS)
def test_a_quick_function_reaches_its_operator_and_gives_the_same(name: str) -> None:
    """Also to a tensor that it is given, where it may be."""
    torch.manual_seed(1)
    with Kernels() as kernels:
        quick = BUILTINS[name](*operands(name))
    torch.manual_seed(1)
    assert kernels.called == [name]
    expected = find_operator(name)(*operands(name))
    torch.testing.assert_close(quick, expected, rtol=0, atol=0, check_stride=True)
    if name in WRITES_OUT:
        out = torch.full_like(expected, torch.nan)
        with Kernels() as kernels:
            assert BUILTINS[name](*operands(name), out=out) is out
        assert out.equal(expected)
        assert len(kernels.called) == 1, "no copy"


def test_every_row_is_an_operator_of_the_table() -> None:
    assert set(OPERATORS) > set(BUILTINS) > WRITES_OUT
    assert set(OPERANDS) <= set(BUILTINS)


def r(*shape: int) -> Tensor:
    """Numbers of float16, the same for equal shapes."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).half()


ROWS, IMAGE, FILTER = r(6, 5), r(2, 4, 9, 9), r(6, 4, 3, 3)
LSTM = [r(16, 5), r(16, 4), r(16), r(16)]
STRIDES = ([2, 2], [1, 1], [1, 1], False, [0, 0], 1)
ATTENTION = "_scaled_dot_product_flash_attention_for_cpu.default"

PRODUCTS: Mapping[str, Sequence[object]] = {
    "mm.default": (ROWS, r(5, 7)),
    "_weight_int8pack_mm.default": (r(6, 32), torch.ones(4, 32, dtype=torch.int8), r(4)),
    "einsum.default": ("bij,bkj->bik", [r(2, 3, 5), r(2, 7, 5)]),
    "_foreach_mm.default": ([ROWS, r(5, 7)], [r(5, 7), r(7, 2)]),
    "convolution.default": (IMAGE, FILTER, None, *STRIDES),
    "convolution_backward.default": (r(2, 6, 5, 5), IMAGE, FILTER, [6], *STRIDES, [True, True, True]),
    ATTENTION: (r(2, 3, 8, 16), r(2, 3, 6, 16), r(2, 3, 6, 16)),
    "lstm.input": (r(3, 7, 5), [r(1, 3, 4), r(1, 3, 4)], LSTM, True, 1, 0.0, False, False, True),
    "mkldnn_rnn_layer.default": (
        *(r(7, 3, 5), *LSTM, r(1, 3, 4), r(1, 3, 4)),
        *(False, [], 2, 4, 1, True, False, False, True),
    ),
}
"""Of each kind: with one result, several or a list, and with other dtypes. tests/ir/test_operators.py names all."""


def in_float32(name: str) -> list[Tensor]:
    """What torch's operator gives for the operands widened to float32."""
    wide = pytree.tree_map_only(Tensor, lambda x: x.float() if x.dtype is torch.float16 else x, tuple(PRODUCTS[name]))
    return tensors_of(find_operator(f"aten.{name}")(*wide))


def bound(name: str, dtypes: Sequence[str]) -> tuple[Instruction, list[object]]:
    """The instruction of a node of the operator with results of these dtypes, and the values of its operands."""
    registers, tensors = RegisterFile(), dict[str, Tensor]()

    def argument(value: object) -> Argument:
        if isinstance(value, Tensor):
            tensors[f"t{len(tensors)}"] = value
            return Ref(f"t{len(tensors) - 1}")
        if isinstance(value, tuple | list):
            return tuple(map(argument, value))
        assert value is None or isinstance(value, bool | int | float | str)
        return value

    values = {f"y{number}": TensorType(dtype, ()) for number, dtype in enumerate(dtypes)}
    node = Node("n", f"aten.{name}", tuple(map(argument, PRODUCTS[name])), (), tuple(values))
    instruction = instruction_of(node, Binding(registers, values, tensors.__getitem__))
    for symbol, tensor in tensors.items():
        registers.initial[registers.value(symbol)] = tensor
    return instruction, [value_of(operand, registers.initial) for operand in instruction.operands]


@pytest.mark.parametrize("name", PRODUCTS)
def test_a_product_of_float16_is_that_of_float32_rounded_once(name: str) -> None:
    expected = [tensor.half() if tensor.is_floating_point() else tensor for tensor in in_float32(name)]
    instruction, values = bound(name, [str(tensor.dtype).removeprefix("torch.") for tensor in expected])
    with Kernels() as kernels:
        results = tensors_of(instruction.function(*values))
    assert torch.float32 in kernels.read
    assert torch.float16 not in kernels.read
    assert [result.dtype for result in results] == [tensor.dtype for tensor in expected]
    for result, tensor in zip(results, expected, strict=True):
        # Not so oneDNN's workspace, parts of which are never written.
        assert not result.is_floating_point() or torch.equal(result, tensor)


def test_results_that_the_program_keeps_in_float32_are_not_rounded() -> None:
    instruction, values = bound(ATTENTION, ["float16", "float32"])
    attended, sums = tensors_of(instruction.function(*values))
    expected = in_float32(ATTENTION)
    assert torch.equal(attended, expected[0].half())
    assert torch.equal(sums, expected[1])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_other_dtypes_call_the_kernel_itself(dtype: str) -> None:
    assert bound("mm.default", [dtype])[0].function is torch.mm


@pytest.mark.parametrize(
    ("keys", "has_amx", "computed"),
    [(16, False, torch.float32), (16, True, torch.bfloat16), (2048, False, torch.bfloat16)],
)
def test_the_backward_of_short_attention_is_computed_in_float32(
    keys: int, has_amx: bool, computed: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless the CPU has matrix units for bfloat16."""
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: has_amx)
    attention, backward = (
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
    )
    query, key, value = (torch.randn(1, 1, length, 16).bfloat16() for length in (4, keys, keys))
    attended, sums = attention(query, key, value)
    operands = (query, query, key, value, attended, sums, 0.0, False)
    values = {name: TensorType("bfloat16", tuple(x.shape)) for name, x in zip("qkv", (query, key, value), strict=True)}
    node = Node("n", str(backward), tuple(map(Ref, "gqkvos")), (), tuple(values))
    function = instruction_of(node, Binding(RegisterFile(), values, dict[str, Tensor]().__getitem__)).function
    with Kernels() as kernels:
        results = tensors_of(function(*operands))
    assert computed in kernels.read
    given = (x.to(computed) if x is not sums and isinstance(x, Tensor) else x for x in operands)
    expected = backward(*given)
    assert all(map(torch.equal, results, (gradient.bfloat16() for gradient in expected)))
