"""Which gradients kernels write directly to their destination, and which nodes inductor compiles together."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from sambasim.ir.graph import Graph, Node, Output, Ref, Section, SectionKind
from sambasim.ir.program import Program
from sambasim.ir.types import Symbol, SymbolKind, TensorType
from sambasim.runtime.engine.routes import find_routes
from sambasim.runtime.engine.units import BACKWARD_UNITS, Region, Step, Steps, Unit, choose_units
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


FWD, BCKWD = SectionKind.FWD, SectionKind.BCKWD


def test_the_forward_is_one_unit_and_the_backward_a_few_of_about_the_same_size() -> None:
    sections = [(FWD, 5), (FWD, 7), *[(BCKWD, 3)] * 26]
    units = choose_units(sections)
    assert units[0] == Unit(0, 12, 2)
    assert len(units) == 1 + BACKWARD_UNITS
    assert [unit.sections for unit in units[1:]] == [7, 6, 7, 6]
    assert [unit.start for unit in units[1:]] == [unit.stop for unit in units[:-1]]
    assert units[-1].stop == 12 + 3 * 26


def test_few_sections_are_a_unit_each() -> None:
    assert choose_units([(FWD, 4)]) == [Unit(0, 4, 1)]
    assert choose_units([(FWD, 4), (BCKWD, 1), (BCKWD, 9)]) == [Unit(0, 4, 1), Unit(4, 14, 2)]
    assert choose_units([(FWD, 4), (BCKWD, 9), (BCKWD, 1)]) == [Unit(0, 4, 1), Unit(4, 13, 1), Unit(13, 14, 1)]


def planned(nodes: Sequence[Node], units: Sequence[Unit], stored: Sequence[str], taken: Sequence[int] = ()) -> (
    list[list[Step]]
):  # fmt: skip
    unit_of = [number for number, unit in enumerate(units) for _ in range(unit.start, unit.stop)]
    return Steps(nodes, taken, stored, find_routes(nodes, unit_of, stored, [])).of(units)


def test_a_product_that_is_only_a_gradient_comes_last_with_the_views_that_it_alone_reads() -> None:
    nodes = (
        node("relu.default", ("x",), "a"),
        node("t.default", ("a",), "a_t"),
        node("mm.default", ("a_t", "x"), "product"),
        node("t.default", ("product",), "gradient"),
        node("relu.default", ("a",), "loss"),
    )
    steps = planned(nodes, [Unit(0, 5, 1)], ["gradient", "loss"])
    assert steps == [[Region((), (0, 4), ("x",), ("a", "loss")), 1, 2, 3]]


def test_a_product_that_others_read_is_compiled_with_them() -> None:
    nodes = (node("mm.default", ("x", "x"), "gradient"), node("relu.default", ("gradient",), "loss"))
    steps = planned(nodes, [Unit(0, 2, 1)], ["gradient", "loss"])
    assert steps == [[Region((), (0, 1), ("x",), ("gradient", "loss"))]]


def test_a_view_of_what_another_unit_makes_is_taken_again() -> None:
    nodes = (
        node("relu.default", ("x",), "a"),
        node("t.default", ("a",), "a_t"),
        node("relu.default", ("a_t",), "b"),
        node("neg.default", ("a_t",), "c"),
    )
    steps = planned(nodes, [Unit(0, 3, 1), Unit(3, 4, 1)], ["b", "c"])
    assert steps == [[Region((), (0, 1, 2), ("x",), ("a", "b"))], [Region((1,), (3,), ("a",), ("c",))]]


def test_a_recurrent_layer_is_carried_out_by_its_own_kernel_in_between() -> None:
    nodes = (
        node("relu.default", ("x",), "a"),
        node("lstm_cell.default", ("a",), "b"),
        node("relu.default", ("b",), "c"),
    )
    steps = planned(nodes, [Unit(0, 3, 1)], ["c"])
    assert steps == [[Region((), (0,), ("x",), ("a",)), 1, Region((), (2,), ("b",), ("c",))]]


def test_a_view_of_a_symbol_that_is_taken_already_is_an_input() -> None:
    nodes = (node("t.default", ("weight",), "turned"), node("mm.default", ("x", "turned"), "y"))
    steps = planned(nodes, [Unit(0, 2, 1)], ["y"], taken=[0])
    assert steps == [[1]]  # the product is all that is left, and is stored
    more = (*nodes, node("relu.default", ("y",), "z"))
    steps = planned(more, [Unit(0, 3, 1)], ["z"], taken=[0])
    assert steps == [[Region((), (1, 2), ("x", "turned"), ("z",))]]
