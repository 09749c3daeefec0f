"""Momentum contrast (He et al., 2020): an encoder learns from keys of a momentum encoder, which a queue keeps."""

import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize
from torch.optim.lr_scheduler import CosineAnnealingLR

from tests.parity.scripts import BATCH, STEPS, Built, Trained, batches, generator

HOW: dict[str, object] = {}
ACCUMULATED = 1
MOMENTUM, QUEUE, TEMPERATURE = 0.9, 48, 0.2


class Moco(nn.Module):
    queue: Tensor
    pointer: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 16))
        self.momentum_encoder = copy.deepcopy(self.encoder)
        for weight in self.momentum_encoder.parameters():
            weight.requires_grad = False
        self.register_buffer("queue", normalize(torch.randn(16, QUEUE), dim=0))
        self.register_buffer("pointer", torch.zeros(1, dtype=torch.long))

    @torch.no_grad()
    def _keys(self, x: Tensor) -> Tensor:
        for own, other in zip(self.momentum_encoder.parameters(), self.encoder.parameters(), strict=True):
            own.data = own.data * MOMENTUM + other.data * (1 - MOMENTUM)
        return normalize(self.momentum_encoder(x), dim=1)

    @torch.no_grad()
    def _enqueue(self, keys: Tensor) -> None:
        places = (self.pointer + torch.arange(len(keys))) % QUEUE
        self.queue[:, places] = keys.T
        self.pointer.copy_((self.pointer + len(keys)) % QUEUE)

    def forward(self, x: Tensor, other_view: Tensor) -> Tensor:
        queries = normalize(self.encoder(x), dim=1)
        keys = self._keys(other_view)
        positive = (queries * keys).sum(1, keepdim=True)
        negative = queries @ self.queue.clone().detach()
        scores = torch.cat([positive, negative], dim=1) / TEMPERATURE
        self._enqueue(keys)
        return cross_entropy(scores, torch.zeros(len(x), dtype=torch.long))


def build() -> Built:
    torch.manual_seed(0)
    model = Moco()
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.1, momentum=0.9, weight_decay=1e-3, fused=True)
    return Built(model, [optimizer], [CosineAnnealingLR(optimizer, STEPS)])


def data() -> tuple[Tensor, Tensor]:
    """Two views of each sample."""
    x = torch.randn(STEPS * BATCH, 16, generator=generator())
    return x, x + 0.2 * torch.randn(x.shape, generator=generator(2))


def _sum(tensors: Sequence[Tensor]) -> Tensor:
    """As a tree adds up."""
    half = len(tensors) // 2
    return _sum(tensors[:half]) + _sum(tensors[half:]) if half else tensors[0]


def in_pytorch(replicas: int) -> Trained:
    """Each replica has statistics, keys and a queue of its own, as under DDP without broadcast_buffers."""
    built = [build() for _ in range(replicas)]
    losses = []
    for step in zip(*(batches(*data(), first=replica, every=replicas) for replica in range(replicas)), strict=True):
        total = 0.0
        for (model, (optimizer,), _), (x, other_view) in zip(built, step, strict=True):
            loss = model(x, other_view)
            optimizer.zero_grad()
            loss.backward()
            total += loss.item()
        for weights in zip(*(model.parameters() for model, _, _ in built), strict=True):
            if weights[0].requires_grad:
                gradient = _sum([weight.grad for weight in weights]) / replicas
                for weight in weights:
                    weight.grad = gradient.clone()
        for _, (optimizer,), (scheduler,) in built:
            optimizer.step()
            scheduler.step()
        losses.append(total / replicas)
    return Trained(losses, built[0].model.state_dict())
