"""The page of `sambasim report`: one HTML file with everything in it. Its security policy forbids network access.

    ui          building blocks: escaped HTML, tables, and figures; the only file that uses plotly
    overview    predicted: key figures, memory over time, and the figures that the prediction uses
    sections    predicted: sections, the pipeline of a section, operators
    replicas    predicted: timeline and scaling of data parallel replicas
    measured    the metrics of a run

A part of the page is either predicted or measured, and says which; no figure or table mixes both.
"""

import base64
import hashlib
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from string import Template

from sambasim.records.metrics import RunRecords
from sambasim.report.page.measured import measured_parts
from sambasim.report.page.overview import caveat, facts_line, grounds, memory, summary
from sambasim.report.page.replicas import scaling, timeline
from sambasim.report.page.sections import operators, pipeline, sections_part
from sambasim.report.page.ui import Html, Part, element, for_script, joined, plotly_script
from sambasim.simulation.prediction import Prediction

_PREDICTED = (summary, timeline, sections_part, pipeline, memory, scaling, operators, grounds)


def predicted_page(prediction: Prediction, digest: str | None, run: tuple[RunRecords, str] | None = None) -> str:
    """The page of a PEF with this digest, or of a model without a PEF. `run` adds the parts of a run of the PEF, given
    with the name of its file."""
    parts, note = [make(prediction) for make in _PREDICTED], caveat(prediction)
    if run is not None:
        text = " parts have a coloured edge. They show a run, on the machine where it ran."
        note = joined(note, element("p", element("b", "Measured"), text, class_="caveat"))
        *others, last = parts
        parts = [*others, *measured_parts(*run), last]
    return _page(prediction.program.name, facts_line(prediction, digest), note, parts)


def measured_page(run: RunRecords, name: str) -> str:
    """The page of a run. Nothing on it is predicted."""
    facts, summary = [("file", name)], run.summary
    if summary is not None:
        facts += [("replicas", str(summary.world_size)), ("sync", summary.sync), ("PEF", summary.pef_digest[:12])]
    text = " All numbers on this page are from a run; none is predicted."
    note = element("p", element("b", "Measured."), text, class_="caveat")
    return _page(Path(name).stem, facts, note, measured_parts(run, name))


def _page(name: str, facts: Sequence[tuple[str, str]], note: Html, parts: Sequence[Part]) -> str:
    library, script = plotly_script(), _own("page.js")
    data: dict[str, object] = {key: value for part in parts for key, value in part.data.items()}
    data["figures"] = {id_: drawn for part in parts for id_, drawn in part.figures.items()}
    of = (element("div", element("dt", key), element("dd", value, title=value)) for key, value in facts)
    return Template(_own("page.html")).substitute(
        title=joined(name, ", sambasim report"),
        policy=f"{_digest(library)} {_digest(script)}",
        style=_own("style.css"),
        name=element("h1", name, title=name),
        badges=joined(*map(_badge, dict.fromkeys(map(_class, parts)))),
        facts=element("dl", *of, class_="of"),
        note=note,
        links=joined(*(element("a", part.title, href=f"#{part.id}", class_=_class(part)) for part in parts)),
        parts=joined(*map(_section, parts)),
        data=for_script(data),
        library=library,
        script=script,
    )


def _section(part: Part) -> Html:
    heading = element("h2", part.title, _badge(_class(part)))
    lead = element("p", part.lead, class_="lead")
    return element("section", heading, lead, part.body, id=part.id, class_=_class(part))


def _badge(word: str) -> Html:
    return element("span", word, class_=f"badge {word}")


def _class(part: Part) -> str:
    return "measured" if part.measured else "predicted"


def _own(name: str) -> Html:
    return Html((files("sambasim.report.page") / name).read_text(encoding="utf-8"))


def _digest(script: str) -> str:
    """The hash of an allowed script, as a Content-Security-Policy spells it."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"
