"""The LSTM app: dropout that each replica draws for itself, and AdamW with clipped gradients."""

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
        train=("-e", "2"),
        save=("--checkpoint", "weights.pt"),
        saved="weights.pt",
        told=r"held out: accuracy [4-7]\d",  # of 10 % to begin with
    )

    def plainly(self, app: App, replicas: int) -> dict[str, Tensor]:
        module = app.module()
        torch.manual_seed(256)
        return plain.train(
            module.LSTMClassifier(hidden=64, layers=2, dropout=0.2),
            module.datasets()[0],
            replicas,
            epochs=2,
            batch_size=32,
            optimizer=lambda flats: torch.optim.AdamW(flats, lr=0.005, fused=True),
            max_grad_norm=1.0,
            begin=lambda rank: torch.manual_seed(256 + rank),
        )
