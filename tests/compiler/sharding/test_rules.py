"""Every sharding rule: what two ranks compute from parts, joined, is what one computes from whole tensors."""

from collections.abc import Iterator, Mapping
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from sambasim.compiler.sharding.plan import propagate
from sambasim.compiler.sharding.rules import RULES
from sambasim.compiler.sharding.sharder import PARTIAL, Layout, Sharder, cut, cut_of, fits, part_type
from sambasim.ir.graph import Graph
from sambasim.ir.mesh import TENSOR, Axis, Mesh
from sambasim.ir.operators import OPERATORS, OperatorKind
from sambasim.ir.program import Program
from sambasim.runtime.engine.executor import Executor
from sambasim.runtime.transports.connect import connect_here
from sambasim.runtime.transports.in_process import run_together
from sambasim.runtime.values.memory import DeviceMemory, part_of
from tests.support.ir_text import parse_program

RANKS = 2

CASES: Mapping[str, str] = {
    "add.Tensor": "%a : float32[4, 8], %b : float32[8]; %y = (%a, %b) : float32[4, 8]",
    "add.Tensor one": "%a : float32[4, 8]; %y = (%a, 1.0) : float32[4, 8]",
    "sub.Tensor": "%a : float32[4, 8], %b : float32[4, 1]; %y = (%a, %b) : float32[4, 8]",
    "mul.Tensor": "%a : float32[4, 8], %b : float32[4, 8]; %y = (%a, %b) : float32[4, 8]",
    "mul.Scalar": "%a : float32[4, 8]; %y = (%a, 0.3) : float32[4, 8]",
    "relu.default": "%a : float32[4, 8]; %y = (%a) : float32[4, 8]",
    "gelu_backward.default": "%a : float32[4, 8], %b : float32[4, 8]; %y = (%a, %b) : float32[4, 8]",
    "threshold_backward.default": "%a : float32[4, 8], %b : float32[4, 8]; %y = (%a, %b, 0) : float32[4, 8]",
    "clone.default": "%a : float32[4, 8]; %y = (%a) : float32[4, 8]",
    "view.default": "%a : float32[4, 2, 8]; %y = (%a, (8, 4, 2)) : float32[8, 4, 2]",
    "reshape.default": "%a : float32[4, 24]; %y = (%a, (4, 3, 4, 2)) : float32[4, 3, 4, 2]",
    "permute.default": "%a : float32[4, 2, 8]; %y = (%a, (2, 0, 1)) : float32[8, 4, 2]",
    "transpose.int": "%a : float32[4, 2, 8]; %y = (%a, -1, 0) : float32[8, 2, 4]",
    "mT.default": "%a : float32[4, 2, 8]; %y = (%a) : float32[4, 8, 2]",
    "t.default": "%a : float32[4, 8]; %y = (%a) : float32[8, 4]",
    "unsqueeze.default": "%a : float32[4, 8]; %y = (%a, 1) : float32[4, 1, 8]",
    "squeeze.dim": "%a : float32[4, 1, 8]; %y = (%a, 1) : float32[4, 8]",
    "expand.default": "%a : float32[4, 1, 8]; %y = (%a, (2, 4, 6, 8)) : float32[2, 4, 6, 8]",
    "select.int": "%a : float32[4, 2, 8]; %y = (%a, 1, 1) : float32[4, 8]",
    "unbind.int": "%a : float32[2, 4, 8]; %y, %z = (%a, 0) : float32[4, 8], float32[4, 8]",
    "select_backward.default": "%a : float32[4, 8]; %y = (%a, (4, 2, 8), 1, 1) : float32[4, 2, 8]",
    "slice.Tensor": "%a : float32[4, 8]; %y = (%a, 1, 2, 6) : float32[4, 4]",
    "slice_backward.default": "%a : float32[4, 4]; %y = (%a, (4, 8), 1, 2, 6, 1) : float32[4, 8]",
    "split.Tensor": "%a : float32[4, 16]; %y, %z = (%a, 8, 1) : float32[4, 8], float32[4, 8]",
    "cat.default": "%a : float32[4, 8], %b : float32[4, 8]; %y = ((%a, %b), 1) : float32[4, 16]",
    "cat.default empty": "%a : float32[4, 2, 8], %e : float32[0]; %y = ((%e, %a), 1) : float32[4, 2, 8]",
    "stack.default": "%a : float32[4, 8], %b : float32[4, 8]; %y = ((%a, %b), -1) : float32[4, 8, 2]",
    "sum.dim_IntList": "%a : float32[4, 8, 2]; %y = (%a, (1,), True) : float32[4, 1, 2]",
    "sum.default": "%a : float32[4, 8]; %y = (%a) : float32[]",
    "mean.dim": "%a : float32[4, 8, 2]; %y = (%a, (-1,)) : float32[4, 8]",
    "_softmax.default": "%a : float32[4, 8]; %y = (%a, 1, False) : float32[4, 8]",
    "_safe_softmax.default": "%a : float32[4, 8]; %y = (%a, 1) : float32[4, 8]",
    "_log_softmax.default": "%a : float32[4, 8]; %y = (%a, 1, False) : float32[4, 8]",
    "_log_softmax_backward_data.default": (
        "%a : float32[4, 8], %b : float32[4, 8]; %y = (%a, %b, 1, torch.float32) : float32[4, 8]"
    ),
    "native_layer_norm.default": (
        "%a : float32[4, 6, 8], %w : float32[8], %b : float32[8]; "
        "%y, %m, %d = (%a, (8,), %w, %b, 1e-05) : float32[4, 6, 8], float32[4, 6, 1], float32[4, 6, 1]"
    ),
    "native_layer_norm_backward.default": (
        "%g : float32[4, 8], %a : float32[4, 8], %m : float32[4, 1], %d : float32[4, 1], %w : float32[8], "
        "%b : float32[8]; %x, %y, %z = (%g, %a, (8,), %m, %d, %w, %b, (True, True, True)) : "
        "float32[4, 8], float32[8], float32[8]"
    ),
    "mm.default": "%a : float32[4, 8], %b : float32[8, 6]; %y = (%a, %b) : float32[4, 6]",
    "bmm.default": "%a : float32[2, 4, 8], %b : float32[2, 8, 6]; %y = (%a, %b) : float32[2, 4, 6]",
    "addmm.default": "%c : float32[6], %a : float32[4, 8], %b : float32[8, 6]; %y = (%c, %a, %b) : float32[4, 6]",
    "linear.default": (
        "%a : float32[4, 2, 8], %w : float32[6, 8], %b : float32[6]; %y = (%a, %w, %b) : float32[4, 2, 6]"
    ),
    "scaled_dot_product_attention.default": (
        "%q : float32[2, 4, 6, 8], %k : float32[2, 4, 6, 8], %v : float32[2, 4, 6, 8]; "
        "%y = (%q, %k, %v, None, 0.0, True) : float32[2, 4, 6, 8]"
    ),
    "scaled_dot_product_attention.default masked": (
        "%q : float32[2, 4, 6, 8], %k : float32[2, 4, 6, 8], %v : float32[2, 4, 6, 8], %m : float32[4, 1, 6]; "
        "%y = (%q, %k, %v, %m) : float32[2, 4, 6, 8]"
    ),
    "scaled_dot_product_attention.default grouped": (
        "%q : float32[2, 4, 6, 8], %k : float32[2, 2, 6, 8], %v : float32[2, 2, 6, 8]; "
        "%y = (%q, %k, %v, None, 0.0, False, enable_gqa=True) : float32[2, 4, 6, 8]"
    ),
    "convolution.default": (
        "%a : float32[2, 4, 6, 6], %w : float32[8, 4, 3, 3], %b : float32[8]; "
        "%y = (%a, %w, %b, (1, 1), (1, 1), (1, 1), False, (0, 0), 1) : float32[2, 8, 6, 6]"
    ),
    "conv2d.default of one sample": (
        "%a : float32[4, 4, 6], %w : float32[8, 4, 3, 3]; %y = (%a, %w) : float32[8, 2, 4]"
    ),
    "convolution_backward.default": (
        "%g : float32[2, 8, 6, 6], %a : float32[2, 4, 6, 6], %w : float32[8, 4, 3, 3]; "
        "%x, %y, %z = (%g, %a, %w, (8,), (1, 1), (1, 1), (1, 1), False, (0, 0), 1, (True, True, True)) : "
        "float32[2, 4, 6, 6], float32[8, 4, 3, 3], float32[8]"
    ),
    "_native_batch_norm_legit_functional.default": (
        "%a : float32[2, 4, 6, 6], %w : float32[4], %b : float32[4], %m : float32[4], %v : float32[4]; "
        "%y, %s, %d, %n, %u = (%a, %w, %b, %m, %v, True, 0.1, 1e-05) : "
        "float32[2, 4, 6, 6], float32[4], float32[4], float32[4], float32[4]"
    ),
    "avg_pool2d.default": "%a : float32[2, 4, 6, 6]; %y = (%a, (2, 2)) : float32[2, 4, 3, 3]",
    "embedding.default": "%w : float32[8, 6], %i : int64[4, 2]; %y = (%w, %i) : float32[4, 2, 6]",
    "embedding_dense_backward.default": (
        "%g : float32[4, 2, 6], %i : int64[4, 2]; %y = (%g, %i, 8, -1, False) : float32[8, 6]"
    ),
    "nll_loss_forward.default": (
        "%a : float32[4, 8], %i : int64[4]; %y, %n = (%a, %i, None, 1, 3) : float32[], float32[]"
    ),
    "nll_loss_backward.default": (
        "%a : float32[4, 8], %g : float32[], %i : int64[4], %n : float32[]; "
        "%y = (%g, %a, %i, None, 1, 3, %n) : float32[4, 8]"
    ),
}
"""By operator: its operands, and a node. Sizes differ where they may, and are even."""

