"""Models of pictures, decisions, equations and sequences, with linear algebra, mixtures of experts, and forms that a
result may have, as people write them by hand."""

# Calling a module, or what one holds, gives Any; parts of torch are untyped.
# mypy: no-warn-return-any, disable-error-code="no-untyped-call,operator,index,arg-type"

import random
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import weight_norm

from tests.zoo.own_data import CLASSES, FEATURES, ITEMS, LENGTH, WIDTH, Model, TwoLayers


class Capsules(Model):
    def make(self) -> None:
        self.weight = nn.Parameter(torch.randn(6, CLASSES, 4, 2) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        predicted = torch.einsum("bni,ncdi->bncd", x.view(-1, 6, 2), self.weight)
        logits = torch.zeros(x.shape[0], 6, CLASSES)
        for _ in range(3):
            total = torch.einsum("bnc,bncd->bcd", logits.softmax(2), predicted)
            norm = total.norm(dim=-1, keepdim=True)
            squashed = total * norm / (1 + norm.pow(2))
            with torch.no_grad():
                logits = logits + torch.einsum("bncd,bcd->bnc", predicted, squashed)
        return squashed.norm(dim=-1)


class SpatialTransformer(Model):
    def make(self) -> None:
        self.locate, self.features = nn.Linear(64, 6), nn.Conv2d(1, 4, 3)
        self.head = nn.Linear(4, CLASSES)
        nn.init.zeros_(self.locate.weight)
        self.locate.bias.data.copy_(torch.tensor([1.0, 0, 0, 0, 1, 0]))

    def forward(self, image: Tensor) -> Tensor:
        grid = F.affine_grid(self.locate(image.flatten(1)).view(-1, 2, 3), list(image.shape), align_corners=False)
        return self.head(self.features(F.grid_sample(image, grid, align_corners=False)).amax((2, 3)))


class SelfSupervised(Model):
    def make(self) -> None:
        self.encoder = nn.Sequential(nn.Linear(FEATURES, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU(), nn.Linear(WIDTH, 8))

    def forward(self, x: Tensor) -> Tensor:
        views = torch.cat((F.dropout(x, 0.2, self.training), F.dropout(x, 0.2, self.training)))
        z = F.normalize(self.encoder(views), dim=1)
        scores = (z @ z.T / 0.5).masked_fill(torch.eye(len(z), dtype=torch.bool), float("-inf"))
        return F.cross_entropy(scores, torch.arange(len(z)).roll(len(x)))


class StochasticDepth(Model):
    """Layers that Python's own random numbers drop; a factor drawn by torch would be captured."""

    def make(self) -> None:
        self.layers = nn.ModuleList(nn.Linear(FEATURES, FEATURES) for _ in range(3))
        self.head = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if random.random() > 0.5 or not self.training:
                x = x + torch.tanh(layer(x))
        return self.head(x)


class PolicyGradient(Model):
    def make(self) -> None:
        self.body = nn.Sequential(nn.Linear(FEATURES, WIDTH), nn.Tanh())
        self.policy, self.value = nn.Linear(WIDTH, CLASSES), nn.Linear(WIDTH, 1)

    def forward(self, state: Tensor, action: Tensor, old: Tensor, advantage: Tensor) -> Tensor:
        hidden = self.body(state)
        chances = torch.distributions.Categorical(logits=self.policy(hidden))
        ratio = (chances.log_prob(action) - old).exp()
        clipped = torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
        return F.mse_loss(self.value(hidden).squeeze(1), advantage) - clipped - 0.01 * chances.entropy().mean()


class NeuralField(Model):
    def make(self) -> None:
        self.register_buffer("frequencies", torch.randn(2, 8) * 3)
        self.first, self.second = nn.Linear(16, WIDTH), nn.Linear(WIDTH, 3)

    def forward(self, position: Tensor) -> Tensor:
        angles = 2 * torch.pi * position @ self.frequencies
        return self.second(torch.sin(30 * self.first(torch.cat((angles.sin(), angles.cos()), 1)))).sigmoid()


class OrdinaryDifferentialEquation(Model):
    def make(self) -> None:
        self.slope = nn.Sequential(nn.Linear(FEATURES, WIDTH), nn.Softplus(), nn.Linear(WIDTH, FEATURES))

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(4):
            k1 = self.slope(x)
            k2 = self.slope(x + 0.125 * k1)
            k3 = self.slope(x + 0.125 * k2)
            x = x + 0.25 / 6 * (k1 + 2 * k2 + 2 * k3 + self.slope(x + 0.25 * k3))
        return x


class StateSpace(Model):
    """A diagonal linear recurrence by cumulative sums, as S4D's real part."""

    def make(self) -> None:
        self.decay = nn.Parameter(torch.rand(WIDTH))
        self.into, self.out = nn.Linear(FEATURES, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        times = torch.arange(x.shape[1])
        kernel = torch.exp(-self.decay.abs()[:, None] * times)
        padded = F.pad(self.into(x).transpose(1, 2), (LENGTH - 1, 0))
        states = F.conv1d(padded, kernel.flip(1)[:, None], groups=WIDTH)
        return self.out(states[:, :, -1])


@dataclass
class Result:
    loss: Tensor
    logits: Tensor


class DataclassResult(Model):
    def make(self) -> None:
        self.head = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor, label: Tensor) -> Result:
        logits = self.head(x)
        return Result(F.cross_entropy(logits, label), logits)


class MixedPrecision(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return self.second(F.gelu(self.first(x)))


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
