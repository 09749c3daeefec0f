"""Values that the device would convert at a loss."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from sambasim import samba
from sambasim.ir.program import Program
from sambasim.pef import read
from sambasim.samba.checks.conversions import lossy


class Tagger(nn.Module):
    """Tokens `[batch]` to the loss of each against its label."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 4)

    def forward(self, token: Tensor, scale: Tensor, label: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.embedding(token) * scale, label)


class Picker(nn.Module):
    """Row numbers `[batch]`, each picked with in another way, to the loss of each row against its label."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.randn(50, 4))

    def forward(self, index: Tensor, select: Tensor, gather: Tensor, one_hot: Tensor, label: Tensor) -> Tensor:
        one = self.rows[index] + self.rows.index_select(0, select)
        other = self.rows.gather(0, gather.unsqueeze(1).expand(-1, 4)) + nn.functional.one_hot(one_hot, 4)
        return nn.functional.cross_entropy(one + other, label)


def _compiled(model: nn.Module, inputs: list[Tensor], folder: Path) -> Program:
    samba.from_torch_model_(model)
    optimizer = samba.optim.SGD(model.parameters(), lr=0.1)
    pef = samba.session.compile(model, inputs, optimizer, "net", config_dict={"output_folder": str(folder)})
    return read(Path(pef)).program


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Program:
    inputs = [torch.zeros(2, dtype=torch.int64), torch.ones(2, 1), torch.zeros(2, dtype=torch.int64)]
    return _compiled(Tagger(), inputs, tmp_path_factory.mktemp("out"))


def test_row_numbers_are_no_labels_however_they_pick(tmp_path: Path) -> None:
    names = ["index", "select", "gather", "one_hot", "label"]
    program = _compiled(Picker(), [torch.zeros(2, dtype=torch.int64) for _ in names], tmp_path)
    batch = {name: torch.tensor([0, 40_000]) for name in names}
    assert [finding.what.split(":")[0] for finding in lossy(program, batch, None)] == ["label has 40000"]


def _batch(token: int = 1, scale: torch.dtype = torch.float32, label: int = 1) -> dict[str, Tensor]:
    return {
        "token": torch.tensor([0, token]),
        "scale": torch.ones(2, 1, dtype=scale),
        "label": torch.tensor([label, 0]),
    }


@pytest.mark.parametrize("batch", [_batch(), _batch(token=50_000), _batch(label=32_767), _batch(label=-100)])
def test_what_stays_as_it_is_is_no_finding(program: Program, batch: dict[str, Tensor]) -> None:
    assert list(lossy(program, batch, None)) == []


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        (_batch(label=32_768), "AP03: label has 32768: the device keeps labels as int16, up to 32767"),
        (_batch(label=-40_000), "AP03: label has -40000: the device keeps labels as int16"),
        (_batch(scale=torch.float64), "AP03: scale is float64: the device computes in bf16"),
    ],
)
def test_what_does_not_is(program: Program, batch: dict[str, Tensor], words: str) -> None:
    (finding,) = lossy(program, batch, "app.py:1: run()")
    assert finding.words.startswith(words)
    assert finding.where == "app.py:1: run()"
