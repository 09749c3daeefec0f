"""Products of float16: every product operator of the table computes in float32, whatever graph holds it."""

# torch.utils._python_dispatch is untyped.
# mypy: no-disallow-untyped-calls

from collections.abc import Mapping, Sequence

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from sambasim.ir.graph import Argument, Node, Ref
from sambasim.ir.operators import OPERATORS, OperatorKind
from sambasim.ir.types import TensorType
from sambasim.runtime.engine.handlers import Binding, instruction_of
from sambasim.runtime.engine.instructions import Instruction, RegisterFile, find_operator, value_of


def r(*shape: int) -> Tensor:
    """Numbers of float16, the same for equal shapes."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).half()


ROWS, IMAGE, VOLUME = r(6, 5), r(2, 4, 9, 9), r(2, 4, 5, 5, 5)
HEADS = (r(2, 3, 8, 16), r(2, 3, 6, 16), r(2, 3, 6, 16))
MASK = torch.ones(8, 6, dtype=torch.bool).tril()
ATTENDED = (r(2, 3, 8, 16), *HEADS, r(2, 3, 8, 16), r(2, 3, 8).float(), 0.0, False)
WEIGHTS = {gates: [r(4 * gates, 5), r(4 * gates, 4), r(4 * gates), r(4 * gates)] for gates in (1, 3, 4)}
RECURRENT = (True, 1, 0.0, False, False, True)
STRIDES = ([2, 2], [1, 1], [1, 1], False, [0, 0], 1)
PROJECTIONS = (r(24, 8), r(24), r(8, 8), r(8))
ENCODER = (8, 2, *PROJECTIONS, False, False, 1e-5, r(8), r(8), r(8), r(8), r(16, 8), r(16), r(8, 16), r(8))
ONEDNN = (r(7, 3, 5), *WEIGHTS[4], r(1, 3, 4), r(1, 3, 4))
SETTINGS: tuple[object, ...] = (False, [], 2, 4, 1, True, False, False, True)
*OUTPUTS, WORKSPACE = torch.ops.aten.mkldnn_rnn_layer(*(operand.float() for operand in ONEDNN), *SETTINGS)
MADE = [output.half() for output in OUTPUTS]
BACKWARD: tuple[object, ...] = (False, 2, 4, 1, True, True, False, [], False, WORKSPACE)
WINDOW = ([3, 3], [1, 1], [0, 0])

CALLS: Mapping[str, Sequence[object]] = {
    **dict.fromkeys(("mm.default", "linalg_matmul.default"), (ROWS, r(5, 7))),
    "bmm.default": (r(2, 3, 5), r(2, 5, 7)),
    "matmul.default": (r(4, 2, 3, 5), r(5, 7)),
    "mv.default": (ROWS, r(5)),
    **dict.fromkeys(("dot.default", "vdot.default"), (r(300), r(300))),
    "linear.default": (r(2, 3, 5), r(7, 5), r(7)),
    "linalg_vecdot.default": (ROWS, r(6, 5)),
    "_int_mm.default": (r(32, 16).char(), r(16, 8).char()),
    "_weight_int8pack_mm.default": (r(6, 32), torch.ones(4, 32, dtype=torch.int8), r(4)),
    "_grouped_mm.default": (r(2, 6, 16), r(2, 16, 8)),
    "_foreach_mm.default": ([ROWS, r(5, 7)], [r(5, 7), r(7, 2)]),
    "addbmm.default": (r(3, 7), r(2, 3, 5), r(2, 5, 7)),
    **dict.fromkeys(("addmm.default", "_addmm_activation.default"), (r(7), ROWS, r(5, 7))),
    "baddbmm.default": (r(2, 3, 7), r(2, 3, 5), r(2, 5, 7)),
    "addmv.default": (r(6), ROWS, r(5)),
    **dict.fromkeys(("outer.default", "ger.default"), (r(5), r(7))),
    "kron.default": (ROWS, r(2, 2)),
    "einsum.default": ("bij,bkj->bik", [r(2, 3, 5), r(2, 7, 5)]),
    "tensordot.default": (r(2, 3, 5), r(3, 5, 7), [1, 2], [0, 1]),
    "linear_backward.default": (ROWS, r(6, 7), r(7, 5), [True, True, True]),
    "_trilinear.default": (ROWS, r(7, 5, 3), r(6, 3), [1, 3], [0], [1, 2], [2, 3]),
    "bilinear.default": (ROWS, r(6, 3), r(7, 5, 3), r(7)),
    **dict.fromkeys(("inner.default", "cdist.default", "_euclidean_dist.default"), (ROWS, r(7, 5))),
    "_cdist_forward.default": (ROWS, r(7, 5), 2.0, None),
    "_cdist_backward.default": (r(6, 7), ROWS, r(7, 5), 2.0, r(6, 7).abs()),
    "convolution.default": (IMAGE, r(6, 4, 3, 3), None, *STRIDES),
    "_convolution.default": (IMAGE, r(6, 4, 3, 3), None, *STRIDES, False, True, True, True),
    "conv1d.default": (r(2, 4, 9), r(6, 4, 3), r(6)),
    "conv1d.padding": (r(2, 4, 9), r(6, 4, 3), r(6), [1], "same"),
    "conv2d.default": (IMAGE, r(6, 4, 3, 3), r(6)),
    "conv2d.padding": (IMAGE, r(6, 4, 3, 3), r(6), [1, 1], "same"),
    "conv3d.default": (VOLUME, r(6, 4, 3, 3, 3), r(6)),
    "conv3d.padding": (VOLUME, r(6, 4, 3, 3, 3), r(6), [1, 1, 1], "same"),
    "_slow_conv2d_forward.default": (IMAGE, r(6, 4, 3, 3), [3, 3], None, [1, 1], [0, 0]),
    "_slow_conv2d_backward.output_mask": (r(2, 6, 7, 7), IMAGE, r(6, 4, 3, 3), *WINDOW, [True] * 3),
    "slow_conv3d_forward.default": (VOLUME, r(6, 4, 3, 3, 3), [3, 3, 3], None, [1, 1, 1], [0, 0, 0]),
    "slow_conv_dilated2d.default": (IMAGE, r(6, 4, 3, 3), [3, 3]),
    "slow_conv_dilated3d.default": (VOLUME, r(6, 4, 3, 3, 3), [3, 3, 3]),
    "slow_conv_transpose2d.default": (IMAGE, r(4, 6, 3, 3), [3, 3]),
    "slow_conv_transpose3d.default": (VOLUME, r(4, 6, 3, 3, 3), [3, 3, 3]),
    "mkldnn_convolution.default": (IMAGE, r(6, 4, 3, 3), None, [1, 1], [1, 1], [1, 1], 1),
    "conv_tbc.default": (r(9, 2, 4), r(3, 4, 6), r(6)),
    "conv_transpose1d.default": (r(2, 4, 9), r(4, 6, 3)),
    "conv_transpose2d.input": (IMAGE, r(4, 6, 3, 3)),
    "conv_transpose3d.input": (VOLUME, r(4, 6, 3, 3, 3)),
    "convolution_backward.default": (r(2, 6, 5, 5), IMAGE, r(6, 4, 3, 3), [6], *STRIDES, [True, True, True]),
    "scaled_dot_product_attention.default": (*HEADS, MASK),
    "_scaled_dot_product_attention_math.default": (*HEADS, MASK),
    "_scaled_dot_product_flash_attention_for_cpu.default": HEADS,
    "_scaled_dot_product_flash_attention_for_cpu_backward.default": ATTENDED,
    "_transformer_encoder_layer_fwd.default": (r(2, 3, 8), *ENCODER),
    "_native_multi_head_attention.default": (*(r(2, 3, 8),) * 3, 8, 2, *PROJECTIONS),
    "lstm.input": (r(3, 7, 5), [r(1, 3, 4), r(1, 3, 4)], WEIGHTS[4], *RECURRENT),
    "gru.input": (r(3, 7, 5), r(1, 3, 4), WEIGHTS[3], *RECURRENT),
    **dict.fromkeys(("rnn_tanh.input", "rnn_relu.input"), (r(3, 7, 5), r(1, 3, 4), WEIGHTS[1], *RECURRENT)),
    "lstm_cell.default": (r(3, 5), [r(3, 4), r(3, 4)], *WEIGHTS[4]),
    "gru_cell.default": (r(3, 5), r(3, 4), *WEIGHTS[3]),
    **dict.fromkeys(("rnn_tanh_cell.default", "rnn_relu_cell.default"), (r(3, 5), r(3, 4), *WEIGHTS[1])),
    "mkldnn_rnn_layer.default": (*ONEDNN, *SETTINGS),
    "mkldnn_rnn_layer_backward.default": (*ONEDNN, *MADE, *MADE, *BACKWARD),
}
WITHOUT_KERNEL = {"linear_backward.default", "_int_mm.default"}
"""On a CPU, where a program that holds it cannot run; or for float16 and float32."""


class Dtypes(TorchDispatchMode):
    """The dtypes that kernels other than conversions read."""

    def __init__(self) -> None:
        super().__init__()
        self.read: set[torch.dtype] = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]  # torch's
        if function is not torch.ops.aten._to_copy.default:
            self.read |= {tensor.dtype for tensor in tensors_of((args, kwargs))}
        return function(*args, **(kwargs or {}))


def tensors_of(tree: object) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def in_float32(name: str) -> list[Tensor]:
    """What torch's operator gives for the operands widened to float32."""
    operands = pytree.tree_map_only(Tensor, lambda x: x.float() if x.dtype is torch.float16 else x, tuple(CALLS[name]))
    return tensors_of(find_operator(f"aten.{name}")(*operands))


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
    node = Node("n", f"aten.{name}", tuple(map(argument, CALLS[name])), (), tuple(values))
    instruction = instruction_of(node, Binding(registers, values, tensors.__getitem__))
    for symbol, tensor in tensors.items():
        registers.initial[registers.value(symbol)] = tensor
    return instruction, [value_of(operand, registers.initial) for operand in instruction.operands]


