"""Losses that are a sum and a count: replicas and micro-batches together are one batch of all, as in an eager loop that
divides the sum of all losses by the number of all that are counted."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_

import sambasim as ss
from tests.parity.test_held_out import CLASSES, Tagger, data
from tests.support.whole import whole_case

STEPS, NORM = 4, 0.05


class WithLoss(nn.Module):
    """A tagger that returns its own sum and count."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Tagger()

    def forward(self, tokens: Tensor, tags: Tensor) -> dict[str, Tensor]:
        scores = self.net(tokens)
        total = cross_entropy(scores, tags, reduction="sum")
        return {"scores": scores, "loss_sum": total, "count": tags.ne(-100).sum()}


def summed(scores: Tensor, tags: Tensor) -> tuple[Tensor, Tensor]:
    return cross_entropy(scores, tags, reduction="sum"), tags.ne(-100).sum()


WAYS: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "named": (Tagger, {"loss": "cross_entropy", "set": {"loss.mean_over": "elements"}}),
    "function": (Tagger, {"loss": summed}),
    "model": (WithLoss, {}),
}
LAYOUTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "1 × 4": ({}, {"replicas": 1, "grad_accumulation_steps": 4}),
    "4 × 1": ({}, {"replicas": 4}),
    "2 × 2, clipped": ({"max_grad_norm": NORM}, {"replicas": 2, "grad_accumulation_steps": 2}),
    "4 × 1, ZeRO 2": ({"zero": 2}, {"replicas": 4}),
    "2 × 2, ZeRO 3": ({"zero": 3}, {"replicas": 2, "grad_accumulation_steps": 2}),
    "2 × 2, pipeline": ({"pipeline_stages": 2, "micro_batches": 2}, {"replicas": 2, "grad_accumulation_steps": 2}),
    "2 × 2, skips": ({}, {"replicas": 2, "grad_accumulation_steps": 2, "on_nonfinite": "skip"}),
}
BY_DEFAULT = {("named", "2 × 2, clipped"), ("function", "1 × 4"), ("model", "4 × 1, ZeRO 2")}
CASES = [(way, layout) for way in WAYS for layout in LAYOUTS]


def _eager(model: nn.Module, tokens: Tensor, tags: Tensor, clip: float | None) -> list[float]:
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=0.01), []
    net: nn.Module = model.net if isinstance(model, WithLoss) else model
    for step in range(STEPS):
        here = slice(16 * step, 16 * step + 16)
        total, count = summed(net(tokens[here]), tags[here])
        loss = total / count
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        if clip is not None:
            clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(("way", "layout"), [one if one in BY_DEFAULT else whole_case(*one) for one in CASES])
@pytest.mark.usefixtures("one_thread")
def test_replicas_and_micro_batches_are_one_batch(way: str, layout: str, tmp_path: Path) -> None:
    (make, how), (compiled, run) = WAYS[way], LAYOUTS[layout]
    tokens, tags = data(16 * STEPS)
    tags[:4] = -100  # a micro-batch without anything to count
    model, held_out = make(), data(23)
    wanted = _eager(make(), tokens, tags, compiled.get("max_grad_norm"))
    example, both = (tokens[4:8], tags[4:8]), {"optimizer": torch.optim.AdamW(model.parameters(), lr=0.01)}
    given = {**both, **how, **compiled, "data_parallel": True, "output_folder": tmp_path}
    pef = ss.compile(model, example, quiet=True, check=2, **given)
    order: dict[str, Any] = {"steps": STEPS, "threads": 1, "quiet": True, "set": {"data.shuffle": False}}
    found = ss.run(pef, ((tokens, tags), held_out), **order, **run)
    assert found.losses == pytest.approx(wanted, rel=1e-5)
    assert len({round(loss, 3) for loss in wanted}) == STEPS
    net: Any = model.net if way == "model" else model
    net.load_state_dict({name.removeprefix("net."): value for name, value in found.weights.items()})
    with torch.no_grad():
        total, count = summed(net(held_out[0]), held_out[1])
    assert found.evaluations[-1].loss == pytest.approx(float(total / count), rel=1e-5)
    assert net.head.out_features == CLASSES
