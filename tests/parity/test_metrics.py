"""Metrics of evaluations beside torchmetrics on the whole set, at several numbers of replicas.

The sets do not fill their last batch, nor the last round of the replicas.
"""

# Calling a module gives Any.
# mypy: no-warn-return-any, allow-untyped-calls

from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import sambasim as ss
from sambasim.api.pef import Pef
from sambasim.errors import OptionError

BATCH, SAMPLES, CLASSES = 4, 23, 5


def next_token(logits: Tensor, target: Tensor) -> Tensor:
    """Of `[batch, length, classes]`."""
    return nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())


class Kind(NamedTuple):
    """`metrics`: of torchmetrics, on outputs and targets as the function `seen` gives them."""

    model: nn.Module
    loss: Any
    target: Callable[[int], Tensor]
    metrics: Mapping[str, tuple[Mapping[str, object], Callable[[], Any]]]
    seen: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] = lambda outputs, target: (outputs, target)
    length: tuple[int, ...] = ()


def class_indices(count: int) -> Tensor:
    """Every seventh is ignored."""
    target = torch.randint(CLASSES, (count,))
    target[::7] = -100
    return target


def lazily(name: str, **options: Any) -> Callable[[], Any]:
    """A metric of torchmetrics, whose import takes seconds."""
    parts = ("classification", "regression", "text")
    return lambda: next(
        made(**options) for part in parts if (made := getattr(import_module(f"torchmetrics.{part}"), name, None))
    )


_OF_CLASSES: dict[str, Any] = {"num_classes": CLASSES, "ignore_index": -100}
_OF_LABELS: dict[str, Any] = {"num_labels": CLASSES}
KINDS = {
    "classes": Kind(
        nn.Linear(6, CLASSES),
        "cross_entropy",
        class_indices,
        {
            "accuracy": ({}, lazily("MulticlassAccuracy", **_OF_CLASSES, average="micro")),
            "top2": ({}, lazily("MulticlassAccuracy", **_OF_CLASSES, average="micro", top_k=2)),
            "precision": ({}, lazily("MulticlassPrecision", **_OF_CLASSES)),
            "recall": ({}, lazily("MulticlassRecall", **_OF_CLASSES)),
            "f1": ({"average": "weighted"}, lazily("MulticlassF1Score", **_OF_CLASSES, average="weighted")),
            "auroc": ({}, lazily("MulticlassAUROC", **_OF_CLASSES)),
        },
    ),
    "labels": Kind(
        nn.Linear(6, CLASSES),
        "bce_with_logits",
        lambda count: torch.rand(count, CLASSES).round(),
        {
            "accuracy": ({}, lazily("MultilabelAccuracy", **_OF_LABELS)),
            "f1": ({}, lazily("MultilabelF1Score", **_OF_LABELS)),
            "auroc": ({}, lazily("MultilabelAUROC", **_OF_LABELS)),
        },
        lambda outputs, target: (outputs.sigmoid(), target.long()),
    ),
    "one label": Kind(
        nn.Linear(6, 1),
        "bce_with_logits",
        lambda count: torch.rand(count, 1).round(),
        {"f1": ({}, lazily("BinaryF1Score")), "auroc": ({}, lazily("BinaryAUROC"))},
        lambda outputs, target: (outputs.sigmoid().flatten(), target.long().flatten()),
    ),
    "numbers": Kind(
        nn.Linear(6, 1),
        "mse",
        lambda count: torch.randn(count, 1),
        {
            "mae": ({}, lazily("MeanAbsoluteError")),
            "mse": ({"squared": False}, lazily("MeanSquaredError", squared=False)),
            "r2": ({}, lazily("R2Score")),
        },
    ),
    "tokens": Kind(
        nn.Linear(6, CLASSES),
        next_token,
        lambda count: class_indices(count * 3).view(count, 3),
        {
            "perplexity": ({}, lazily("Perplexity", ignore_index=-100)),
            "accuracy": ({}, lazily("MulticlassAccuracy", **_OF_CLASSES, average="micro")),
        },
        lambda outputs, target: (outputs, target),
        (3,),
    ),
}


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Kind, Pef, tuple[Any, Any]]:
    """One of them, its PEF, and samples to train and to evaluate on."""
    torch.manual_seed(0)
    one = KINDS[request.param]
    train, held_out = ((torch.randn(count, *one.length, 6), one.target(count)) for count in (4 * BATCH, SAMPLES))
    return one, compiled(one, train, tmp_path_factory.mktemp("pef")), (train, held_out)


