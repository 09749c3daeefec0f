"""Every sharding rule: what two ranks compute from parts, joined, is what one computes from whole tensors."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from sambasim.compiler.sharding.plan import propagate
from sambasim.compiler.sharding.rules import RULES
from sambasim.compiler.sharding.sharder import PARTIAL, Layout, cut, divided, fits
from sambasim.ir.dataflow import gathers
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
    "add.Tensor": "a[4, 8] b[8]; y[4, 8]; %a, %b",
    "add.Tensor one": "a[4, 8]; y[4, 8]; %a, 1.0",
    "sub.Tensor": "a[4, 8] b[4, 1]; y[4, 8]; %a, %b",
    "mul.Tensor": "a[4, 8] b[4, 8]; y[4, 8]; %a, %b",
    "mul.Scalar": "a[4, 8]; y[4, 8]; %a, 0.3",
    "relu.default": "a[4, 8]; y[4, 8]; %a",
    "gelu_backward.default": "a[4, 8] b[4, 8]; y[4, 8]; %a, %b",
    "threshold_backward.default": "a[4, 8] b[4, 8]; y[4, 8]; %a, %b, 0",
    "clone.default": "a[4, 8]; y[4, 8]; %a",
    "view.default": "a[4, 2, 8]; y[8, 4, 2]; %a, (8, 4, 2)",
    "reshape.default": "a[4, 24]; y[4, 3, 4, 2]; %a, (4, 3, 4, 2)",
    "permute.default": "a[4, 2, 8]; y[8, 4, 2]; %a, (2, 0, 1)",
    "transpose.int": "a[4, 2, 8]; y[8, 2, 4]; %a, -1, 0",
    "mT.default": "a[4, 2, 8]; y[4, 8, 2]; %a",
    "t.default": "a[4, 8]; y[8, 4]; %a",
    "unsqueeze.default": "a[4, 8]; y[4, 1, 8]; %a, 1",
    "squeeze.dim": "a[4, 1, 8]; y[4, 8]; %a, 1",
    "expand.default": "a[4, 1, 8]; y[2, 4, 6, 8]; %a, (2, 4, 6, 8)",
    "select.int": "a[4, 2, 8]; y[4, 8]; %a, 1, 1",
    "unbind.int": "a[2, 4, 8]; y[4, 8] z[4, 8]; %a, 0",
    "select_backward.default": "a[4, 8]; y[4, 2, 8]; %a, (4, 2, 8), 1, 1",
    "slice.Tensor": "a[4, 8]; y[4, 4]; %a, 1, 2, 6",
    "slice_backward.default": "a[4, 4]; y[4, 8]; %a, (4, 8), 1, 2, 6, 1",
    "split.Tensor": "a[4, 16]; y[4, 8] z[4, 8]; %a, 8, 1",
    "cat.default": "a[4, 8] b[4, 8]; y[4, 16]; (%a, %b), 1",
    "cat.default empty": "a[4, 2, 8] e[0]; y[4, 2, 8]; (%e, %a), 1",
    "stack.default": "a[4, 8] b[4, 8]; y[4, 8, 2]; (%a, %b), -1",
    "sum.dim_IntList": "a[4, 8, 2]; y[4, 1, 2]; %a, (1,), True",
    "sum.default": "a[4, 8]; y[]; %a",
    "mean.dim": "a[4, 8, 2]; y[4, 8]; %a, (-1,)",
    "_softmax.default": "a[4, 8]; y[4, 8]; %a, 1, False",
    "_safe_softmax.default": "a[4, 8]; y[4, 8]; %a, 1",
    "_log_softmax.default": "a[4, 8]; y[4, 8]; %a, 1, False",
    "_log_softmax_backward_data.default": "a[4, 8] b[4, 8]; y[4, 8]; %a, %b, 1, torch.float32",
    "native_layer_norm.default": "a[4, 6, 8] w[8] b[8]; y[4, 6, 8] m[4, 6, 1] d[4, 6, 1]; %a, (8,), %w, %b, 1e-05",
    "native_layer_norm_backward.default":
        "g[4, 8] a[4, 8] m[4, 1] d[4, 1] w[8] b[8]; "
        "x[4, 8] y[8] z[8]; %g, %a, (8,), %m, %d, %w, %b, (True, True, True)",
    "mm.default": "a[4, 8] b[8, 6]; y[4, 6]; %a, %b",
    "bmm.default": "a[2, 4, 8] b[2, 8, 6]; y[2, 4, 6]; %a, %b",
    "addmm.default": "c[6] a[4, 8] b[8, 6]; y[4, 6]; %c, %a, %b",
    "linear.default": "a[4, 2, 8] w[6, 8] b[6]; y[4, 2, 6]; %a, %w, %b",
    "scaled_dot_product_attention.default":
        "q[2, 4, 6, 8] k[2, 4, 6, 8] v[2, 4, 6, 8]; y[2, 4, 6, 8]; %q, %k, %v, None, 0.0, True",
    "scaled_dot_product_attention.default masked":
        "q[2, 4, 6, 8] k[2, 4, 6, 8] v[2, 4, 6, 8] m[4, 1, 6]; y[2, 4, 6, 8]; %q, %k, %v, %m",
    "scaled_dot_product_attention.default grouped":
        "q[2, 4, 6, 8] k[2, 2, 6, 8] v[2, 2, 6, 8]; y[2, 4, 6, 8]; %q, %k, %v, None, 0.0, False, enable_gqa=True",
    "convolution.default":
        "a[2, 4, 6, 6] w[8, 4, 3, 3] b[8]; y[2, 8, 6, 6]; %a, %w, %b, (1, 1), (1, 1), (1, 1), False, (0, 0), 1",
    "conv2d.default of one sample": "a[4, 4, 6] w[8, 4, 3, 3]; y[8, 2, 4]; %a, %w",
    "convolution_backward.default":
        "g[2, 8, 6, 6] a[2, 4, 6, 6] w[8, 4, 3, 3]; x[2, 4, 6, 6] y[8, 4, 3, 3] z[8]; "
        "%g, %a, %w, (8,), (1, 1), (1, 1), (1, 1), False, (0, 0), 1, (True, True, True)",
    "_native_batch_norm_legit_functional.default":
        "a[2, 4, 6, 6] w[4] b[4] m[4] v[4]; y[2, 4, 6, 6] s[4] d[4] n[4] u[4]; %a, %w, %b, %m, %v, True, 0.1, 1e-05",
    "avg_pool2d.default": "a[2, 4, 6, 6]; y[2, 4, 3, 3]; %a, (2, 2)",
    "embedding.default": "w[8, 6] i[4, 2]; y[4, 2, 6]; %w, %i",
    "embedding_dense_backward.default": "g[4, 2, 6] i[4, 2]; y[8, 6]; %g, %i, 8, -1, False",
    "nll_loss_forward.default": "a[4, 8] i[4]; y[] n[]; %a, %i, None, 1, 3",
    "nll_loss_backward.default": "a[4, 8] g[] i[4] n[]; y[4, 8]; %g, %a, %i, None, 1, 3, %n",
}  # fmt: skip
"""By operator: its operands (`i` of int64, others of float32), results and arguments. Sizes differ where they may, and
are even."""

NOT_LINEAR_IN = ("i", "n")
"""Operands that cannot be the sum of what ranks have: integers, and a count that is divided by."""


def program_of(operator: str) -> Program:
    operands, results, arguments = CASES[operator].split("; ")
    inputs, outputs = (re.findall(r"(\w)(\[.*?\])", text) for text in (operands, results))
    names, types = ", ".join(f"%{name}" for name, _ in outputs), ", ".join(f"float32{shape}" for _, shape in outputs)
    lines = [f"%{name} : {'int64' if name == 'i' else 'float32'}{shape} input" for name, shape in inputs]
    lines += ["section 0 FWD all", f"{names} = aten.{operator.partition(' ')[0]}({arguments}) : {types}"]
    return parse_program("\n".join([*lines, *(f"%{name} -> {name}_out" for name, _ in outputs)]), Axis(TENSOR, RANKS))


def values_of(program: Program) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    types = {name: program.symbols[name].type for name in program.evaluation.inputs}
    return {
        name: torch.randint(0, 8, type_.shape, generator=generator)
        if type_.dtype == "int64"
        else torch.rand(type_.shape, generator=generator) + 0.1
        for name, type_ in types.items()
    }


def placements(program: Program) -> Iterator[dict[str, Layout]]:
    summed = [name for name in program.evaluation.inputs if name not in NOT_LINEAR_IN]
    for name in program.evaluation.inputs:
        shape = program.symbols[name].type.shape
        layouts = [cut(dim, outer) for dim in range(len(shape)) for outer in (1, 2, 3)]
        yield from (({name: one}) for one in layouts if fits(shape, one, RANKS))
    yield from ({name: PARTIAL} for name in summed)
    yield dict.fromkeys(summed, PARTIAL)


def outputs_of(
    program: Program, graph: Graph, values: Mapping[str, Tensor], at_rest: Mapping[str, Layout], ranks: int
) -> list[dict[str, Tensor]]:
    """The outputs of all ranks, of which each has its part of `values`; of a partial one, a term."""
    symbols = dict(program.symbols)
    for name, layout in at_rest.items():
        symbols[name] = divided(symbols[name], layout, ranks)
    placed = replace(program, symbols=symbols, evaluation=graph)
    memories = [DeviceMemory.private(placed) for _ in range(ranks)]
    executors = []
    transports = connect_here(memories, Mesh({TENSOR: ranks}))
    for rank, (memory, transport) in enumerate(zip(memories, transports, strict=True)):
        for name, value in values.items():
            own = part_of(value, symbols[name].cuts, {TENSOR: rank})
            if at_rest.get(name) == PARTIAL:
                own = value * 0.25 if rank == 0 else value * 0.75
            memory.tensor(name).copy_(own)
        executors.append(Executor(graph, placed, memory.tensor, transport=transport))

    torch.manual_seed(3)  # for each: all ranks of a replica draw alike
    return [outputs for (outputs,) in run_together([executor.run() for executor in executors], transports[0].hub)]


@pytest.mark.parametrize("operator", CASES)
def test_joined_parts_are_the_whole(operator: str) -> None:
    program = program_of(operator)
    values = values_of(program)
    (right,) = outputs_of(program, program.evaluation, values, {}, 1)
    in_parts = 0
    for at_rest in placements(program):
        sharder = propagate(program, program.evaluation, RANKS, at_rest)
        in_parts += all(gather.operator == "outputs" for gather in gathers(sharder.graph, TENSOR, RANKS))
        for of_rank in outputs_of(program, sharder.graph, values, at_rest, RANKS):
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
    graph = propagate(program, program.evaluation, RANKS, at_rest).graph
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


def test_a_new_rule_is_one_row() -> None:
    assert set(RULES) <= set(OPERATORS)
    assert {OPERATORS[name].kind for name in RULES} | WITHOUT == set(OperatorKind)
    assert {f"aten.{case.partition(' ')[0]}" for case in CASES} <= set(RULES)