NOT_LINEAR_IN = ("%i", "%n")
"""Operands that cannot be the sum of what ranks have: integers, and a count that is divided by."""


def program_of(operator: str) -> Program:
    operands, _, node = CASES[operator].partition("; ")
    declared = "\n".join(f"{one} input" for one in operands.replace(", %", ",\n%").split(",\n"))
    results, _, call = node.partition(" = ")
    text = f"{declared}\nsection 0 FWD all\n{results} = aten.{operator.partition(' ')[0]}{call}\n"
    text += "\n".join(f"{name.strip()} -> {name.strip().removeprefix('%')}_out" for name in results.split(","))
    return parse_program(text, Axis(TENSOR, RANKS))


def values_of(program: Program) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    found = {}
    for name in program.evaluation.inputs:
        type_ = program.symbols[name].type
        if type_.dtype == "int64":
            found[name] = torch.randint(0, 8, type_.shape, generator=generator)
        else:
            found[name] = torch.rand(type_.shape, generator=generator) + 0.1
    return found


def placements(program: Program) -> Iterator[dict[str, Layout]]:
    for name in program.evaluation.inputs:
        shape = program.symbols[name].type.shape
        layouts = [cut(dim, outer) for dim in range(len(shape)) for outer in (1, 2, 3)]
        yield from (({name: one}) for one in layouts if fits(shape, one, RANKS))
        if f"%{name}" not in NOT_LINEAR_IN:
            yield {name: PARTIAL}
    summed = [name for name in program.evaluation.inputs if f"%{name}" not in NOT_LINEAR_IN]
    yield dict.fromkeys(summed, PARTIAL)


