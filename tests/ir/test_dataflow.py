"""What sections read and write, and when groups may be reduced and updated."""

from dataclasses import replace

from sambasim.ir.dataflow import Readiness, groups_of, pass_and_update, readiness, section_effects
from sambasim.ir.graph import Graph, Node, Output, Ref, Section, SectionKind
from sambasim.ir.program import Member, ParameterGroup, Program
from sambasim.ir.types import Symbol, SymbolKind, TensorType
from sambasim.runtime.measure.operands import flat_program

SQUARE = TensorType("float32", (8, 8))


def _program(nodes: list[Node], cuts: list[int], outputs: list[Output]) -> Program:
    """`cuts` are where sections end; the first is FWD, the others BCKWD, and an OPT section follows."""
    starts = [0, *cuts[:-1]]
    sections = [
        Section(index, SectionKind.BCKWD if index else SectionKind.FWD, f"s{index}", start, stop)
        for index, (start, stop) in enumerate(zip(starts, cuts, strict=True))
    ]
    optimizer = Node("opt", "opt.sgd", ("group_0",))
    sections.append(Section(len(cuts), SectionKind.OPT, "opt", len(nodes), len(nodes) + 1))
    values = {name: SQUARE for node in nodes for name in node.results if name}
    graph = Graph("training", ("w", "x"), (*nodes, optimizer), tuple(outputs), values, tuple(sections))
    group = ParameterGroup("group_0", "float32", 64, (Member("w", "w__grad", 0, 64),), 0, {})
    symbols = {name: Symbol(name, SymbolKind.PARAMETER, SQUARE) for name in ("w", "x")}
    return replace(flat_program(64), training=graph, groups=(group,), symbols=symbols)


def _mm(result: str, a: str, b: str) -> Node:
    return Node(result, "aten.mm.default", (Ref(a), Ref(b)), results=(result,))


def _t(result: str, a: str) -> Node:
    return Node(result, "aten.t.default", (Ref(a),), results=(result,))


GRADIENT = Output("grad", "w__grad")


def test_a_gradient_is_complete_after_the_section_that_makes_it() -> None:
    program = _program([_mm("y", "x", "w"), _mm("grad", "x", "y"), _mm("z", "x", "y")], [1, 2, 3], [GRADIENT])
    assert program.training is not None
    assert [len(part) for part in pass_and_update(program.training)] == [3, 1]
    assert readiness(program) == {"group_0": Readiness(reduce=2, update=2)}


def test_a_parameter_that_is_read_later_may_not_be_updated_before() -> None:
    program = _program([_mm("y", "x", "w"), _mm("grad", "x", "y"), _mm("z", "y", "w")], [1, 2, 3], [GRADIENT])
    assert readiness(program) == {"group_0": Readiness(reduce=2, update=3)}


def test_a_view_of_a_parameter_counts_as_the_parameter() -> None:
    nodes = [_t("wt", "w"), _mm("y", "x", "wt"), _mm("grad", "x", "y"), _t("again", "wt"), _mm("z", "y", "again")]
    assert readiness(_program(nodes, [2, 3, 5], [GRADIENT])) == {"group_0": Readiness(reduce=2, update=3)}


def test_what_is_computed_from_a_parameter_is_no_view_of_it() -> None:
    nodes = [_mm("y", "x", "w"), _mm("grad", "x", "y"), _mm("z", "y", "y")]
    assert readiness(_program(nodes, [1, 2, 3], [GRADIENT]))["group_0"].update == 2


def test_a_product_that_a_compiler_may_leave_out_counts_as_its_operand() -> None:
    same = Node("same", "aten.mul.Tensor", (Ref("w"), Ref("x")), results=("same",))
    nodes = [same, _mm("grad", "x", "same"), _mm("z", "x", "same")]
    assert readiness(_program(nodes, [1, 2, 3], [GRADIENT]))["group_0"].update == 3


def test_an_output_that_is_a_view_of_a_parameter_is_read_after_the_pass() -> None:
    nodes = [_t("wt", "w"), _mm("grad", "x", "wt")]
    program = _program(nodes, [1, 2], [GRADIENT, Output("wt", "out")])
    assert readiness(program) == {"group_0": Readiness(reduce=2, update=3)}


def test_a_gradient_that_no_node_makes_is_there_when_the_pass_has_ended() -> None:
    program = _program([_mm("y", "x", "w"), _mm("z", "x", "y")], [1, 2], [Output("x", "w__grad")])
    assert readiness(program) == {"group_0": Readiness(reduce=3, update=3)}


def test_a_section_reads_what_comes_from_outside_and_writes_what_is_used_outside() -> None:
    program = _program([_mm("y", "x", "w"), _mm("grad", "x", "y"), _mm("z", "x", "y")], [1, 3], [GRADIENT])
    graph = program.training
    assert graph is not None
    forward, backward, update = (section_effects(program, graph, section) for section in graph.sections)
    assert forward.reads == {"x", "w"}
    assert forward.writes == {"y"}
    assert backward.reads == {"x", "y"}
    assert backward.writes == {"w__grad"}
    assert update.reads == {"group_0.gradient", "group_0.parameter"}
    assert update.writes == {"group_0.parameter"}


def test_only_the_update_works_on_groups() -> None:
    assert groups_of(_mm("y", "x", "w")) == ()
    assert groups_of(Node("r", "comm.all_reduce", (Ref("y"),), (("axis", "dp"),), ("r",))) == ()
    assert groups_of(Node("s", "opt.square_sums", (("group_0", "group_1"),))) == ("group_0", "group_1")
    assert groups_of(Node("s", "comm.all_gather", ("group_0",), (("axis", "dp"),))) == ("group_0",)
