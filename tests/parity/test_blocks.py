"""What a forward may hold beside operators: each is captured, and a step of it has the bits of eager PyTorch."""

# Calling a module gives Any.
# mypy: no-warn-return-any

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils import checkpoint

from sambasim.compiler.capture.step import Example
from sambasim.compiler.compile import compile_model
from sambasim.options.compile import CompileOptions
from tests.support.compiled import loaded, step_of

CHECKPOINTING = "torch.utils.checkpoint in the model saves no memory here, and --recompute full does"


class Rounded(torch.autograd.Function):
    """The straight-through estimator."""

    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        return gradient


class Clipped(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.sign()

    @staticmethod
    def setup_context(context: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        context.save_for_backward(*inputs)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        (x,) = context.saved_tensors
        return torch.where(x.abs() < 1, gradient, 0.0)


class Scaled(torch.autograd.Function):
    """Of two outputs, and with an argument that is no tensor."""

    @staticmethod
    def forward(context: Any, x: Tensor, weight: Tensor, shift: float) -> tuple[Tensor, Tensor]:
        context.save_for_backward(x, weight)
        return x * weight, x + shift

    @staticmethod
    def backward(context: Any, scaled: Tensor, shifted: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight = context.saved_tensors
        of_weight = (scaled * x).sum(0) if context.needs_input_grad[1] else None
        return scaled * weight + shifted, of_weight, None


def straight_through(net: "Net", h: Tensor) -> Tensor:
    return Rounded.apply(h)  # type: ignore[no-untyped-call]  # torch's, untyped


def with_a_context(net: "Net", h: Tensor) -> Tensor:
    return Clipped.apply(h)  # type: ignore[no-untyped-call]  # torch's, untyped


def of_two_outputs(net: "Net", h: Tensor) -> Tensor:
    scaled, shifted = Scaled.apply(h, net.first.bias, 0.5)  # type: ignore[no-untyped-call]  # torch's, untyped
    return scaled + shifted


def in_bfloat16(net: "Net", h: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return net.middle(h).float() + h


def dropped_in_bfloat16(net: "Net", h: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return functional.dropout(net.middle(h), 0.3).float() + h


def without_autocast(net: "Net", h: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=False):
        return net.middle(h)


def checkpointed(net: "Net", h: Tensor) -> Tensor:
    return checkpoint.checkpoint(lambda a: functional.dropout(net.middle(a).relu()), h, use_reentrant=False)


def checkpointed_by_an_older_way(net: "Net", h: Tensor) -> Tensor:
    return checkpoint.checkpoint(lambda a: net.middle(a).relu(), h, use_reentrant=True)


def pooled_after_a_transpose(net: "Net", h: Tensor) -> Tensor:
    return nn.AdaptiveAvgPool1d(1)(h.view(-1, 2, 4).transpose(1, 2)).flatten(1).repeat(1, 2)


def pooled_in_channels_last(net: "Net", h: Tensor) -> Tensor:
    pictures = h.view(-1, 8, 1, 1).expand(-1, 8, 3, 3).contiguous(memory_format=torch.channels_last)
    return nn.AdaptiveAvgPool2d((1, 1))(pictures).flatten(1) + nn.AdaptiveAvgPool2d((2, 1))(pictures).mean((2, 3))


def raises_where_values_are_large(net: "Net", h: Tensor) -> Tensor:
    if not torch.isfinite(h).all() or (h.abs() > 1e3).any():
        raise ValueError("too large")
    return h


def warns_where_values_are_large(net: "Net", h: Tensor) -> Tensor:
    if h.abs().max() > 1e3:
        logging.getLogger(__name__).warning("%s", h.abs().max().item())
    return net.middle(h)


def masked_as_torch_detects(net: "Net", h: Tensor) -> Tensor:
    """Torch compares the mask with a causal one."""
    x = h.view(-1, 2, 4)
    mask = nn.Transformer.generate_square_subsequent_mask(2)
    return net.encoder(x, mask=mask, src_key_padding_mask=x[:, :, 0] > 1e3).flatten(1)


def factorized(net: "Net", h: Tensor) -> Tensor:
    matrix = h.T @ h + torch.eye(8)
    lower = torch.linalg.cholesky(matrix)
    q, r = torch.linalg.qr(matrix)
    solved = torch.linalg.solve(matrix, h.T).T + torch.cholesky_solve(h.T, lower).T
    return solved @ torch.linalg.inv(matrix) + torch.linalg.slogdet(matrix)[1] + (q @ r).mean(0) + matrix.logdet()


def decomposed(net: "Net", h: Tensor) -> Tensor:
    u, s, v = torch.linalg.svd(h, full_matrices=False)
    return (u * s) @ v + torch.linalg.eigvalsh(h.T @ h + torch.diag(torch.arange(1.0, 9.0)))


def of_frequencies(net: "Net", h: Tensor) -> Tensor:
    spectrum = torch.fft.rfft(h, dim=1) * torch.view_as_complex(torch.stack((net.first.bias[:5], net.last.bias), 1))
    return torch.fft.irfft(spectrum, n=8, dim=1) + torch.fft.fft(h).abs() + torch.fft.fft2(h).imag


def of_overlapping_windows(net: "Net", h: Tensor) -> Tensor:
    windows = h.contiguous().as_strided((len(h), 3, 4), (8, 2, 1))
    return torch.cat((windows.mean(1), windows.amax(1)), 1)


def aligned(net: "Net", h: Tensor) -> Tensor:
    """CTC, with lengths in tensors."""
    scores = h.view(-1, 4, 2).log_softmax(-1).transpose(0, 1)
    count = len(h)
    words = torch.ones(count, 2, dtype=torch.long)
    return h + functional.ctc_loss(scores, words, torch.full((count,), 4), torch.full((count,), 2))


def told_that_it_is_not_compiled(net: "Net", h: Tensor) -> Tensor:
    asked = torch.compiler.is_compiling(), torch.compiler.is_exporting(), torch.compiler.is_dynamo_compiling()
    return h * 2 if any(asked) else h.tanh()


@dataclass
class Pair:
    first: Tensor
    second: Tensor


def in_a_dataclass(net: "Net", h: Tensor) -> Tensor:
    pair = Pair(h.tanh(), h.relu())
    return pair.first + pair.second


BLOCKS: tuple[tuple[Callable[["Net", Tensor], Tensor], tuple[str, ...]], ...] = (
    *((block, ()) for block in (
        straight_through, with_a_context, of_two_outputs, in_bfloat16, dropped_in_bfloat16, without_autocast,
        pooled_after_a_transpose, pooled_in_channels_last, raises_where_values_are_large,
        warns_where_values_are_large, masked_as_torch_detects, factorized, decomposed, of_frequencies,
        of_overlapping_windows, aligned, told_that_it_is_not_compiled, in_a_dataclass,
    )),
    (checkpointed, (CHECKPOINTING,)), (checkpointed_by_an_older_way, (CHECKPOINTING,)),
)  # fmt: skip


class Net(nn.Module):
    def __init__(self, block: Callable[["Net", Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 5)
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), 1)
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        return functional.cross_entropy(self.last(self.block(self, self.first(x))), torch.arange(len(x)))


@pytest.mark.parametrize(("block", "notices"), BLOCKS, ids=[block.__name__ for block, _ in BLOCKS])
def test_a_step_has_the_bits_of_eager_pytorch(
    block: Callable[[Net, Tensor], Tensor], notices: tuple[str, ...], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    net, x = Net(block), torch.randn(4, 8)
    options = {"model": {"target": "net:Net"}, "optimizer": {"name": "sgd"}, "output_folder": tmp_path}
    chosen = CompileOptions.model_validate(options | {"training": {"batch_size": 4}})
    compiled = compile_model(net, Example({"x": x}), chosen)
    assert [one for one in compiled.notices if "without a gradient" not in one] == list(notices)
    program, memory = loaded(compiled.path, {"x": x})
    loss, gradients = step_of(program, memory)
    torch.manual_seed(1)
    eager = net(x)
    eager.backward()
    assert torch.equal(loss, eager.detach())
    theirs = {name: parameter.grad for name, parameter in net.named_parameters() if parameter.grad is not None}
    assert gradients.keys() == theirs.keys()
    assert [name for name in theirs if not torch.equal(gradients[name], theirs[name])] == []
