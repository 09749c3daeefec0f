"""Digests of a model's source files: which changes are seen."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from sambasim.compiler.capture.step import Example
from sambasim.compiler.compile import compile_model
from sambasim.data.user_code import load_object
from sambasim.options.compile import CompileOptions
from sambasim.pef import PefDocument, read
from sambasim.pef.sources import SOURCES, changed

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
    assert list(changed(replace(document, metadata={SOURCES: text}))) == []


def test_names_from_a_pef_lead_to_no_other_place(document: PefDocument, tmp_path: Path) -> None:
    (tmp_path.parent / "other.py").write_text("")
    recorded = json.loads(document.metadata[SOURCES])
    for file in ("../other.py", str(tmp_path.parent / "other.py"), "", "."):
        metadata = {SOURCES: json.dumps({"python": recorded["python"], file: "0"})}
        assert list(changed(replace(document, metadata=metadata))) == []
