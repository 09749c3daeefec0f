"""AP03: values of a batch that the device would not keep as they are."""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from sambasim.ir.graph import Node, node_references
from sambasim.ir.program import Program
from sambasim.samba.checks.findings import Finding

_LIMITS = torch.iinfo(torch.int16)

_PICKING = {"embedding", "_embedding_bag", "index", "index_select", "gather", "one_hot"}
_RESHAPING = {"view", "reshape", "expand", "unsqueeze", "squeeze", "slice", "select", "transpose", "t", "_to_copy"}
"""Operators of ATen that read row numbers, and those that hand on what they are given in another shape or type."""


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
    """Inputs that pick rows, such as the tokens of an embedding, whatever shape they are first brought into: they are
    no labels."""
    graph = program.training or program.evaluation
    counted = {result for node in graph.nodes if _name(node) == "arange" for result in node.results}
    indices: set[str] = set()
    for node in reversed(graph.nodes):
        name, read = _name(node), set(node_references(node))
        one_hot = name == "eq" and not counted.isdisjoint(read)  # as torch.export has it
        reshaped = name in _RESHAPING and not indices.isdisjoint(node.results)
        if name in _PICKING or one_hot or reshaped:
            indices |= read
    return indices


def _name(node: Node) -> str:
    """`embedding` of `aten.embedding.default`."""
    return node.operator.split(".")[1]
