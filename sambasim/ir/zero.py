"""ZeRO 2 and 3: what a rank keeps in slices only, as nodes of the pass (Rajbhandari et al., SC 2020).

    ZeRO   each rank keeps its slice of             whole only while
    1      optimizer states
    2      and gradients                            the backward computes them
    3      and parameters                           a section reads them

A compiled program has the nodes of ZeRO 1. Transports without shared device memory run `in_slices` of it. There, a
group's reduce_scatter follows the section that completes its gradients, all_gather comes before a section that reads
its parameters, and `memory.release` frees all but the own slice.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from sambasim.ir.dataflow import groups_of, pass_and_update, readers, readiness
from sambasim.ir.graph import Graph, Node, Section
from sambasim.ir.mesh import DATA_PARALLEL
from sambasim.ir.program import Program
from sambasim.ir.types import DTYPE_BYTES

_RELEASE = "memory.release"


def ends_step(node: Node) -> bool:
    """Whether a node of a pass runs in the last pass of a step only, because earlier ones add to the gradients."""
    of_gradients = node.operator == "comm.reduce_scatter" or (node.operator == _RELEASE and node.args[1] == "gradient")
    return of_gradients and bool(groups_of(node))


def in_slices(program: Program) -> Program:
    """`program`, with what `zero` says kept in slices only. Of ZeRO 0 or 1 it is the same."""
    training = program.training
    if training is None or program.zero < 2:
        return program
    sections, update = pass_and_update(training)
    before: list[list[Node]] = [[] for _ in sections]
    behind: list[list[Node]] = [[] for _ in sections]
    reduced: set[str] = set()
    ready, read = readiness(program), readers(program)
    for node in training.nodes[sections[-1].stop :]:
        if node.operator == "comm.reduce_scatter":
            (name,) = groups_of(node)
            complete = ready[name].reduce
            if complete <= len(sections):
                behind[complete - 1] += [node, _release(name, "gradient", complete)]
                reduced.add(name)
    if program.zero == 3:
        for group in program.groups:
            for first, last in _spans(read[group.name], sections, program):
                gather = f"{group.name}__gather_{first}"
                before[first].append(Node(gather, "comm.all_gather", (group.name,), (("axis", DATA_PARALLEL),)))
                if read[group.name][-1] < len(sections):  # not if an output of the pass shares its memory
                    behind[last].append(_release(group.name, "parameter", last))

    nodes: list[Node] = []
    kept: list[Section] = []

    def add(section: Section, members: Sequence[Node]) -> None:
        if members:
            start = len(nodes)
            nodes.extend(members)
            kept.append(replace(section, index=len(kept), start=start, stop=len(nodes)))

    for section, first_nodes, last_nodes in zip(sections, before, behind, strict=True):
        add(section, [*first_nodes, *training.section_nodes(section), *last_nodes])
    for section in update:
        add(section, [one for one in training.section_nodes(section) if not _replaced(one, program, reduced)])
    return replace(program, training=_with(training, nodes, kept))


@dataclass(frozen=True, slots=True)
class Kept:
    """Bytes that a program has of one kind, and those of them that one replica keeps between steps."""

    kind: str
    whole_bytes: int
    kept_bytes: int


def kept(program: Program, owned: Mapping[str, tuple[int, int]]) -> Sequence[Kept]:
    """What a replica that owns these slices of groups keeps of parameters, gradients and optimizer states."""
    found = []
    for kind, level in (("parameters", 3), ("gradients", 2), ("states", 1)):
        whole_bytes = own_bytes = 0
        for group in program.groups:
            start, stop = owned[group.name] if program.zero >= level else (0, group.numel)
            for region in program.optimizers[group.optimizer].states if kind == "states" else (kind[:-1],):
                size_bytes = DTYPE_BYTES[group.region_type(region).dtype]
                whole_bytes += group.numel * size_bytes
                own_bytes += (stop - start) * size_bytes
        found.append(Kept(kind, whole_bytes, own_bytes))
    return found


def _with(training: Graph, nodes: Sequence[Node], sections: Sequence[Section]) -> Graph:
    return replace(training, nodes=tuple(nodes), sections=tuple(sections))


def _release(group: str, region: str, position: int) -> Node:
    return Node(f"{group}__release_{region}_{position}", _RELEASE, (group, region))


def _replaced(node: Node, program: Program, reduced: set[str]) -> bool:
    """Whether a node of the update is in the pass now."""
    if not groups_of(node):
        return False
    if node.operator == "comm.reduce_scatter":
        return reduced.issuperset(groups_of(node))
    return node.operator == "comm.all_gather" and program.zero == 3


def _spans(read: Sequence[int], sections: Sequence[Section], program: Program) -> list[tuple[int, int]]:
    """The first and last sections of the runs for which parameters that the sections `read` read are kept whole: also
    where the next section reads them again, unless that is another action of a pipeline's schedule."""
    spans: list[tuple[int, int]] = []
    for at in read:
        if at == len(sections):
            continue
        if spans and at - spans[-1][1] == 1 and (program.schedule is None or _alike(sections[at - 1], sections[at])):
            spans[-1] = spans[-1][0], at
        else:
            spans.append((at, at))
    return spans


def _alike(one: Section, other: Section) -> bool:
    """Whether the same action of a schedule runs both sections."""
    return (one.stage, one.kind, one.weights_only) == (other.stage, other.kind, other.weights_only)
