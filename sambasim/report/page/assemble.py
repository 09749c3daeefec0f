"""Parts to a page: one file with everything in it, of which the browser is told to ask nobody for more."""

import base64
import hashlib
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from string import Template

from sambasim.records.metrics import RunRecords
from sambasim.report.page.figure import plotly_script
from sambasim.report.page.grounds import grounds
from sambasim.report.page.header import caveat, facts_line, summary
from sambasim.report.page.html import Html, element, for_script, joined
from sambasim.report.page.measured import measured
from sambasim.report.page.memory import memory
from sambasim.report.page.operators import operators
from sambasim.report.page.part import Part
from sambasim.report.page.pipeline import pipeline
from sambasim.report.page.scaling import scaling
from sambasim.report.page.sections import sections
from sambasim.report.page.timeline import timeline
from sambasim.simulation.prediction import Prediction

_PREDICTED = (summary, timeline, sections, pipeline, memory, scaling, operators, grounds)


def predicted_page(prediction: Prediction, digest: str | None, run: tuple[RunRecords, str] | None = None) -> str:
    """The page of a PEF with this digest, or of a model alone. A `run` of the PEF, with the name of its file, comes
    behind what is predicted."""
    parts, note = [make(prediction) for make in _PREDICTED], caveat(prediction)
    if run is not None:
        note = joined(
            [
                note,
                element(
                    "p",
                    element("b", "Measured"),
                    " are the parts with a coloured edge: they are of a run, on the machine where it ran.",
                    class_="caveat",
                ),
            ]
        )
        *others, last = parts
        parts = [*others, *measured(*run), last]
    return _page(prediction.program.name, facts_line(prediction, digest), note, parts)


def measured_page(run: RunRecords, name: str) -> str:
    """The page of a run, of which nothing is predicted."""
    facts = [("file", name)]
    if run.summary is not None:
        facts += [
            ("replicas", str(run.summary.world_size)),
            ("sync", run.summary.sync),
            ("PEF", run.summary.pef_digest[:12]),
        ]
    note = element(
        "p", element("b", "Measured."), " Every number on this page is from a run; none is predicted.", class_="caveat"
    )
    return _page(Path(name).stem, facts, note, measured(run, name))


def _page(name: str, facts: Sequence[tuple[str, str]], note: Html, parts: Sequence[Part]) -> str:
    library, script = plotly_script(), _own("page.js")
    data: dict[str, object] = {key: value for part in parts for key, value in part.data.items()}
    data["figures"] = {id_: drawn for part in parts for id_, drawn in part.figures.items()}
    of = (element("div", element("dt", key), element("dd", value, title=value)) for key, value in facts)
    links = (element("a", part.title, href=f"#{part.id}", class_=_class(part)) for part in parts)
    return Template(_own("page.html")).substitute(
        title=joined([name, ", sambasim report"]),
        policy=f"{_digest(library)} {_digest(script)}",
        style=_own("style.css"),
        name=element("h1", name, title=name),
        badges=joined(element("span", word, class_=f"badge {word}") for word in _words(parts)),
        facts=element("dl", *of, class_="of"),
        note=note,
        links=joined(links),
        parts=joined(map(_section, parts)),
        data=for_script(data),
        library=library,
        script=script,
    )  # fmt: skip


def _section(part: Part) -> Html:
    badge = element("span", _class(part), class_=f"badge {_class(part)}")
    heading = element("h2", part.title, badge)
    return element(
        "section", heading, element("p", part.lead, class_="lead"), part.body, id=part.id, class_=_class(part)
    )


def _class(part: Part) -> str:
    return "measured" if part.measured else "predicted"


def _words(parts: Sequence[Part]) -> list[str]:
    return list(dict.fromkeys(map(_class, parts)))


def _own(name: str) -> Html:
    return Html((files("sambasim.report.page") / name).read_text(encoding="utf-8"))


def _digest(script: str) -> str:
    """As a policy names the scripts that may run."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"
