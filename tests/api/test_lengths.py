"""A PEF with a graph for each of a few lengths of samples: its steps are those of a loop over padded batches."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad

import sambasim as ss

# mypy: allow-untyped-calls

WORDS = 5
Text = tuple[Tensor, Tensor]


class Tagger(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.drop, self.head = nn.Embedding(WORDS, 8), nn.Dropout(dropout), nn.Linear(8, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        scores: Tensor = self.head(self.drop(self.words(tokens))).transpose(1, 2)
        return scores


def texts(*lengths: int) -> list[Text]:
    tokens = [torch.arange(length) % WORDS for length in lengths]
    return [(one, (one + 1) % WORDS) for one in tokens]


def compiled(folder: Path, model: nn.Module, lr: float = 0.1) -> ss.Pef:
    how: dict[str, Any] = {"loss": "cross_entropy", "optimizer": "sgd", "lr": lr, "check": 0, "quiet": True}
    example = torch.zeros(2, 3, dtype=torch.int64), torch.zeros(2, 3, dtype=torch.int64)
    how |= {"data_parallel": True, "world_size": 1, "output_folder": folder}
    return ss.compile(model, example, set={"data.buckets": [4, 8]}, **how)


IN_ORDER: dict[str, Any] = {"set": {"data.shuffle": False}, "threads": 1, "quiet": True}


@pytest.fixture(scope="module")
def pef(tmp_path_factory: pytest.TempPathFactory) -> ss.Pef:
    return compiled(tmp_path_factory.mktemp("lengths"), Tagger())


def eager(samples: Sequence[Text], batch: int, replicas: int = 1) -> tuple[list[float], nn.Module]:
    """`batch`: of all replicas, which take its samples in turn."""
    model, losses = Tagger(), list[float]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for start in range(0, len(samples), batch):
        rows = [[pad(part, (0, 8 - len(part)), value=value) for part, value in zip(one, (0, -100), strict=True)]
                for one in samples[start : start + batch]]  # fmt: skip
        tokens, target = (torch.stack(column) for column in zip(*rows, strict=True))
        parts = [slice(first, None, replicas) for first in range(replicas)]
        loss = torch.stack([cross_entropy(model(tokens[part]), target[part]) for part in parts]).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, model


def right_words(scores: Tensor, target: Tensor) -> dict[str, float]:
    """Of texts of several lengths, in one tensor."""
    counts = target != -100
    return {"words": float(counts.sum()), "right": float((scores.argmax(1).eq(target) & counts).sum())}


def test_padding_counts_neither_in_a_batch_nor_up_to_its_length(pef: ss.Pef) -> None:
    samples = texts(3, 2, 7, 5, 4, 1, 8, 3)
    run = ss.run(pef, (samples, texts(2, 6, 3)), evaluation_metrics=right_words, **IN_ORDER)
    losses, model = eager(samples, 2)
    assert run.losses == pytest.approx(losses, rel=1e-6)
    assert torch.allclose(run.weights["head.weight"], model.state_dict()["head.weight"], atol=1e-6)
    right = [model(tokens[None]).argmax(1).eq(target) for tokens, target in texts(2, 6, 3)]
    assert run.evaluations[-1].accuracy == pytest.approx(torch.cat(right, 1).float().mean().item())
    assert run.evaluations[-1].metrics == {"words": 2 + 6 + 3, "right": torch.cat(right, 1).sum().item()}


def test_replicas_take_the_same_graph(pef: ss.Pef) -> None:
    """Of a step, some have samples for the shorter graph only."""
    samples = texts(1, 5, 2, 6, *(1 + index % 8 for index in range(20)))
    run = ss.run(pef, samples, replicas=2, **IN_ORDER)
    losses, model = eager(samples, 4, replicas=2)
    assert run.losses == pytest.approx(losses, rel=1e-6)
    assert torch.allclose(run.weights["head.weight"], model.state_dict()["head.weight"], atol=1e-6)


def test_each_step_has_its_number_and_draws(tmp_path: Path) -> None:
    pef = compiled(tmp_path, Tagger(0.5), lr=0.0)
    run = ss.run(pef, texts(3, 3, 3, 3, 3, 3, 3, 3), metrics=tmp_path / "m.csv", **IN_ORDER)
    steps = [line.partition(",")[0] for line in (tmp_path / "m.csv").read_text().splitlines()]
    assert steps == ["step", "1", "2", "3", "4"]
    assert len({*run.losses}) == 4


@pytest.mark.parametrize(
    ("samples", "how", "says"),
    [
        (texts(9, 9), {}, r"of length 9, .* is 8\n  try: .* with set=\{\"data.buckets\": \[4, 8, 9\]\}"),
        (texts(3, 3), {"set": {"data.padding": {"tokns": 1}}}, "tokns is of no input: these are tokens, target"),
        (texts(3, 3), {"set": {"data.buckets": [4]}}, "buckets"),
        (texts(3, 3), {"record_digests": "d.json"}, "watches one graph"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_told(pef: ss.Pef, samples: list[Text], how: dict[str, Any], says: str) -> None:
    with pytest.raises(ss.SambasimError, match=says):
        ss.run(pef, samples, **{**IN_ORDER, **how})
