"""What sections read and write, when groups may be reduced and updated; the mesh."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sambasim.errors import InternalError
from sambasim.ir.dataflow import Readiness, groups_of, pass_and_update, readiness, section_effects
from sambasim.ir.graph import Graph, Node, Output, Ref, Section, SectionKind
from sambasim.ir.mesh import Axis, Mesh, least_replicas, mesh_of, replica_mesh
from sambasim.ir.program import Member, ParameterGroup, Program
from sambasim.ir.types import Symbol, SymbolKind, TensorType
from sambasim.runtime.measure.paths import flat_program

SQUARE = TensorType("float32", (8, 8))


def program_of(nodes: list[Node], cuts: list[int], outputs: list[Output]) -> Program:
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
    group = ParameterGroup("group_0", "float32", 64, (Member("w", "w__grad", 0, 64, 0),), 0, {})
    symbols = {name: Symbol(name, SymbolKind.PARAMETER, SQUARE) for name in ("w", "x")}
    return replace(flat_program(64), training=graph, groups=(group,), symbols=symbols)


def times(result: str, a: str, b: str) -> Node:
    return Node(result, "aten.mm.default", (Ref(a), Ref(b)), results=(result,))


def _t(result: str, a: str) -> Node:
    return Node(result, "aten.t.default", (Ref(a),), results=(result,))


GRADIENT = Output("grad", "w__grad")


def test_a_gradient_is_complete_after_the_section_that_makes_it() -> None:
    program = program_of([times("y", "x", "w"), times("grad", "x", "y"), times("z", "x", "y")], [1, 2, 3], [GRADIENT])
    assert [len(part) for part in pass_and_update(program.step)] == [3, 1]
    assert readiness(program) == {"group_0": Readiness(reduce=2, update=2)}


def test_a_view_of_a_parameter_counts_as_the_parameter() -> None:
    nodes = [_t("wt", "w"), times("y", "x", "wt"), times("grad", "x", "y"), _t("again", "wt"), times("z", "y", "again")]
    assert readiness(program_of(nodes, [2, 3, 5], [GRADIENT])) == {"group_0": Readiness(reduce=2, update=3)}


def test_what_is_computed_from_a_parameter_is_no_view_of_it() -> None:
    nodes = [times("y", "x", "w"), times("grad", "x", "y"), times("z", "y", "y")]
    assert readiness(program_of(nodes, [1, 2, 3], [GRADIENT]))["group_0"].update == 2


def test_a_product_that_a_compiler_may_leave_out_counts_as_its_operand() -> None:
    same = Node("same", "aten.mul.Tensor", (Ref("w"), Ref("x")), results=("same",))
    nodes = [same, times("grad", "x", "same"), times("z", "x", "same")]
    assert readiness(program_of(nodes, [1, 2, 3], [GRADIENT]))["group_0"].update == 3


def test_an_output_that_is_a_view_of_a_parameter_is_read_after_the_pass() -> None:
    nodes = [_t("wt", "w"), times("grad", "x", "wt")]
    program = program_of(nodes, [1, 2], [GRADIENT, Output("wt", "out")])
    assert readiness(program) == {"group_0": Readiness(reduce=2, update=3)}


def test_a_gradient_that_no_node_makes_is_there_when_the_pass_has_ended() -> None:
    program = program_of([times("y", "x", "w"), times("z", "x", "y")], [1, 2], [Output("x", "w__grad")])
    assert readiness(program) == {"group_0": Readiness(reduce=3, update=3)}


def test_a_section_reads_what_comes_from_outside_and_writes_what_is_used_outside() -> None:
    program = program_of([times("y", "x", "w"), times("grad", "x", "y"), times("z", "x", "y")], [1, 3], [GRADIENT])
    effects = [section_effects(program, program.step, section) for section in program.step.sections]
    assert [(set(one.reads), set(one.writes)) for one in effects] == [
        ({"x", "w"}, {"y"}),
        ({"x", "y"}, {"w__grad"}),
        ({"group_0.gradient", "group_0.parameter"}, {"group_0.parameter"}),
    ]


def test_only_the_update_works_on_groups() -> None:
    assert groups_of(times("y", "x", "w")) == ()
    assert groups_of(Node("r", "comm.all_reduce", (Ref("y"),), (("axis", "dp"),), ("r",))) == ()
    assert groups_of(Node("s", "opt.square_sums", (("group_0", "group_1"),))) == ("group_0", "group_1")
    assert groups_of(Node("s", "comm.all_gather", ("group_0",), (("axis", "dp"),))) == ("group_0",)


sizes = st.dictionaries(st.sampled_from(["dp", "pp", "tp"]), st.integers(1, 4), min_size=1)


def test_the_last_axis_is_the_innermost() -> None:
    mesh = Mesh({"dp": 2, "tp": 3})
    assert mesh.coordinates(4) == {"dp": 1, "tp": 1}
    assert mesh.group(4, "tp") == (3, 4, 5)
    assert mesh.group(4, "dp") == (1, 4)


@given(sizes)
def test_the_groups_along_an_axis_share_no_rank_and_leave_none_out(sizes: dict[str, int]) -> None:
    mesh = Mesh(sizes)
    for axis, size in sizes.items():
        groups = {mesh.group(rank, axis) for rank in range(mesh.world_size)}
        assert sorted(rank for group in groups for rank in group) == list(range(mesh.world_size))
        for group in groups:
            assert [mesh.coordinates(rank)[axis] for rank in group] == list(range(size))


def test_the_axis_of_replicas_takes_the_ranks_that_the_others_leave() -> None:
    axes = (Axis("dp", 2, at_run_time=True), Axis("tp", 2))
    assert mesh_of(axes, 4).sizes == {"dp": 2, "tp": 2}
    assert mesh_of(axes, 16).sizes == {"dp": 8, "tp": 2}


def test_chips_of_a_replica_are_along_the_axis_of_replicas() -> None:
    axes = (Axis("dp", 4, at_run_time=True, chips=2), Axis("pp", 2))
    assert (least_replicas(axes), replica_mesh(axes).sizes) == (2, {"dp": 2, "pp": 2})
    assert mesh_of(axes, 12).sizes == {"dp": 6, "pp": 2}
    with pytest.raises(InternalError, match="with 2 chips a replica"):
        mesh_of(axes, 10)


def test_an_axis_that_is_not_there_has_one_rank() -> None:
    mesh = Mesh({"dp": 2})
    assert (mesh.group(1, "pp"), mesh.size("pp"), mesh.coordinate(1, "pp")) == ((1,), 1, 0)
