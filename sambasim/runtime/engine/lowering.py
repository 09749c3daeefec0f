"""From the nodes of a graph to instructions: each node by its handler, and runs of update nodes by a fusion.

Adjacent reduce_scatter and all_gather nodes are one communication. Where a transport has a fusion for the runs that
follow, one instruction executes them: over a shared window, the whole update is one pass over memory.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

from torch import Tensor

from sambasim.ir.dataflow import groups_of
from sambasim.ir.graph import Graph, Node, Section
from sambasim.ir.operators import OPERATORS, OperatorKind
from sambasim.optimizers import OPTIMIZERS
from sambasim.runtime.engine.handlers import Binding, communicating, handler_of, nothing
from sambasim.runtime.engine.instructions import Instruction, RegisterFile, free_after_use
from sambasim.runtime.engine.straight_line import Part
from sambasim.runtime.transports.gradient_sync import Fusion

_MERGED = ("comm.reduce_scatter", "comm.all_gather")
"""Operators on parameter groups: one communication may execute several adjacent nodes."""


def lower(nodes: Sequence[Node], binding: Binding, keep: Iterable[str]) -> list[Instruction | None]:
    """The instructions of a pass; None for a view that is evaluated here, once. Values in `keep` are not freed. Raises
    PefError."""
    lowered: list[Instruction | None] = []
    for node in nodes:
        instruction = handler_of(node.operator)([node], binding)
        lowered.append(None if _evaluate_view(instruction, binding.registers) else instruction)
    return free_after_use(lowered, keep, binding.registers)


def lower_update(graph: Graph, sections: Sequence[Section], binding: Binding) -> list[Part]:
    """The parts of the update, which consists of `sections`, the last ones of `graph`."""
    nodes = [node for section in sections for node in graph.section_nodes(section)]
    runs = [_Run(operator, tuple(run)) for operator, run in groupby(nodes, key=_operator)]
    fusions = sorted(binding.transport.fusions() if binding.transport else (), key=lambda one: -len(one.pattern))
    parts: list[Part] = []
    reached = sections[0].start if sections else 0

    def add(instruction: Instruction, count: int) -> None:
        nonlocal reached
        reached += count
        instructions = () if instruction.function is nothing else (instruction,)
        parts.append(Part(sum(section.stop <= reached for section in graph.sections), instructions))

    groups = [group.name for group in binding.transport.program.groups] if binding.transport else []
    at = 0
    while at < len(runs):
        fusion = next((one for one in fusions if _fits(one, runs[at:], groups)), None)
        if fusion is not None:
            fused = runs[at : at + len(fusion.pattern)]
            add(_fused(fusion, fused, binding), sum(len(run.nodes) for run in fused))
            at += len(fused)
            continue
        run = runs[at]
        for few in [run.nodes] if run.operator in _MERGED else [(node,) for node in run.nodes]:
            add(handler_of(few[0].operator)(few, binding), len(few))
        at += 1
    return parts


@dataclass(frozen=True, slots=True)
class _Run:
    """Adjacent update nodes of one operator; `opt` stands for any optimizer."""

    operator: str
    nodes: tuple[Node, ...]


def _operator(node: Node) -> str:
    return "opt" if node.operator.removeprefix("opt.") in OPTIMIZERS else node.operator


def _fits(fusion: Fusion, runs: Sequence[_Run], groups: Sequence[str]) -> bool:
    """Whether `runs` begin with the pattern of `fusion`, and each run that works on groups works on all of them."""
    found = runs[: len(fusion.pattern)]
    named = [[name for node in run.nodes for name in groups_of(node)] for run in found]
    return tuple(run.operator for run in found) == fusion.pattern and all(
        names in ([], list(groups)) for names in named
    )


def _fused(fusion: Fusion, runs: Sequence[_Run], binding: Binding) -> Instruction:
    """One instruction for `runs`. It returns the norm if one of the nodes computes it."""
    first, normed = runs[0].nodes[0], [run.nodes[0] for run in runs if run.operator == "opt.total_norm"]
    if binding.optimizers is None:
        return communicating(first, binding, None)
    node = Node(first.name, first.operator, results=normed[0].results if normed else ())
    return communicating(node, binding, fusion.bind(binding.optimizers))


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
        view = instruction.function(*(registers.initial[operand] for operand in instruction.operands))
    except Exception:  # the first pass raises it again, with its context
        return False
    memories = {operand.untyped_storage().data_ptr() for operand in operands if isinstance(operand, Tensor)}
    if not isinstance(view, Tensor) or view.untyped_storage().data_ptr() not in memories:
        return False
    registers.initial[result] = view
    return True
