"""Parameter groups in pieces, each of which is a group: its gradients are sent while others are computed.

    group_0   [ head.weight | norm.weight norm.bias | block5 … ]     in the order in which the backward completes them
    pieces     group_0_0      group_0_1                group_0_2     in the same device memory

The slices that replicas update are those of the pieces. No sum changes: see `collectives`.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

from sambasim.ir.dataflow import groups_of
from sambasim.ir.graph import Node, with_sections
from sambasim.ir.program import ParameterGroup, Program
from sambasim.ir.types import DTYPE_BYTES
from sambasim.units import MIB

PIECE_BYTES, MOST_PIECES = MIB, 256
"""Between nodes, gradients are sent in pieces of at most so many bytes, or one parameter; in larger ones if there were
more than so many: each takes some time of Python."""


def piece_bytes(program: Program) -> int:
    return max(PIECE_BYTES, program.gradient_bytes // MOST_PIECES)


def in_pieces(program: Program, limit_bytes: int | None = None) -> Program:
    """A placed `program` with groups that have one member each, or at most `limit_bytes` of gradients, by default
    `piece_bytes`."""
    training, limit = program.training, limit_bytes or piece_bytes(program)
    if training is None:
        return program
    pieces = {group.name: pieces_of(group, limit) for group in program.groups}
    parts = ((section, _of_pieces(training.section_nodes(section), pieces)) for section in training.sections)
    groups = tuple(piece for group in program.groups for piece in pieces[group.name])
    return replace(program, groups=groups, training=with_sections(training, parts))


def pieces_of(group: ParameterGroup, limit_bytes: int) -> Sequence[ParameterGroup]:
    limit, starts = limit_bytes // DTYPE_BYTES[group.dtype], [0]
    for member in group.members[1:]:
        if member.start + member.numel - starts[-1] > limit:
            starts.append(member.start)
    if len(starts) == 1:
        return [group]
    pieces = []
    for number, (start, stop) in enumerate(pairwise([*starts, group.numel])):
        name = f"{group.name}_{number}"
        members = tuple(replace(m, start=m.start - start) for m in group.members if start <= m.start < stop)
        regions = {
            region: offset + start * DTYPE_BYTES[group.region_type(region).dtype]
            for region, offset in group.regions.items()
        }
        pieces.append(replace(group, name=name, numel=stop - start, members=members, regions=regions))
    return pieces


def _of_pieces(nodes: Sequence[Node], pieces: Mapping[str, Sequence[ParameterGroup]]) -> Iterator[Node]:
    """The nodes, with one for each piece of the group that a node works on; the norm is one of all."""
    for node in nodes:
        names = [piece.name for name in groups_of(node) for piece in pieces[name]]
        if node.operator == "opt.square_sums":
            yield replace(node, args=(tuple(names), *node.args[1:]))
        elif len(names) > 1:
            for number, name in enumerate(names):
                yield replace(node, name=f"{node.name}_{number}", args=(name, *node.args[1:]))
        else:
            yield node
