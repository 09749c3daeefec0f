"""Models of many kinds, as people write them by hand: what no package has."""

# Calling a module, or what one holds, gives Any; parts of torch are untyped.
# mypy: no-warn-return-any, disable-error-code="no-untyped-call,operator,index,arg-type"

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

from tests.zoo.entry import Batch, Entry, Outcome

FEATURES, CLASSES, ITEMS, LENGTH, WIDTH = 12, 5, 40, 8, 16


class WideAndDeep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Embedding(ITEMS, 1)
        self.deep = nn.Embedding(ITEMS, 8)
        self.mlp = nn.Sequential(nn.Linear(8 * LENGTH, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 1))

    def forward(self, items: Tensor) -> Tensor:
        return (self.wide(items).sum(dim=1) + self.mlp(self.deep(items).flatten(1))).squeeze(1)


class DLRM(nn.Module):
    """Dense features and sparse ones, and the products of all pairs of their embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.bottom = nn.Sequential(nn.Linear(FEATURES, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 8), nn.ReLU())
        self.tables = nn.ModuleList(nn.EmbeddingBag(ITEMS, 8, mode="sum") for _ in range(3))
        self.top = nn.Linear(8 + 6, 1)

    def forward(self, dense: Tensor, items: Tensor) -> Tensor:
        bottom = self.bottom(dense)
        vectors = [bottom, *(table(items[:, i : i + 2]) for i, table in enumerate(self.tables))]
        stacked = torch.stack(vectors, dim=1)
        row, column = torch.tril_indices(4, 4, offset=-1)
        pairs = torch.bmm(stacked, stacked.transpose(1, 2))[:, row, column]
        return self.top(torch.cat((bottom, pairs), dim=1)).squeeze(1)


class FactorizationMachine(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.factors = nn.Embedding(ITEMS, 1), nn.Embedding(ITEMS, 8)

    def forward(self, items: Tensor) -> Tensor:
        v = self.factors(items)
        return self.first(items).sum((1, 2)) + 0.5 * (v.sum(1).pow(2) - v.pow(2).sum(1)).sum(1)


class TwoTowers(nn.Module):
    """Users and items, trained to find each other among the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.user, self.item = nn.EmbeddingBag(ITEMS, WIDTH), nn.Embedding(ITEMS, WIDTH)
        self.temperature = nn.Parameter(torch.tensor(0.07).log())

    def forward(self, history: Tensor, item: Tensor) -> Tensor:
        users, items = F.normalize(self.user(history), dim=1), F.normalize(self.item(item), dim=1)
        return F.cross_entropy(users @ items.T / self.temperature.exp(), torch.arange(len(users)))


class SparseTable(nn.Module):
    """An embedding with sparse gradients, which PyTorch adds up in another order."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(ITEMS, 8, sparse=True), nn.Linear(8, CLASSES)

    def forward(self, items: Tensor) -> Tensor:
        return self.head(self.table(items).mean(1))


class GraphConvolution(nn.Module):
    """Nodes that share a dense, normalized adjacency."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(FEATURES, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        adjacency = (edges + edges.transpose(1, 2) > 0).float() + torch.eye(edges.shape[1])
        scale = adjacency.sum(-1).rsqrt()
        adjacency = scale[:, :, None] * adjacency * scale[:, None, :]
        return self.second(adjacency @ torch.relu(self.first(adjacency @ nodes))).mean(1)


class GraphAttention(GraphConvolution):
    def __init__(self) -> None:
        super().__init__()
        self.sender, self.receiver = nn.Linear(WIDTH, 1), nn.Linear(WIDTH, 1)

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        hidden = self.first(nodes)
        scores = F.leaky_relu(self.sender(hidden) + self.receiver(hidden).transpose(1, 2), 0.2)
        scores = scores.masked_fill((edges + torch.eye(edges.shape[1])) == 0, float("-inf"))
        return self.second(F.elu(scores.softmax(-1) @ hidden)).mean(1)


class MessagePassing(nn.Module):
    """Edges as a list of indices: gather, message, scatter."""

    def __init__(self) -> None:
        super().__init__()
        self.message, self.head = nn.Linear(FEATURES, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, nodes: Tensor, pairs: Tensor) -> Tensor:
        source, to = pairs[:, 0], pairs[:, 1]
        messages = self.message(nodes).gather(1, source[:, :, None].expand(-1, -1, WIDTH))
        total = torch.zeros(nodes.shape[0], nodes.shape[1], WIDTH)
        total = total.scatter_add(1, to[:, :, None].expand(-1, -1, WIDTH), messages)
        return self.head(total.relu().amax(1))