def test_every_product_of_the_table_is_called_here() -> None:
    without = OperatorKind.FACTORIZATION, OperatorKind.FOURIER  # torch traces none of float16
    products = {name for name, row in OPERATORS.items() if row.flops is not None and row.kind not in without}
    assert {f"aten.{name}" for name in CALLS} == products


@pytest.mark.parametrize("name", [name for name in CALLS if name not in WITHOUT_KERNEL])
def test_a_product_of_float16_is_that_of_float32_rounded_once(name: str) -> None:
    expected = [tensor.half() if tensor.is_floating_point() else tensor for tensor in in_float32(name)]
    instruction, operands = bound(name, [str(tensor.dtype).removeprefix("torch.") for tensor in expected])
    with Dtypes() as kernels:
        results = tensors_of(instruction.function(*operands))
    assert torch.float32 in kernels.read
    assert torch.float16 not in kernels.read
    assert [result.dtype for result in results] == [tensor.dtype for tensor in expected]
    for result, tensor in zip(results, expected, strict=True):
        # Not so oneDNN's workspace, parts of which are never written.
        assert not result.is_floating_point() or torch.equal(result, tensor)


def test_results_that_the_program_keeps_in_float32_are_not_rounded() -> None:
    name = "_scaled_dot_product_flash_attention_for_cpu.default"
    instruction, operands = bound(name, ["float16", "float32"])
    attended, sums = tensors_of(instruction.function(*operands))
    expected = in_float32(name)
    assert torch.equal(attended, expected[0].half())
    assert torch.equal(sums, expected[1])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_other_dtypes_call_the_kernel_itself(dtype: str) -> None:
    assert bound("mm.default", [dtype])[0].function is torch.mm
