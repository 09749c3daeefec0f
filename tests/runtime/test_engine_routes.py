"""Gradients that their kernels write to their place, and those that must be copied there."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from sambasim.ir.graph import Graph, Node, Output, Ref, Section, SectionKind
from sambasim.ir.program import Program
from sambasim.ir.types import Symbol, SymbolKind, TensorType
from sambasim.runtime.engine.routes import find_routes
from sambasim.runtime.executor import Executor

SQUARE = TensorType("float32", (2, 2))
X = torch.tensor([[1.0, 2.0], [3.0, 4.0]])


def node(operator: str, reads: Sequence[str], result: str, *more: int) -> Node:
    return Node(f"of_{result}", f"aten.{operator}", (*map(Ref, reads), *more), (), (result,))


MM, T = "mm.default", "t.default"
PRODUCT = node(MM, ("x", "x"), "product")
TWICE = (PRODUCT, node(T, ("product",), "turned"), node(T, ("turned",), "value"))


def positions(nodes: Sequence[Node], sections: Sequence[int], keep: Sequence[str] = (), also: Sequence[str] = ()) -> (
    list[tuple[int, int, tuple[int, ...]]]
):  # fmt: skip
    """Maker, last and unread of each route to `value` and `also`."""
    return [(r.maker, r.last, r.unread) for r in find_routes(nodes, sections, ["value", *also], keep)]


def test_a_product_seen_through_views_is_written_and_the_views_are_not_needed() -> None:
    assert positions(TWICE, (0, 0, 0)) == [(0, 2, (2, 1))]


def test_a_view_that_others_read_stays() -> None:
    reader = node("relu.default", ("turned",), "other")
    assert positions((*TWICE, reader), (0, 0, 0, 0)) == [(0, 2, (2,))]


def test_what_a_later_section_reads_is_copied() -> None:
    """A peer may write the mean over it before that section runs; also where it is read by way of a view."""
    for read in ("product", "turned", "value"):
        reader = node("relu.default", (read,), "other")
        assert positions((*TWICE, reader), (0, 0, 0, 1)) == []
        assert len(positions((*TWICE, reader), (0, 0, 1, 1))) == 1


def test_what_is_handed_out_or_is_two_gradients_is_copied() -> None:
    assert positions(TWICE, (0, 0, 0), keep=["turned"]) == []
    assert positions(TWICE, (0, 0, 0), also=["product"]) == []


def test_an_operator_that_cannot_write_to_a_place_is_copied() -> None:
    assert positions((node("relu.default", ("x",), "value"),), (0,)) == []


class Counted:
    """A graph of `nodes` whose gradients are the values in `stored`, and the tensors they go to."""

    def __init__(self, nodes: Sequence[Node], *stored: str) -> None:
        self.places = {f"{value}__grad": torch.full((2, 2), torch.nan) for value in stored}
        symbols = {"x": Symbol("x", SymbolKind.INPUT, SQUARE, 0)}
        symbols |= {name: Symbol(name, SymbolKind.GRADIENT, SQUARE, 0) for name in self.places}
        outputs = tuple(Output(value, f"{value}__grad") for value in stored)
        values = {name: SQUARE for one in nodes for name in one.results if name is not None}
        section = Section(0, SectionKind.BCKWD, "bwd", 0, len(nodes))
        graph = Graph("training", ("x",), tuple(nodes), outputs, values, (section,))
        program = Program("net", 2, symbols, graph, graph, None, None, False, (), (), (), None, 512)
        self.executable = Executor(graph, program, lambda name: self.places.get(name, X))

    def calls(self, *, accumulate: bool = False) -> list[str]:
        """The kernels of one pass, in order, without how the first one sees a place."""
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            self.executable.run(accumulate=accumulate)
        events = sorted(profile.events(), key=lambda event: event.time_range.start)
        names = [event.name for event in events if event.cpu_parent is None]
        return [name for name in names if name.startswith("aten::") and name != "aten::as_strided"]


@pytest.mark.parametrize("turns", [0, 2])
def test_from_the_second_pass_on_nothing_is_copied(turns: int) -> None:
    counted = Counted(TWICE[: turns + 1], "value" if turns else "product")
    (place,) = counted.places.values()
    assert counted.calls() == ["aten::mm"] + ["aten::t"] * turns + ["aten::copy_"]
    assert place.equal(X @ X)
    place.fill_(torch.nan)
    assert counted.calls() == ["aten::mm"]
    assert place.equal(X @ X)
    assert counted.calls(accumulate=True)[-1] == "aten::add_"
    assert place.equal(2 * (X @ X))


def test_a_gradient_that_lies_otherwise_than_its_place_goes_on_being_copied() -> None:
    """The kernel would have to write columns where it writes rows: it might take another way, with other bits."""
    counted = Counted(TWICE[:2], "turned")
    for _ in range(2):
        assert counted.calls() == ["aten::mm", "aten::t", "aten::copy_"]
        assert _only(counted).equal((X @ X).t())


def test_views_of_symbols_are_taken_once() -> None:
    nodes = (node(T, ("x",), "turned"), node(MM, ("turned", "x"), "value"))
    counted = Counted(nodes, "value")
    assert counted.calls() == ["aten::mm", "aten::copy_"]
    assert _only(counted).equal(X.t() @ X)


def _only(counted: Counted) -> Tensor:
    (place,) = counted.places.values()
    return place