def outputs_of(
    program: Program, graph: Graph, values: Mapping[str, Tensor], at_rest: Mapping[str, Layout], ranks: int
) -> list[dict[str, Tensor]]:
    """The outputs of all ranks, of which each has its part of `values`; of a partial one, a term."""
    symbols, mesh = dict(program.symbols), Mesh({TENSOR: ranks})
    for name, layout in at_rest.items():
        symbol = symbols[name]
        type_ = part_type(symbol.type, layout, ranks)
        symbols[name] = replace(symbol, type=type_, cuts=cut_of(layout, ranks))
    placed = replace(program, symbols=symbols, evaluation=graph)
    memories = [DeviceMemory.private(placed) for _ in range(ranks)]
    executors = []
    transports = connect_here(memories, mesh)
    for rank, (memory, transport) in enumerate(zip(memories, transports, strict=True)):
        for name, value in values.items():
            own = part_of(value, symbols[name].cuts, {TENSOR: rank})
            if at_rest.get(name) == PARTIAL:
                own = value * 0.25 if rank == 0 else value * 0.75
            memory.tensor(name).copy_(own)
        executors.append(Executor(graph, placed, memory.tensor, transport=transport))

    def passed(executor: Executor):  # type: ignore[no-untyped-def]  # a generator
        torch.manual_seed(3)  # as in a run: all ranks of a replica draw alike
        (outputs,) = yield from executor.run()
        return outputs

    return run_together([passed(executor) for executor in executors], transports[0].hub)


