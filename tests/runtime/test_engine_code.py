"""A pass is one generated function: invalid nodes are rejected, failures name their cause, kernels write gradients in
place."""

import re
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from sambasim.errors import DataError, InternalError, MachineError, PefError, SambasimError
from sambasim.ir.graph import Argument, Graph, Node, Output, Ref, Section, SectionKind, SourceLine, TorchConstant
from sambasim.ir.operators import OPERATORS
from sambasim.ir.program import Program
from sambasim.ir.types import Symbol, SymbolKind, TensorType
from sambasim.runtime.engine.code import generate, operator_error
from sambasim.runtime.engine.executor import Executor
from sambasim.runtime.engine.instructions import Instruction, RegisterFile, Unit, aten_instruction
from sambasim.runtime.engine.pass_code import find_routes
from sambasim.runtime.transports.communication import Communication
from sambasim.runtime.values.operators import find_operator
from tests.runtime.test_calls import Kernels
from tests.support.compiled import outputs_of

X = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
LINE = SourceLine("net.py", 7, "return self.table(x)")
FORWARD = Section(0, SectionKind.FWD, "fwd", 0, 6)


def node(operator: str, reads: str = "x", results: str | tuple[str | None, ...] = "y", *more: Argument) -> Node:
    """A node that reads these values; `operator` is its default overload, unless it says another."""
    name = f"aten.{operator}" if "." in operator else f"aten.{operator}.default"
    made = (results,) if isinstance(results, str) else results
    return Node("n", name, (*map(Ref, reads.split()), *more), (), made, "", LINE)


def executor_of(nodes: Sequence[Node], places: Mapping[str, Tensor] | None = None) -> Executor:
    """Of a graph from `x`, which is X. It returns y, or writes gradients, by value, to `places`."""
    square, kind = TensorType("float32", (2, 2)), SymbolKind.GRADIENT if places else SymbolKind.OUTPUT
    outputs = [Output(value, f"{value}__out") for value in places or ["y"]]
    symbols = {output.symbol: Symbol(output.symbol, kind, square, 0) for output in outputs}
    symbols["x"] = Symbol("x", SymbolKind.INPUT, square, 0)
    values = {name: square for one in nodes for name in one.results if name is not None}
    section = replace(FORWARD, kind=SectionKind.BCKWD if places else SectionKind.FWD, stop=len(nodes))
    graph = Graph("training", ("x",), tuple(nodes), tuple(outputs), values, (section,))
    program = Program("net", 2, symbols, graph, graph, None, None, False, (), (), (), 512)
    tensors = {f"{value}__out": place for value, place in (places or {}).items()}
    return Executor(graph, program, lambda name: tensors.get(name, X))


def y_of(*nodes: Node) -> Tensor:
    return outputs_of(executor_of(nodes))["y__out"]


def test_a_list_of_another_length_than_stated_is_refused() -> None:
    assert y_of(node("split.Tensor", "x", ("y", None), 1)).tolist() == [[1.0, 2.0]]
    with pytest.raises(PefError, match=r"node n: aten\.split\.Tensor does not return the 3 tensors that the PEF"):
        y_of(node("split.Tensor", "x", ("y", None, None), 1))


def test_a_view_of_memory_is_made_once_and_sees_what_is_written_there(monkeypatch: pytest.MonkeyPatch) -> None:
    place, x = torch.empty(2, 2), X.clone()
    monkeypatch.setattr(sys.modules[__name__], "X", x)
    executor = executor_of([node("t", "x", "z"), node("relu", "z")], {"y": place})
    x.copy_(written := torch.rand(2, 2))
    with Kernels() as kernels:
        outputs_of(executor)
    assert place.equal(written.t())
    assert "aten.t.default" not in kernels.called


def test_a_gradient_that_its_operator_masks_is_refused() -> None:
    mask, place = node("native_layer_norm_backward", "", (None, "y")), torch.ones(2)
    results, stores = (None, 0), ((0, place),)
    masked = Instruction(mask, lambda: (torch.zeros(2), None), (), returned=2, results=results, stores=stores)
    with pytest.raises(PefError, match="does not return the 2 tensors that the PEF states"):
        list(generate([Unit((), (masked,), 1)], {}, reports=False).run([None], None))
    assert place.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("constant", [TorchConstant("dtype", "strided"), TorchConstant("module", "hub")])
def test_a_constant_that_torch_has_as_something_else_is_refused(constant: TorchConstant) -> None:
    fault = re.escape(f"the PEF uses '{constant.name}' as a {constant.kind}, which torch {torch.__version__} does not")
    with pytest.raises(PefError, match=fault) as caught:
        aten_instruction(replace(node("sum"), kwargs=(("dtype", constant),)), RegisterFile())
    assert caught.value.remedy == "compile the model again: sambasim compile"


