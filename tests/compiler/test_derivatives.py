"""Models that differentiate, map over a batch, ask a distribution, call NumPy or compute with complex numbers."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributions import MultivariateNormal

import sambasim as ss

X = torch.linspace(-1, 1, 16)[:, None]


class Derivative(nn.Module):
    """The derivative of a network fits the target, as in physics-informed networks."""

    def __init__(self, *, turns_on: bool) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1))
        self.turns_on = turns_on

    def forward(self, x: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        with torch.set_grad_enabled(self.turns_on or torch.is_grad_enabled()):
            x = x.detach().requires_grad_(True)
            value = self.net(x)
            (slope,) = torch.autograd.grad(value.sum(), x, create_graph=True)
            return (slope - target).square().mean(), value


class Mapped(nn.Module):
    """A weight for each sample, made by the model."""

    def __init__(self) -> None:
        super().__init__()
        self.make, self.layer = nn.Linear(1, 8), nn.Linear(1, 4)

    def forward(self, x: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        weights = self.make(x).view(-1, 2, 4)
        outputs = torch.vmap(lambda weight, row: weight @ row)(weights, torch.vmap(torch.relu)(self.layer(x)))
        return (outputs - target).square().mean(), outputs


class Prior(nn.Module):
    """Its distribution keeps a matrix that lies in memory by columns."""

    def __init__(self, *, validates: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 3)
        self.prior = MultivariateNormal(torch.zeros(3), torch.eye(3) + 0.5, validate_args=validates)

    def forward(self, x: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        outputs = self.layer(x)
        likelihood: Tensor = self.prior.log_prob(outputs)  # type: ignore[no-untyped-call]  # of torch
        return -likelihood.mean() + (outputs - target).square().mean(), outputs


class Frequencies(nn.Module):
    """NumPy makes a constant, which PyTorch would round otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 1)

    def forward(self, x: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        scales = torch.from_numpy(np.exp(np.arange(8, dtype=np.float32) / 7))
        outputs = self.layer(torch.sin(x * scales))
        return (outputs - target).square().mean(), outputs


class Measured(Frequencies):
    def forward(self, x: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(torch.from_numpy(np.tanh(x.numpy())), target)


class Spectrum(Frequencies):
    def forward(self, x: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        spectrum = (
            torch.stft(x.expand(-1, 8), n_fft=4, window=torch.ones(4), return_complex=True) * torch.exp(2j * x)[0]
        )
        outputs = self.layer(torch.view_as_real(spectrum * (1 + 0.5j)).flatten(1)[:, :8])
        return (outputs - target).square().mean(), outputs


class Singular(Frequencies):
    """Reads singular and eigenvalues alone, which PyTorch then computes without vectors."""

    def forward(self, x: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        rows = torch.cat((x, target, x * target), 1)
        with_vectors = torch.linalg.svd(rows, full_matrices=False)[1]
        values = torch.cat((torch.linalg.svdvals(rows), torch.linalg.eigvalsh(rows.T @ rows), with_vectors))
        outputs = self.layer(x * values[:8])
        return (outputs - target).square().mean(), outputs


class Spoken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 4 * 5)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        letters = self.layer(x).view(-1, 4, 5).log_softmax(-1).transpose(0, 1)
        lengths = [4] * len(x)
        return torch.ctc_loss(letters, torch.ones(len(x), 2, dtype=torch.int64), lengths, [2] * len(x), 0, 1)


MODELS = [
    Derivative(turns_on=True),
    Derivative(turns_on=False),
    Mapped(),
    Prior(validates=False),
    Prior(validates=True),
    Frequencies(),
    Spectrum(),
    Singular(),
]


@pytest.mark.parametrize("model", MODELS, ids=lambda model: type(model).__name__)
def test_they_train_and_predict_as_in_pytorch(tmp_path: Path, model: nn.Module) -> None:
    one = ss.compile(model, (X, X), optimizer="sgd", lr=0.1, output_folder=tmp_path, quiet=True)
    order = torch.randperm(16, generator=torch.Generator().manual_seed(0))
    run = ss.run(one, (X, X), steps=1, quiet=True)
    torch.set_num_threads(run.summary.threads)
    assert run.losses == [model(X[order], X[order])[0].item()]
    assert torch.allclose(ss.predict(one, (X, X)).outputs[0], model(X, X)[1], atol=1e-6)


def test_numpy_functions_of_values_are_refused_with_a_rewrite(tmp_path: Path) -> None:
    with pytest.raises(ss.SambasimError, match="NumPy, which a graph does not call") as caught:
        ss.compile(Measured(), (X, X), output_folder=tmp_path, quiet=True)
    assert str(caught.value.where).endswith("np.tanh(x.numpy())), target)")
    assert "torch.tanh(x), not np.tanh" in str(caught.value.remedy)


def test_numbers_as_lengths_of_a_ctc_loss_are_refused_with_a_rewrite(tmp_path: Path) -> None:
    with pytest.raises(ss.SambasimError, match="ctc_loss\\(\\) with lengths that are numbers") as caught:
        ss.compile(Spoken(), (X, X), output_folder=tmp_path, quiet=True)
    assert "give both as tensors" in str(caught.value.remedy)
