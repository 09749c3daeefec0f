"""Data parallelism: the axis `dp`, gradient groups, the reduce operand buffer, and the REDUCE and GATHER sections.

REDUCE is a reduce-scatter: replica r gets slice r of every group's gradients, averaged over the replicas. OPT then
updates that slice, and GATHER is the all-gather that gives every replica every updated slice. Where gradients are
clipped, each replica sums the squares of its slice, and an all-reduce in GRADNORM adds them. How many replicas there
are is the runtime argument `dp_scale_factor`; the program knows the smallest number.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from sambasim.compiler.names import UniqueNames, prefix_of
from sambasim.ir.dataflow import pass_and_update
from sambasim.ir.graph import Graph, Node, Ref, Section, SectionKind, node_references
from sambasim.ir.mesh import DATA_PARALLEL, Axis
from sambasim.ir.program import DataParallel, GradientGroup, ParameterGroup, Program, RuntimeArgument
from sambasim.ir.types import ALIGNMENT_ELEMENTS, DTYPE_BYTES, Symbol, SymbolKind, TensorType
from sambasim.ir.verify import Stage

REDUCE_BUFFER = "accum_dummy_0_reduce_buf"
"""The name of the reduce operand buffer, unless an input has it."""

_ARGUMENTS = (
    RuntimeArgument("dp_scale_factor", 1, "replicas that take part: sums of gradients are divided by it"),
    RuntimeArgument("dp_replica", 0, "which replica this is, and so which slice of every group it owns"),
)


@dataclass(frozen=True, slots=True)
class AddDataParallel:
    """`world_size` is the smallest number of replicas that may run the program."""

    title: ClassVar[str] = "add gather and reduce sections"
    reaches: ClassVar[Stage] = Stage.OPTIMIZED
    world_size: int

    def __call__(self, program: Program) -> Program:
        training = program.training
        if training is None:
            return program
        symbols = dict(program.symbols)
        gradient_groups = []
        for group in program.groups:
            wrapper = Symbol(
                _wrapper_name(group), SymbolKind.ACCUMULATION_GROUP, TensorType(group.dtype, (group.numel,))
            )
            symbols[wrapper.name] = wrapper
            gradient_groups.append(GradientGroup(group.name, wrapper.name))
        largest = max(program.groups, key=lambda group: group.numel * DTYPE_BYTES[group.dtype])
        buffer_type = TensorType(largest.dtype, (largest.numel + ALIGNMENT_ELEMENTS,))
        names = UniqueNames()
        for name in symbols:
            names.take(name)
        buffer = Symbol(names.take(REDUCE_BUFFER), SymbolKind.REDUCE_BUFFER, buffer_type)
        symbols[buffer.name] = buffer
        return replace(
            program,
            symbols=symbols,
            training=_with_communication(training, program),
            data_parallel=DataParallel(tuple(gradient_groups), buffer.name),
            mesh=(Axis(DATA_PARALLEL, self.world_size, at_run_time=True), *program.mesh),
            runtime_arguments=(*program.runtime_arguments, *_ARGUMENTS),
        )


def _wrapper_name(group: ParameterGroup) -> str:
    members = "\n".join(f"{member.gradient} {member.start}" for member in group.members)
    return f"$OPT_dp_accum_group_{hashlib.sha1(members.encode(), usedforsecurity=False).hexdigest()}"


_AXIS = ("axis", DATA_PARALLEL)
_MEAN = (_AXIS, ("op", "mean"), ("order", "tree"))
_SUM = (_AXIS, ("op", "sum"), ("order", "tree"))


def _with_communication(training: Graph, program: Program) -> Graph:
    """REDUCE before the update, GATHER behind it, and in GRADNORM the sum over replicas."""
    prefix = prefix_of(program.loss or "")
    groups = [group.name for group in program.groups]
    nodes: list[Node] = []
    sections: list[Section] = []
    values = dict(training.values)

    def add(kind: SectionKind, name: str, members: Sequence[Node]) -> None:
        sections.append(Section(len(sections), kind, name, len(nodes), len(nodes) + len(members)))
        nodes.extend(members)

    in_pass, update = pass_and_update(training)
    for section in in_pass:
        add(section.kind, section.name, training.section_nodes(section))
    name = f"{prefix}__reduce"
    add(SectionKind.REDUCE, name, [Node(f"{name}_{one}", "comm.reduce_scatter", (one,), _MEAN) for one in groups])
    for section in update:
        members: list[Node] = []
        for node in training.section_nodes(section):
            if node.operator == "opt.total_norm":
                (own,) = node_references(node)
                total = f"{own}_all"
                values[total] = values[own]
                members.append(Node(total, "comm.all_reduce", (Ref(own),), _SUM, (total,)))
                node = replace(node, args=(Ref(total),))
            members.append(node)
        add(section.kind, section.name, members)
    name = f"{prefix}__gather"
    add(SectionKind.GATHER, name, [Node(f"{name}_{one}", "comm.all_gather", (one,), (_AXIS,)) for one in groups])
    return replace(training, nodes=tuple(nodes), sections=tuple(sections), values=values)
