"""Fine-tuning of a GPT: no decay for biases and norms, a warm-up, an average of the weights, and padded tokens that do
not count."""

# Calling a module gives Any.
# mypy: no-warn-return-any, allow-untyped-calls

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from tests.parity.scripts import BATCH, STEPS, Built, Trained, batches, generator

HOW = {"loss": "cross_entropy", "max_grad_norm": 1.0, "set": {"loss.mean_over": "elements", "ema.decay": 0.9}}
ACCUMULATED = 2
VOCABULARY, LENGTH, WIDTH, HEADS, WARMUP = 48, 16, 32, 4, 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).view(*x.shape[:2], 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        attended = scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(x.shape))
        return x + self.mlp(self.mlp_norm(x))


class Gpt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks, self.norm = nn.Sequential(Block(), Block()), nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Scores of the next token, classes second, as cross_entropy wants them."""
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))
        return self.head(self.norm(self.blocks(x))).transpose(1, 2)


def build() -> Built:
    torch.manual_seed(0)
    model = Gpt()
    decayed = [weight for weight in model.parameters() if weight.ndim > 1]
    others = [weight for weight in model.parameters() if weight.ndim == 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=3e-3, betas=(0.9, 0.95), fused=True)
    return Built(model, [optimizer], [LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / WARMUP))])


def data() -> tuple[Tensor, Tensor]:
    """Texts of other lengths, and the next tokens, -100 behind the end."""
    tokens = torch.randint(1, VOCABULARY, (STEPS * BATCH, LENGTH + 1), generator=generator())
    lengths = torch.randint(3, LENGTH + 1, (STEPS * BATCH, 1), generator=generator(2))
    is_text = torch.arange(LENGTH) < lengths
    return tokens[:, :-1] * is_text, torch.where(is_text, tokens[:, 1:], -100)


def in_pytorch(replicas: int) -> Trained:
    model, (optimizer,), (scheduler,) = build()
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    losses = []
    for tokens, targets in batches(*data()):
        counted = (targets != -100).sum()
        optimizer.zero_grad()
        total = 0.0
        for part in range(ACCUMULATED):
            scores = model(tokens[part::ACCUMULATED])
            loss = cross_entropy(scores, targets[part::ACCUMULATED], reduction="sum") / counted
            loss.backward()
            total += loss.item()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        averaged.update_parameters(model)
        losses.append(total)
    return Trained(losses, model.state_dict(), averaged.module.state_dict())
