"""Whose mistake it is when an operator fails in the middle of a step."""

import pytest
import torch

from sambasim.errors import DataError, InternalError, MachineError, SambasimError
from sambasim.ir.graph import Node, SourceLine
from sambasim.ir.types import Symbol, SymbolKind, TensorType
from sambasim.runtime.operator_failure import operator_error

NODE = Node(
    name="net__embedding",
    operator="aten.embedding.default",
    args=(),
    kwargs=(),
    results=(),
    module="table",
    source=SourceLine("net.py", 7, "return self.table(x)"),
)
INPUTS = (
    Symbol("x", SymbolKind.INPUT, TensorType("int64", (2,)), exclusive_bound=10),
    Symbol("scale", SymbolKind.INPUT, TensorType("float32", (2,))),
)


def fail(raised: Exception, least: int, largest: int) -> SambasimError:
    return operator_error(NODE, raised, INPUTS, {"x": torch.tensor([least, largest]), "scale": torch.ones(2)})


@pytest.mark.parametrize(("least", "largest"), [(0, 10), (-1, 9), (-5, 50)])
def test_values_that_no_one_saw_when_compiling_are_the_datas(least: int, largest: int) -> None:
    error = fail(IndexError("index out of range in self\nand more"), least, largest)
    assert isinstance(error, DataError)
    assert error.what == (
        "the samples hold values that the model cannot take (IndexError: index out of range in self): "
        f"x goes from {least} to {largest}, and went up to 9 when compiled"
    )
    assert error.where == "net.py:7: return self.table(x)"


@pytest.mark.parametrize(
    "raised", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")]
)
def test_memory_is_the_machines(raised: Exception) -> None:
    error = fail(raised, 0, 50)
    assert isinstance(error, MachineError)
    assert error.remedy == "compile for a smaller --batch-size, or start fewer ranks on this host"


def test_anything_else_is_ours() -> None:
    error = fail(RuntimeError("broken"), 0, 9)
    assert isinstance(error, InternalError)
    assert error.what == "the operator aten.embedding.default failed: RuntimeError: broken"
