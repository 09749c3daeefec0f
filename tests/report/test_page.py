"""The page of `sambasim report`: whole, on its own, and nothing from a file becomes markup."""

import base64
import hashlib
import json
import re
import shutil
import subprocess
from dataclasses import replace
from functools import partial
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, cast

import plotly.graph_objects
import pytest

from sambasim.costs.cut import Level
from sambasim.costs.work import work_of
from sambasim.ir.graph import Graph, SourceLine
from sambasim.records.metrics import EvaluationRecord, RunRecords, StepRecord
from sambasim.report.analysis import Analysis
from sambasim.report.page import measured_page, predicted_page
from sambasim.report.page.choices import zoomed
from sambasim.report.page.sections import pipeline
from sambasim.report.page.ui import element, for_script
from sambasim.units import format_seconds
from tests.pef.samples import inference_program, sample_program
from tests.simulation import test_advice
from tests.support.summaries import summary as a_summary

DIGEST = "0123456789abcdef" * 4
MOST_BYTES = 1_500_000
PREDICTED = [
    *("summary", "advice", "timeline", "sections", "roofline", "graph", "pipeline", "memory", "scaling", "operators"),
    "grounds",
]
MEASURED = ["measured", "learning", "run-time", "run-mean", "run-summary"]

HOSTILE = "</script><img src=x onerror=alert(1)>\"'&lt;%{x}<a href='https://example.org'>\u202e$"

predicted = partial(test_advice.predicted, replicas=None)


def a_run(*, whole: bool = True) -> RunRecords:
    steps = tuple(
        StepRecord(
            step=number, epoch=1, loss=2.0 / number, lr=0.1, step_s=0.2, sync_s=0.05, hidden_sync_s=0.01,
            samples_per_s=80, grad_norm=1.5,
        )
        for number in range(1, 9)
    )  # fmt: skip
    evaluation = EvaluationRecord(step=8, epoch=1, samples=36, loss=0.5, accuracy=0.875, evaluation_s=0.1)
    numbers = {"threads": 1, "steps": 8, "samples": 128, "training_s": 1.6, "samples_per_s": 80, "sync_share": 0.25}
    summary = a_summary("device").model_copy(update={"pef_digest": DIGEST, "evaluation": evaluation, **numbers})
    return RunRecords(steps, (evaluation,), summary if whole else None)


