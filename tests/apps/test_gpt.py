"""The GPT app: three optimizers, and steps that are run section by section."""

from argparse import Namespace
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

from tests.apps import plain
from tests.apps.support import App, Example, ExampleTests

BATCH, LENGTH, LAYERS, MICRO_STEPS, WARMUP_STEPS = 4, 32, 1, 2, 4
RATE, DECAY, MAX_GRAD_NORM = 0.003, 0.1, 1.5


class TestGpt(ExampleTests):
    example = Example(
        "gpt",
        batch_size=BATCH,
        every=(
            *("--length", str(LENGTH), "--layers", str(LAYERS), "--learning-rate", str(RATE)),
            *("--weight-decay", str(DECAY), "--max-grad-norm", str(MAX_GRAD_NORM)),
            *("--grad-accumulation-steps", str(MICRO_STEPS)),
        ),
        rounds=20,
        rounds_flag="--steps",
        train=("--warmup-steps", str(WARMUP_STEPS), "--log-every", "10"),
        save=("--checkpoint", "weights.pt"),
        saved="weights.pt",
        told=r"step 20: loss 3\.",  # of 4.6 to begin with
    )
    few_steps = replace(
        example, rounds=3, train=("--warmup-steps", str(WARMUP_STEPS), "--log-every", "3"), told="step 3"
    )

    def told(self, name: str, tensor: Tensor) -> Tensor:
        """A key's bias adds the same to all scores of a query: it has no gradient, and Adam moves it all the same."""
        if not name.endswith("in_proj_bias"):
            return tensor
        query, _, value = tensor.chunk(3)
        return torch.cat((query, value))

    def plainly(self, app: App, replicas: int) -> dict[str, Tensor]:
        module = app.module()
        torch.manual_seed(256)
        model = module.GPT(LENGTH, LAYERS)
        shards = [_batches(module.windows(LENGTH), replicas, rank) for rank in range(replicas)]
        optimizers = _optimizers(model)
        schedule = Namespace(learning_rate=RATE, warmup_steps=WARMUP_STEPS, steps=app.example.rounds)
        norms = []
        for step in range(app.example.rounds):
            gradients = dict(
                zip(model.parameters(), plain.mean([_gradients(model, shard) for shard in shards]), strict=True)
            )
            norms.append(nn.utils.get_total_norm(gradients.values()).item())
            plain.clip(list(gradients.values()), MAX_GRAD_NORM)
            for padded in optimizers:
                padded.optimizer.param_groups[0]["lr"] = module.learning_rate(schedule, step)
                padded.step([gradients[parameter] for parameter in padded.parameters])
        assert not norms or max(norms) > MAX_GRAD_NORM, "some steps clip"
        return dict(model.state_dict())


def _batches(data: Dataset[Any], replicas: int, rank: int) -> Iterator[list[Tensor]]:
    sampler: DistributedSampler[Any] = DistributedSampler(data, replicas, rank)
    loader: DataLoader[Any] = DataLoader(data, BATCH, sampler=sampler, drop_last=True)
    for epoch in count():
        sampler.set_epoch(epoch)
        yield from loader


def _optimizers(model: nn.Module) -> list[plain.PaddedOptimizer]:
    """For embeddings, for the other matrices, and for norms and biases."""
    names = dict(model.named_parameters())
    tables = [names.pop("tokens.weight"), names.pop("positions.weight")]
    matrices = [parameter for parameter in names.values() if parameter.ndim == 2]
    vectors = [parameter for parameter in names.values() if parameter.ndim == 1]

    def adamw(parameters: list[nn.Parameter], decay: float) -> plain.PaddedOptimizer:
        return plain.PaddedOptimizer(
            parameters, lambda flats: torch.optim.AdamW(flats, betas=(0.9, 0.95), weight_decay=decay, fused=True)
        )

    adam = plain.PaddedOptimizer(tables, lambda flats: torch.optim.Adam(flats, betas=(0.9, 0.99), fused=True))
    return [adam, adamw(matrices, DECAY), adamw(vectors, 0.0)]


def _gradients(model: nn.Module, shard: Iterator[list[Tensor]]) -> list[Tensor]:
    """Those of the mean loss of MICRO_STEPS batches."""
    model.zero_grad()
    for _ in range(MICRO_STEPS):
        loss, _ = model(*next(shard))
        (loss / MICRO_STEPS).backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