def compiled(one: Kind, train: tuple[Tensor, Tensor], folder: Path) -> Pef:
    example = tuple(tensor[:BATCH] for tensor in train)
    how: dict[str, Any] = {"optimizer": "sgd", "lr": 0.0, "check": 0, "data_parallel": True, "quiet": True}
    return ss.compile(one.model, example, loss=one.loss, name="net", output_folder=folder, **how)


def both(outputs: Tensor, targets: Tensor) -> dict[str, float]:
    return {"mean": float(outputs.double().mean()), "targets": float(targets.double().sum())}


@pytest.mark.usefixtures("one_thread")
def test_they_are_those_of_torchmetrics_on_the_whole_set_at_any_number_of_replicas(
    kind: tuple[Kind, Pef, tuple[Any, Any]],
) -> None:
    one, pef, data = kind
    options = {name: options for name, (options, _) in one.metrics.items()}
    x, target = data[1]
    outputs = one.model(x).detach()
    wanted = {"mean": float(outputs.double().mean()), "targets": float(target.double().sum())}
    for name, (_, make) in one.metrics.items():
        metric = make()
        ours, theirs = one.seen(outputs, target)
        if ours.ndim == target.ndim + 1 and name != "perplexity":
            ours = ours.movedim(-1, 1)
        metric.reset()
        metric.update(ours, theirs)
        wanted[name] = float(metric.compute())
    found = []
    for replicas in (1, 2, 3):
        run = ss.run(pef, data, replicas=replicas, steps=1, threads=1, quiet=True, set={"evaluation.metrics": options})
        by_function = ss.run(pef, data, replicas=replicas, steps=1, threads=1, quiet=True, evaluation_metrics=both)
        found.append({**run.evaluations[-1].metrics, **by_function.evaluations[-1].metrics})
        assert found[-1] == pytest.approx(wanted, rel=2e-6)
    assert found[0] == found[1] == found[2]
    predicted = ss.predict(pef, data[1], threads=1, set={"evaluation.metrics": options}).metrics
    assert predicted == {name: found[0][name] for name in one.metrics}


class OwnLoss(nn.Module):
    """Gives its loss, and with `shows` the outputs beside it."""

    def __init__(self, shows: bool) -> None:
        super().__init__()
        self.layer, self.shows = nn.Linear(6, CLASSES), shows

    def forward(self, x: Tensor, target: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        logits = self.layer(x)
        loss = nn.functional.cross_entropy(logits, target)
        return (loss, logits) if self.shows else loss


@pytest.mark.parametrize("shows", [True, False])
def test_a_model_with_a_loss_of_its_own_needs_an_output_beside_it(shows: bool, tmp_path: Path) -> None:
    data = torch.randn(SAMPLES, 6), torch.randint(CLASSES, (SAMPLES,))
    pef = compiled(Kind(OwnLoss(shows), None, class_indices, {}), data, tmp_path)
    if shows:
        found = ss.run(pef, (data, data), steps=1, quiet=True, evaluation_metrics="accuracy").evaluations[-1].metrics
        guesses = ss.predict(pef, data).outputs[0].argmax(1)
        assert found["accuracy"] == pytest.approx(float(guesses.eq(data[1]).float().mean()))
    else:
        with pytest.raises(OptionError, match="lacks an output for each sample"):
            ss.run(pef, (data, data), steps=1, quiet=True, evaluation_metrics="accuracy")
