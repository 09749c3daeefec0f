"""All operators of the step's graph, with the lines of the user's program that they come from."""

from sambasim.costs.work import work_of
from sambasim.ir.graph import Node
from sambasim.ir.operators import OPERATORS
from sambasim.report.page.html import visible
from sambasim.report.page.part import Part, live_table
from sambasim.simulation.prediction import Prediction


class _Strings:
    """Texts, each kept once: names of modules and source lines repeat a lot."""

    def __init__(self) -> None:
        self._places: dict[str, int] = {}

    def place(self, text: str) -> int:
        return self._places.setdefault(text, len(self._places))

    @property
    def all(self) -> list[str]:
        return list(self._places)


def operators(prediction: Prediction) -> Part:
    """A row for each node of the graph."""
    strings = _Strings()
    section_of: dict[int, int] = {}
    for number, section in enumerate(prediction.alone.sections):
        section_of.update(dict.fromkeys(range(*section.nodes), number))
    working = {stage.node for stage in work_of(prediction.graph, prediction.program.symbols).stages}
    rows = [
        [
            place,
            section_of.get(place),
            place in working,
            *(strings.place(visible(text)) for text in _words(prediction, node)),
            node.source.line if node.source else None,
        ]
        for place, node in enumerate(prediction.graph.nodes)
    ]
    return Part(
        id="operators",
        title="Operators and source lines",
        lead=(
            "Every operator of the graph in order. A backward operator has the line of its forward. Pale ones are "
            "views, or depend on nothing that changes: they take no time on the device."
        ),
        measured=False,
        body=live_table("operators-rows", "Search: name, module, file:line, code, shape"),
        data={"operators": rows, "strings": strings.all},
    )


def _words(prediction: Prediction, node: Node) -> tuple[str, ...]:
    """Operator, kind, result, name, module, file, code."""
    graph = prediction.graph
    types = ", ".join(str(graph.values[name]) for name in node.results if name is not None and name in graph.values)
    file, code = (node.source.file, node.source.code.strip()) if node.source else ("", "")
    return node.operator, OPERATORS[node.operator].kind.value, types, node.name, node.module, file, code
