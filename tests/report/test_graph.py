"""The drawing of sections: every section in one box, every tensor between boxes in a curve."""

import json
from html.parser import HTMLParser

import pytest
import torch
from torch import Tensor, nn

from sambasim.compiler.capture.step import Example
from sambasim.compiler.front import compile_shapes
from sambasim.ir.program import Program
from sambasim.options.compile import CompileOptions
from sambasim.options.training import OptimizerOptions, TrainingOptions
from sambasim.report.analysis import Analysis
from sambasim.report.page.graph import section_graph
from sambasim.report.simulation import simulation_json
from sambasim.simulation.sync import SyncPath
from tests.pef.samples import inference_program
from tests.report.test_page import predicted as sample_prediction
from tests.simulation.test_advice import predicted
from tests.simulation.test_laws import _perceptron


class Skip(nn.Module):
    """Its first result is read again at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        kept = self.first(x)
        result: Tensor = (self.third(torch.tanh(self.second(kept))) + kept).square().mean()
        return result


def skip() -> Program:
    options = CompileOptions(
        optimizer=OptimizerOptions(name="sgd"), training=TrainingOptions(batch_size=16), pef_name="skip"
    )
    return compile_shapes(Skip, lambda _: Example({"x": torch.zeros(16, 8, 64, 64)}, False), options)


class Drawing(HTMLParser):
    def __init__(self, found: Analysis) -> None:
        super().__init__()
        self.boxes: list[tuple[int, int]] = []
        self.curves: list[tuple[int, int]] = []
        self.titles: list[str] = []
        self.sizes: list[str] = []
        self._in = ""
        self.feed(section_graph(found).body)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {key: value or "" for key, value in attrs}
        self._in = "size" if found.get("class") == "size" else tag
        if found.get("class") == "box":
            self.boxes.append((int(found["data-first"]), int(found["data-last"])))
        if tag == "path":
            self.curves.append((int(found["data-from"]), int(found["data-to"])))

    def handle_data(self, data: str) -> None:
        if self._in in ("title", "size"):
            (self.titles if self._in == "title" else self.sizes).append(data)


def test_a_skip_connection_passes_other_sections() -> None:
    found = Analysis(predicted(skip(), level="o0"))
    drawing = Drawing(found)
    sections = sorted(number for first, last in drawing.boxes for number in range(first, last + 1))
    assert sections == list(range(len(found.step.sections)))
    box_of = {number: box for box, (first, last) in enumerate(drawing.boxes) for number in range(first, last + 1)}
    named = {section.name: number for number, section in enumerate(found.step.sections)}
    start = box_of[named["skip__first__conv2d"]]
    readers = [drawing.boxes[stop][0] for begin, stop in drawing.curves if begin == start]
    assert any(found.step.sections[number].name.startswith("skip__add") for number in readers)
    assert any("1.0 MiB from 0 skip__first__conv2d to " in title for title in drawing.titles), "bf16[16, 8, 64, 64]"
    assert "1.0 MiB" in drawing.sizes


def test_repeated_layers_are_one_box() -> None:
    found = Analysis(predicted(_perceptron(width=64, depth=30), level="o0"))
    drawing = Drawing(found)
    assert len(drawing.boxes) < len(found.step.sections) / 3
    assert any("\u00d7" in title for title in drawing.titles)
    assert all(begin != stop for begin, stop in drawing.curves)
    (line,) = simulation_json(found.prediction, [SyncPath.RDU])
    record = json.loads(line)
    pairs = {(one["from"], one["to"]): one["bytes"] for one in record["tensors"]}
    assert pairs == found.stages.tensors


def test_a_forward_alone_is_one_column() -> None:
    found = Analysis(sample_prediction(inference_program()))
    assert Drawing(found).boxes == [(0, 0)]


def test_too_many_boxes_are_not_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sambasim.report.page.graph.MOST_BOXES", 3)
    body = section_graph(Analysis(predicted(skip(), level="o0"))).body
    assert "too large to draw" in body
    assert "<svg" not in body
