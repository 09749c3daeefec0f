"""Which tensors of a step are recorded: what leaves its section, each once, and nothing nondeterministic."""

from dataclasses import replace

from sambasim.ir.graph import Graph, Node, Output, Ref, Section, SectionKind
from sambasim.ir.operators import OPERATORS
from sambasim.ir.program import Program
from sambasim.ir.types import SymbolKind, TensorType
from sambasim.runtime.recording import UNWRITTEN, Seen, seen_in_memory, seen_of_sections
from tests.pef.samples import sample_program

VECTOR = TensorType("float32", (4,))


def program_of(*nodes: Node, stops: tuple[int, ...], outputs: tuple[Output, ...] = ()) -> Program:
    """The sample with another training step: a section up to each of `stops`, the last one backward."""
    program = sample_program()
    starts = (0, *stops)
    sections = tuple(
        Section(number, SectionKind.BCKWD if stop == stops[-1] else SectionKind.FWD, f"s{number}", start, stop)
        for number, (start, stop) in enumerate(zip(starts, stops, strict=False))
    )
    values = {name: VECTOR for node in nodes for name in node.results if name is not None}
    return replace(program, training=Graph("training", ("x",), nodes, outputs, values, sections))


def relu(name: str, of: str) -> Node:
    return Node(name, "aten.relu.default", (Ref(of),), (), (name,))


def seen(program: Program) -> list[list[Seen]]:
    assert program.training is not None
    return [list(section) for section in seen_of_sections(program.training, program)]


def test_a_value_that_another_section_reads_is_seen_and_one_that_none_reads_is_not() -> None:
    program = program_of(relu("a", "x"), relu("b", "a"), relu("c", "b"), stops=(2, 3))
    assert seen(program) == [[Seen("value", "b", 0, "b")], []]


def test_gradients_are_seen_in_memory_and_losses_and_buffers_by_their_symbols() -> None:
    program = sample_program()
    assert program.training is not None
    forward, backward = seen(program)
    assert forward == [
        Seen("value", "log_softmax", 0, "log_softmax"),
        Seen("loss", "loss", 0, "nll"),
        Seen("value", "n", 0, "n"),
    ]
    weight, bias = "logreg__lin_layer__weight__grad", "logreg__lin_layer__bias__grad"
    assert backward == [Seen("gradient", weight, 1, None), Seen("gradient", bias, 1, None)]


def test_a_changed_buffer_that_leaves_its_section_is_seen_once() -> None:
    steps = Output("a", "logreg__steps")
    program = program_of(relu("a", "x"), relu("b", "a"), stops=(1, 2), outputs=(steps,))
    assert seen(program)[0] == [Seen("buffer", "logreg__steps", 0, "a")]


def test_a_gradient_that_is_read_later_is_seen_as_a_value_too() -> None:
    """What lies in its place is a sum over micro-steps, of which the value is a part."""
    gradient = Output("a", "logreg__lin_layer__bias__grad")
    program = program_of(relu("a", "x"), relu("b", "a"), stops=(1, 2), outputs=(gradient,))
    assert [one.what for one in seen(program)[0]] == ["value", "gradient"]


def test_results_with_bytes_that_nobody_has_written_are_not_seen() -> None:
    empty = Node("a", "aten.empty_like.default", (Ref("x"),), (), ("a",))
    layer = Node("l", "aten.mkldnn_rnn_layer.default", (Ref("x"),), (), ("y", "h", "c", "notes"))
    after = Node("z", "aten.cat.default", ((Ref("a"), Ref("y"), Ref("notes")),), (), ("z",))
    assert seen(program_of(empty, layer, after, stops=(2, 3)))[0] == [Seen("value", "y", 0, "y")]


def test_every_operator_that_makes_empty_tensors_is_known() -> None:
    """Those that have `empty` in their names."""
    named = {name for name in OPERATORS if "empty" in name}
    assert named == {name for name in UNWRITTEN if "empty" in name}


def test_symbols_in_memory_are_seen_by_kind_in_order() -> None:
    found = seen_in_memory(sample_program(), SymbolKind.PARAMETER, SymbolKind.BUFFER)
    assert [(one.what, one.name) for one in found] == [
        ("parameter", "logreg__lin_layer__weight"),
        ("parameter", "logreg__lin_layer__bias"),
        ("buffer", "logreg__steps"),
    ]
