"""The errors of operators during a pass: of the data, of memory, or of the PEF."""

import re
from collections.abc import Callable, Sequence
from itertools import starmap
from typing import TypeAlias

import torch
from torch import Tensor

from sambasim.errors import AssertionFailedError, DataError, InternalError, MachineError, PefError, SambasimError
from sambasim.ir.graph import Node
from sambasim.ir.types import Symbol
from sambasim.pef.archive import COMPILE_AGAIN
from sambasim.runtime.engine.instructions import Instruction


class Misfit(Exception):
    """An operator did not return the tensors that its node states."""


_REPORT = re.compile(r"[,.]? ?please report a bug to PyTorch\.?", re.IGNORECASE)
_OUT_OF_MEMORY = ("can't allocate memory", "not enough memory", "out of memory")

Held: TypeAlias = Sequence[tuple[Symbol, Tensor]]
"""Inputs of the program, and the tensors that they hold."""


def raise_for(error: Exception, instruction: Instruction | None, held: Callable[[], Held]) -> None:
    """Raise the error to show in place of `error`, which `instruction` raised, if there is one. `held`: the inputs."""
    if instruction is None or isinstance(error, SambasimError):
        return
    node = instruction.node
    if isinstance(error, Misfit):
        what = f"node {node.name}: {node.operator} does not return the {len(node.results)} tensors that the PEF states"
        raise PefError(what, where=str(node.source or node.operator), remedy=COMPILE_AGAIN) from error
    if node.operator.startswith(("comm.", "opt.")) and not isinstance(error, MemoryError):
        return  # its operands are ours: values of the inputs are not to blame
    raise operator_error(node, error, held()) from error


def operator_error(node: Node, raised: Exception, held: Held) -> SambasimError:
    """The error for `raised`, which `node`'s operator raised while inputs were `held`: DataError for integers out of
    range, MachineError if memory ran out."""
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
    suspects = [*filter(None, starmap(_unseen, held))]
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