def test_no_operator_takes_a_list_of_tensors_by_keyword_only() -> None:
    """As the rule forbids it, and the executor would have no place for it."""
    names = [name for name in OPERATORS if name.startswith("aten.")]
    arguments = [argument for name in names for argument in find_operator(name)._schema.arguments]
    assert not [a for a in arguments if a.kwarg_only and str(a.type) in ("List[Tensor]", "List[Optional[Tensor]]")]


def test_what_a_pef_calls_its_values_is_not_run() -> None:
    hostile = "y = __import__('os').abort()  #"
    source = SourceLine("abort()", 1, "abort()")
    first = Node("abort()", "aten.relu.default", (Ref("x"),), (), (hostile,), "os.abort()", source)
    second = Node("n", "aten.relu.default", (Ref(hostile),), (), ("y",))
    assert y_of(first, second).equal(X)


def test_an_operator_that_fails_names_its_own_line() -> None:
    fails = replace(node("mv", "x x"), source=SourceLine("net.py", 9, "return x @ x"))
    with pytest.raises(InternalError, match=r"the operator aten\.mv\.default failed") as caught:
        y_of(node("relu", "x", "z"), fails)
    assert caught.value.where == "net.py:9: return x @ x"


def fail(raised: Exception, least: int, largest: int) -> SambasimError:
    """The error of an embedding of these numbers, of which it has 10."""
    inputs = Symbol("x", SymbolKind.INPUT, TensorType("int64", (2,)), exclusive_bound=10)
    return operator_error(node("embedding"), raised, [(inputs, torch.tensor([least, largest]))])


@pytest.mark.parametrize(("least", "largest"), [(0, 10), (-1, 9)])
def test_values_that_no_one_saw_when_compiling_are_an_error_of_the_data(least: int, largest: int) -> None:
    error = fail(IndexError("index out of range in self\nand more"), least, largest)
    assert isinstance(error, DataError)
    assert error.what == (
        "the samples hold values that the model cannot take (IndexError: index out of range in self): "
        f"x goes from {least} to {largest}, and went up to 9 when compiled"
    )
    assert error.where == "net.py:7: return self.table(x)"


def test_memory_that_runs_out_is_an_error_of_the_machine_and_anything_else_is_ours() -> None:
    refused = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"
    for raised in (MemoryError(), RuntimeError(refused)):
        error = fail(raised, 0, 50)
        assert isinstance(error, MachineError)
        assert error.remedy == "compile for a smaller --batch-size, or start fewer ranks on this host"
    ours = fail(RuntimeError("broken"), 0, 9)
    assert isinstance(ours, InternalError)
    assert ours.what == "the operator aten.embedding.default failed: RuntimeError: broken"


class Logged(Communication):
    """Adds its operands, once it has been asked twice whether it is ready."""

    def __init__(self, name: str, log: list[str]) -> None:
        self._name, self._log = name, log
        self._operands: tuple[object, ...] = ()
        self._asked = 0

    def begin(self, *operands: object) -> None:
        self._operands = operands
        self._log.append(f"begin {self._name}")

    def is_ready(self) -> bool:
        self._asked += 1
        return self._asked % 2 == 0

    def finish(self) -> object:
        self._log.append(f"finish {self._name}")
        return [*self._operands, self._name]


def logged(name: str, log: list[str], operand: int, result: int, frees: tuple[int, ...] = ()) -> Instruction:
    """A communication if its name begins with `sum`."""
    communication = Logged(name, log) if name.startswith("sum") else None

    def plain(operand: object) -> object:
        log.append(name)
        return [operand, name]

    of = Node(name, "comm.all_reduce" if communication else "aten.add.Tensor", (Ref("x"),), (("axis", "tp"),), ("y",))
    function = communication.finish if communication else plain
    return Instruction(of, function, (operand,), 1, (result,), (), frees, communication)


def test_a_communication_finishes_where_its_result_is_read() -> None:
    """What does not depend on it runs meanwhile; the next communication waits for it, and so does the next unit."""
    log: list[str] = []
    waited: dict[str, float] = defaultdict(float)
    first = (
        *(logged("sum_a", log, 0, 1, (0,)), logged("independent", log, 7, 2), logged("reader", log, 1, 3)),
        *(logged("sum_b", log, 3, 4), logged("other", log, 7, 5), logged("sum_c", log, 5, 6)),
    )
    units = [Unit((FORWARD,), first, 1), Unit((replace(FORWARD, index=1),), (logged("last", log, 7, 8),), 2)]
    code = generate(units, waited, reports=True)
    registers: list[object] = [0, *[None] * 6, 7, None]
    assert code.yields
    waits = list(code.run(registers, lambda unit: log.append(f"ended {unit.sections[0].index}")))
    assert len(waits) == 3
    assert log == [
        *("begin sum_a", "independent", "finish sum_a", "reader"),
        *("begin sum_b", "other", "finish sum_b", "begin sum_c", "finish sum_c", "ended 0", "last", "ended 1"),
    ]
    assert registers[0] is None, "freed"
    assert registers[3:5] == [[[0, "sum_a"], "reader"], [[[0, "sum_a"], "reader"], "sum_b"]]
    assert waited.keys() == {"tp"}
    assert 0 < waited["tp"] < 1


