"""The predicted part about the order of sections and the tensors between them: a drawing of boxes and curves."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import sqrt

from sambasim.ir.graph import SectionKind
from sambasim.report.analysis import Analysis
from sambasim.report.page import ui
from sambasim.simulation.alone import MODEL_KINDS
from sambasim.units import counted, format_bytes, format_seconds

MOST_BOXES = 400
"""A drawing with more is slow to open."""

_WIDTH, _HEIGHT, _PITCH = 262, 54, 82
_SIDE, _MIDDLE, _TOP = 84, 180, 14
_NAME_LETTERS, _LINE_LETTERS = 29, 35
_LABEL = (62, 15)
"""Width and height of a label, which must not cover another."""


@dataclass(frozen=True, slots=True)
class Box:
    """A section, a run of repeated layers, or the whole update: sections `first` to `last`, at the left upper corner x,
    y."""

    first: int
    last: int
    kind: SectionKind
    name: str
    facts: str
    line: str
    share: float
    x: float
    y: float


@dataclass(frozen=True, slots=True)
class Curve:
    start: int
    stop: int
    size_bytes: int
    path: str
    label: tuple[float, float]


def section_graph(analysis: Analysis) -> ui.Part:
    lead = (
        "The forward runs down on the left, the backward up on the right; repeated layers are one box. A curve is what "
        "a section reads of what another wrote: bytes of one pass, of all layers of a box. Parameters, and tensors "
        "inside of sections, are not drawn. A bar is the box's share of the device time. A click on a box shows its "
        "section further down."
    )
    boxes = _boxes(analysis)
    if len(boxes) > MOST_BOXES:
        body = ui.element("p", f"With {len(boxes)} boxes it is too large to draw: a higher level has fewer sections.")
    else:
        body = ui.element("div", _drawing(boxes, _curves(analysis, boxes)), class_="graph")
    return ui.Part("graph", "Sections and tensors", lead, body)


def _boxes(analysis: Analysis) -> list[Box]:
    sections = analysis.step.sections
    spans: dict[SectionKind, list[range]] = {kind: [] for kind in MODEL_KINDS}
    for run in analysis.runs:
        if sections[run.start].kind in spans:
            spans[sections[run.start].kind].append(range(run.start, run.stop))
    model = sum(section.kind in MODEL_KINDS for section in sections)
    if model < len(sections):
        spans.setdefault(SectionKind.OPT, []).append(range(model, len(sections)))
    left = spans[SectionKind.FWD]
    right = [*spans[SectionKind.BCKWD], *spans.get(SectionKind.OPT, [])]
    rows = max(len(left), len(right), 1)

    def at(place: int, count: int) -> float:
        """Boxes of the shorter column are spread over the height of the longer one."""
        return _TOP + _PITCH * (place + 0.5) * rows / count - _PITCH / 2

    boxes = [_box(analysis, span, _SIDE, at(place, len(left))) for place, span in enumerate(left)]
    for place, span in enumerate(right):
        boxes.append(_box(analysis, span, _SIDE + _WIDTH + _MIDDLE, at(len(right) - 1 - place, len(right))))
    return boxes


def _box(analysis: Analysis, span: range, x: float, y: float) -> Box:
    step = analysis.step
    inside = [step.sections[number] for number in span]
    costliest = max(span, key=lambda number: step.sections[number].price.predicted_s)
    seconds = sum(step.runs(section) * section.price.predicted_s for section in inside)
    shown = step.sections[costliest]
    is_update = shown.kind not in MODEL_KINDS
    period = len(span) // max(1, _repeats(analysis, span))
    if is_update:
        facts = counted(len(span), "section")
    elif len(span) > 1:
        facts = f"\u00d7{len(span) // period}" + (f" of {counted(period, 'section')}" if period > 1 else "")
    else:
        facts = shown.kind.value
    line = "" if is_update else analysis.lines[costliest]
    share = seconds / step.device_s if step.device_s else 0.0
    facts = f"{facts} \u00b7 {format_seconds(seconds)} \u00b7 {share:.0%}"
    return Box(span[0], span[-1], shown.kind, "update" if is_update else shown.name, facts, line, share, x, y)


def _repeats(analysis: Analysis, span: range) -> int:
    return next((run.count for run in analysis.runs if run.start == span[0]), 1)


def _curves(analysis: Analysis, boxes: Sequence[Box]) -> list[Curve]:
    box_of = {number: place for place, box in enumerate(boxes) for number in range(box.first, box.last + 1)}
    between: Counter[tuple[int, int]] = Counter()
    for (writer, reader), size_bytes in analysis.stages.tensors.items():
        if box_of[writer] != box_of[reader]:
            between[box_of[writer], box_of[reader]] += size_bytes
    return [Curve(*pair, size, *_path(boxes, *pair)) for pair, size in between.most_common()]


def _path(boxes: Sequence[Box], start: int, stop: int) -> tuple[str, tuple[float, float]]:
    """The path from box `start` to box `stop`, and the middle of it."""
    a, b = boxes[start], boxes[stop]
    if a.x != b.x:
        (x, y), (end_x, end_y) = (a.x + _WIDTH, a.y + 0.7 * _HEIGHT), (b.x, b.y + 0.7 * _HEIGHT)
        middle = (x + end_x) / 2
        return f"M{x:.0f} {y:.0f}C{middle:.0f} {y:.0f} {middle:.0f} {end_y:.0f} {end_x:.0f} {end_y:.0f}", (
            middle,
            (y + end_y) / 2,
        )
    if stop == start + 1:
        x = a.x + _WIDTH / 2
        y, end_y = (a.y + _HEIGHT, b.y) if b.y > a.y else (a.y, b.y + _HEIGHT)
        return f"M{x:.0f} {y:.0f}L{x:.0f} {end_y:.0f}", (x, (y + end_y) / 2)
    outward, x = (-1, a.x) if a.x == _SIDE else (1, a.x + _WIDTH)
    reach = x + outward * min(1.25 * _SIDE, 24 * sqrt(stop - start))
    y, end_y = a.y + _HEIGHT / 2, b.y + _HEIGHT / 2
    path = f"M{x:.0f} {y:.0f}C{reach:.0f} {y:.0f} {reach:.0f} {end_y:.0f} {x:.0f} {end_y:.0f}"
    return path, (x + 0.75 * (reach - x), (y + end_y) / 2)


def _drawing(boxes: Sequence[Box], curves: Sequence[Curve]) -> ui.Html:
    width = _SIDE + max(box.x + _WIDTH for box in boxes)
    height = max(box.y for box in boxes) + _PITCH
    most = max((curve.size_bytes for curve in curves), default=1)
    return ui.element(
        "svg",
        *(_curve(curve, boxes, most) for curve in curves),
        *(_box_html(place, box) for place, box in enumerate(boxes)),
        *_labels(curves),
        viewBox=f"0 0 {width:.0f} {height:.0f}",
        width=f"{width:.0f}",
        height=f"{height:.0f}",
        role="group",
        aria_label="Sections, and the tensors between them",
    )


def _curve(curve: Curve, boxes: Sequence[Box], most_bytes: int) -> ui.Html:
    a, b = boxes[curve.start], boxes[curve.stop]
    title = f"{format_bytes(curve.size_bytes)} from {_numbers(a)} {a.name} to {_numbers(b)} {b.name}"
    return ui.element(
        "path",
        ui.element("title", title),
        d=curve.path,
        stroke_width=f"{1 + 6 * sqrt(curve.size_bytes / most_bytes):.1f}",
        data_from=curve.start,
        data_to=curve.stop,
    )


def _numbers(box: Box) -> str:
    return str(box.first) if box.first == box.last else f"{box.first}-{box.last}"


def _box_html(place: int, box: Box) -> ui.Html:
    def text(words: str, y: float, class_: str) -> ui.Html:
        return ui.element("text", words, x=f"{box.x + 14:.0f}", y=f"{box.y + y:.0f}", class_=class_)

    title = f"{_numbers(box)} {box.name}\n{box.facts}\n{box.line}"
    at = {"x": f"{box.x:.0f}", "y": f"{box.y:.0f}"}
    bar = f"{max(1.0, (_WIDTH - 6) * box.share):.1f}"
    return ui.element(
        "g",
        ui.element("title", title),
        ui.element("rect", **at, width=_WIDTH, height=_HEIGHT, rx=5, class_="frame"),
        ui.element("rect", **at, width=6, height=_HEIGHT, fill=ui.KINDS[box.kind]),
        ui.element(
            "rect", x=f"{box.x + 6:.0f}", y=f"{box.y + _HEIGHT - 4:.0f}", width=bar, height=4, fill=ui.VERMILLION
        ),
        text(f"{_numbers(box)}  {_cut(box.name, _NAME_LETTERS - len(_numbers(box)))}", 16, "name"),
        text(box.facts, 31, "facts"),
        text(_cut(box.line, _LINE_LETTERS), 45, "line"),
        class_="box",
        tabindex=0,
        role="button",
        data_box=place,
        data_first=box.first,
        data_last=box.last,
    )


def _cut(text: str, most: int) -> str:
    """The end of `text`, which says more than its beginning."""
    return text if len(text) <= most else f"\u2026{text[1 - most :]}"


def _labels(curves: Sequence[Curve]) -> Iterator[ui.Html]:
    """The bytes of the largest curves, as many as have room."""
    placed: list[tuple[float, float]] = []
    for curve in curves:
        x, y = curve.label
        if all(abs(x - other_x) > _LABEL[0] or abs(y - other_y) > _LABEL[1] for other_x, other_y in placed):
            placed.append(curve.label)
            at: Mapping[str, str] = {"x": f"{x:.0f}", "y": f"{y + 4:.0f}"}
            yield ui.element("text", format_bytes(curve.size_bytes), **at, class_="size")
