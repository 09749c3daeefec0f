"""A GAN: generator and critic are trained in one step, each by an Adam of its own."""

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import binary_cross_entropy_with_logits as cross_entropy

from tests.parity.scripts import BATCH, STEPS, Built, Trained, batches, generator

HOW: dict[str, object] = {}
ACCUMULATED = 1


def _mlp(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, 32), nn.LeakyReLU(0.2), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, outputs))


class Gan(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator, self.critic = _mlp(4, 2), _mlp(2, 1)

    def forward(self, real: Tensor, noise: Tensor) -> dict[str, Tensor]:
        fake = self.generator(noise)
        of_real, of_fake = self.critic(real), self.critic(fake.detach())
        ones, zeros = torch.ones_like(of_real), torch.zeros_like(of_real)
        critic_loss = cross_entropy(of_real, ones) + cross_entropy(of_fake, zeros)
        fixed = {name: weight.detach() for name, weight in self.critic.named_parameters()}
        generator_loss = cross_entropy(functional_call(self.critic, fixed, fake), ones)
        return {"loss": critic_loss + generator_loss, "critic": critic_loss, "generator": generator_loss}


def build() -> Built:
    torch.manual_seed(0)
    model = Gan()
    betas = (0.5, 0.999)
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.Adam(model.generator.parameters(), lr=1e-3, betas=betas, fused=True),
        torch.optim.Adam(model.critic.parameters(), lr=4e-3, betas=betas, fused=True),
    ]
    return Built(model, optimizers, [])


def data() -> tuple[Tensor, Tensor]:
    """Points on a circle, and noise."""
    angles = torch.rand(STEPS * BATCH, generator=generator()) * 6.28
    return torch.stack([angles.cos(), angles.sin()], 1), torch.randn(STEPS * BATCH, 4, generator=generator(2))


def in_pytorch(replicas: int) -> Trained:
    model, optimizers, _ = build()
    losses = []
    for real, noise in batches(*data()):
        loss = model(real, noise)["loss"]
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        losses.append(loss.item())
    return Trained(losses, model.state_dict())