def test_what_fails_in_a_communication_or_a_report_is_told_apart() -> None:
    log: list[str] = []

    def fails(*operands: object) -> None:
        raise MemoryError("broken")

    communication = replace(logged("sum", log, 0, 1), function=fails)
    for instructions, error in (((communication, logged("next", log, 2, 3)), MachineError), ((), MemoryError)):
        code = generate([Unit((FORWARD,), instructions, 1)], defaultdict(float), reports=True)
        with pytest.raises(error, match="broken"):
            list(code.run([None] * 4, fails))


PRODUCT = node("mm", "x x", "product")
TWICE = (PRODUCT, node("t", "product", "turned"), node("t", "turned", "value"))
UNREAD: dict[str, tuple[int, ...]] = {"product": (2, 1), "turned": (2,), "value": ()}
"""By value that another node reads: the views that are not needed all the same."""


def also_read(value: str) -> Node:
    return node("relu", value, "other")


@pytest.mark.parametrize(
    ("nodes", "sections", "others", "expected"),
    [
        pytest.param(TWICE, (0, 0, 0), {}, [(0, 2, (2, 1))], id="seen through views, which are not needed"),
        pytest.param((*TWICE, also_read("turned")), (0,) * 4, {}, [(0, 2, (2,))], id="a view that others read stays"),
        pytest.param((node("mm", "x x", "value"), also_read("x")), (0, 1), {}, [(0, 0, ())], id="nobody reads it"),
        # torch.ops.aten.mul.Tensor takes no tensor to write to.
        pytest.param([node("mul.Tensor", "x", "value", 0.5)], (0,), {}, [], id="a product with a number"),
        pytest.param([node("mul.Tensor", "x x", "value")], (0,), {}, [(0, 0, ())], id="a product"),
        pytest.param(TWICE, (0, 0, 0), {"keep": ["turned"]}, [], id="handed out"),
        pytest.param(TWICE, (0, 0, 0), {"also": ["product"]}, [], id="two gradients"),
        # A peer may write the mean over it before the later section runs; also where it is read by way of a view.
        *(((*TWICE, also_read(value)), (0, 0, 0, 1), {}, []) for value in UNREAD),
        *(((*TWICE, also_read(value)), (0, 0, 1, 1), {}, [(0, 2, unread)]) for value, unread in UNREAD.items()),
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

    values = [f"value{number}" for number in range(100)]
    nodes = Counted(node("mm", "x x", value) for value in values)
    assert len(find_routes(nodes, [0] * 100, values, ())) == 100
    assert nodes.rounds <= 2


def kernels_of(executor: Executor, *, accumulate: bool = False) -> list[str]:
    """The kernels of one pass, in order, without how the first one sees a place."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        outputs_of(executor, accumulate=accumulate)
    events = sorted(profile.events(), key=lambda event: event.time_range.start)
    names = [event.name for event in events if event.cpu_parent is None]
    return [name for name in names if name.startswith("aten::") and name != "aten::as_strided"]


@pytest.mark.parametrize("turns", [0, 2])
def test_from_the_second_pass_on_nothing_is_copied(turns: int) -> None:
    place = torch.full((2, 2), torch.nan)
    executor = executor_of(TWICE[: turns + 1], {"value" if turns else "product": place})
    assert kernels_of(executor) == ["aten::mm"] + ["aten::t"] * turns + ["aten::copy_"]
    assert place.equal(X @ X)
    place.fill_(torch.nan)
    assert kernels_of(executor) == ["aten::mm"]
    assert place.equal(X @ X)
    assert kernels_of(executor, accumulate=True)[-1] == "aten::add_"
    assert place.equal(2 * (X @ X))


def test_a_gradient_that_lies_otherwise_than_its_place_goes_on_being_copied() -> None:
    """The kernel would have to write columns where it writes rows: it might take another way, with other bits."""
    place = torch.full((2, 2), torch.nan)
    executor = executor_of(TWICE[:2], {"turned": place})
    for _ in range(2):
        assert kernels_of(executor) == ["aten::mm", "aten::t", "aten::copy_"]
        assert place.equal((X @ X).t())
