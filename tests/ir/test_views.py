"""Programs seen otherwise: for inference, of a whole replica, of one rank, and with slices."""

from dataclasses import replace

import pytest

from sambasim.errors import OptionError
from sambasim.ir.graph import Argument, Graph, Node, Output, Ref, Section, SectionKind, with_sections
from sambasim.ir.mesh import Axis
from sambasim.ir.program import Program
from sambasim.ir.ranks import as_one_rank, in_slices, of_ranks, with_cut_batch, without_loss
from sambasim.ir.schedule import make
from sambasim.ir.types import Cut, Symbol, SymbolKind, TensorType
from sambasim.ir.verify import Progress, verify
from tests.ir.test_dataflow import GRADIENT, program_of, times

ROWS = TensorType("float32", (4, 3))
NUMBER = TensorType("float32", ())


def message(operator: str, name: str, tag: int) -> Node:
    how: tuple[tuple[str, Argument], ...] = (("axis", "pp"), ("shift", 1), ("tag", tag))
    if operator == "comm.send":
        return Node(f"{name}_sent", operator, (Ref(name),), how)
    return Node(name, operator, (), how, (name,))


def two_stages() -> Program:
    """Sends what the output needs, and the target, which the loss alone needs, to the second stage."""
    nodes = (
        Node("a", "aten.relu.default", (Ref("x"),), (), ("a",)),
        message("comm.send", "a", 0),
        message("comm.send", "target", 1),
        message("comm.recv", "there", 0),
        message("comm.recv", "wanted", 1),
        Node("y", "aten.tanh.default", (Ref("there"),), (), ("y",)),
        Node("loss", "aten.mse_loss.default", (Ref("y"), Ref("wanted")), (), ("loss",)),
    )
    kinds = {"x": SymbolKind.INPUT, "target": SymbolKind.INPUT, "outputs__0": SymbolKind.OUTPUT}
    symbols = {name: Symbol(name, kind, ROWS) for name, kind in kinds.items()}
    symbols["net__loss"] = Symbol("net__loss", SymbolKind.OUTPUT, NUMBER)
    sections = (Section(0, SectionKind.FWD, "0", 0, 3), Section(1, SectionKind.FWD, "1", 3, 7, stage=1))
    values = dict.fromkeys(("a", "there", "wanted", "y"), ROWS) | {"loss": NUMBER}
    outputs = (Output("loss", "net__loss"), Output("y", "outputs__0"))
    graph = Graph("evaluation", ("x", "target"), nodes, outputs, values, sections)
    program = Program("net", 4, symbols, None, graph, None, "net__loss", False, (), (), (), 0)
    return replace(program, mesh=(Axis("pp", 2),), schedule=make("gpipe", 2, 1))


def test_without_its_loss_a_program_needs_no_labels_and_sends_none() -> None:
    verify(two_stages(), Progress.CAPTURED)
    program = without_loss(two_stages())
    verify(program, Progress.CAPTURED)
    assert [node.name for node in program.evaluation.nodes] == ["a", "a_sent", "there", "y"]
    assert program.symbols.keys() == {"x", "outputs__0", "net__loss"}
    assert (program.evaluation.inputs, program.evaluation.outputs) == (("x",), (Output("y", "outputs__0"),))
    assert without_loss(program) == program


def test_a_rank_has_its_stage_and_the_symbols_of_it() -> None:
    first, second = of_ranks(two_stages())
    assert [node.name for node in first.evaluation.nodes] == ["a", "a_sent", "target_sent"]
    assert [node.name for node in second.evaluation.nodes] == ["there", "wanted", "y", "loss"]
    assert [section.index for section in second.evaluation.sections] == [0]
    assert (first.evaluation.inputs, second.evaluation.inputs) == (("x", "target"), ())


