"""From the nodes of a graph to instructions: each node by its handler, and runs of update nodes by a fusion.

Adjacent reduce_scatter and all_gather nodes are one communication. Where a transport has a fusion for the runs that
follow, one instruction executes them: over a shared window, the whole update is one pass over memory.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from torch import Tensor

from sambasim.ir.dataflow import groups_of
from sambasim.ir.graph import Node, Section
from sambasim.ir.operators import OPERATORS, OperatorKind
from sambasim.runtime.engine.handlers import UPDATES, Binding, executed_by, instruction_of, nothing
from sambasim.runtime.engine.instructions import Instruction, RegisterFile, Unit, free_after_use, value_of
from sambasim.runtime.transports.gradient_sync import Fusion

_MERGED = ("comm.reduce_scatter", "comm.all_gather")
"""Operators on parameter groups: one communication may execute several adjacent nodes."""


def lower(nodes: Sequence[Node], binding: Binding, keep: Collection[str]) -> list[Instruction | None]:
    """The instructions of a pass; None for a view that is evaluated here, once. Values in `keep` are not freed. Raises
    PefError."""
    lowered = [instruction_of(node, binding) for node in nodes]
    left = [None if _evaluate_view(instruction, binding.registers) else instruction for instruction in lowered]
    return free_after_use(left, keep, binding.registers)


def lower_update(sections: Sequence[Section], nodes: Sequence[Node], binding: Binding) -> list[Unit]:
    """The update, which consists of `sections`. `nodes`: all those of the graph."""
    units: list[Unit] = []
    begun: list[Instruction] = []
    left, reached = sections, sections[0].start if sections else 0
    for instruction, count in _update_instructions([*nodes[reached:]] if sections else [], binding):
        reached += count
        if instruction.function is not nothing:
            begun.append(instruction)
        ended = [section for section in left if section.stop <= reached]
        if ended:
            units.append(Unit(tuple(ended), tuple(begun)))
            begun, left = [], left[len(ended) :]
    return units


def _update_instructions(nodes: Sequence[Node], binding: Binding) -> Iterator[tuple[Instruction, int]]:
    """Each instruction, and how many of `nodes` it executes."""
    runs = [_Run(operator, tuple(run)) for operator, run in groupby(nodes, key=_operator)]
    fusions = sorted(binding.connected.fusions(), key=lambda fusion: -len(fusion.pattern))
    groups = [group.name for group in binding.connected.program.groups]
    while runs:
        fusion = next((fusion for fusion in fusions if _fits(fusion, runs, groups)), None)
        taken = runs[: len(fusion.pattern) if fusion else 1]
        runs = runs[len(taken) :]
        if fusion is not None:
            yield _fused(fusion, taken, binding), sum(len(run.nodes) for run in taken)
        elif taken[0].operator in _MERGED:
            node = _merged(taken[0].nodes)
            yield instruction_of(node, binding), len(taken[0].nodes)
        else:
            for node in taken[0].nodes:
                yield instruction_of(node, binding), 1


def _merged(nodes: Sequence[Node]) -> Node:
    """One node that works on the groups of all."""
    groups = tuple(name for node in nodes for name in groups_of(node))
    return replace(nodes[0], name=" ".join(node.name for node in nodes), args=(groups,))


@dataclass(frozen=True, slots=True)
class _Run:
    """Adjacent update nodes of one operator; `opt` stands for any optimizer."""

    operator: str
    nodes: tuple[Node, ...]


def _operator(node: Node) -> str:
    return "opt" if node.operator in UPDATES else node.operator


def _fits(fusion: Fusion, runs: Sequence[_Run], groups: Sequence[str]) -> bool:
    """Whether `runs` begin with the pattern of `fusion`, and each run that works on groups works on all of them."""
    first = runs[: len(fusion.pattern)]
    named = [[name for node in run.nodes for name in groups_of(node)] for run in first]
    return tuple(run.operator for run in first) == fusion.pattern and all(
        names in ([], list(groups)) for names in named
    )


def _fused(fusion: Fusion, runs: Sequence[_Run], binding: Binding) -> Instruction:
    """One instruction for `runs`. It returns the norm if one of the nodes computes it."""
    first, normed = runs[0].nodes[0], [run.nodes[0] for run in runs if run.operator == "opt.total_norm"]
    node = Node(first.name, first.operator, results=normed[0].results if normed else ())
    return executed_by(fusion.bind(binding.updating), node, binding)


def _evaluate_view(instruction: Instruction, registers: RegisterFile) -> bool:
    """Evaluate `instruction` once if it is a view of symbols only, and keep the view in its register."""
    node, result = instruction.node, instruction.results[0] if instruction.results else None
    if OPERATORS[node.operator].kind is not OperatorKind.VIEW or not instruction.single:
        return False
    if result is None or instruction.stores:
        return False
    operands = [registers.initial[registers.value(name)] for name in node.reads]
    if not operands or not all(isinstance(operand, Tensor) for operand in operands):
        return False
    try:
        view = instruction.function(*(value_of(operand, registers.initial) for operand in instruction.operands))
    except Exception:  # the first pass raises it again, with its context
        return False
    memories = {operand.untyped_storage().data_ptr() for operand in operands if isinstance(operand, Tensor)}
    if not isinstance(view, Tensor) or view.untyped_storage().data_ptr() not in memories:
        return False
    registers.initial[result] = view
    return True