def found_of(program: Program, at_rest: Mapping[str, Layout]) -> Sharder:
    return propagate(program, program.evaluation, RANKS, at_rest)


@pytest.mark.parametrize("operator", CASES)
def test_joined_parts_are_the_whole(operator: str) -> None:
    program = program_of(operator)
    values = values_of(program)
    (right,) = outputs_of(program, program.evaluation, values, {}, 1)
    in_parts = 0
    for at_rest in placements(program):
        found = found_of(program, at_rest)
        in_parts += not found.replicated
        for of_rank in outputs_of(program, found.graph, values, at_rest, RANKS):
            for output, value in right.items():
                torch.testing.assert_close(of_rank[output], value, msg=lambda text: f"{at_rest}: {text}")  # noqa: B023
    assert in_parts, "the rule was never used"


def test_dropout_of_parts_drops_what_the_whole_drops() -> None:
    text = """
      %a : float32[4, 8] input
    section 0 FWD all
      %y, %m = aten.native_dropout.default(%a, 0.5, True) : float32[4, 8], bool[4, 8]
      %y -> y_out
      %m -> m_out
    """
    program = parse_program(text, Axis(TENSOR, RANKS))
    values, at_rest = values_of(program), {"a": cut(1)}
    graph = found_of(program, at_rest).graph
    (right,) = outputs_of(program, program.evaluation, values, {}, 1)
    first, _ = outputs_of(program, graph, values, at_rest, RANKS)
    assert 0 < int(right["m_out"].sum()) < 32
    assert torch.equal(first["m_out"], right["m_out"])
    torch.testing.assert_close(first["y_out"], right["y_out"])


WITHOUT = {
    OperatorKind.RECURRENT, OperatorKind.SCAN, OperatorKind.RANDOM, OperatorKind.CREATION, OperatorKind.INDEXING,
    OperatorKind.RESIZE, OperatorKind.OPTIMIZER, OperatorKind.COLLECTIVE, OperatorKind.MEMORY,
    OperatorKind.GENERATOR, OperatorKind.CHECK, OperatorKind.FACTORIZATION, OperatorKind.FOURIER,
}  # fmt: skip
"""Kinds of which most operators are computed whole by every rank."""


def test_the_operators_of_the_examples_have_rules() -> None:
    """A new rule is one row: this says of which kinds there are any."""
    with_rules = {OPERATORS[name].kind for name in RULES}
    assert set(RULES) <= set(OPERATORS)
    assert with_rules | WITHOUT == set(OperatorKind)
    assert not {case.partition(" ")[0] for case in CASES} - {name.removeprefix("aten.") for name in RULES}
