"""Models of sequences, with linear algebra, and mixtures of experts, as people write them by hand."""

# Calling a module, or what one holds, gives Any; parts of torch are untyped.
# mypy: no-warn-return-any, disable-error-code="no-untyped-call,operator,index,arg-type"

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import weight_norm

from tests.zoo.own_data import CLASSES, FEATURES, ITEMS, LENGTH, WIDTH, Model


class LSTMTagger(Model):
    def make(self) -> None:
        self.words = nn.Embedding(ITEMS, WIDTH)
        self.lstm = nn.LSTM(WIDTH, 8, num_layers=2, bidirectional=True, dropout=0.2, batch_first=True)
        self.tags = weight_norm(nn.Linear(16, CLASSES))

    def forward(self, words: Tensor, tags: Tensor) -> Tensor:
        return F.cross_entropy(self.tags(self.lstm(self.words(words))[0]).transpose(1, 2), tags)


class UnrolledCell(Model):
    def make(self) -> None:
        self.cell, self.head = nn.LSTMCell(FEATURES, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        state = (torch.zeros(x.shape[0], WIDTH), torch.zeros(x.shape[0], WIDTH))
        for step in x.unbind(1):
            state = self.cell(step, state)
        return self.head(state[0])


class TemporalConvolution(Model):
    def make(self) -> None:
        self.layers = nn.ModuleList(nn.Conv1d(FEATURES, FEATURES, 3, dilation=2**i) for i in range(3))
        self.head = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = x.transpose(1, 2)
        for layer in self.layers:
            x = x + F.gelu(layer(F.pad(x, (2 * layer.dilation[0], 0))))
        return self.head(x.mean(2))


class SpeechCTC(Model):
    def make(self) -> None:
        self.rnn, self.head = nn.LSTM(FEATURES, WIDTH, batch_first=True), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor, words: Tensor) -> Tensor:
        scores = self.head(self.rnn(x)[0]).log_softmax(-1).transpose(0, 1)
        count = x.shape[0]
        return F.ctc_loss(scores, words, torch.full((count,), x.shape[1]), torch.full((count,), words.shape[1]))


class FourierMixer(Model):
    """FNet's mixing, and a spectral filter with complex weights."""

    def make(self) -> None:
        self.embedding, self.head = nn.Linear(FEATURES, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.filter = nn.Parameter(torch.randn(LENGTH // 2 + 1, WIDTH, 2) * 0.02)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        x = x + torch.fft.fft(torch.fft.fft(x, dim=-1), dim=-2).real
        spectrum = torch.fft.rfft(x, dim=1, norm="ortho") * torch.view_as_complex(self.filter)
        return self.head(torch.fft.irfft(spectrum, n=LENGTH, dim=1, norm="ortho").mean(1))


class GaussianProcess(Model):
    def make(self) -> None:
        self.log_scale, self.log_noise = nn.Parameter(torch.zeros(())), nn.Parameter(torch.tensor(-1.0))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        distance = (x[:, None] - x[None]).pow(2).sum(-1)
        kernel = (-0.5 * distance / self.log_scale.exp()).exp() + self.log_noise.exp() * torch.eye(len(x))
        factor = torch.linalg.cholesky(kernel)
        alpha = torch.cholesky_solve(y[:, None], factor)
        return (0.5 * y @ alpha).squeeze() + factor.diagonal().log().sum()


class OrthogonalLayer(Model):
    """Cayley's map: an inverse, and a determinant as a penalty."""

    def make(self) -> None:
        self.weight, self.head = nn.Parameter(torch.randn(FEATURES, FEATURES) * 0.1), nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        skew, eye = self.weight - self.weight.T, torch.eye(FEATURES)
        rotation = torch.linalg.solve(eye + skew, eye - skew)
        _, volume = torch.linalg.slogdet(eye + self.weight @ self.weight.T)
        return F.cross_entropy(self.head(x @ rotation), target) + 0.01 * volume


class MixtureOfExperts(Model):
    def make(self) -> None:
        self.gate = nn.Linear(FEATURES, 4)
        self.experts = nn.ModuleList(nn.Linear(FEATURES, CLASSES) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        best, chosen = self.gate(x).topk(2, dim=1)
        weights = torch.zeros(x.shape[0], 4).scatter(1, chosen, best.softmax(1))
        return (weights[:, :, None] * torch.stack([expert(x) for expert in self.experts], 1)).sum(1)


class RoutedExperts(MixtureOfExperts):
    """Each expert sees its own samples only, so sizes depend on values; all experts could be weighted instead."""

    def forward(self, x: Tensor) -> Tensor:
        best, chosen = self.gate(x).softmax(1).max(1)
        result = torch.zeros(x.shape[0], CLASSES)
        for number, expert in enumerate(self.experts):
            rows = torch.where(chosen == number)[0]
            result = result.index_add(0, rows, best[rows, None] * expert(x[rows]))
        return result
