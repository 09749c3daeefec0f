"""AP03: values of a batch that the device would not keep as they are."""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from sambasim.ir.graph import node_references
from sambasim.ir.program import Program
from sambasim.samba.checks.findings import Finding

_LIMITS = torch.iinfo(torch.int16)


def lossy(program: Program, batch: Mapping[str, Tensor], where: str | None) -> Iterator[Finding]:
    """A finding for each input whose values the device's conversion changes: labels become int16 there, and floating
    point numbers bf16."""
    indices = _indices(program)
    for name, tensor in batch.items():
        if tensor.dtype is torch.float64:
            what = f"{name} is float64: the device computes in bf16, and keeps 8 of its 53 bits"
            yield Finding("AP03", what, where, f"{name}.float() in the dataset, so that all see the same numbers")
        elif not tensor.is_floating_point() and tensor.numel() and name not in indices:
            least, most = int(tensor.min()), int(tensor.max())
            if least < _LIMITS.min or most > _LIMITS.max:
                value = most if most > _LIMITS.max else least
                what = f"{name} has {value}: the device keeps labels as int16, up to {_LIMITS.max}"
                yield Finding("AP03", what, where, f"at most {_LIMITS.max + 1} classes, or two labels in place of one")


def _indices(program: Program) -> set[str]:
    """Inputs that are rows of an embedding, such as tokens: they are no labels."""
    graph = program.training or program.evaluation
    readers = (node for node in graph.nodes if "embedding" in node.operator)
    return {name for node in readers for name in node_references(node)}