class Page(HTMLParser):
    """What a browser would find: elements with their attributes, and the text of scripts, styles and all else."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.words: list[str] = []
        self.styles = ""
        self._inside = ""
        self.feed(text)
        self.data: dict[str, Any] = json.loads(self.scripts[0]) if self.scripts else {}
        self.figures: dict[str, dict[str, Any]] = self.data.get("figures", {})

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self._inside = tag
        self.scripts += [""] * (tag == "script")

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside == "script":
            self.scripts[-1] += data
        elif self._inside == "style":
            self.styles += data
        else:
            self.words.append(data)

    def ids(self, tag: str) -> list[str | None]:
        return [attributes.get("id") for name, attributes in self.elements if name == tag]


@pytest.fixture(scope="module")
def text() -> str:
    return predicted_page(predicted(sample_program()), DIGEST, (a_run(), "run.jsonl"))


def test_it_has_every_part_is_small_and_the_same_each_time(text: str) -> None:
    page = Page(text)
    assert len(text.encode()) < MOST_BYTES
    assert predicted_page(predicted(sample_program()), DIGEST, (a_run(), "run.jsonl")) == text
    assert page.ids("section") == [*PREDICTED[:-1], *MEASURED, PREDICTED[-1]]
    assert set(page.figures) <= set(page.ids("div"))
    assert len(page.figures) == 10
    for figure in page.figures.values():
        plotly.graph_objects.Figure(**figure)  # raises for a property that plotly does not know
        assert {trace["type"] for trace in figure["data"]} <= {"scatter", "bar"}, "what the basic bundle draws"
    assert "logreg.py" in page.scripts[0]
    assert "return self.lin_layer(x)" in page.scripts[0]


def check_it_asks_nobody(page: Page) -> None:
    """Also if the page does not ask by itself: the browser is told to ask nobody, and to run nothing else."""
    asked = [value for _, attributes in page.elements for key, value in attributes.items() if key in ("src", "href")]
    assert asked
    assert all(value is not None and value.startswith("#") for value in asked)
    assert "url(" not in page.styles
    assert "@import" not in page.styles
    assert not {"link", "iframe", "img", "object", "embed", "base"} & {name for name, _ in page.elements}
    policy = next(a["content"] for name, a in page.elements if name == "meta" and "http-equiv" in a)
    assert policy is not None
    assert policy.startswith("default-src 'none'; ")
    assert "'unsafe-inline'" not in policy.partition("script-src")[2].partition(";")[0]
    assert "'unsafe-eval'" not in policy
    assert len(page.scripts) == 3
    for script in page.scripts[1:]:
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        assert f"'sha256-{digest}'" in policy


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
def test_the_script_draws_every_figure_and_fills_every_table(text: str) -> None:
    page = Page(text)
    scripts = json.dumps([page.scripts[0], page.scripts[2]])
    browser = Path(__file__).with_name("browser.js")
    printed = subprocess.run(["node", browser], input=scripts, capture_output=True, text=True, check=True).stdout
    drawn = json.loads(printed)
    assert drawn["plots"].keys() == page.figures.keys()
    traces = [trace for plot in drawn["plots"].values() for trace in plot["traces"] if "meta" in trace]
    assert {trace["meta"] for trace in traces} == {"sections", "spans", "memory", "roofline"}
    for trace in traces:
        assert len(trace["hovertext"]) == len(trace["customdata"])
        assert all(isinstance(words, str) and "undefined" not in words for words in trace["hovertext"])
    analysis, texts = Analysis(predicted(sample_program())), drawn["texts"]
    for section, line in zip(analysis.step.sections, analysis.lines, strict=True):
        row = f"{line} {format_seconds(section.price.predicted_s)}"
        assert row in " ".join(texts["sections-rows"].split()), section.name
    assert "return self.lin_layer(x)" in texts["operators-rows"]
    assert "on the chip" in texts["pipeline-head"]
    assert not [words for words in texts.values() if "undefined" in words or "NaN" in words]


def test_predicted_and_measured_are_told_apart_and_nobody_is_asked(text: str) -> None:
    """Plotly's default is a button that shares the chart on a cloud."""
    page = Page(text)
    check_it_asks_nobody(page)
    assert 'showSendToCloud: false, plotlyServerURL: ""' in page.scripts[2]
    assert "modeBarButtons: [" in page.scripts[2]
    kinds = {a["id"]: a["class"] for name, a in page.elements if name == "section"}
    assert kinds == dict.fromkeys(PREDICTED, "predicted") | dict.fromkeys(MEASURED, "measured")
    assert "Predicted, not measured." in text
    alone = Page(measured_page(a_run(), "run.jsonl"))
    assert alone.ids("section") == MEASURED
    assert not [a for _, a in alone.elements if "predicted" in (a.get("class") or "").split()]
    assert "SN30" not in "".join(alone.words)


def test_what_a_file_says_is_text() -> None:
    def spoiled(graph: Graph) -> Graph:
        line = SourceLine(HOSTILE, 7, HOSTILE)
        return replace(graph, nodes=tuple(replace(n, name=HOSTILE, module=HOSTILE, source=line) for n in graph.nodes))

    sample = sample_program()
    training, evaluation = spoiled(sample.leading), spoiled(sample.evaluation)
    hostile = replace(sample, name=HOSTILE, training=training, evaluation=evaluation)
    page = predicted_page(predicted(hostile), HOSTILE, (a_run(), HOSTILE))
    found = Page(page)
    assert {name for name, _ in found.elements} == {name for name, _ in Page(page.replace(HOSTILE, "x")).elements}
    assert "img" not in {name for name, _ in found.elements}
    assert not [key for _, attributes in found.elements for key in attributes if key.startswith("on")]
    assert len(found.scripts) == 3
    assert "\u202e" not in page
    assert HOSTILE.replace("\u202e", r"\u202e") in found.words
    assert not re.search("<a|<img|%{", json.dumps(found.figures))


