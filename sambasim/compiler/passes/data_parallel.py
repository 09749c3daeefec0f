"""Data parallelism: gradient groups, the reduce operand buffer, and the REDUCE and GATHER sections.

REDUCE is a reduce-scatter: replica r ends up with slice r of every group's gradients, averaged over the replicas. OPT
then updates that slice, and GATHER is the all-gather by which every replica sees every updated slice. How many replicas
there are is the runtime argument `dp_scale_factor`; the program only knows the smallest number.
"""

import hashlib
from dataclasses import dataclass, replace
from itertools import groupby
from typing import ClassVar

from sambasim.compiler.names import UniqueNames, prefix_of
from sambasim.ir.graph import Graph, Node, Section, SectionKind
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
            training=_with_collectives(training, program),
            data_parallel=DataParallel(self.world_size, tuple(gradient_groups), buffer.name),
            runtime_arguments=(*program.runtime_arguments, *_ARGUMENTS),
        )


def _wrapper_name(group: ParameterGroup) -> str:
    members = "\n".join(f"{member.gradient} {member.start}" for member in group.members)
    return f"$OPT_dp_accum_group_{hashlib.sha1(members.encode(), usedforsecurity=False).hexdigest()}"


def _with_collectives(training: Graph, program: Program) -> Graph:
    """REDUCE before the optimizer's sections, GATHER behind them."""
    names = tuple(group.name for group in program.groups)
    prefix = prefix_of(program.loss or "")
    reduce = Node(f"{prefix}__reduce", "sambasim.reduce_scatter", (names,))
    gather = Node(f"{prefix}__gather", "sambasim.all_gather", (names,))
    nodes: list[Node] = []
    sections: list[Section] = []

    def add(kind: SectionKind, name: str, members: tuple[Node, ...]) -> None:
        sections.append(Section(len(sections), kind, name, len(nodes), len(nodes) + len(members)))
        nodes.extend(members)

    for differentiating, run in groupby(
        training.sections, key=lambda s: s.kind in (SectionKind.FWD, SectionKind.BCKWD)
    ):
        if not differentiating:
            add(SectionKind.REDUCE, reduce.name, (reduce,))
        for section in run:
            add(section.kind, section.name, training.section_nodes(section))
    add(SectionKind.GATHER, gather.name, (gather,))
    return replace(training, nodes=tuple(nodes), sections=tuple(sections))
