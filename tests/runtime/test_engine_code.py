"""Instructions of a pass: invalid nodes are rejected, a pass is one generated function, failures name their cause."""

import re
from collections import defaultdict
from dataclasses import replace

import pytest
import torch

from sambasim.errors import DataError, InternalError, MachineError, PefError, SambasimError
from sambasim.ir.graph import Argument, Graph, Node, Output, Ref, Section, SectionKind, SourceLine, TorchConstant
from sambasim.ir.operators import OPERATORS
from sambasim.ir.program import Program
from sambasim.ir.types import Symbol, SymbolKind, TensorType
from sambasim.runtime.engine.code import generate, operator_error
from sambasim.runtime.engine.executor import Executor
from sambasim.runtime.engine.instructions import Instruction, RegisterFile, Unit, aten_instruction, find_operator
from sambasim.runtime.transports.communication import Communication
from tests.support.compiled import outputs_of

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
    program = Program("net", 2, symbols, None, graph, None, None, False, (), (), (), 512)
    return Executor(graph, program, lambda name: torch.tensor([1.0, 2.0]))


def test_a_list_of_another_length_than_stated_is_refused() -> None:
    fits = node("aten.split.Tensor", (X, 1), (), ("y", None))
    assert outputs_of(executable(fits))["out"].tolist() == [1.0]
    fault = re.escape("node n: aten.split.Tensor does not return the 3 tensors that the PEF states")
    with pytest.raises(PefError, match=fault):
        outputs_of(executable(node("aten.split.Tensor", (X, 1), (), ("y", None, None))))


def test_a_gradient_that_its_operator_masks_is_refused() -> None:
    mask = node("aten.native_layer_norm_backward.default", (), results=(None, "y"))
    place = torch.ones(2)
    masked = Instruction(mask, lambda: (torch.zeros(2), None), (), returned=2, results=(None, 0), stores=((0, place),))
    with pytest.raises(PefError, match="does not return the 2 tensors that the PEF states"):
        list(generate([Unit((), (masked,))], {}, reports=False).run([None], None))
    assert place.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("constant", [TorchConstant("dtype", "strided"), TorchConstant("module", "hub")])
def test_a_constant_that_torch_has_as_something_else_is_refused(constant: TorchConstant) -> None:
    fault = re.escape(f"the PEF uses '{constant.name}' as a {constant.kind}, which torch {torch.__version__} does not")
    with pytest.raises(PefError, match=fault) as caught:
        aten_instruction(node("aten.sum.default", (X,), (("dtype", constant),), ("z",)), RegisterFile())
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
    found = outputs_of(executable(*nodes))["out"]
    torch.manual_seed(3)
    x = torch.tensor([1.0, 2.0])
    torch.rand_like(x)
    torch.native_dropout(x, 0.5, True)
    assert found.equal(torch.rand_like(x))


def test_what_a_pef_calls_its_values_is_not_run() -> None:
    hostile = "y = __import__('os').abort()  #"
    source = SourceLine("abort()", 1, "abort()")
    first = Node("abort()", "aten.relu.default", (X,), (), (hostile,), "os.abort()", source)
    runs = executable(first, node("aten.relu.default", (Ref(hostile),)))
    assert outputs_of(runs)["out"].tolist() == [1.0, 2.0]


def test_an_operator_that_fails_names_its_own_line() -> None:
    fails = Node("n", "aten.mm.default", (X, X), (), ("y",), "", SourceLine("net.py", 9, "return x @ x"))
    with pytest.raises(InternalError, match=r"the operator aten\.mm\.default failed") as caught:
        outputs_of(executable(node("aten.relu.default", (X,), (), ("z",)), fails))
    assert caught.value.where == "net.py:9: return x @ x"


NODE = Node("n", "aten.embedding.default", source=SourceLine("net.py", 7, "return self.table(x)"))
INPUT = Symbol("x", SymbolKind.INPUT, TensorType("int64", (2,)), exclusive_bound=10)


def fail(raised: Exception, least: int, largest: int) -> SambasimError:
    return operator_error(NODE, raised, [(INPUT, torch.tensor([least, largest]))])


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

    of = Node(name, "comm.all_reduce" if communication else "aten.add.Tensor", (X,), (("axis", "tp"),), ("y",))
    function = communication.finish if communication else plain
    return Instruction(of, function, (operand,), True, (result,), (), frees, communication)


def test_a_communication_finishes_where_its_result_is_read() -> None:
    """What does not depend on it runs meanwhile; the next communication waits for it, and so does the next unit."""
    log: list[str] = []
    waited: dict[str, float] = defaultdict(float)
    first = (
        logged("sum_a", log, 0, 1, (0,)),
        logged("independent", log, 7, 2),
        logged("reader", log, 1, 3),
        logged("sum_b", log, 3, 4),
        logged("other", log, 7, 5),
        logged("sum_c", log, 5, 6),
    )
    section = Section(0, SectionKind.FWD, "fwd", 0, 6)
    units = [Unit((section,), first), Unit((replace(section, index=1),), (logged("last", log, 7, 8),))]
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
    section = Section(0, SectionKind.FWD, "fwd", 0, 2)
    for instructions, error in (((communication, logged("next", log, 2, 3)), MachineError), ((), MemoryError)):
        code = generate([Unit((section,), instructions)], defaultdict(float), reports=True)
        with pytest.raises(error, match="broken"):
            list(code.run([None] * 4, fails))
