"""Which operators of torch add up in float32 where they are given 16 bits; the others are those that are widened."""

from collections.abc import Callable
from typing import TypeAlias

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from sambasim.compiler.capture.tensors import ADDING, Widened, default_type

Operator: TypeAlias = Callable[..., Tensor]

ROUNDING = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
INDEX = torch.arange(4096) % 4


def _normal(*shape: int, mean: float = 0.0, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape) + 10_000 * seed)
    return (torch.randn(shape, generator=generator) + mean).bfloat16()


ADDS_IN_FLOAT32: dict[str, tuple[Operator, tuple[Tensor, ...]]] = {
    "matmul": (torch.matmul, (_normal(16, 4096), _normal(4096, 16))),
    "linear": (functional.linear, (_normal(512, 64), _normal(16, 64), _normal(16))),
    "bmm": (torch.bmm, (_normal(2, 16, 512), _normal(2, 512, 16))),
    "conv2d": (functional.conv2d, (_normal(4, 32, 12, 12), _normal(32, 32, 3, 3))),
    "attention": (functional.scaled_dot_product_attention, tuple(_normal(2, 4, 64, 32, seed=at) for at in range(3))),
    "sum": (torch.sum, (_normal(20_000, mean=1.0),)),
    "sum of rows": (lambda x: x.sum(0), (_normal(4096, 64, mean=1.0),)),
    "cumsum": (lambda x: x.cumsum(0), (_normal(4096, mean=1.0),)),
    "softmax": (lambda x: x.softmax(1), (_normal(64, 512),)),
    "batch_norm": (
        lambda x, w, b: functional.batch_norm(x, None, None, w, b, training=True),
        (_normal(32, 8, 8, 8), _normal(8), _normal(8)),
    ),
    "scatter_add": (
        lambda x: torch.zeros(4, 8, dtype=x.dtype).scatter_add(0, INDEX[:, None].expand(-1, 8), x),
        (_normal(4096, 8, mean=1.0),),
    ),
    "interpolate": (lambda x: functional.interpolate(x, (64, 64), mode="bilinear"), (_normal(2, 2, 8, 8),)),
    "variance": (lambda x: x.var(0), (_normal(4096, 4),)),
}

OF_ADDING: dict[str, tuple[Operator, tuple[Tensor, ...]]] = {
    "aten.avg_pool1d.default": (lambda x: functional.avg_pool1d(x, 15, 1), (_normal(4, 4, 64),)),
    "aten.avg_pool2d.default": (lambda x: functional.avg_pool2d(x, 7, 1), (_normal(4, 4, 32, 32),)),
    "aten.avg_pool3d.default": (lambda x: functional.avg_pool3d(x, 5, 1), (_normal(2, 2, 16, 16, 16),)),
    "aten.col2im.default": (lambda x: functional.fold(x, (26, 26), 7), (_normal(2, 98, 400, mean=1.0),)),
    "aten.im2col.default": (lambda x: functional.unfold(x, 7), (_normal(2, 2, 32, 32),)),
    "aten.index_put.default": (
        lambda x: torch.zeros(4, 8, dtype=x.dtype).index_put((INDEX,), x, accumulate=True),
        (_normal(4096, 8, mean=1.0),),
    ),
    "aten.logcumsumexp.default": (lambda x: x.logcumsumexp(0), (_normal(512),)),
    "aten.logsumexp.default": (lambda x: x.logsumexp(0), (_normal(4096, 4),)),
    "aten.max_pool2d.default": (lambda x: functional.max_pool2d(x, 7, 1), (_normal(4, 4, 32, 32),)),
    "aten.max_pool3d.default": (lambda x: functional.max_pool3d(x, 5, 1), (_normal(2, 2, 12, 12, 12),)),
    "aten.pad.default": (lambda x: functional.pad(x, (20, 20, 20, 20), mode="replicate"), (_normal(2, 2, 32, 32),)),
    "aten.unfold.default": (lambda x: x.unfold(0, 15, 1), (_normal(256),)),
    "aten.embedding.default": (lambda table: functional.embedding(INDEX, table), (_normal(4, 8),)),
    "aten.index.Tensor": (lambda table: table[INDEX], (_normal(4, 8),)),
    "aten.layer_norm.default": (
        lambda x, w, b: functional.layer_norm(x, (64,), w, b),
        (_normal(4096, 64), _normal(64), _normal(64)),
    ),
    "aten.prod.default": (torch.prod, ((1 + _normal(4096) * 2**-6).bfloat16(),)),
    "aten.prod.dim_int": (lambda x: x.prod(0), ((1 + _normal(4096, 4) * 2**-6).bfloat16(),)),
}


def _results(function: Operator, operands: tuple[Tensor, ...], dtype: torch.dtype) -> list[Tensor]:
    """The result, and the gradient at each operand of a sum of the result with weights."""
    leaves = [operand.to(dtype).requires_grad_() for operand in operands]
    result = function(*leaves)
    weights = _normal(*result.shape, mean=1.0, seed=9).to(result.dtype)
    return [result.detach(), *torch.autograd.grad(result, leaves, weights)]


def _error(function: Operator, operands: tuple[Tensor, ...], dtype: torch.dtype = torch.bfloat16) -> float:
    """The largest error of the kernels for `dtype`, in roundings of the largest number of each result."""
    pairs = zip(*(_results(function, operands, one) for one in (dtype, torch.float32)), strict=True)
    worst = max((narrow.double() - wide.double()).abs().max() / wide.double().abs().max() for narrow, wide in pairs)
    return float(worst) / ROUNDING[dtype]


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("name", ADDS_IN_FLOAT32)
def test_torchs_kernels_for_16_bits_add_up_in_float32(name: str, dtype: torch.dtype) -> None:
    """What is rounded once is less than one rounding off; some kernels round twice."""
    assert _error(*ADDS_IN_FLOAT32[name], dtype) < 2


@pytest.mark.parametrize("name", sorted(ADDING))
def test_what_is_widened_would_round_after_each_addition(name: str) -> None:
    if name == "aten.avg_pool3d.default":
        with pytest.raises(NotImplementedError):
            _error(*OF_ADDING[name])
    else:
        assert _error(*OF_ADDING[name]) > 2
    with Widened():  # eager PyTorch can add up as a PEF does
        assert all(_error(*OF_ADDING[name], dtype) < 2 for dtype in ROUNDING)


def test_types_views_and_outputs_that_are_given_stay() -> None:
    large, x = torch.tensor([300.0, 300.0]).half(), _normal(8)
    result = torch.zeros((), dtype=torch.bfloat16)
    with default_type(torch.bfloat16), Widened():
        assert float(torch.prod(large, 0, dtype=torch.float32)) == 90_000
        torch.logsumexp(x, 0, out=result)
        x.unfold(0, 2, 2)[:2].zero_()
        x[torch.tensor(7)].fill_(3)
        made = torch.arange(3) / 3
        of_numpy = torch.tensor(np.array([0.1, 4097.0], dtype=np.float32))
    assert float(result) != 0
    assert x[:4].tolist() == [0, 0, 0, 0]
    assert float(x[7]) == 3
    assert (made.dtype, of_numpy.dtype) == (torch.bfloat16, torch.float32)


def test_what_adds_up_in_float32_is_left_as_it_is() -> None:
    x = _normal(8, 4)
    with Widened():
        x[0] = 1
        x[1:3] += 1
        assert x[1:3].data_ptr() == x.data_ptr() + 8
        assert functional.layer_norm(x.float(), (4,)).dtype == torch.float32
