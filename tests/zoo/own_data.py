"""Models of users and items, of graphs, and generative ones, as people write them by hand."""

# Calling a module, or what one holds, gives Any; parts of torch are untyped.
# mypy: no-warn-return-any, disable-error-code="no-untyped-call,operator,index,arg-type"

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import spectral_norm

FEATURES, CLASSES, ITEMS, LENGTH, WIDTH = 12, 5, 40, 8, 16


class Model(nn.Module):
    """`make` gives it its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.make()

    def make(self) -> None:
        """Nothing, of a model without layers."""


class WideAndDeep(Model):
    def make(self) -> None:
        self.wide, self.deep = nn.Embedding(ITEMS, 1), nn.Embedding(ITEMS, 8)
        self.mlp = nn.Sequential(nn.Linear(8 * LENGTH, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 1))

    def forward(self, items: Tensor) -> Tensor:
        return (self.wide(items).sum(dim=1) + self.mlp(self.deep(items).flatten(1))).squeeze(1)


class DLRM(Model):
    """Dense features and sparse ones, and the products of all pairs of their embeddings."""

    def make(self) -> None:
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


class FactorizationMachine(Model):
    def make(self) -> None:
        self.first, self.factors = nn.Embedding(ITEMS, 1), nn.Embedding(ITEMS, 8)

    def forward(self, items: Tensor) -> Tensor:
        v = self.factors(items)
        return self.first(items).sum((1, 2)) + 0.5 * (v.sum(1).pow(2) - v.pow(2).sum(1)).sum(1)


class TwoTowers(Model):
    def make(self) -> None:
        self.user, self.item = nn.EmbeddingBag(ITEMS, WIDTH), nn.Embedding(ITEMS, WIDTH)
        self.temperature = nn.Parameter(torch.tensor(0.07).log())

    def forward(self, history: Tensor, item: Tensor) -> Tensor:
        users, items = F.normalize(self.user(history), dim=1), F.normalize(self.item(item), dim=1)
        return F.cross_entropy(users @ items.T / self.temperature.exp(), torch.arange(len(users)))


class SparseTable(Model):
    """An embedding with sparse gradients, which PyTorch adds up in another order."""

    def make(self) -> None:
        self.table, self.head = nn.Embedding(ITEMS, 8, sparse=True), nn.Linear(8, CLASSES)

    def forward(self, items: Tensor) -> Tensor:
        return self.head(self.table(items).mean(1))


class TwoLayers(Model):
    def make(self) -> None:
        self.first, self.second = nn.Linear(FEATURES, WIDTH), nn.Linear(WIDTH, CLASSES)


class GraphConvolution(TwoLayers):
    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        adjacency = (edges + edges.transpose(1, 2) > 0).float() + torch.eye(edges.shape[1])
        scale = adjacency.sum(-1).rsqrt()
        adjacency = scale[:, :, None] * adjacency * scale[:, None, :]
        return self.second(adjacency @ torch.relu(self.first(adjacency @ nodes))).mean(1)


class GraphAttention(GraphConvolution):
    def make(self) -> None:
        super().make()
        self.sender, self.receiver = nn.Linear(WIDTH, 1), nn.Linear(WIDTH, 1)

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        hidden = self.first(nodes)
        scores = F.leaky_relu(self.sender(hidden) + self.receiver(hidden).transpose(1, 2), 0.2)
        scores = scores.masked_fill((edges + torch.eye(edges.shape[1])) == 0, float("-inf"))
        return self.second(F.elu(scores.softmax(-1) @ hidden)).mean(1)


class MessagePassing(Model):
    """Edges as a list of indices: gather, message, scatter."""

    def make(self) -> None:
        self.message, self.head = nn.Linear(FEATURES, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, nodes: Tensor, pairs: Tensor) -> Tensor:
        source, to = pairs[:, 0], pairs[:, 1]
        messages = self.message(nodes).gather(1, source[:, :, None].expand(-1, -1, WIDTH))
        total = torch.zeros(nodes.shape[0], nodes.shape[1], WIDTH)
        total = total.scatter_add(1, to[:, :, None].expand(-1, -1, WIDTH), messages)
        return self.head(total.relu().amax(1))


class Diffusion(Model):
    def make(self) -> None:
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


class VariationalAutoencoder(Model):
    def make(self) -> None:
        self.encoder, self.decoder = nn.Linear(FEATURES, 8), nn.Linear(4, FEATURES)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        mean, log_variance = self.encoder(x).chunk(2, dim=1)
        z = mean + torch.randn_like(mean) * (0.5 * log_variance).exp()
        rebuilt = self.decoder(z)
        divergence = -0.5 * (1 + log_variance - mean.pow(2) - log_variance.exp()).sum(1).mean()
        return F.mse_loss(rebuilt, x) + divergence, rebuilt


class VectorQuantizer(Model):
    def make(self) -> None:
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


class BinaryNetwork(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(F.linear(x, _Sign.apply(self.first.weight), self.first.bias)))


class LoRA(Model):
    def make(self) -> None:
        self.base = nn.Sequential(nn.Linear(FEATURES, WIDTH), nn.ReLU(), nn.Linear(WIDTH, CLASSES))
        self.base.requires_grad_(False)
        self.down, self.up = nn.Linear(FEATURES, 2, bias=False), nn.Linear(2, WIDTH, bias=False)
        self.dropout = nn.Dropout(0.05)

    def forward(self, x: Tensor) -> Tensor:
        return self.base[2](self.base[1](self.base[0](x) + 2.0 * self.up(self.down(self.dropout(x)))))


class GeneratorLoss(Model):
    def make(self) -> None:
        slope, norm = nn.LeakyReLU(0.2), nn.BatchNorm1d(WIDTH)
        self.generator = nn.Sequential(nn.Linear(4, WIDTH), norm, slope, nn.Linear(WIDTH, 8))
        self.critic = nn.Sequential(nn.Linear(8, WIDTH), nn.LeakyReLU(0.2), nn.Linear(WIDTH, 1)).requires_grad_(False)

    def forward(self, noise: Tensor) -> Tensor:
        return F.softplus(-self.critic(self.generator(noise))).mean()


class CriticLoss(Model):
    def make(self) -> None:
        first, last = spectral_norm(nn.Linear(8, WIDTH)), spectral_norm(nn.Linear(WIDTH, 1))
        self.critic = nn.Sequential(first, nn.LeakyReLU(0.2), last)

    def forward(self, real: Tensor, fake: Tensor) -> Tensor:
        return F.relu(1 - self.critic(real)).mean() + F.relu(1 + self.critic(fake)).mean()


class GradientPenalty(Model):
    def make(self) -> None:
        self.critic = nn.Sequential(nn.Linear(8, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))

    def forward(self, real: Tensor, fake: Tensor) -> Tensor:
        share = torch.rand(real.shape[0], 1)
        with torch.enable_grad():
            mixed = (share * real + (1 - share) * fake).requires_grad_()
            (slope,) = torch.autograd.grad(self.critic(mixed).sum(), mixed, create_graph=True)
        penalty = (slope.norm(dim=1) - 1).pow(2).mean()
        return self.critic(fake).mean() - self.critic(real).mean() + 10 * penalty
