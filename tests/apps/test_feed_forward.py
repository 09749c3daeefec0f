"""The feed-forward app: Adam with weight decay."""

from dataclasses import replace

import torch
from torch import Tensor

from tests.apps import plain
from tests.apps.support import App, Example, ExampleTests
from tests.support.whole import whole


@whole
class TestFeedForward(ExampleTests):
    example = Example(
        "feed_forward",
        batch_size=32,
        rounds=2,
        save=("--checkpoint", "weights.pt"),
        saved="weights.pt",
        told=r"held out: accuracy [89]\d",  # of 10 % to begin with
    )
    few_steps = replace(example, batch_size=240, rounds=1, told="held out")

    def plainly(self, app: App, replicas: int) -> dict[str, Tensor]:
        module = app.module()
        torch.manual_seed(256)
        model = module.FeedForward(64, 128, 10)
        return plain.train(
            model,
            module.datasets()[0],
            replicas,
            epochs=app.example.rounds,
            batch_size=app.example.batch_size,
            optimizer=lambda flats: torch.optim.Adam(flats, lr=0.001, weight_decay=1e-4, fused=True),
        )
