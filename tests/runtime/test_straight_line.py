"""A part as one function: which instruction failed, and what may be in its text."""

import gc
import weakref

import pytest
import torch
from torch import Tensor

from sambasim.errors import InternalError
from sambasim.ir.graph import Node, Ref, SourceLine
from sambasim.runtime.engine.straight_line import Misfit, Part, StraightLine
from sambasim.runtime.instructions import Instruction, Registers
from tests.runtime.test_operands import X, executable, node

REGISTERS = 4


def _fail(*operands: object) -> Tensor:
    raise ValueError(str(operands))


def _instruction(number: int, **changes: object) -> Instruction:
    """Doubles register 0 into register 1."""
    plain: dict[str, object] = {
        "node": Node(f"n{number}", "aten.mul.Tensor"),
        "function": lambda x: x * 2,
        "operands": (0,),
        "single": True,
        "results": (1,),
        "stores": (),
        "frees": (),
    }
    return Instruction(**{**plain, **changes})  # type: ignore[arg-type]  # whatever a case is about


def _run(*instructions: Instruction, accumulate: bool = False) -> tuple[StraightLine, Registers]:
    line = StraightLine(Part(1, instructions), accumulate=accumulate)
    registers: Registers = [torch.tensor([1.0, 2.0]), *([None] * (REGISTERS - 1))]
    line(registers)
    return line, registers


def test_results_are_kept_stored_and_freed() -> None:
    place = torch.ones(2)
    first = _instruction(0, stores=((1, place),))
    second = _instruction(1, operands=(1,), results=(2,), frees=(0, 1))
    nobody_reads = _instruction(2, operands=(2,), results=(None,))
    both = _instruction(3, function=lambda x: (x, x + 1), operands=(2,), single=False, results=(None, 3))
    _, registers = _run(first, second, nobody_reads, both)
    assert registers[:2] == [None, None]
    assert [value.tolist() for value in registers[2:] if isinstance(value, Tensor)] == [[4.0, 8.0], [5.0, 9.0]]
    assert place.tolist() == [2.0, 4.0]
    _run(first, accumulate=True)
    assert place.tolist() == [4.0, 8.0]


def test_what_a_part_stores_to_goes_with_it() -> None:
    """Without waiting for a collection: it may be a whole device memory."""
    place = torch.ones(2)
    stored = weakref.ref(place)
    line, _ = _run(_instruction(0, stores=((1, place),)))
    gc.disable()
    try:
        del line, place
        assert stored() is None
    finally:
        gc.enable()


def test_a_part_without_instructions_does_nothing() -> None:
    _, registers = _run()
    assert len(registers) == REGISTERS


@pytest.mark.parametrize("wrong", range(4))
@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"function": _fail}, ValueError),
        ({"function": lambda x: (x,), "single": False, "results": (1, 2)}, Misfit),
        ({"function": lambda x: x, "single": False, "results": (1, 2)}, Misfit),
        ({"function": lambda x: None, "stores": ((1, torch.ones(2)),)}, Misfit),
    ],
    ids=["it fails", "too few", "no list", "nothing to store"],
)
def test_the_instruction_that_failed_is_told(wrong: int, changes: dict[str, object], error: type[Exception]) -> None:
    instructions = [_instruction(n, **(changes if n == wrong else {})) for n in range(4)]
    line = StraightLine(Part(1, tuple(instructions)), accumulate=False)
    with pytest.raises(error) as caught:
        line([torch.ones(2), None, None, None])
    assert line.failed(caught.value).node.name == f"n{wrong}"


def test_what_a_pef_calls_its_values_is_not_run() -> None:
    hostile = "y = __import__('os').abort()  #"
    source = SourceLine("abort()", 1, "abort()")
    first = Node("abort()", "aten.relu.default", (X,), (), (hostile,), "os.abort()", source)
    runs = executable(first, node("aten.relu.default", (Ref(hostile),)))
    assert runs.run()["out"].tolist() == [1.0, 2.0]


def test_an_operator_that_fails_is_told_by_its_own_line() -> None:
    fails = Node("n", "aten.mm.default", (X, X), (), ("y",), "", SourceLine("net.py", 9, "return x @ x"))
    with pytest.raises(InternalError, match=r"the operator aten\.mm\.default failed") as caught:
        executable(node("aten.relu.default", (X,), (), ("z",)), fails).run()
    assert caught.value.where == "net.py:9: return x @ x"