def on_chips(*, single: bool, loss: TensorType = NUMBER) -> Program:
    """Rows and a loss of a batch of 4, and rows of a `single` sample."""
    types = {"x": ROWS, "y": ROWS, "loss": loss} | ({"y1": TensorType("float32", (1, 3))} if single else {})
    kinds = {"x": SymbolKind.INPUT}
    symbols = {name: Symbol(name, kinds.get(name, SymbolKind.OUTPUT), type_) for name, type_ in types.items()}
    graph = Graph("evaluation", ("x",), (), (), {})
    at_one = replace(graph, name="single", outputs=(Output("y", "y1"),)) if single else None
    mesh = (Axis("dp", 4, at_run_time=True, chips=2),)
    return Program("net", 4, symbols, None, graph, at_one, "loss", False, (), (), (), 0, mesh=mesh)


@pytest.mark.parametrize("single", [True, False])
def test_chips_share_the_batch_of_a_replica(single: bool) -> None:
    program = on_chips(single=single)
    cut = with_cut_batch(program, 2)
    assert {name for name, symbol in cut.symbols.items() if symbol.cuts == (Cut("dp", 0, 2),)} == {"x", "y"}
    assert {name for name, symbol in cut.symbols.items() if symbol.cuts == ()} == program.symbols.keys() - {"x", "y"}
    assert cut.mesh == (Axis("dp", 2, at_run_time=True),)
    assert with_cut_batch(program, 1) == program
    whole = as_one_rank(program)
    assert (whole.batch_size, whole.symbols["y"].type.shape, whole.symbols["y"].cuts) == (8, (8, 3), ())
    assert (whole.chips, whole.mesh) == (1, (Axis("dp", 2, at_run_time=True),))
    alone = as_one_rank(replace(program, mesh=(Axis("dp", 2, chips=2),), reduce_buffer="buffer", zero=1))
    assert (alone.mesh, alone.data_parallel, alone.zero) == ((), False, 0)


@pytest.mark.parametrize("type_", [TensorType("float32", (3,)), TensorType("int64", ())])
def test_an_output_that_is_neither_of_samples_nor_a_loss_cannot_be_joined(type_: TensorType) -> None:
    with pytest.raises(OptionError, match="cannot be joined over the chips"):
        with_cut_batch(on_chips(single=True, loss=type_), 2)


def sliced(zero: int, stages: tuple[int, int, int] = (0, 0, 0)) -> list[list[str]]:
    """By section, the operators on groups: the first, second and fourth section read the parameters."""
    nodes = [times("a", "x", "w"), times("b", "a", "w"), times("c", "b", "b"), times("grad", "c", "w")]
    program = program_of(nodes, [1, 2, 3, 4], [GRADIENT])
    pairs = zip(program.step.sections, (*stages, stages[-1], 0), strict=True)
    sections = [replace(section, stage=stage) for section, stage in pairs]
    update = [Node("reduce", "comm.reduce_scatter", ("group_0",)), *program.step.nodes[4:]]
    graph = with_sections(program.step, zip(sections, [*([node] for node in nodes), update], strict=True))
    schedule = make("gpipe", 2, 1) if any(stages) else None
    found = in_slices(replace(program, training=graph, zero=zero, schedule=schedule)).step
    return [
        [f"{node.operator} {node.args[-1]}" for node in found.section_nodes(section) if not node.reads]
        for section in found.sections
    ]


GATHER, RELEASE = "comm.all_gather group_0", "memory.release parameter"
REDUCE = ["comm.reduce_scatter group_0", "memory.release gradient"]
UPDATE = ["opt.sgd group_0"]


def test_what_is_kept_in_slices_is_whole_while_sections_read_or_complete_it() -> None:
    """Gradients are reduced behind the section that completes them. Parameters are gathered for the first section in a
    row that reads them, and another action of a schedule gathers them again."""
    assert sliced(1)[-1] == ["comm.reduce_scatter group_0", *UPDATE]
    assert sliced(2) == [[], [], [], REDUCE, UPDATE]
    assert sliced(3) == [[GATHER], [RELEASE], [], [GATHER, *REDUCE, RELEASE], UPDATE]
    assert sliced(3, (0, 1, 1))[:2] == [[GATHER, RELEASE], [GATHER, RELEASE]]
