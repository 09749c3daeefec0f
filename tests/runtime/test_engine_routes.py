"""Operators as Python functions, and gradients that kernels write in place."""

# torch.utils._python_dispatch is untyped.
# mypy: no-disallow-untyped-calls

from collections.abc import Iterator, Mapping, Sequence

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from sambasim.ir.graph import Graph, Node, Output, Ref, Section, SectionKind
from sambasim.ir.operators import OPERATORS
from sambasim.ir.program import Program
from sambasim.ir.types import Symbol, SymbolKind, TensorType
from sambasim.runtime.engine.executor import Executor
from sambasim.runtime.engine.instructions import BUILTINS, WRITES_OUT, builtin, find_operator
from sambasim.runtime.engine.pass_code import find_routes
from tests.support.compiled import outputs_of

SQUARE = TensorType("float32", (2, 2))
X = torch.tensor([[1.0, 2.0], [3.0, 4.0]])


def node(operator: str, reads: Sequence[str], result: str, *more: int) -> Node:
    return Node(f"of_{result}", f"aten.{operator}", (*map(Ref, reads), *more), (), (result,))


MM, T = "mm.default", "t.default"
PRODUCT = node(MM, ("x", "x"), "product")
TWICE = (PRODUCT, node(T, ("product",), "turned"), node(T, ("turned",), "value"))


def relu(read: str) -> Node:
    return node("relu.default", (read,), "other")


UNREAD: dict[str, tuple[int, ...]] = {"product": (2, 1), "turned": (2,), "value": ()}
NUMBER = Node("m", "aten.mul.Tensor", (Ref("x"), 0.5), (), ("value",))


@pytest.mark.parametrize(
    ("nodes", "sections", "others", "expected"),
    [
        pytest.param(TWICE, (0, 0, 0), {}, [(0, 2, (2, 1))], id="seen through views, which are not needed"),
        pytest.param((*TWICE, relu("turned")), (0,) * 4, {}, [(0, 2, (2,))], id="a view that others read stays"),
        pytest.param(
            (node(MM, ("x", "x"), "value"), relu("x")), (0, 1), {}, [(0, 0, ())], id="nobody reads the gradient"
        ),
        # torch.ops.aten.mul.Tensor takes no tensor to write to.
        pytest.param([NUMBER], (0,), {}, [], id="a product with a number"),
        pytest.param([node("mul.Tensor", ("x", "x"), "value")], (0,), {}, [(0, 0, ())], id="a product"),
        pytest.param(TWICE, (0, 0, 0), {"keep": ["turned"]}, [], id="handed out"),
        pytest.param(TWICE, (0, 0, 0), {"also": ["product"]}, [], id="two gradients"),
        # A peer may write the mean over it before the later section runs; also where it is read by way of a view.
        *(((*TWICE, relu(read)), (0, 0, 0, 1), {}, []) for read in UNREAD),
        *(((*TWICE, relu(read)), (0, 0, 1, 1), {}, [(0, 2, unread)]) for read, unread in UNREAD.items()),
    ],
)
def test_which_gradients_are_written_in_place(
    nodes: Sequence[Node], sections: Sequence[int], others: Mapping[str, Sequence[str]], expected: list[object]
) -> None:
    """By maker, last node and unread views of each route."""
    routes = find_routes(nodes, sections, ["value", *others.get("also", ())], others.get("keep", ()))
    assert [(route.maker, route.last, route.unread) for route in routes] == expected


def test_the_nodes_are_looked_through_as_often_for_many_gradients_as_for_one() -> None:
    class Counted(list[Node]):
        rounds = 0

        def __iter__(self) -> Iterator[Node]:
            self.rounds += 1
            return super().__iter__()

    for count in (1, 100):
        nodes = Counted(node(MM, ("x", "x"), f"value{number}") for number in range(count))
        values = [f"value{number}" for number in range(count)]
        assert len(find_routes(nodes, [0] * count, values, ())) == count
        assert nodes.rounds <= 2


class Counted:
    """A graph of `nodes` whose gradients are the values in `stored`, and the tensors they go to."""

    def __init__(self, nodes: Sequence[Node], *stored: str) -> None:
        self.places = {f"{value}__grad": torch.full((2, 2), torch.nan) for value in stored}
        symbols = {"x": Symbol("x", SymbolKind.INPUT, SQUARE, 0)}
        symbols |= {name: Symbol(name, SymbolKind.GRADIENT, SQUARE, 0) for name in self.places}
        outputs = tuple(Output(value, f"{value}__grad") for value in stored)
        values = {name: SQUARE for one in nodes for name in one.results if name is not None}
        section = Section(0, SectionKind.BCKWD, "bwd", 0, len(nodes))
        graph = Graph("training", ("x",), tuple(nodes), outputs, values, (section,))
        program = Program("net", 2, symbols, graph, graph, None, None, False, (), (), (), 512)
        self.executable = Executor(graph, program, lambda name: self.places.get(name, X))

    def calls(self, *, accumulate: bool = False) -> list[str]:
        """The kernels of one pass, in order, without how the first one sees a place."""
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            outputs_of(self.executable, accumulate=accumulate)
        events = sorted(profile.events(), key=lambda event: event.time_range.start)
        names = [event.name for event in events if event.cpu_parent is None]
        return [name for name in names if name.startswith("aten::") and name != "aten::as_strided"]


