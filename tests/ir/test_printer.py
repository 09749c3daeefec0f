"""The printed form of graphs; `tests/golden` has whole ones."""

from dataclasses import replace

from sambasim.ir.graph import ComplexNumber, Node, Ref, TorchConstant, format_argument, format_graph, format_node
from tests.pef.samples import LINE, sample_program


def test_arguments() -> None:
    constants = (TorchConstant("dtype", "bfloat16"), TorchConstant("device", "cpu"))
    assert format_argument(constants) == '(torch.bfloat16, device("cpu"))'
    assert format_argument((1, (Ref("a"), None), (True,), ())) == "(1, (%a, None), (True,), ())"
    assert format_argument((0.1, float("inf"), "mean", ComplexNumber(0, -2))) == "(0.1, inf, 'mean', -2j)"


def test_a_result_that_nobody_reads() -> None:
    graph = sample_program().evaluation
    node = replace(graph.nodes[0], results=(None, "linear"))
    assert format_node(graph, node).startswith("_, %linear = aten.linear.default(")
    assert ") : _, float32[4, 2]  #" in format_node(graph, node)


def test_what_comes_from_a_file_cannot_move_the_cursor() -> None:
    program = sample_program()
    node = Node("n", "aten.relu.default", (Ref("x\x1b[2J"),), source=replace(LINE, file="a\rb.py", line=1))
    assert format_node(program.evaluation, node) == "aten.relu.default(%x\\x1b[2J)  # a\\x0db.py:1"
    graph = replace(program.evaluation, name="evil\x1b\n")
    assert format_graph(graph, program.symbols).startswith("graph evil\\x1b\\x0a(\n")
