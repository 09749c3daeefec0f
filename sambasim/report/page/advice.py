"""The predicted part about changes that would make the step quicker, and about other devices."""

from sambasim.report.advice import BACKED, NO_CHANGE, compared_text, gain_text, how_text, step_text
from sambasim.report.findings import Findings
from sambasim.report.page import ui
from sambasim.simulation.advice import Change
from sambasim.units import format_rate, format_seconds


def advice(found: Findings) -> ui.Part:
    changes = found.advice.changes
    lead = (
        "Each change is predicted again by itself, and compared on the same hardware. Those that gain more than 2 % "
        "are listed, best first; gains do not add up."
    )
    listed = ui.element("ol", *map(_item, changes), class_="advice") if changes else ui.element("p", NO_CHANGE)
    return ui.Part("advice", "What would make it quicker", lead, ui.joined(listed, _devices(found)))


def _item(change: Change) -> ui.Html:
    numbers = ui.element("div", ui.element("b", f"step {step_text(change)}"), compared_text(change), class_="gain")
    words = ui.element("div", ui.element("b", change.what), how_text(change), class_="how")
    return ui.element("li", ui.element("span", gain_text(change), class_="factor"), words, numbers)


def _devices(found: Findings) -> ui.Html:
    rows = [
        (one.device, "does not fit", "")
        if one.speed is None
        else (one.device, format_seconds(one.speed.step_s), format_rate(one.speed.samples_per_s))
        for one in found.advice.devices
    ]
    title = ui.element("h3", "One replica on a whole RDU")
    table = ui.table(("device", "step", "samples/s"), rows, class_="fitted")
    return ui.element("div", title, table, ui.element("p", BACKED, class_="muted"), class_="under devices")
