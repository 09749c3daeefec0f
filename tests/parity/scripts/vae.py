"""A variational autoencoder: the divergence from the prior counts more and more, `beta` from 0 to 1."""

# Calling a module gives Any.
# mypy: no-warn-return-any, allow-untyped-calls

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from tests.parity.scripts import BATCH, STEPS, Built, Trained, batches, generator

WARMUP, PIXELS, LATENT = 8, 64, 4
HOW = {"arguments": {"beta": {"schedule": "linear", "from": 0.0, "to": 1.0, "steps": WARMUP}}}
ACCUMULATED = 1


class Vae(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(PIXELS, 32), nn.GELU(), nn.Linear(32, 2 * LATENT))
        self.decoder = nn.Sequential(nn.Linear(LATENT, 32), nn.GELU(), nn.Linear(32, PIXELS))

    def forward(self, x: Tensor, noise: Tensor, beta: Tensor) -> dict[str, Tensor]:
        mean, log_variance = self.encoder(x).chunk(2, dim=1)
        decoded = self.decoder(mean + noise * torch.exp(0.5 * log_variance))
        reconstruction = binary_cross_entropy_with_logits(decoded, x, reduction="sum") / len(x)
        divergence = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum(1).mean()
        return {"loss": reconstruction + beta * divergence, "reconstruction": reconstruction, "divergence": divergence}


def build() -> Built:
    torch.manual_seed(0)
    model = Vae()
    return Built(model, [torch.optim.Adam(model.parameters(), lr=2e-3, fused=True)], [])


def data() -> tuple[Tensor, Tensor]:
    """Pictures of pixels from 0 to 1, and noise."""
    patterns = torch.rand(10, PIXELS, generator=generator())
    which = torch.randint(10, (STEPS * BATCH,), generator=generator(2))
    return (patterns[which] > 0.6).float(), torch.randn(STEPS * BATCH, LATENT, generator=generator(3))


def in_pytorch(replicas: int) -> Trained:
    model, (optimizer,), _ = build()
    losses = []
    for step, (x, noise) in enumerate(batches(*data())):
        loss = model(x, noise, torch.tensor(min(step / WARMUP, 1.0)))["loss"]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return Trained(losses, model.state_dict())
