"""The page of `sambasim report` and `plan --html`: one HTML file; its security policy forbids network access. Each part
is either predicted or measured, and says which.

`ui` has the building blocks. Predicted parts, each with its heading, are in `overview`, `timeline` (also the schedule
of several ranks), `sections` and `choices` (scaling, and the page of `plan`), measured ones in `run`; the title and the
order of parts are here. `page.js` draws the figures and fills the live tables.
"""

import base64
import hashlib
from collections.abc import Iterable, Sequence
from importlib.resources import files
from pathlib import Path
from string import Template

from sambasim.pef import Checked
from sambasim.records.metrics import RunRecords
from sambasim.report.analysis import Analysis
from sambasim.report.page.choices import plan_content, scaling
from sambasim.report.page.overview import advice, caveat, facts_line, grounds, memory, summary
from sambasim.report.page.run import measured_parts, mesh_facts
from sambasim.report.page.sections import operators, pipeline, roofline, section_graph, sections_part
from sambasim.report.page.timeline import parts_of_ranks, timeline
from sambasim.report.page.ui import Html, Part, element, for_script, joined
from sambasim.report.page.ui import caveat as caveat_of
from sambasim.simulation.planning.search import Plan
from sambasim.simulation.prediction import Prediction

_OF_ONE_RANK = (summary, advice, timeline, sections_part, roofline, section_graph, pipeline, memory)


def predicted_page(
    prediction: Prediction,
    digest: str | None,
    run: tuple[RunRecords, str] | None = None,
    checked: Checked | None = None,
) -> str:
    """Of a PEF with this digest, or of a model; `run` adds the parts of a run of the PEF, with its file's name."""
    note = caveat(prediction)
    if prediction.program.ranks_of_replica > 1:
        parts = [*parts_of_ranks(prediction), scaling(prediction)]
    else:
        found = Analysis(prediction)
        parts = [*(make(found) for make in _OF_ONE_RANK), scaling(prediction), operators(found)]
        lines = element("code", found.costliest_lines)
        costliest = element("p", "Costliest lines, of the device time: ", lines, class_="lines")
        note = joined(element("p", found.headline, class_="headline"), *([costliest] if found.line_s else []), note)
    if run is not None:
        text = "parts have a coloured edge. They show a run, on the machine where it ran."
        note = joined(note, caveat_of("Measured", text))
        parts += measured_parts(*run, beside=True)
    return _page(prediction.program.name, facts_line(prediction, digest, checked), note, [*parts, grounds(prediction)])


def plan_page(plan: Plan) -> str:
    return _page(plan.name, *plan_content(plan))


def measured_page(run: RunRecords, name: str) -> str:
    facts, summary = [("file", name)], run.summary
    if summary is not None:
        facts += [("replicas", str(summary.world_size)), *mesh_facts(summary)]
        facts += [("sync", summary.sync), ("PEF", summary.pef_digest[:12])]
    note = caveat_of("Measured.", "All numbers on this page are from a run; none is predicted.")
    return _page(Path(name).stem, facts, note, measured_parts(run, name))


def _page(name: str, facts: Sequence[tuple[str, str]], note: Html, parts: Iterable[Part]) -> str:
    parts = list(parts)
    library, script = _own("plotly-basic.min.js"), _own("page.js")
    data: dict[str, object] = {key: value for part in parts for key, value in part.data.items()}
    data["figures"] = {id_: drawn for part in parts for id_, drawn in part.figures.items()}
    of = (element("div", element("dt", key), element("dd", value, title=value)) for key, value in facts)
    return Template(_own("page.html")).substitute(
        title=joined(name, ", sambasim report"),
        policy=f"{_digest(library)} {_digest(script)}",
        style=_own("style.css"),
        name=element("h1", name, title=name),
        badges=joined(*map(_badge, dict.fromkeys(part.kind for part in parts))),
        facts=element("dl", *of, class_="of"),
        note=note,
        links=joined(*(element("a", part.title, href=f"#{part.id}", class_=part.kind) for part in parts)),
        parts=joined(*map(_section, parts)),
        data=for_script(data),
        library=library,
        script=script,
    )


def _section(part: Part) -> Html:
    heading, lead = element("h2", part.title, _badge(part.kind)), element("p", part.lead, class_="lead")
    return element("section", heading, lead, part.body, id=part.id, class_=part.kind)


def _badge(word: str) -> Html:
    return element("span", word, class_=f"badge {word}")


def _own(name: str) -> Html:
    return Html((files("sambasim.report.page") / name).read_text(encoding="utf-8"))


def _digest(script: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"
