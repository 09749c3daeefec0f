"""Nodes that name what this torch does not have, or whose results are not those that they state, are refused."""

import re

import pytest
import torch

from sambasim.errors import PefError
from sambasim.ir.graph import Argument, Graph, Node, Output, Ref, Section, SectionKind, SourceLine, TorchConstant
from sambasim.ir.operators import OPERATORS
from sambasim.ir.program import Program
from sambasim.ir.types import Symbol, SymbolKind, TensorType
from sambasim.runtime.executor import Executor
from sambasim.runtime.instructions import RegisterFile, aten_instruction, find_operator

X = Ref("x")
TYPE = TensorType("float32", (2,))
Keywords = tuple[tuple[str, Argument], ...]


def node(
    operator: str, args: tuple[Argument, ...], kwargs: Keywords = (), results: tuple[str | None, ...] = ("y",)
) -> Node:
    return Node("n", operator, args, kwargs, results, "", SourceLine("net.py", 7, "return x"))


def executable(*nodes: Node) -> Executor:
    """A graph of these nodes, from x = [1, 2] to y."""
    symbols = {"x": Symbol("x", SymbolKind.INPUT, TYPE, 0), "out": Symbol("out", SymbolKind.OUTPUT, TYPE)}
    values = {name: TYPE for one in nodes for name in one.results if name is not None}
    section = Section(0, SectionKind.FWD, "fwd", 0, len(nodes))
    graph = Graph("evaluation", ("x",), nodes, (Output("y", "out"),), values, (section,))
    program = Program("net", 2, symbols, None, graph, None, None, False, (), (), (), None, 512)
    return Executor(graph, program, lambda name: torch.tensor([1.0, 2.0]))


def test_a_list_of_another_length_than_stated_is_refused() -> None:
    fits = node("aten.split.Tensor", (X, 1), (), ("y", None))
    assert executable(fits).run()["out"].tolist() == [1.0]
    fault = re.escape("node n: aten.split.Tensor does not return the 3 tensors that the PEF states")
    with pytest.raises(PefError, match=fault):
        executable(node("aten.split.Tensor", (X, 1), (), ("y", None, None))).run()


@pytest.mark.parametrize(
    "constant",
    [
        TorchConstant("dtype", "load"),
        TorchConstant("dtype", "strided"),
        TorchConstant("layout", "float32"),
        TorchConstant("memory_format", "nowhere"),
        TorchConstant("device", "cuda"),
        TorchConstant("module", "hub"),
    ],
)
def test_a_constant_that_torch_has_as_something_else_is_refused(constant: TorchConstant) -> None:
    told = re.escape(f"the PEF uses '{constant.name}' as a {constant.kind}, which torch {torch.__version__} does not")
    with pytest.raises(PefError, match=told) as caught:
        aten_instruction(node("aten.sum.default", (X,), (("dtype", constant),), ("z",)), RegisterFile(), {})
    assert caught.value.remedy == "compile the model again: sambasim compile"


def test_no_operator_takes_a_list_of_tensors_by_keyword_only() -> None:
    """As the rule forbids it, and the executor would have no place for it."""
    names = [name for name in OPERATORS if name.startswith("aten.")]
    arguments = [argument for name in names for argument in find_operator(name)._schema.arguments]
    assert not [a for a in arguments if a.kwarg_only and str(a.type) in ("List[Tensor]", "List[Optional[Tensor]]")]


def test_an_unread_random_operator_draws_all_the_same() -> None:
    """In between two that are read: the second of them must see what eager PyTorch would."""
    nodes = (
        node("aten.rand_like.default", (X,), (), (None,)),
        node("aten.native_dropout.default", (X, 0.5, True), (), (None, None)),
        node("aten.rand_like.default", (X,)),
    )
    torch.manual_seed(3)
    found = executable(*nodes).run()["out"]
    torch.manual_seed(3)
    x = torch.tensor([1.0, 2.0])
    torch.rand_like(x)
    torch.native_dropout(x, 0.5, True)
    assert found.equal(torch.rand_like(x))
