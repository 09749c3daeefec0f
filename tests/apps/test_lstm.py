"""The LSTM app: dropout that each replica draws for itself, and AdamW with clipped gradients."""

from dataclasses import replace

import torch
from torch import Tensor

from tests.apps import plain
from tests.apps.support import App, Example, ExampleTests
from tests.support.whole import whole


@whole
class TestLstm(ExampleTests):
    example = Example(
        "lstm",
        batch_size=32,
        rounds=2,
        save=("--checkpoint", "weights.pt"),
        saved="weights.pt",
        told=r"held out: accuracy [4-7]\d",  # of 10 % to begin with
    )
    few_steps = replace(example, batch_size=240, rounds=1, told="held out")

    def plainly(self, app: App, replicas: int) -> dict[str, Tensor]:
        module = app.module()
        torch.manual_seed(256)
        return plain.train(
            module.LSTMClassifier(hidden=64, layers=2, dropout=0.2),
            module.datasets()[0],
            replicas,
            epochs=app.example.rounds,
            batch_size=app.example.batch_size,
            optimizer=lambda flats: torch.optim.AdamW(flats, lr=0.005, fused=True),
            max_grad_norm=1.0,
            begin=lambda rank: torch.manual_seed(256 + rank),
        )