class Diffusion(nn.Module):
    """Noise is drawn in forward, and predicted."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("kept", torch.cumprod(1 - torch.linspace(1e-4, 0.02, 20), dim=0))
        self.time = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.SiLU(), nn.Linear(WIDTH, 8))
        self.down, self.up = nn.Conv2d(1, 8, 3, padding=1), nn.Conv2d(8, 1, 3, padding=1)
        self.norm = nn.GroupNorm(2, 8)

    def forward(self, image: Tensor) -> Tensor:
        step = torch.randint(20, (image.shape[0],))
        noise = torch.randn_like(image)
        kept = self.kept[step][:, None, None, None]
        noisy = kept.sqrt() * image + (1 - kept).sqrt() * noise
        frequencies = torch.exp(-math.log(1e4) * torch.arange(WIDTH // 2) / (WIDTH // 2))
        angles = step[:, None] * frequencies
        embedded = self.time(torch.cat((angles.sin(), angles.cos()), dim=1))
        hidden = F.silu(self.norm(self.down(noisy)) + embedded[:, :, None, None])
        return F.mse_loss(self.up(hidden), noise)


class VariationalAutoencoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(FEATURES, 8), nn.Linear(4, FEATURES)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        mean, log_variance = self.encoder(x).chunk(2, dim=1)
        z = mean + torch.randn_like(mean) * (0.5 * log_variance).exp()
        rebuilt = self.decoder(z)
        divergence = -0.5 * (1 + log_variance - mean.pow(2) - log_variance.exp()).sum(1).mean()
        return F.mse_loss(rebuilt, x) + divergence, rebuilt


class VectorQuantizer(nn.Module):
    """The nearest code, straight through."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.codes, self.decoder = nn.Linear(FEATURES, 4), nn.Embedding(8, 4), nn.Linear(4, FEATURES)

    def forward(self, x: Tensor) -> Tensor:
        z = self.encoder(x)
        code = self.codes(torch.cdist(z, self.codes.weight).argmin(1))
        loss = F.mse_loss(code, z.detach()) + 0.25 * F.mse_loss(z, code.detach())
        return loss + F.mse_loss(self.decoder(z + (code - z).detach()), x)


class _Sign(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sign()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradient * (x.abs() <= 1)


class BinaryNetwork(nn.Module):
    """Weights of 1 and -1 by a straight-through estimator."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(FEATURES, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(F.linear(x, _Sign.apply(self.first.weight), self.first.bias)))


class LoRA(nn.Module):
    """Frozen weights with a low-rank update that is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Sequential(nn.Linear(FEATURES, WIDTH), nn.ReLU(), nn.Linear(WIDTH, CLASSES)).requires_grad_(
            False
        )
        self.down, self.up = nn.Linear(FEATURES, 2, bias=False), nn.Linear(2, WIDTH, bias=False)
        self.dropout = nn.Dropout(0.05)

    def forward(self, x: Tensor) -> Tensor:
        return self.base[2](self.base[1](self.base[0](x) + 2.0 * self.up(self.down(self.dropout(x)))))


class GeneratorLoss(nn.Module):
    """The generator's half of a GAN: its critic is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(
            nn.Linear(4, WIDTH), nn.BatchNorm1d(WIDTH), nn.LeakyReLU(0.2), nn.Linear(WIDTH, 8)
        )
        self.critic = nn.Sequential(nn.Linear(8, WIDTH), nn.LeakyReLU(0.2), nn.Linear(WIDTH, 1)).requires_grad_(False)

    def forward(self, noise: Tensor) -> Tensor:
        return F.softplus(-self.critic(self.generator(noise))).mean()


class CriticLoss(nn.Module):
    """The critic's half, with spectral normalization and a hinge."""

    def __init__(self) -> None:
        super().__init__()
        self.critic = nn.Sequential(
            spectral_norm(nn.Linear(8, WIDTH)), nn.LeakyReLU(0.2), spectral_norm(nn.Linear(WIDTH, 1))
        )

    def forward(self, real: Tensor, fake: Tensor) -> Tensor:
        return F.relu(1 - self.critic(real)).mean() + F.relu(1 + self.critic(fake)).mean()


class GradientPenalty(nn.Module):
    """WGAN-GP: a gradient of the gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.critic = nn.Sequential(nn.Linear(8, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))

    def forward(self, real: Tensor, fake: Tensor) -> Tensor:
        share = torch.rand(real.shape[0], 1)
        with torch.enable_grad():
            mixed = (share * real + (1 - share) * fake).requires_grad_()
            (slope,) = torch.autograd.grad(self.critic(mixed).sum(), mixed, create_graph=True)
        penalty = (slope.norm(dim=1) - 1).pow(2).mean()
        return self.critic(fake).mean() - self.critic(real).mean() + 10 * penalty


class LSTMTagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(ITEMS, WIDTH)
        self.lstm = nn.LSTM(WIDTH, 8, num_layers=2, bidirectional=True, dropout=0.2, batch_first=True)
        self.tags = weight_norm(nn.Linear(16, CLASSES))

    def forward(self, words: Tensor, tags: Tensor) -> Tensor:
        return F.cross_entropy(self.tags(self.lstm(self.words(words))[0]).transpose(1, 2), tags)


class UnrolledCell(nn.Module):
    """A loop over time in Python, with an LSTMCell."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.LSTMCell(FEATURES, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        state = (torch.zeros(x.shape[0], WIDTH), torch.zeros(x.shape[0], WIDTH))
        for step in x.unbind(1):
            state = self.cell(step, state)
        return self.head(state[0])


class TemporalConvolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv1d(FEATURES, FEATURES, 3, dilation=2**i) for i in range(3))
        self.head = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = x.transpose(1, 2)
        for layer in self.layers:
            x = x + F.gelu(layer(F.pad(x, (2 * layer.dilation[0], 0))))
        return self.head(x.mean(2))