@pytest.mark.parametrize("turns", [0, 2])
def test_from_the_second_pass_on_nothing_is_copied(turns: int) -> None:
    counted = Counted(TWICE[: turns + 1], "value" if turns else "product")
    (place,) = counted.places.values()
    assert counted.calls() == ["aten::mm"] + ["aten::t"] * turns + ["aten::copy_"]
    assert place.equal(X @ X)
    place.fill_(torch.nan)
    assert counted.calls() == ["aten::mm"]
    assert place.equal(X @ X)
    assert counted.calls(accumulate=True)[-1] == "aten::add_"
    assert place.equal(2 * (X @ X))


def test_a_gradient_that_lies_otherwise_than_its_place_goes_on_being_copied() -> None:
    """The kernel would have to write columns where it writes rows: it might take another way, with other bits."""
    counted = Counted(TWICE[:2], "turned")
    for _ in range(2):
        assert counted.calls() == ["aten::mm", "aten::t", "aten::copy_"]
        assert counted.places["turned__grad"].equal((X @ X).t())


PLAIN = torch.arange(12.0).view(3, 4) / 7 + 0.1
ROW = torch.tensor([[0.5, -1.0, 2.0, 0.25]])

OPERANDS: Mapping[str, Sequence[object]] = {
    "aten.mm.default": (PLAIN, PLAIN.t()),
    "aten.addmm.default": (PLAIN[:, :3], PLAIN, PLAIN.t()),
    "aten.bmm.default": (PLAIN[None], PLAIN.t()[None]),
    "aten.baddbmm.default": (PLAIN[None, :, :3], PLAIN[None], PLAIN.t()[None]),
    "aten.t.default": (PLAIN,),
    "aten.transpose.int": (PLAIN, 0, 1),
    "aten.permute.default": (PLAIN, [1, 0]),
    "aten.unsqueeze.default": (PLAIN, 1),
    "aten.squeeze.dim": (ROW, 0),
    "aten.select.int": (PLAIN, 0, 1),
    "aten.view.default": (PLAIN, [2, 6]),
    "aten.expand.default": (ROW, [3, 4]),
    "aten.sum.dim_IntList": (PLAIN, [0], True),
    "aten.mean.dim": (PLAIN, [0], True),
    "aten._log_softmax.default": (PLAIN, 1, False),
    "aten._softmax.default": (PLAIN, 1, False),
    "aten._log_softmax_backward_data.default": (PLAIN, PLAIN, 1, torch.float32),
    "aten._softmax_backward_data.default": (PLAIN, PLAIN, 1, torch.float32),
    "aten.native_layer_norm.default": (PLAIN, [4], None, None, 1e-5),
    "aten.embedding.default": (PLAIN, torch.tensor([0, 2]), -1, False, False),
    "aten.native_dropout.default": (PLAIN, 0.5, True),
}
"""By operator: operands as the schema has them. An operator that is not here takes PLAIN, or two of it, or a row."""

TWO = ("add", "sub", "mul", "div")


def operands(name: str) -> Sequence[object]:
    return OPERANDS.get(name, (PLAIN, ROW) if name.split(".")[1] in TWO else (PLAIN,))


class Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]  # torch's
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


def same(one: object, other: object) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.equal(other) and one.stride() == other.stride()
    assert isinstance(one, tuple)
    assert isinstance(other, tuple)
    return all(map(same, one, other))


@pytest.mark.parametrize("name", BUILTINS)
def test_a_quick_function_reaches_its_operator_and_gives_the_same(name: str) -> None:
    recorder = Recorder()
    torch.manual_seed(1)
    with recorder:
        quick = BUILTINS[name](*operands(name))
    torch.manual_seed(1)
    assert recorder.seen == [name]
    assert same(quick, find_operator(name)(*operands(name)))


@pytest.mark.parametrize("name", sorted(WRITES_OUT))
def test_what_is_written_out_is_what_is_returned(name: str) -> None:
    returned = BUILTINS[name](*operands(name))
    assert isinstance(returned, Tensor)
    out = torch.full_like(returned, torch.nan)
    recorder = Recorder()
    with recorder:
        assert BUILTINS[name](*operands(name), out=out) is out
    assert out.equal(returned)
    assert len(recorder.seen) == 1, "no copy"


def test_every_row_is_an_operator_of_the_table() -> None:
    assert set(OPERATORS) > set(BUILTINS) > WRITES_OUT
    assert set(OPERANDS) <= set(BUILTINS)


def test_a_number_in_the_place_of_a_tensor_is_left_to_the_operator() -> None:
    schema = find_operator("aten.mul.Tensor")._schema
    assert builtin(Node("n", "aten.mul.Tensor", (Ref("x"), Ref("y"))), schema) is torch.mul
    assert builtin(Node("n", "aten.mul.Tensor", (Ref("x"), 2.0)), schema) is None
