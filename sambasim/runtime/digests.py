"""Digests of what a run trained and of what its steps compute.

`run` prints the sha256 of the final state, so that two runs can be compared at a glance. `run --record-digests` stores
a short digest of every tensor that leaves a section; values that stay within a section are not recorded, and they show
in the values that leave it.
"""

import hashlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from sambasim.ir.dataflow import pass_and_update
from sambasim.ir.graph import Graph, node_references
from sambasim.ir.program import Program
from sambasim.ir.types import SymbolKind
from sambasim.pef.weights import bytes_of
from sambasim.records.digests import ValueDigest, What
from sambasim.runtime.device import DeviceMemory

_WEIGHTS = (SymbolKind.PARAMETER,)
_STATE = (SymbolKind.PARAMETER, SymbolKind.BUFFER, SymbolKind.OPTIMIZER_STATE)


def weights_sha256(program: Program, memory: DeviceMemory) -> str:
    """Over the parameters in name order, little-endian."""
    return _digest(program, _WEIGHTS, memory.tensor).hexdigest()


def state_sha256(program: Program, tensor_of: Callable[[str], Tensor], steps: int) -> str:
    """Over parameters, buffers and optimizer states in name order, and the number of optimizer steps.

    `tensor_of` is called once for each symbol, in name order; its result is read before the next call.
    """
    digest = _digest(program, _STATE, tensor_of)
    digest.update(steps.to_bytes(8, "little"))
    return digest.hexdigest()


def tensor_sha256(tensor: Tensor) -> str:
    """Over the elements, little-endian, in row-major order."""
    return hashlib.sha256(bytes_of(tensor)).hexdigest()


def _digest(program: Program, kinds: Iterable[SymbolKind], tensor_of: Callable[[str], Tensor]) -> "hashlib._Hash":
    digest = hashlib.sha256()
    wanted = set(kinds)
    for name in sorted(name for name, symbol in program.symbols.items() if symbol.kind in wanted):
        digest.update(bytes_of(tensor_of(name)))
    return digest


UNWRITTEN: Mapping[str, int] = {
    "aten.mkldnn_rnn_layer.default": 3,  # the kernel's workspace for its backward
    "aten.empty.memory_format": 0,
    "aten.empty_like.default": 0,
    "aten.empty_permuted.default": 0,
    "aten.new_empty.default": 0,
    "aten.new_empty_strided.default": 0,
}
"""By operator: the result with uninitialized bytes. They differ from run to run and affect no other value."""

_DIGEST_BYTES = 8
_OUTPUTS: Mapping[SymbolKind, What] = {SymbolKind.GRADIENT: "gradient", SymbolKind.BUFFER: "buffer"}


class Seen(NamedTuple):
    """A tensor to record: its role in the step, its name, and the section that computes it.

    `value` is its name in the graph, for a value in a register; None for a tensor in device memory.
    """

    what: What
    name: str
    section: int | None = None
    value: str | None = None


def seen_of_sections(graph: Graph, program: Program) -> Sequence[Sequence[Seen]]:
    """For each section of the pass of `graph`, the tensors to record at its end, in the order of its nodes.

    By then a gradient is in device memory, and the other values are in registers because a later section reads them.
    """
    sections, _ = pass_and_update(graph)
    section_of = {
        result: section.index
        for section in sections
        for node in graph.section_nodes(section)
        for result in node.results
        if result is not None
    }
    unwritten = {node.results[UNWRITTEN[node.operator]] for node in graph.nodes if node.operator in UNWRITTEN}
    leaving = {
        name
        for section in sections
        for node in graph.section_nodes(section)
        for name in node_references(node)
        if section_of.get(name, section.index) != section.index and name not in unwritten
    }
    named: dict[str, list[Seen]] = {}
    for output in graph.outputs:
        what = "loss" if output.symbol == program.loss else _OUTPUTS.get(program.symbols[output.symbol].kind)
        if what is not None:
            in_memory = what == "gradient"
            one = Seen(what, output.symbol, section_of.get(output.value), None if in_memory else output.value)
            named.setdefault(output.value, []).append(one)
    return [
        [
            one
            for node in graph.section_nodes(section)
            for result in node.results
            if result is not None
            for one in _seen(result, section.index, result in leaving, named.get(result, ()))
        ]
        for section in sections
    ]


def _seen(value: str, section: int, leaves: bool, named: Sequence[Seen]) -> Sequence[Seen]:
    """What to record of one value: under its own name only if it has no other. (A gradient in memory is a sum over
    micro-steps, so its value is recorded too.)"""
    shown = any(one.value is not None for one in named)
    return [*([Seen("value", value, section, value)] if leaves and not shown else ()), *named]


def seen_in_memory(program: Program, *kinds: SymbolKind) -> Sequence[Seen]:
    """The symbols of `kinds` in device memory, in the order of the program."""
    whats: Mapping[SymbolKind, What] = {
        SymbolKind.INPUT: "input",
        SymbolKind.PARAMETER: "parameter",
        SymbolKind.BUFFER: "buffer",
    }
    return [Seen(whats[symbol.kind], symbol.name) for symbol in program.symbols.values() if symbol.kind in kinds]


def digested(seen: Seen, tensor: Tensor, micro_step: int | None = None) -> ValueDigest:
    """The digest of `tensor`, described by `seen`, as it is now."""
    norm = _norm(tensor)
    finite = math.isfinite(norm)
    not_finite = 0 if finite else int(tensor.numel() - torch.isfinite(tensor).sum())
    return ValueDigest(
        seen.what, seen.name, micro_step, seen.section, digest_of(tensor), norm if finite else None, not_finite
    )


def digest_of(tensor: Tensor) -> str:
    """A digest of dtype, shape and elements, in row-major order."""
    digest = hashlib.blake2b(f"{tensor.dtype}{tuple(tensor.shape)}".encode(), digest_size=_DIGEST_BYTES)
    digest.update(bytes_of(tensor))
    return digest.hexdigest()


def _norm(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor.detach().to(torch.float64)))