class SpeechCTC(nn.Module):
    """Connectionist temporal classification; the lengths are constants."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.LSTM(FEATURES, WIDTH, batch_first=True), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor, words: Tensor) -> Tensor:
        scores = self.head(self.rnn(x)[0]).log_softmax(-1).transpose(0, 1)
        count = x.shape[0]
        return F.ctc_loss(scores, words, torch.full((count,), x.shape[1]), torch.full((count,), words.shape[1]))


class FourierMixer(nn.Module):
    """FNet's mixing, and a spectral filter with complex weights."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Linear(FEATURES, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.filter = nn.Parameter(torch.randn(LENGTH // 2 + 1, WIDTH, 2) * 0.02)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        x = x + torch.fft.fft(torch.fft.fft(x, dim=-1), dim=-2).real
        spectrum = torch.fft.rfft(x, dim=1, norm="ortho") * torch.view_as_complex(self.filter)
        return self.head(torch.fft.irfft(spectrum, n=LENGTH, dim=1, norm="ortho").mean(1))


class GaussianProcess(nn.Module):
    """The negative log likelihood of a kernel's regression: Cholesky, a solve, a log determinant."""

    def __init__(self) -> None:
        super().__init__()
        self.log_scale, self.log_noise = nn.Parameter(torch.zeros(())), nn.Parameter(torch.tensor(-1.0))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        distance = (x[:, None] - x[None]).pow(2).sum(-1)
        kernel = (-0.5 * distance / self.log_scale.exp()).exp() + self.log_noise.exp() * torch.eye(len(x))
        factor = torch.linalg.cholesky(kernel)
        alpha = torch.cholesky_solve(y[:, None], factor)
        return (0.5 * y @ alpha).squeeze() + factor.diagonal().log().sum()


