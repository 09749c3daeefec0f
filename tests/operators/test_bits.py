"""Nets of operators that are rare, of complex numbers and of distributions: each has the bits of eager PyTorch."""

# Calling a module gives Any, and torch.distributions is untyped.
# mypy: no-warn-return-any, no-disallow-untyped-calls

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Beta, Dirichlet, Gamma, Pareto
from torch.nn import functional

from tests.parity.test_blocks import check_bits
from tests.support.whole import every_second

X = torch.randn(8, 4, generator=torch.Generator().manual_seed(3))
Y = X[:, :1].clone()


class Net(nn.Module):
    """`compute` is called with the outputs [8, 6] of a layer; real and imaginary parts count alike."""

    def __init__(self, compute: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer: nn.Module = nn.Linear(4, 6)
        self.last = nn.Linear(1, 1)
        self.compute = compute

    def forward(self, x: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        h = self.layer(x)
        made = self.compute(h)
        rows = (torch.view_as_real(made) if made.is_complex() else made).float().reshape(len(x), -1)
        loss = (self.last(rows.mean(1, keepdim=True)) - target).square().mean() + 0.1 * h.square().mean()
        return loss, rows


def orthogonal() -> Net:
    net = Net(lambda h: h)
    net.layer = nn.utils.parametrizations.orthogonal(nn.Linear(4, 6))
    return net


def square(h: Tensor) -> Tensor:
    """A matrix [6, 6] that is not symmetric, with distinct eigenvalues."""
    return h.T @ h + torch.diag(torch.arange(6.0)) + torch.arange(36.0).view(6, 6) / 100


def each(matrix: Tensor, h: Tensor) -> Tensor:
    """`matrix` as a part of each sample."""
    return matrix.flatten()[: h.shape[1]] * h


def bessel(h: Tensor) -> Tensor:
    x, special = h.detach().abs() + 0.1, torch.special
    first = special.bessel_j0(x) + special.bessel_j1(x) + special.bessel_y0(x) + special.bessel_y1(x)
    second = special.modified_bessel_i0(x) + special.modified_bessel_i1(x) + special.modified_bessel_k0(x)
    scaled = special.scaled_modified_bessel_k0(x) + special.scaled_modified_bessel_k1(x) + special.airy_ai(x)
    return (first + second + special.modified_bessel_k1(x) + scaled + special.spherical_bessel_j0(x)) * h


def polynomials(h: Tensor) -> Tensor:
    x, special = h.detach(), torch.special
    powers = torch.arange(6)
    by_number = special.chebyshev_polynomial_t(x, 3) + special.hermite_polynomial_h(x, 2)
    by_tensor = special.legendre_polynomial_p(x, powers) + special.laguerre_polynomial_l(x, powers)
    return (by_number + by_tensor + special.shifted_chebyshev_polynomial_u(0.5, powers)) * h / 100


def lists(h: Tensor) -> Tensor:
    doubled = torch._foreach_mul([h, h + 1], 2.0)
    added = torch._foreach_addcdiv(doubled, [h, h], [h.abs() + 1, h.abs() + 2], [0.1, 0.2])
    return torch.stack(added, 1) * torch._foreach_norm([h])[0]


def windows(h: Tensor) -> Tensor:
    made = torch.kaiser_window(6) + torch.bartlett_window(6) + torch.blackman_window(6) + torch.fft.fftfreq(6)
    return torch.fft.ifft(torch.fft.fft(h) * made) * torch.linspace(h.detach().min(), h.detach().max(), 6)


def counts(h: Tensor) -> Tensor:
    x = h.detach()
    histogram = torch.histogram(x, bins=6, range=(-1.0, 1.0))[0] + torch.histc(x, 6, -1, 1)
    grid = torch.histogramdd(x[:, :2], bins=[3, 2], range=[-1.0, 1.0, -1.0, 1.0])[0]
    return (histogram + grid.flatten()) * h + torch.bucketize(x, torch.linspace(-1, 1, 5))


def copies(h: Tensor) -> Tensor:
    unbind, split = torch.ops.aten.unbind_copy.int, torch.ops.aten.split_copy.Tensor
    parts = torch.cat((*unbind(h.unsqueeze(2), 2), *split(h, 2, 1)), 1)
    moved = torch.permute_copy(torch.view_copy(h, (-1, 2, 3)), (0, 2, 1)).flatten(1)
    return torch.narrow_copy(parts, 1, 3, 6) + moved + torch.t_copy(h).T + torch.slice_copy(h, 1, 0, 6)


def segments(h: Tensor) -> Tensor:
    by_length = torch.segment_reduce(h.T.contiguous(), "max", lengths=torch.tensor([4, 2]), axis=0)
    by_offset = torch.segment_reduce(h.T.contiguous(), "mean", offsets=torch.tensor([0, 1, 6]), axis=0)
    return torch.cat((by_length, by_offset)).T


def whole_numbers(h: Tensor) -> Tensor:
    x = (h.detach() * 10).int()
    bits = torch.bitwise_and(6, x) + (x << torch.tensor(2)) + torch.bitwise_left_shift(1, x.abs() % 4)
    return torch.gcd(x, torch.tensor(12)) * h + torch.lcm(x, torch.tensor(6)) * h / 100 + bits * h / 100


def reflections(h: Tensor) -> Tensor:
    wide = h.view(-1, 3, 2)
    made = torch.linalg.householder_product(wide, wide[:, 0].sigmoid())
    return torch.ormqr(wide.tanh(), wide[:, 0].sigmoid(), made).flatten(1)


def pooled(h: Tensor) -> Tensor:
    picture = functional.pad(h, (0, 10)).view(-1, 1, 4, 4)
    samples = torch.linspace(0.1, 0.9, 2).view(1, 1, 2).expand(len(h), 1, 2)
    made = functional.fractional_max_pool2d(picture, 2, output_size=2, _random_samples=samples)
    unfolded = functional.fold(functional.unfold(picture, 2), (4, 4), 2)
    grid = torch.stack((h, h.flip(1)), 2).view(-1, 2, 3, 2).tanh()
    return torch.cat(
        (made.flatten(1), unfolded.flatten(1), functional.grid_sample(picture, grid, align_corners=False).flatten(1)), 1
    )


def step_convolution(h: Tensor) -> Tensor:
    steps = h.view(-1, 2, 3).transpose(0, 1).contiguous()
    made = torch.conv_tbc(steps, torch.full((2, 3, 4), 0.1), torch.zeros(4), 1).square().mean(0)
    return torch.cat((made, torch.addbmm(h, h.view(1, -1, 6), torch.full((1, 6, 6), 0.1))), 1)


def experts(h: Tensor) -> Tensor:
    """Two matrices, each for one half of the rows; then one product for each half."""
    rows, ends = h[:, :4].contiguous(), torch.tensor([len(h) // 2, len(h)], dtype=torch.int32)
    made = functional.grouped_mm(rows, h.mean() + torch.arange(64.0).view(2, 4, 8) / 64, offs=ends)
    return made.square() / 100 + functional.grouped_mm(rows.T, made, offs=ends).tanh().sum((0, 1))


def complex_products(h: Tensor) -> Tensor:
    z = torch.complex(h, h + 1)
    turned = torch.add(z * torch.polar(torch.ones(6), torch.arange(6.0)), z**2j, alpha=0.5j)
    return torch.where(h > 0, 1j, turned.masked_fill(h > 1, 2 - 1j)) * torch.tensor(1 + 2j) + torch.full((6,), 1j)


def forward_mode(h: Tensor) -> Tensor:
    return torch.func.jvp(lambda x: torch.sin(x) * 3 + 1, (h,), (h.cos(),))[1]


def positive(h: Tensor) -> Tensor:
    return functional.softplus(h) + 0.5


NETS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "hessian": lambda h: torch.func.vmap(torch.func.hessian(lambda row: (row.tanh() ** 3).sum()))(h),
    "jvp": forward_mode,
    "jacfwd": lambda h: each(torch.func.jacfwd(lambda row: torch.stack((row[0] * row[1], row.new_ones(())))) (h[0]), h),
    "eig": lambda h: each(torch.linalg.eig(square(h))[1].abs() + torch.linalg.eigvals(square(h)).real, h),
    "pinv": lambda h: torch.linalg.pinv(h).T,
    "igamma": lambda h: torch.igamma(positive(h).detach(), positive(h)) + torch.igammac(positive(h).detach(), h.abs()),
    "frexp": lambda h: torch.frexp(h)[0] + torch.frexp(h.detach())[1],
    "whole numbers": whole_numbers,
    "fake_quantize tensor": lambda h: torch.fake_quantize_per_tensor_affine(h, 0.1, 0, -128, 127),
    "fake_quantize channel": lambda h: torch.fake_quantize_per_channel_affine(
        h, torch.full((6,), 0.1), torch.zeros(6, dtype=torch.int32), 1, -128, 127
    ),
    "where of bytes": lambda h: torch.where((h > 0).to(torch.uint8), h, h * 2),
    "angle": lambda h: torch.complex(h, h * 2 + 1).angle(),
    "polar": lambda h: torch.polar(h.abs() + 0.1, h) * (2 + 1j),
    "complex products": complex_products,
    "experts": experts,
    "bessel": bessel,
    "polynomials": polynomials,
    "lists": lists,
    "windows": windows,
    "counts": counts,
    "copies": copies,
    "segments": segments,
    "reflections": reflections,
    "pooled": pooled,
    "step convolution": step_convolution,
    "mvlgamma": lambda h: torch.mvlgamma(positive(h) + 2, 3) + torch.special.zeta(positive(h) + 1, 1.5).detach() * h,
    "masked softmax": lambda h: torch._masked_softmax(h, h > 0.3, 1),
    "strides": lambda h: torch.as_strided_copy(h * 1, (len(h), 3), (6, 2)),
}  # fmt: skip
RANDOM: Mapping[str, Callable[[Tensor], Tensor]] = {
    "Gamma": lambda h: Gamma(positive(h), positive(h)).rsample(),
    "Beta": lambda h: Beta(positive(h), positive(h)).rsample(),
    "Dirichlet": lambda h: Dirichlet(positive(h)).rsample(),
    "Pareto": lambda h: Pareto(positive(h), positive(h) + 1).rsample(),
    "random_": lambda h: h + torch.empty_like(h).random_(0, 5) + torch.empty_like(h).random_(3),
    "no generator": lambda h: h + torch.randn(6, generator=None) + torch.randint_like(h, torch.tensor(9)),
}


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("name", every_second(["orthogonal", *NETS, *RANDOM]))
def test_a_step_and_an_evaluation_have_the_bits_of_eager(tmp_path: Path, name: str) -> None:
    net = orthogonal() if name == "orthogonal" else Net({**NETS, **RANDOM}[name])
    _, evaluated = check_bits(net, {"x": X, "target": Y}, tmp_path)
    assert all(torch.equal(*pair) for pair in evaluated)
