"""What sections read and write, when groups may be reduced and updated; the mesh."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sambasim.errors import InternalError
from sambasim.ir.dataflow import groups_of, pass_and_update, readiness, section_effects
from sambasim.ir.graph import Graph, Node, Output, Ref, Section, SectionKind, with_sections
from sambasim.ir.mesh import Axis, Mesh, least_replicas, mesh_of, replica_mesh
from sambasim.ir.program import Member, ParameterGroup, Program
from sambasim.ir.types import Symbol, SymbolKind, TensorType
from sambasim.runtime.measure.paths import flat_program

SQUARE = TensorType("float32", (8, 8))


def program_of(nodes: list[Node], cuts: list[int], outputs: list[Output]) -> Program:
    """`cuts` are where sections end; the first is FWD, the others BCKWD, and an OPT section follows."""
    kinds = [SectionKind.FWD, *[SectionKind.BCKWD] * (len(cuts) - 1), SectionKind.OPT]
    sections = [Section(index, kind, f"s{index}", 0, 0) for index, kind in enumerate(kinds)]
    parts = [*(nodes[start:stop] for start, stop in pairwise([0, *cuts])), [Node("opt", "opt.sgd", ("group_0",))]]
    values = {name: SQUARE for node in nodes for name in node.results if name}
    whole = Graph("training", ("w", "x"), (), tuple(outputs), values)
    graph = with_sections(whole, zip(sections, parts, strict=True))
    group = ParameterGroup("group_0", "float32", 64, (Member("w", "w__grad", 0, 64, 0),), 0, {})
    symbols = {name: Symbol(name, SymbolKind.PARAMETER, SQUARE) for name in ("w", "x")}
    return replace(flat_program(64), training=graph, groups=(group,), symbols=symbols)


def times(result: str, a: str, b: str) -> Node:
    return Node(result, "aten.mm.default", (Ref(a), Ref(b)), results=(result,))


def _t(result: str, a: str) -> Node:
    return Node(result, "aten.t.default", (Ref(a),), results=(result,))


GRADIENT = Output("grad", "w__grad")


Y, GRAD, Z = times("y", "x", "w"), times("grad", "x", "y"), times("z", "x", "y")
T = _t("wt", "w")
SAME = Node("same", "aten.mul.Tensor", (Ref("w"), Ref("x")), results=("same",))
OF_SAME = [times("grad", "x", "same"), times("z", "x", "same")]
OF_VIEW = [times("y", "x", "wt"), GRAD, _t("again", "wt"), times("z", "y", "again")]
READINESS: dict[str, tuple[list[Node], list[int], list[Output], tuple[int, int]]] = {
    "after the section that makes it": ([Y, GRAD, Z], [1, 2, 3], [GRADIENT], (2, 2)),
    "a view of a parameter counts as it": ([T, *OF_VIEW], [2, 3, 5], [GRADIENT], (2, 3)),
    "what is computed from it is no view": ([Y, GRAD, times("z", "y", "y")], [1, 2, 3], [GRADIENT], (2, 2)),
    "a product that may be left out": ([SAME, *OF_SAME], [1, 2, 3], [GRADIENT], (2, 3)),
    "a view that is an output is read after the pass": (
        [T, times("grad", "x", "wt")], [1, 2], [GRADIENT, Output("wt", "out")], (2, 3),
    ),
    "one that no node makes, after the pass": ([Y, Z], [1, 2], [Output("x", "w__grad")], (3, 3)),
}  # fmt: skip


@pytest.mark.parametrize("name", READINESS)
def test_when_a_gradient_is_complete_and_a_parameter_is_read_no_more(name: str) -> None:
    nodes, cuts, outputs, expected = READINESS[name]
    program = program_of(nodes, cuts, outputs)
    assert [len(part) for part in pass_and_update(program.step)] == [len(cuts), 1]
    ready = readiness(program)["group_0"]
    assert (ready.reduce, ready.update) == expected


def test_a_section_reads_what_comes_from_outside_and_writes_what_is_used_outside() -> None:
    program = program_of([Y, GRAD, Z], [1, 3], [GRADIENT])
    effects = [section_effects(program, program.step, section) for section in program.step.sections]
    assert effects == [
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
    assert (mesh.group(1, "pp"), mesh.size("pp"), mesh.coordinate(1, "pp")) == ((1,), 1, 0), "an axis that is not there"


@given(sizes)
def test_the_groups_along_an_axis_share_no_rank_and_leave_none_out(sizes: dict[str, int]) -> None:
    mesh = Mesh(sizes)
    for axis, size in sizes.items():
        groups = {mesh.group(rank, axis) for rank in range(mesh.world_size)}
        assert sorted(rank for group in groups for rank in group) == list(range(mesh.world_size))
        for group in groups:
            assert [mesh.coordinates(rank)[axis] for rank in group] == list(range(size))


def test_the_axis_of_replicas_takes_the_ranks_that_the_others_leave_and_the_chips() -> None:
    axes = (Axis("dp", 2, at_run_time=True), Axis("tp", 2))
    assert mesh_of(axes, 4).sizes == {"dp": 2, "tp": 2}
    assert mesh_of(axes, 16).sizes == {"dp": 8, "tp": 2}
    axes = (Axis("dp", 4, at_run_time=True, chips=2), Axis("pp", 2))
    assert (least_replicas(axes), replica_mesh(axes).sizes) == (2, {"dp": 2, "pp": 2})
    assert mesh_of(axes, 12).sizes == {"dp": 6, "pp": 2}
    with pytest.raises(InternalError, match="with 2 chips a replica"):
        mesh_of(axes, 10)