class OrthogonalLayer(nn.Module):
    """Cayley's map: an inverse, and a determinant as a penalty."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.head = nn.Parameter(torch.randn(FEATURES, FEATURES) * 0.1), nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        skew, eye = self.weight - self.weight.T, torch.eye(FEATURES)
        rotation = torch.linalg.solve(eye + skew, eye - skew)
        _, volume = torch.linalg.slogdet(eye + self.weight @ self.weight.T)
        return F.cross_entropy(self.head(x @ rotation), target) + 0.01 * volume


class MixtureOfExperts(nn.Module):
    """Every expert sees every sample, and the gate weighs the best two."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(FEATURES, 4)
        self.experts = nn.ModuleList(nn.Linear(FEATURES, CLASSES) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        best, chosen = self.gate(x).topk(2, dim=1)
        weights = torch.zeros(x.shape[0], 4).scatter(1, chosen, best.softmax(1))
        return (weights[:, :, None] * torch.stack([expert(x) for expert in self.experts], 1)).sum(1)


class RoutedExperts(MixtureOfExperts):
    """Each expert sees its own samples only, so sizes depend on values; all experts could be weighed instead."""

    def forward(self, x: Tensor) -> Tensor:
        best, chosen = self.gate(x).softmax(1).max(1)
        result = torch.zeros(x.shape[0], CLASSES)
        for number, expert in enumerate(self.experts):
            rows = torch.where(chosen == number)[0]
            result = result.index_add(0, rows, best[rows, None] * expert(x[rows]))
        return result


class Capsules(nn.Module):
    """Dynamic routing: einsum, and a loop without gradients."""

    def __init__(self) -> None:
        super().__init__()
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


class SpatialTransformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.locate, self.features = nn.Linear(64, 6), nn.Conv2d(1, 4, 3)
        self.head = nn.Linear(4, CLASSES)
        nn.init.zeros_(self.locate.weight)
        self.locate.bias.data.copy_(torch.tensor([1.0, 0, 0, 0, 1, 0]))

    def forward(self, image: Tensor) -> Tensor:
        grid = F.affine_grid(self.locate(image.flatten(1)).view(-1, 2, 3), list(image.shape), align_corners=False)
        return self.head(self.features(F.grid_sample(image, grid, align_corners=False)).amax((2, 3)))


class SelfSupervised(nn.Module):
    """SimCLR: two views that a dropout makes, and a contrastive loss."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(FEATURES, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU(), nn.Linear(WIDTH, 8))

    def forward(self, x: Tensor) -> Tensor:
        views = torch.cat((F.dropout(x, 0.2, self.training), F.dropout(x, 0.2, self.training)))
        z = F.normalize(self.encoder(views), dim=1)
        scores = (z @ z.T / 0.5).masked_fill(torch.eye(len(z), dtype=torch.bool), float("-inf"))
        return F.cross_entropy(scores, torch.arange(len(z)).roll(len(x)))


class StochasticDepth(nn.Module):
    """Layers that Python's own random numbers drop; a factor drawn by torch would be captured."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(FEATURES, FEATURES) for _ in range(3))
        self.head = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if random.random() > 0.5 or not self.training:
                x = x + torch.tanh(layer(x))
        return self.head(x)


class PolicyGradient(nn.Module):
    """PPO's clipped objective with a value head and an entropy bonus, by torch.distributions."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(FEATURES, WIDTH), nn.Tanh())
        self.policy, self.value = nn.Linear(WIDTH, CLASSES), nn.Linear(WIDTH, 1)

    def forward(self, state: Tensor, action: Tensor, old: Tensor, advantage: Tensor) -> Tensor:
        hidden = self.body(state)
        chances = torch.distributions.Categorical(logits=self.policy(hidden))
        ratio = (chances.log_prob(action) - old).exp()
        clipped = torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
        return F.mse_loss(self.value(hidden).squeeze(1), advantage) - clipped - 0.01 * chances.entropy().mean()


class NeuralField(nn.Module):
    """Sine layers on Fourier features of coordinates."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("frequencies", torch.randn(2, 8) * 3)
        self.first, self.second = nn.Linear(16, WIDTH), nn.Linear(WIDTH, 3)

    def forward(self, position: Tensor) -> Tensor:
        angles = 2 * torch.pi * position @ self.frequencies
        return self.second(torch.sin(30 * self.first(torch.cat((angles.sin(), angles.cos()), 1)))).sigmoid()


class OrdinaryDifferentialEquation(nn.Module):
    """Four steps of Runge and Kutta."""

    def __init__(self) -> None:
        super().__init__()
        self.slope = nn.Sequential(nn.Linear(FEATURES, WIDTH), nn.Softplus(), nn.Linear(WIDTH, FEATURES))

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(4):
            k1 = self.slope(x)
            k2 = self.slope(x + 0.125 * k1)
            k3 = self.slope(x + 0.125 * k2)
            x = x + 0.25 / 6 * (k1 + 2 * k2 + 2 * k3 + self.slope(x + 0.25 * k3))
        return x


class StateSpace(nn.Module):
    """A diagonal linear recurrence by cumulative sums, as S4D's real part."""

    def __init__(self) -> None:
        super().__init__()
        self.decay, self.into, self.out = (
            nn.Parameter(torch.rand(WIDTH)),
            nn.Linear(FEATURES, WIDTH),
            nn.Linear(WIDTH, CLASSES),
        )

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


class DataclassResult(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor, label: Tensor) -> Result:
        logits = self.head(x)
        return Result(F.cross_entropy(logits, label), logits)


class MixedPrecision(nn.Module):
    """A forward under torch.autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(FEATURES, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return self.second(F.gelu(self.first(x)))


Make = Callable[[int, torch.Generator], Tensor]


def _numbers(*shape: int) -> Make:
    return lambda samples, generator: torch.randn(samples, *shape, generator=generator)


def _integers(below: int, *shape: int) -> Make:
    return lambda samples, generator: torch.randint(below, (samples, *shape), generator=generator)


def _entry(kind: type[nn.Module], loss: str | None = None, expected: Outcome = "exact", **inputs: Make) -> Entry:
    def make_batch(samples: int, generator: torch.Generator) -> Batch:
        return {name: make(samples, generator) for name, make in inputs.items()}

    return Entry(kind.__name__, "own", kind, make_batch, loss, expected, note=kind.__doc__ or "")


def _share(samples: int, generator: torch.Generator) -> Tensor:
    return torch.rand(samples, generator=generator)


def _spoken(samples: int, generator: torch.Generator) -> Tensor:
    return torch.randint(1, CLASSES, (samples, 3), generator=generator)


_X, _CLASS, _ITEMS = _numbers(FEATURES), _integers(CLASSES), _integers(ITEMS, LENGTH)
_SEQUENCE, _EDGES = _numbers(LENGTH, FEATURES), _integers(2, 6, 6)

OWN = (
    _entry(WideAndDeep, "mse_loss", items=_ITEMS, target=_numbers()),
    _entry(
        DLRM, "binary_cross_entropy_with_logits", dense=_X, items=_ITEMS, target=lambda n, g: torch.rand(n, generator=g)
    ),
    _entry(FactorizationMachine, "mse_loss", items=_ITEMS, target=_numbers()),
    _entry(TwoTowers, history=_ITEMS, item=_integers(ITEMS)),
    _entry(
        SparseTable,
        "cross_entropy",
        "close",
        items=_ITEMS,
        target=_CLASS,
    ),
    _entry(GraphConvolution, "cross_entropy", nodes=_numbers(6, FEATURES), edges=_EDGES, target=_CLASS),
    _entry(GraphAttention, "cross_entropy", nodes=_numbers(6, FEATURES), edges=_EDGES, target=_CLASS),
    _entry(MessagePassing, "cross_entropy", nodes=_numbers(6, FEATURES), pairs=_integers(6, 2, 9), target=_CLASS),
    _entry(Diffusion, image=_numbers(1, 8, 8)),
    _entry(VariationalAutoencoder, x=_X),
    _entry(VectorQuantizer, x=_X),
    _entry(BinaryNetwork, "cross_entropy", x=_X, target=_CLASS),
    _entry(LoRA, "cross_entropy", x=_X, target=_CLASS),
    _entry(GeneratorLoss, noise=_numbers(4)),
    _entry(CriticLoss, real=_numbers(8), fake=_numbers(8)),
    _entry(GradientPenalty, real=_numbers(8), fake=_numbers(8)),
    _entry(LSTMTagger, words=_ITEMS, tags=_integers(CLASSES, LENGTH)),
    _entry(UnrolledCell, "cross_entropy", x=_SEQUENCE, target=_CLASS),
    _entry(TemporalConvolution, "cross_entropy", x=_SEQUENCE, target=_CLASS),
    _entry(SpeechCTC, x=_SEQUENCE, words=_spoken),
    _entry(FourierMixer, "cross_entropy", x=_SEQUENCE, target=_CLASS),
    _entry(GaussianProcess, x=_X, y=_numbers()),
    _entry(OrthogonalLayer, x=_X, target=_CLASS),
    _entry(MixtureOfExperts, "cross_entropy", x=_X, target=_CLASS),
    _entry(
        RoutedExperts,
        "cross_entropy",
        "refused",
        x=_X,
        target=_CLASS,
    ),
    _entry(Capsules, "cross_entropy", x=_X, target=_CLASS),
    _entry(SpatialTransformer, "cross_entropy", image=_numbers(1, 8, 8), target=_CLASS),
    _entry(SelfSupervised, x=_X),
    _entry(
        StochasticDepth,
        "cross_entropy",
        "refused",
        x=_X,
        target=_CLASS,
    ),
    _entry(PolicyGradient, state=_X, action=_CLASS, old=_numbers(), advantage=_numbers()),
    _entry(NeuralField, "mse_loss", position=_numbers(2), target=_numbers(3)),
    _entry(OrdinaryDifferentialEquation, "mse_loss", x=_X, target=_X),
    _entry(StateSpace, "cross_entropy", x=_SEQUENCE, target=_CLASS),
    _entry(DataclassResult, x=_X, label=_CLASS),
    _entry(MixedPrecision, "cross_entropy", x=_X, target=_CLASS),
)
