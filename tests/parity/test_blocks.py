"""What a forward may hold beside operators: each is captured, and a step of it has the bits of eager PyTorch."""

# Calling a module gives Any, and parts of torch have no types.
# mypy: no-warn-return-any, allow-untyped-calls

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributions import MultivariateNormal
from torch.nn import functional
from torch.utils import checkpoint
from torch.utils._pytree import tree_leaves

from sambasim.compiler.capture.step import Example
from sambasim.runtime.engine.executor import Executor, outputs_in_order
from tests.support.compiled import compile_model, loaded, net_options, outputs_of, step_of

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


def with_backwards_of_their_own(net: "Net", h: Tensor) -> Tensor:
    scaled, shifted = Scaled.apply(h, net.first.bias, 0.5)
    return Rounded.apply(h) + Clipped.apply(h) + scaled + shifted


def under_autocast(net: "Net", h: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        narrow = net.middle(h)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=False):
        wide = net.last(h).sum(1, keepdim=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return functional.dropout(narrow, 0.3).float() + narrow.float() + wide


def checkpointed(net: "Net", h: Tensor) -> Tensor:
    h = checkpoint.checkpoint(lambda a: functional.dropout(net.middle(a).relu()), h, use_reentrant=False)
    return checkpoint.checkpoint(lambda a: net.last(a).relu().sum(1, keepdim=True) + a, h, use_reentrant=True)


def pooled(net: "Net", h: Tensor) -> Tensor:
    """After a transpose, and in channels_last."""
    transposed = nn.AdaptiveAvgPool1d(1)(h.view(-1, 2, 4).transpose(1, 2)).flatten(1).repeat(1, 2)
    pictures = h.view(-1, 8, 1, 1).expand(-1, 8, 3, 3).contiguous(memory_format=torch.channels_last)
    of_pictures = nn.AdaptiveAvgPool2d((1, 1))(pictures).flatten(1) + nn.AdaptiveAvgPool2d((2, 1))(pictures).mean(
        (2, 3)
    )
    return transposed + of_pictures


@dataclass
class Pair:
    first: Tensor
    second: Tensor


def with_python_around(net: "Net", h: Tensor) -> Tensor:
    """It raises or warns where values are large, asks whether it is compiled, has a dataclass and a NumPy constant."""
    if not torch.isfinite(h).all() or (h.abs() > 1e3).any():
        raise ValueError("too large")
    if h.abs().max() > 1e3:
        logging.getLogger(__name__).warning("%s", h.abs().max().item())
    if torch.compiler.is_compiling() or torch.compiler.is_exporting() or torch.compiler.is_dynamo_compiling():
        return h * 2
    pair = Pair(h.tanh(), h.relu())
    return pair.first + torch.sin(pair.second * torch.from_numpy(np.exp(np.arange(8, dtype=np.float32) / 7)))


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
    """With vectors, and without, which PyTorch then does not compute."""
    u, s, v = torch.linalg.svd(h, full_matrices=False)
    values = torch.linalg.eigvalsh(h.T @ h + torch.diag(torch.arange(1.0, 9.0)))
    return (u * s) @ v + values + torch.linalg.svdvals(h).sum()


def of_frequencies_and_windows(net: "Net", h: Tensor) -> Tensor:
    spectrum = torch.fft.rfft(h, dim=1) * torch.view_as_complex(torch.stack((net.first.bias[:5], net.last.bias), 1))
    result = torch.fft.irfft(spectrum, n=8, dim=1) + torch.fft.fft(h).abs() + torch.fft.fft2(h).imag
    short = torch.stft(h, n_fft=4, window=torch.ones(4), return_complex=True) * torch.exp(2j * h[:, :3, None])
    windows = h.contiguous().as_strided((len(h), 3, 4), (8, 2, 1))
    parts = torch.cat((windows.mean(1), windows.amax(1)), 1)
    return result + parts + torch.view_as_real(short * (1 + 0.5j)).flatten(1)[:, :8]


def differentiated(net: "Net", h: Tensor) -> Tensor:
    """A derivative by its inputs, as in physics-informed networks, also where gradients are off."""
    with torch.set_grad_enabled(True):
        x = h.detach().requires_grad_(True)
        (slope,) = torch.autograd.grad(net.middle(x).tanh().sum(), x, create_graph=True)
    return slope + h


def mapped(net: "Net", h: Tensor) -> Tensor:
    """A weight for each sample, made by the model."""
    weights = net.middle(h).view(-1, 2, 4)
    return torch.vmap(lambda weight, row: weight @ row)(weights, torch.vmap(torch.relu)(h[:, :4])).repeat(1, 4)


def of_distributions(net: "Net", h: Tensor) -> Tensor:
    """One keeps a matrix that lies in memory by columns, and one checks its values."""
    return h + sum(prior.log_prob(h[:, :3]).mean() for prior in net.priors)


BLOCKS: tuple[Callable[["Net", Tensor], Tensor], ...] = (
    with_backwards_of_their_own, under_autocast, pooled, with_python_around, masked_as_torch_detects, factorized,
    decomposed, of_frequencies_and_windows, differentiated, mapped, of_distributions, checkpointed,
)  # fmt: skip


class Net(nn.Module):
    def __init__(self, block: Callable[["Net", Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 5)
        if block is masked_as_torch_detects:
            self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), 1)
        matrix = torch.zeros(3), torch.eye(3) + 0.5
        self.priors = [MultivariateNormal(*matrix, validate_args=validates) for validates in (False, True)]
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        return functional.cross_entropy(self.last(self.block(self, self.first(x))), torch.arange(len(x)))


def check_bits(
    net: nn.Module, inputs: Mapping[str, Tensor], folder: Path
) -> tuple[Sequence[str], Sequence[tuple[Tensor, Tensor]]]:
    """Of one step. Returns the notices of the compile, and what an evaluation gives, each with what eager gives."""
    torch.manual_seed(0)
    options = net_options(folder, training={"batch_size": len(next(iter(inputs.values())))})
    compiled = compile_model(net, Example(inputs), options)
    program, memory = loaded(compiled.path, inputs)
    loss, gradients = step_of(program, memory)
    torch.manual_seed(1)
    eager = tree_leaves(net(*inputs.values()))[0]
    eager.backward()
    assert torch.equal(loss, eager.detach())
    theirs = {name: parameter.grad for name, parameter in net.named_parameters() if parameter.grad is not None}
    assert gradients.keys() == theirs.keys()
    assert [name for name in theirs if not torch.equal(gradients[name], theirs[name])] == []
    torch.manual_seed(2)
    evaluated = outputs_in_order(program.evaluation, outputs_of(Executor(program.evaluation, program, memory.tensor)))
    torch.manual_seed(2)
    with torch.no_grad():
        expected = tree_leaves(net.eval()(*inputs.values()))
    return compiled.notices, list(zip(evaluated, expected, strict=True))


@pytest.mark.parametrize("block", BLOCKS)
def test_a_step_has_the_bits_of_eager_pytorch(block: Callable[[Net, Tensor], Tensor], tmp_path: Path) -> None:
    torch.manual_seed(0)
    notices, evaluated = check_bits(Net(block), {"x": torch.randn(4, 8)}, tmp_path)
    assert [one for one in notices if "without a gradient" not in one] == [CHECKPOINTING] * (block is checkpointed)
    for ours, theirs in evaluated:
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