def test_html_is_escaped_where_it_enters() -> None:
    assert element("b", "<i>", title='"') == '<b title="&quot;">&lt;i&gt;</b>'
    assert element("b", element("i", "&")) == "<b><i>&amp;</i></b>"
    assert element("input", hidden=True, title=None, data_for="x") == '<input hidden data-for="x">'
    assert for_script({"a": "</script>&"}) == '{"a":"\\u003c/script\\u003e\\u0026"}'
    assert for_script([(1 / 3, 7), None]) == "[[0.3333333,7],null]"
    with pytest.raises(ValueError, match="not JSON compliant"):
        for_script(float("nan"))


@pytest.mark.parametrize("level", ["o0", "o3"])
def test_stages_add_up_to_their_section(level: Level) -> None:
    prediction = predicted(sample_program(), level=level)
    sections = pipeline(Analysis(prediction)).data["pipeline"]
    work = work_of(prediction.graph, prediction.program.symbols)
    for section, stages in zip(prediction.alone.sections, cast(Any, sections), strict=True):
        if not stages:
            assert section.nodes == (0, 0)
            continue
        nodes, streamed, resident, written, flops, reads, _ = zip(*stages, strict=True)
        made = (work.tensors[value] for stage in work.stages if stage.node in nodes for value in stage.writes)
        sums_bytes = sum(tensor.size_bytes for tensor in made if tensor.resident)
        assert sum(streamed) + sum(resident) == section.load.read_bytes
        assert sum(resident) + sums_bytes == section.load.resident_bytes
        assert (sum(written), sum(flops)) == (section.load.written_bytes, section.load.product_flops)
        assert len(stages) == section.load.stages
        assert all(0 <= source < to for to, of_stage in enumerate(reads) for source, _ in of_stage)


def test_the_axis_of_efficiency_is_zoomed_and_says_so_and_time_can_be_seen_without_the_host(text: str) -> None:
    ends = [zoomed(efficiencies) for efficiencies in ([1.0, 0.98, 1.004], [1.0, 0.9], [1.0, 0.3], [1.0])]
    assert ends == [(0.97, 1.01), (0.88, 1.02), (0.0, 1.09), (0.99, 1.01)]
    page = Page(text)
    axis = page.figures["scaling-efficiency"]["layout"]["yaxis"]
    assert axis["title"]["text"].endswith(f"(from {axis['range'][0]:.0%}, not from 0)") == (axis["range"][0] > 0)
    buttons = [attributes for _, attributes in page.elements if "data-plot" in attributes]
    assert [button["data-plot"] for button in buttons] == ["timeline-figure", "memory-figure"]
    for button in buttons:
        assert float(button["data-from"] or 0) == pytest.approx(predicted(sample_program()).alone.host_s)
        last = page.figures[str(button["data-plot"])]["layout"]["xaxis"]["range"][1]
        assert float(button["data-to"] or 0) == pytest.approx(last, rel=0.02)


def test_a_forward_has_no_sync_and_a_run_that_failed_no_summary() -> None:
    page = Page(predicted_page(predicted(inference_program()), DIGEST))
    assert page.ids("section") == PREDICTED
    assert "replicas exchange nothing" in "".join(page.words)
    assert "scaling-speed" not in page.ids("div")
    failed = Page(measured_page(a_run(whole=False), "run.jsonl"))
    assert failed.ids("section") == MEASURED[:-2]
    assert "The run has no summary" in "".join(failed.words)
