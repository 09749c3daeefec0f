"""Texts of three lengths from a stream: a collate function pads each batch to one of them, and the padding does not
count in loss and metrics."""

# Calling a module gives Any.
# mypy: no-warn-return-any, allow-untyped-calls

from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torchmetrics.classification import MulticlassAccuracy
from torchmetrics.text import Perplexity

from tests.parity.scripts import BATCH, STEPS, Built, Trained, generator
from tests.parity.scripts.gpt import LENGTH, VOCABULARY, Gpt

LENGTHS, HELD_OUT, EVERY = (LENGTH // 4, LENGTH // 2, LENGTH), 24, 4
HOW = {"loss": "cross_entropy", "set": {"loss.mean_over": "elements", "data.buckets": list(LENGTHS)}}
RUN = {"evaluation_metrics": "perplexity,accuracy", "evaluate_every": EVERY}
ACCUMULATED = 1
Text = tuple[Tensor, Tensor]


def _texts(count: int, longest: int, seed: int) -> Iterator[Text]:
    """Tokens, and the next tokens. The first text is the longest."""
    for number in range(count):
        length = longest - int(torch.randint(longest // 2, (), generator=generator(seed + number))) * (number > 0)
        text = torch.randint(1, VOCABULARY, (length + 1,), generator=generator(seed + number))
        yield text[:-1], text[1:]


class Texts(IterableDataset[Text]):
    """The texts of a step are of one length or a little shorter."""

    def __iter__(self) -> Iterator[Text]:
        for step in range(STEPS):
            yield from _texts(BATCH, LENGTHS[(2 - step) % 3], 1000 * step)


def padded(samples: list[Text]) -> dict[str, Tensor]:
    longest = max(len(tokens) for tokens, _ in samples)
    shape = len(samples), next(length for length in LENGTHS if length >= longest)
    tokens, target = torch.zeros(shape, dtype=torch.int64), torch.full(shape, -100)
    for row, (text, following) in enumerate(samples):
        tokens[row, : len(text)], target[row, : len(text)] = text, following
    return {"tokens": tokens, "target": target}


def build() -> Built:
    torch.manual_seed(0)
    model = Gpt()
    return Built(model, [torch.optim.AdamW(model.parameters(), lr=3e-3, eps=1e-6, fused=True)], [])


def data() -> tuple[DataLoader[Any], DataLoader[Any]]:
    held_out = [text for length in LENGTHS for text in _texts(HELD_OUT // 3, length, 7)]
    to_evaluate = cast("Dataset[Text]", held_out)  # torch takes what has indices and a length
    return DataLoader(Texts(), BATCH, collate_fn=padded), DataLoader(to_evaluate, BATCH, collate_fn=padded)


def in_pytorch(replicas: int) -> Trained:
    model, (optimizer,), _ = build()
    train, held_out = data()
    metrics = Perplexity(ignore_index=-100), MulticlassAccuracy(VOCABULARY, average="micro", ignore_index=-100)
    losses, scores = list[float](), list[float]()
    for step, batch in enumerate(train, 1):
        loss = cross_entropy(model(batch["tokens"]), batch["target"])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step % EVERY == 0:
            with torch.no_grad():
                for held in held_out:
                    found = model(held["tokens"])
                    metrics[0].update(found.transpose(1, 2), held["target"])
                    metrics[1].update(found, held["target"])
            scores += [metric.compute().item() for metric in metrics]
            for metric in metrics:
                metric.reset()
    return Trained(losses, model.state_dict(), scores=scores)
