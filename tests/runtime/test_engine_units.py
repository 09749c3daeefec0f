"""What inductor gets to compile together, without compiling it."""

from collections.abc import Sequence

from sambasim.ir.graph import Node, Ref, SectionKind
from sambasim.runtime.engine.routes import find_routes
from sambasim.runtime.engine.units import BACKWARD_UNITS, Region, Step, Steps, Unit, choose_units

FWD, BCKWD = SectionKind.FWD, SectionKind.BCKWD


def node(operator: str, reads: Sequence[str], result: str) -> Node:
    return Node(f"of_{result}", f"aten.{operator}", tuple(map(Ref, reads)), (), (result,))


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
