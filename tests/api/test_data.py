"""Data as scripts have them: collate functions, columns that nobody takes."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

import sambasim as ss
from sambasim.errors import DataError
from tests.api.conftest import LABELS, POINTS, compiled, eager, net, sgd, trained

SIZE = 8
ORDERED: dict[str, Any] = {"threads": 1, "set": {"data.shuffle": False}}


@pytest.fixture(scope="module")
def one(folder: Path) -> ss.Pef:
    model = net()
    example = {"input": POINTS[:SIZE], "target": LABELS[:SIZE]}
    return compiled(folder, model, example, loss="cross_entropy", optimizer=sgd(model), name="one")


def ragged(index: int) -> dict[str, Any]:
    """Of any length and type; a text that nobody takes."""
    points = [POINTS[index].tolist()] * (1 + index % 3)
    return {"points": points, "label": str(int(LABELS[index])), "text": "cat" * index}


def means(samples: list[dict[str, Any]]) -> dict[str, Any]:
    """Pads, and gives means of what was there."""
    padded = pad_sequence([torch.tensor(one["points"]) for one in samples], batch_first=True)
    count = torch.tensor([[len(one["points"])] for one in samples])
    target = torch.tensor([int(one["label"]) for one in samples])
    return {"input": padded.sum(1) / count, "target": target, "text": [one["text"] for one in samples]}


RAGGED = [ragged(index) for index in range(40)]


def in_pytorch(batches: list[Any], collate: Callable[[list[Any]], Mapping[str, Tensor]] = means) -> list[float]:
    """The losses of plain PyTorch."""
    model = net()
    return eager(model, sgd(model), [(one["input"], one["target"]) for one in map(collate, batches)])


@pytest.mark.usefixtures("one_thread")
def test_a_function_makes_batches_of_samples_of_any_kind(one: ss.Pef, capfd: pytest.CaptureFixture[str]) -> None:
    wanted = in_pytorch([RAGGED[start : start + SIZE] for start in range(0, 32, SIZE)])
    by_name = {**ORDERED, "set": {"data.shuffle": False, "data.collate": f"{__name__}:means"}}
    for how in ({**ORDERED, "collate_fn": means}, by_name, {**ORDERED, "collate_fn": f"{__name__}:means"}):
        assert trained(one, (RAGGED, RAGGED[:5]), **how).losses == wanted
    ss.run(one, RAGGED, steps=2, collate_fn=means, workers=1)
    assert capfd.readouterr().out.count("columns that the PEF does not take are dropped: text") == 1
    whole = ss.predict(one, RAGGED[:13], collate_fn=means)
    assert whole.loss == pytest.approx(ss.predict(one, (POINTS[:13], LABELS[:13])).loss)


def test_an_example_is_made_of_samples(folder: Path) -> None:
    pef = compiled(folder, net(), RAGGED[:SIZE], loss="cross_entropy", collate_fn=f"{__name__}:means", name="by_name")
    assert pef.document.data_source["collate"] == f"{__name__}:means"
    assert "neither forward() nor the loss takes are dropped: text" in pef.notices[0]


@pytest.mark.parametrize(
    ("data", "how", "text"),
    [
        (RAGGED, {"collate_fn": lambda samples: samples[0]["x"]}, "the collate function <lambda> raised KeyError: 'x'"),
        (RAGGED, {"collate_fn": lambda samples: means(samples[1:])}, r"input is float32\[7, 2\], and the PEF takes"),
        (RAGGED, {"collate_fn": 3}, "collate_fn is of type int"),
        (RAGGED, {"collate_fn": f"{__name__}:SIZE"}, "SIZE is of type int, which cannot be called"),
        (RAGGED, {"collate_fn": f"{__name__}:mean"}, "did you mean means?"),
        (RAGGED, {}, r"a sample has \(points, label, text\)"),
        ([{"input": POINTS[0].tolist(), "target": 0}] * 9, {}, r'dataset.with_format\("torch"\)'),
        ([{"input": POINTS[0], "target": 0}, {"input": POINTS[:3, 0], "target": 0}] * 9, {}, "gives float32"),
    ],
)
def test_what_makes_no_batch_is_refused(one: ss.Pef, data: object, how: dict[str, Any], text: str) -> None:
    with pytest.raises(DataError, match=text):
        trained(one, data, **how)


def test_columns_that_nobody_takes_may_be_anything(one: ss.Pef) -> None:
    samples = [
        {
            "idx": None,
            "text": "a" * index,
            "tokens": torch.zeros(index),
            "input": POINTS[index],
            "target": LABELS[index],
        }
        for index in range(40)
    ]
    plain = [{name: of[name] for name in ("target", "input")} for of in samples]
    assert trained(one, samples, **ORDERED).losses == trained(one, plain, **ORDERED).losses
