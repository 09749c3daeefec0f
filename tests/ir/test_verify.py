"""For each invariant, programs that break just that one."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeAlias

import pytest

from sambasim.errors import InvariantError
from sambasim.ir.graph import Node, Output, Ref, Section, SectionKind, with_sections
from sambasim.ir.mesh import Axis
from sambasim.ir.program import Optimizer, Program
from sambasim.ir.schedule import make
from sambasim.ir.types import Cut, Symbol, SymbolKind, TensorType
from sambasim.ir.verify import Progress, verify
from tests.mpi.bodies.by_hand import PROGRAMS
from tests.pef.samples import inference_program, sample_program

Change: TypeAlias = Callable[[Program], Program]
WEIGHT, GRADIENT, GROUP = "logreg__lin_layer__weight", "logreg__lin_layer__weight__grad", "group0"


def fields(**changed: Any) -> Change:
    return lambda program: replace(program, **changed)


def symbol(name: str, /, **changed: Any) -> Change:
    return lambda p: replace(p, symbols={**p.symbols, name: replace(p.symbols[name], **changed)})


def group(**changed: Any) -> Change:
    return lambda program: replace(program, groups=(replace(program.groups[0], **changed),))


def member(at: int, **changed: Any) -> Change:
    def change(program: Program) -> Program:
        members = list(program.groups[0].members)
        members[at] = replace(members[at], **changed)
        return group(members=tuple(members))(program)

    return change


def training(**changed: Any) -> Change:
    return lambda program: replace(program, training=replace(program.step, **changed))


def nodes(change: Callable[[Node], Node | None], kind_of: Mapping[SectionKind, SectionKind] | None = None) -> Change:
    """`change` of each node, which None leaves out, and other kinds of sections."""

    def changed(program: Program) -> Program:
        step = program.step
        sections = [replace(one, kind=(kind_of or {}).get(one.kind, one.kind)) for one in step.sections]
        left = [filter(None, map(change, step.section_nodes(one))) for one in sections]
        return replace(program, training=with_sections(step, zip(sections, left, strict=True)))

    return changed


def operator(name: str, /, **changed: Any) -> Change:
    return nodes(lambda node: replace(node, **changed) if node.operator == name else node)


def keywords(name: str, **changed: str) -> Change:
    def change(node: Node) -> Node:
        kwargs = tuple((dict(node.kwargs) | changed).items())
        return replace(node, kwargs=kwargs) if node.operator == name else node

    return nodes(change)


def without(name: str) -> Change:
    return nodes(lambda node: None if node.operator == name else node)


def swapped(program: Program) -> Program:
    """The reduction of gradients after the sum of their squares."""
    *first, reduce, norm, update, gather = program.step.sections
    in_order = [program.step.section_nodes(section) for section in (*first, norm, reduce, update, gather)]
    sections, start = [], 0
    for index, (section, inside) in enumerate(zip((*first, norm, reduce, update, gather), in_order, strict=True)):
        sections.append(replace(section, index=index, start=start, stop=start + len(inside)))
        start += len(inside)
    return training(nodes=tuple(node for inside in in_order for node in inside), sections=tuple(sections))(program)


def without_sum(node: Node) -> Node | None:
    if node.operator == "comm.all_reduce":
        return None
    return replace(node, args=(Ref("sums"),)) if node.operator == "opt.total_norm" else node


def on_two_stages(program: Program) -> Program:
    """The evaluation, with a schedule and its axis, alone."""
    graph = replace(program.evaluation, sections=(replace(program.evaluation.sections[0], stage=2),))
    mesh, schedule = (*program.mesh, Axis("pp", 2)), make("gpipe", 2, 2)
    return replace(program, evaluation=graph, mesh=mesh, schedule=schedule)


FORWARD, BACKWARD = SectionKind.FWD, SectionKind.BCKWD
FLOATS = TensorType("float32", (3, 2))
BROKEN: list[tuple[Any, ...]] = [
    (1, lambda p: replace(p, symbols={**p.symbols, "t": Symbol("t", SymbolKind.CONSTANT, FLOATS, 0)})),
    (1, symbol("x", name="y"), "symbol y is filed under x"),
    (1, lambda p: training(values={name: one for name, one in p.step.values.items() if name != "t"})(p)),
    (1, operator("aten.addmm.default", results=("t",))),
    (2, operator("aten.t.default", args=(Ref("later"),))),
    (2, lambda p: training(inputs=(*p.step.inputs, "nothing"))(p)),
    (2, lambda p: training(outputs=(*p.step.outputs, Output("nothing", "logits")))(p)),
    (2, lambda p: training(outputs=(*p.step.outputs, Output("t", "nothing")))(p)),
    (3, operator("aten.t.default", operator="aten.from_file.default")),
    (3, operator("aten.t.default", operator="memory.release")),
    (3, fields(optimizers=(Optimizer("sgd0", "os", ("momentum",)),)), "the optimizer os is not permitted"),
    (4, lambda p: training(sections=p.step.sections[:-1])(p)),
    (4, lambda p: training(sections=(replace(p.step.sections[0], index=1), *p.step.sections[1:]))(p)),
    (4, lambda p: training(sections=(replace(p.step.sections[0], stop=3), *p.step.sections[1:]))(p)),
    (5, swapped),
    (6, lambda p: training(outputs=(p.step.outputs[0], Output("d_t", GRADIENT), p.step.outputs[2]))(p)),
    (7, symbol("x", offset=None)),
    (7, symbol("x", offset=-512)),
    (7, symbol("x", offset=64)),
    (7, symbol("x", offset=6144)),
    (7, symbol("x", offset=4096), "x and target overlap in device memory"),
    (7, symbol("loss", offset=0)),
    (7, group(regions={"parameter": 512, "gradient": 1024, "momentum": 6144})),
    (8, group(numel=129)),
    (8, group(regions={"parameter": 512, "gradient": 1024})),
    (8, group(optimizer=1)),
    (8, member(1, start=63)),
    (8, member(1, start=0)),
    (8, member(1, numel=66)),
    (8, symbol(GRADIENT, offset=1152)),
    (9, lambda p: replace(p, groups=(p.groups[0], p.groups[0]))),
    (9, member(0, gradient=WEIGHT)),
    (9, member(1, parameter=WEIGHT)),
    (9, lambda p: group(members=p.groups[0].members[:1])(p)),
    (10, fields(mesh=())),
    (10, fields(mesh=(Axis("dp", 0),))),
    (10, fields(mesh=(Axis("dp", 3, at_run_time=True, chips=2),))),
    (10, fields(mesh=(Axis("dp", 2, at_run_time=True, chips=0),))),
    (10, fields(mesh=(Axis("dp", 4, chips=2),))),
    (10, fields(reduce_buffer=None, zero=0)),
    (10, fields(reduce_buffer="x")),
    (10, fields(zero=4)),
    (10, group(wrapper=None)),
    (10, group(wrapper="x")),
    (10, symbol("loss", cuts=(Cut("tp", 0, 2),)), "loss is cut otherwise than the mesh"),
    (10, keywords("comm.reduce_scatter", op="sum")),
    (10, keywords("comm.reduce_scatter", axis="tp")),
    (10, without("comm.all_gather")),
    (11, nodes(without_sum)),
    (11, nodes(lambda node: replace(node, args=node.args[:1]) if node.operator == "opt.sgd" else node)),
    (11, keywords("comm.all_reduce", op="mean")),
    (11, operator("comm.all_reduce", operator="comm.broadcast")),
    (11, without("opt.sgd")),
    (11, member(1, block=2)),
    (11, fields(loss="logits")),
    (11, lambda p: training(outputs=p.step.outputs[:2])(p)),
    (11, fields(training=None), "without a training step has parameter groups"),
    (12, fields(batch_size=0)),
    (12, fields(device_bytes=1 << 47)),
    (12, symbol("loss", type=TensorType("float8", ()))),
    (12, symbol("loss", type=TensorType("float32", (1,) * 65))),
    (12, symbol("loss", type=TensorType("float32", (-1,)))),
    (12, group(state_dtype="float32")),
    (13, nodes(lambda node: node, {FORWARD: BACKWARD, BACKWARD: FORWARD})),
    (13, nodes(lambda node: node, {FORWARD: SectionKind.OPT})),
    (13, operator("opt.sgd", args=("group1", Ref("norm")))),
    (13, lambda p: replace(p, evaluation=replace(p.evaluation, sections=(Section(0, BACKWARD, "b", 0, 1),)))),
    (14, symbol("x", type=TensorType("float32", (5, 3)))),
    (15, lambda p: training(outputs=(*p.step.outputs, Output("t", "logreg__mask")))(p)),
    (16, fields(schedule=make("gpipe", 1, 1))),
    (16, on_two_stages),
    (17, symbol(WEIGHT, torch_names=())),
    (17, symbol(WEIGHT, torch_names=("lin_layer.bias",))),
]


@pytest.mark.parametrize("at", range(len(BROKEN)), ids=[f"{number}-{at}" for at, (number, *_) in enumerate(BROKEN)])
def test_a_program_that_breaks_an_invariant_is_refused_with_its_number(at: int) -> None:
    number, change, *said = BROKEN[at]
    verify(sample_program())
    with pytest.raises(InvariantError) as caught:
        verify(change(sample_program()))
    assert caught.value.number == number, caught.value.what
    assert all(text in caught.value.what for text in said)


@pytest.mark.parametrize(
    "how", [{"dim": 2}, {"dim": -1}, {"dim": 0}, {"dim": 1, "outer": 0}, {"dim": 1, "outer": 5}, {"dim": None}]
)
def test_a_node_that_joins_parts_otherwise_than_its_types_is_refused(how: dict[str, Any]) -> None:
    program = PROGRAMS["ring"]
    verify(program, Progress.CAPTURED)
    kwargs = (("axis", "ring"), *how.items())
    changed = [replace(n, kwargs=kwargs) if n.operator == "comm.all_gather" else n for n in program.evaluation.nodes]
    with pytest.raises(InvariantError, match="invariant 10"):
        verify(replace(program, evaluation=replace(program.evaluation, nodes=tuple(changed))), Progress.CAPTURED)


def test_each_invariant_is_broken_here() -> None:
    assert {number for number, *_ in BROKEN} == set(range(1, 18))


def test_a_program_that_predicts_may_have_replicas_which_exchange_nothing() -> None:
    verify(replace(inference_program(), mesh=(Axis("dp", 2, at_run_time=True),)))
    for wrong in (Axis("dp", 2), Axis("dp", 4, at_run_time=True, chips=2)):
        with pytest.raises(InvariantError, match="dp"):
            verify(replace(inference_program(), mesh=(wrong,)))
