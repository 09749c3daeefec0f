"""The errors of operators during a pass: of the data, of memory, or of the PEF."""

import re
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from sambasim.errors import AssertionFailedError, DataError, InternalError, MachineError, PefError, SambasimError
from sambasim.ir.graph import Node
from sambasim.ir.types import Symbol
from sambasim.pef.archive import COMPILE_AGAIN
from sambasim.runtime.engine.instructions import Instruction


class Misfit(Exception):
    """An operator did not return the tensors that its node states."""


def misfit(instruction: Instruction) -> SambasimError:
    node = instruction.node
    what = f"node {node.name}: {node.operator} does not return the {len(node.results)} tensors that the PEF states"
    return PefError(what, where=str(node.source or node.operator), remedy=COMPILE_AGAIN)


_REPORT = re.compile(r"[,.]? ?please report a bug to PyTorch\.?", re.IGNORECASE)
_OUT_OF_MEMORY = ("can't allocate memory", "not enough memory", "out of memory")


def operator_error(
    node: Node, raised: Exception, inputs: Iterable[Symbol], tensors: Mapping[str, Tensor]
) -> SambasimError:
    """The error for `raised`, which `node`'s operator raised while `inputs` held `tensors` (by symbol): DataError for
    integers out of range, MachineError if memory ran out."""
    said = _REPORT.sub("", str(raised).strip().partition("\n")[0])
    text = f"{type(raised).__name__}: {said}"
    where = str(node.source) if node.source else f"the operator {node.operator}"
    if isinstance(raised, MemoryError) or any(mark in text for mark in _OUT_OF_MEMORY):
        return MachineError(
            f"there is not enough memory for a step: {text}",
            where=where,
            remedy="compile for a smaller --batch-size, or start fewer ranks on this host",
        )
    if isinstance(raised, torch.linalg.LinAlgError):
        return AssertionFailedError(said, where=where, remedy="add a small number to the diagonal of the matrix")
    suspects = [found for symbol in inputs if (found := _unseen(symbol, tensors[symbol.name]))]
    if suspects:
        return DataError(
            f"the samples hold values that the model cannot take ({text}): {'; '.join(suspects)}",
            where=where,
            remedy="correct the samples, or enlarge the model for these values and compile it again",
        )
    return InternalError(f"the operator {node.operator} failed: {text}", where=where)


def _unseen(symbol: Symbol, tensor: Tensor) -> str | None:
    """The range of an input's integers, if it exceeds the one at compile time."""
    if symbol.exclusive_bound is None or tensor.numel() == 0:
        return None
    least, largest = int(tensor.min()), int(tensor.max())
    if least >= 0 and largest < symbol.exclusive_bound:
        return None
    return f"{symbol.name} goes from {least} to {largest}, and went up to {symbol.exclusive_bound - 1} when compiled"
