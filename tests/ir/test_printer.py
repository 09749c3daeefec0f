"""The printed form of graphs."""

from dataclasses import replace

from sambasim.ir.graph import (
    ComplexNumber,
    Node,
    Ref,
    SourceLine,
    TorchConstant,
    format_argument,
    format_graph,
    format_node,
)
from tests.pef.samples import sample_program

TRAINING = """\
graph training(
  %x : float32[4, 3] input
  %target : int64[4] input
  %loss__grad : float32[] tangent
  %logreg__lin_layer__weight : float32[2, 3] parameter
  %logreg__lin_layer__bias : float32[2] parameter
)
section 0 FWD logreg__fwd_0
  %t = aten.t.default(%logreg__lin_layer__weight) : float32[3, 2]  # logreg.py:7
  %addmm = aten.addmm.default(%logreg__lin_layer__bias, %x, %t) : float32[4, 2]  # logreg.py:7
  %log_softmax = aten._log_softmax.default(%addmm, 1, False) : float32[4, 2]
  %nll, %n = aten.nll_loss_forward.default(%log_softmax, %target, None, 1, -100) : float32[], float32[]
section 1 BCKWD logreg__bckwd_1
  %d_log = aten.nll_loss_backward.default(%loss__grad, %log_softmax, %target, None, 1, -100, %n) : float32[4, 2]
  %d_addmm = aten._log_softmax_backward_data.default(%d_log, %log_softmax, 1, torch.float32) : float32[4, 2]
  %d_t = aten.t.default(%d_addmm) : float32[2, 4]  # logreg.py:7
  %d_weight = aten.mm.default(%d_t, %x) : float32[2, 3]  # logreg.py:7
  %d_bias = aten.sum.dim_IntList(%d_addmm, (0,), False, dtype=None) : float32[2]  # logreg.py:7
section 2 REDUCE logreg__reduce_2
  comm.reduce_scatter('group0', axis='dp', op='mean', order='tree')
section 3 GRADNORM logreg__gradnorm_3
  %sums = opt.square_sums(('group0',)) : float64[2]
  %all_sums = comm.all_reduce(%sums, axis='dp', op='sum', order='tree') : float64[2]
  %norm = opt.total_norm(%all_sums) : float64[]
section 4 OPT logreg__opt_4
  opt.sgd('group0', %norm)
section 5 GATHER logreg__gather_5
  comm.all_gather('group0', axis='dp')
return
  %nll -> loss : float32[]
  %d_weight -> logreg__lin_layer__weight__grad : float32[2, 3]
  %d_bias -> logreg__lin_layer__bias__grad : float32[2]
"""


def test_a_training_step() -> None:
    program = sample_program()
    assert format_graph(program.step, program.symbols) == TRAINING


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
    node = Node("n", "aten.relu.default", (Ref("x\x1b[2J"),), source=SourceLine("a\rb.py", 1, ""))
    assert format_node(program.evaluation, node) == "aten.relu.default(%x\\x1b[2J)  # a\\x0db.py:1"
    graph = replace(program.evaluation, name="evil\x1b\n")
    assert format_graph(graph, program.symbols).startswith("graph evil\\x1b\\x0a(\n")
