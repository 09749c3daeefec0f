"""Digests of a model's source files, which tell what has changed; and of its forward, by which a checkpoint knows its
model: equal for every batch size, and not after an edit."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sambasim.compiler.capture.step import Example
from sambasim.data.user_code import load_object
from sambasim.options.compile import CompileOptions
from sambasim.pef import PefDocument, read
from sambasim.pef.digests import SOURCES, changed, digests_of_model
from tests.compiler.test_build import built as capture
from tests.support.compiled import Made, compile_model
from tests.support.whole import whole_case
from tests.zoo.case import evaluate_loss
from tests.zoo.families import CASES

MODEL = """\
from layers.linear import Linear
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = Linear(4, 3)

    def forward(self, x):
        return self.linear(x).square().mean()
"""
LAYER = """\
from torch import nn
from torch.nn import functional

class Linear(nn.Linear):
    def forward(self, x):
        return functional.relu(super().forward(x))
"""


@pytest.fixture
def document(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PefDocument:
    """A PEF of net.py, compiled in its folder, which has a package as well."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "layers").mkdir()
    (tmp_path / "net.py").write_text(MODEL)
    (tmp_path / "layers" / "linear.py").write_text(LAYER)
    model = load_object("net.py:Net", "model")
    assert isinstance(model, type)
    options = CompileOptions.model_validate(
        {"model": {"target": "net.py:Net"}, "optimizer": {"name": "sgd"}, "output_folder": tmp_path / "out"}
    )
    return read(compile_model(model(), Example({"x": torch.ones(2, 4)}), options).path)


def test_files_that_are_as_they_were_are_not_mentioned(document: PefDocument, tmp_path: Path) -> None:
    assert {"net.py", "layers/linear.py"} <= json.loads(document.metadata[SOURCES]).keys()
    assert list(changed(document)) == []
    (tmp_path / "net.py").write_text(f"# A comment.\n{MODEL}")
    (tmp_path / "layers" / "linear.py").unlink()
    assert list(changed(document)) == []


@pytest.mark.parametrize(("file", "text"), [("net.py", MODEL), ("layers/linear.py", LAYER)])
def test_files_that_do_something_else_are_named(file: str, text: str, document: PefDocument, tmp_path: Path) -> None:
    (tmp_path / file).write_text(text.replace("relu", "silu").replace("mean", "sum"))
    (notice,) = changed(document)
    assert notice.startswith(f"{file} has changed since the PEF was compiled")


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"python": "2.7", "net.py": ""}', '{"net.py": ""}'])
def test_what_this_python_has_not_written_says_nothing(text: str, document: PefDocument) -> None:
    assert list(changed(document.only(metadata={SOURCES: text}))) == []


def test_names_from_a_pef_lead_to_no_other_place(document: PefDocument, tmp_path: Path) -> None:
    (tmp_path.parent / "other.py").write_text("")
    recorded = json.loads(document.metadata[SOURCES])
    for file in ("../other.py", str(tmp_path.parent / "other.py"), "", "."):
        metadata = {SOURCES: json.dumps({"python": recorded["python"], file: "0"})}
        assert list(changed(document.only(metadata=metadata))) == []


OPERATORS, INTEGERS = "operators_sha256", "integers_sha256"


@pytest.mark.parametrize(
    "name", ["convolutional", "lstm", "recommender", whole_case("gpt2"), whole_case("bert"), whole_case("vit")]
)
def test_the_operators_are_equal_for_every_batch_size(name: str) -> None:
    """With GroupNorm, whose operator has the batch size; with views, masks and recurrences."""

    def digest(batch_size: int) -> str:
        one = CASES[name]
        batch = one.batch(batch_size)

        def lost(net: Any, *given: Tensor) -> Tensor:
            return evaluate_loss(one, net.model, dict(zip(batch, given, strict=True)))

        inputs = {f"input_{at}": tensor for at, tensor in enumerate(batch.values())}
        built = capture(Made(lost, model=one.module()), inputs)
        return digests_of_model(built.program, built.weights)[OPERATORS]

    assert digest(4) == digest(6)


class Edited(nn.Module):
    """What may be edited and leaves every tensor as large as it is."""

    def __init__(self, heads: int = 2, kernel: int = 3, factor: float = 2, power: int = 2, scale: float = 1.5) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 24), nn.Linear(8, 8)
        self.heads, self.kernel, self.factor, self.power = heads, kernel, factor, power
        self.scale = torch.tensor([scale])

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        q, k, v = (one.unflatten(-1, (self.heads, -1)).transpose(1, 2) for one in self.up(x).chunk(3, -1))
        x = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2) * self.factor
        x = F.avg_pool1d(x, self.kernel, stride=1, padding=self.kernel // 2) * self.scale
        return F.mse_loss(self.down(x).pow(self.power), target) / x.shape[0]


def digests(model: nn.Module, batch_size: int = 4) -> dict[str, str]:
    built = capture(model, {name: torch.zeros(batch_size, 6, 8) for name in ("x", "target")})
    return digests_of_model(built.program, built.weights)


@cache
def unedited(batch_size: int = 4) -> dict[str, str]:
    return digests(Edited(), batch_size)


@pytest.mark.parametrize("edit", [{"kernel": 5}, {"factor": 3}, {"factor": 2.5}, {"power": 3}, {"scale": 1.25}])
def test_a_factor_a_size_or_a_constant_is_seen_at_every_batch_size(edit: dict[str, float]) -> None:
    assert digests(Edited(**edit), batch_size=6)[OPERATORS] != unedited()[OPERATORS]  # type: ignore[arg-type]  # fields by name


def test_a_size_of_a_shape_is_seen_at_one_batch_size() -> None:
    found, edited = unedited(), digests(Edited(heads=4))
    assert found == digests(Edited())
    assert found[INTEGERS] != edited[INTEGERS]
    assert found[OPERATORS] == edited[OPERATORS]
    assert unedited(batch_size=6)[OPERATORS] == found[OPERATORS]
