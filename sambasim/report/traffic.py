"""The bytes that enter and leave each section, worked out from the types that the graph records.

What enters is counted once for each section, however many nodes read it; what leaves is what a later section reads or
an output keeps. These are sizes of values, not measurements: views count as what they show. A composite works on the
flat tensors of its groups:

    opt.<kind>           reads parameters, gradients and states; writes parameters and states
    opt.square_sums      reads gradients
    comm.reduce_scatter  reads and writes gradients
    comm.all_gather      reads and writes parameters
"""

from collections.abc import Iterator, Sequence

from sambasim.ir.graph import Graph, Node, node_references
from sambasim.ir.program import ParameterGroup, Program
from sambasim.ir.types import DTYPE_BYTES


def section_traffic(program: Program, graph: Graph) -> Sequence[tuple[int, int]]:
    """For each section of `graph`, in order: bytes in and bytes out, of one replica."""
    last_read = {name: place for place, node in enumerate(graph.nodes) for name in node_references(node)}
    # Outputs are read after the last node.
    last_read |= {output.value: len(graph.nodes) for output in graph.outputs}
    groups = {group.name: group for group in program.groups}

    def size(name: str) -> int:
        type_ = graph.values.get(name) or program.symbols[name].type
        return type_.size_bytes

    traffic: list[tuple[int, int]] = []
    for section in graph.sections:
        nodes = graph.section_nodes(section)
        made = {result for node in nodes for result in node.results if result is not None}
        entering = {name for node in nodes for name in node_references(node)} - made
        leaving = {name for name in made if last_read.get(name, -1) >= section.stop}
        composites = [_composite_bytes(program, node, groups) for node in nodes]
        in_bytes = sum(map(size, entering)) + sum(read for read, _ in composites)
        out_bytes = sum(map(size, leaving)) + sum(written for _, written in composites)
        traffic.append((in_bytes, out_bytes))
    return traffic


def _composite_bytes(program: Program, node: Node, groups: dict[str, ParameterGroup]) -> tuple[int, int]:
    """Bytes that a composite reads and writes; 0 and 0 for an ATen operator, whose values are counted by name."""
    read = written = 0
    if not node.operator.startswith(("comm.", "opt.")):
        return read, written
    for group in _groups_of(node, groups):
        flat_bytes = group.numel * DTYPE_BYTES[group.dtype]
        states = len(program.optimizers[group.optimizer].states)
        if node.operator == "opt.square_sums":
            read += flat_bytes
        elif node.operator in ("comm.reduce_scatter", "comm.all_gather"):
            read += flat_bytes
            written += flat_bytes
        else:
            read += (2 + states) * flat_bytes
            written += (1 + states) * flat_bytes
    return read, written


def _groups_of(node: Node, groups: dict[str, ParameterGroup]) -> Iterator[ParameterGroup]:
    for argument in node.args:
        for name in argument if isinstance(argument, tuple) else (argument,):
            if isinstance(name, str) and name in groups:
                yield groups[name]
