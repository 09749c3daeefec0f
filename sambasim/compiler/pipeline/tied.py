"""Tied parameters: the rank that updates one, and what it exchanges with the rank that completes the gradient.

The lowest stage that reads a parameter adds up its gradient, because its backward is the last. Its rank need not hold
the optimizer states too. Another rank that reads the parameter may update it, once a step:

    rank 0   forward  backward                 gradient ─┐                     ┌─► parameter
    rank 3   forward  backward                           └─► clip, optimizer ──┘
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from sambasim.ir.graph import Graph, Node
from sambasim.ir.mesh import PIPELINE
from sambasim.ir.program import ParameterGroup, Program
from sambasim.ir.ranks import pipeline_ranks, ranks_of_values
from sambasim.ir.types import SymbolKind, parameter_of

if TYPE_CHECKING:
    from sambasim.compiler.pipeline.assign import Assignment  # with the device model, which an app does without

_LEAST_GAIN = 0.05
"""Of the memory of the fullest rank: for less, no messages are added."""


class Sizes(NamedTuple):
    """The bytes of a parameter, which are those of its gradient, and of its optimizer states on one rank."""

    parameter: float
    states: float


def updaters(assignment: "Assignment", sizes: Mapping[str, Sizes], ranks: int) -> Mapping[str, int]:
    """By trained parameter, the stage that updates it: the one that completes its gradient, or another that reads it,
    if the fullest of `ranks` then holds clearly less."""
    owner, found = assignment.owner, dict(assignment.owner)
    for name in sorted(found, key=lambda one: -sizes[one].states):
        readers = assignment.readers[name]
        if len(readers) == 1 or owner[name] not in readers:
            continue
        best = (1 - _LEAST_GAIN) * _fullest(owner, found, sizes, ranks)
        for stage in readers:
            held = _fullest(owner, found | {name: stage}, sizes, ranks)
            if held < best:
                best, found = held, found | {name: stage}
    return found


def _fullest(owner: Mapping[str, int], updater: Mapping[str, int], sizes: Mapping[str, Sizes], ranks: int) -> float:
    """The bytes of the rank that holds most."""
    held = [0.0] * ranks
    for name, size in sizes.items():
        for rank in {owner[name] % ranks, updater[name] % ranks}:
            held[rank] += 2 * size.parameter
        held[updater[name] % ranks] += size.states
    return max(held)


class Move(NamedTuple):
    """The ranks that complete the gradient of a parameter, and that update it."""

    source: int
    target: int


def moved(program: Program) -> Mapping[str, Move]:
    """By parameter that another rank updates than completes its gradient. That rank reads it without a message."""
    training, ranks = program.training, pipeline_ranks(program)
    if training is None or ranks == 1:
        return {}
    made, read = ranks_of_values(training, ranks)
    found = {}
    for output in training.outputs:
        if program.symbols[output.symbol].kind is SymbolKind.GRADIENT and output.value in made:
            source, name = made[output.value], parameter_of(output.symbol)
            for target in read.get(name, set()) - {source}:
                found[name] = Move(source, target)
    return found


def copies(
    training: Graph, groups: Sequence[ParameterGroup], moves: Mapping[str, Move]
) -> tuple[Sequence[Node], Sequence[Node]]:
    """The nodes that bring gradients to the rank that updates their parameters, and those that bring parameters back.
    Each of `moves` has a group of its own."""
    tags = [tag for node in training.nodes for key, tag in node.kwargs if key == "tag" and isinstance(tag, int)]
    tag = max(tags, default=-1) + 1
    there: list[Node] = []
    back: list[Node] = []
    for group in groups:
        member = group.members[0]
        if (move := moves.get(member.parameter)) is None:
            continue
        for nodes, symbol, source, target in (
            (there, member.gradient, move.source, move.target),
            (back, member.parameter, move.target, move.source),
        ):
            how = (("axis", PIPELINE), ("source", source), ("target", target), ("tag", tag))
            nodes.append(Node(f"{symbol}__copy", "comm.copy", (group.name, symbol), how))
            tag += 1
    return there, back
