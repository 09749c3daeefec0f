"""A program for prediction only, which needs no labels."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from sambasim.ir.graph import Node, Section, node_references
from sambasim.ir.operators import OPERATORS, OperatorKind
from sambasim.ir.program import Program
from sambasim.ir.types import SymbolKind


def without_loss(program: Program) -> Program:
    """`program` for inference without its loss, and without the inputs that only the loss reads. Assertions and random
    draws that do not depend on those inputs stay."""
    if program.loss is None:
        return program
    whole, outputs = program.evaluation, program.evaluation.outputs[1:]
    wanted = {output.value for output in outputs}
    read = _read(whole.nodes, wanted)
    effects = _effects(whole.nodes, [name for name in whole.inputs if name not in read])
    read = _read(whole.nodes, wanted, effects)
    nodes, sections = list[Node](), list[Section]()
    for section in whole.sections:
        start = len(nodes)
        nodes += (node for node in whole.section_nodes(section) if _is_kept(node, read, effects))
        if len(nodes) > start:
            sections.append(replace(section, index=len(sections), start=start, stop=len(nodes)))
    symbols = {name: one for name, one in program.symbols.items() if one.kind is not SymbolKind.INPUT or name in read}
    evaluation = replace(
        whole,
        inputs=tuple(name for name in whole.inputs if name in symbols),
        nodes=tuple(nodes),
        outputs=outputs,
        sections=tuple(sections),
    )
    return replace(
        program, symbols=symbols, training=None, evaluation=evaluation, single=None, loss=None, per_sample_loss=False
    )


def _read(nodes: Sequence[Node], wanted: Iterable[str], effects: Iterable[str] = ()) -> set[str]:
    """`wanted`, and all values that its nodes and the nodes `effects` read."""
    read, named = set(wanted), set(effects)
    for node in reversed(nodes):
        if _is_kept(node, read, named):
            read.update(node_references(node))
    return read


def _is_kept(node: Node, read: set[str], effects: Iterable[str]) -> bool:
    return node.name in effects or not read.isdisjoint(node.results)


def _effects(nodes: Sequence[Node], left_out: Sequence[str]) -> set[str]:
    """The names of the nodes that check or draw something, and do not depend on the inputs `left_out`."""
    depends, effects = set[str | None](left_out), set[str]()
    for node in nodes:
        operator = OPERATORS[node.operator]
        if not depends.isdisjoint(node_references(node)):
            depends.update(node.results)
        elif operator.draws_random_numbers or operator.kind in (OperatorKind.CHECK, OperatorKind.GENERATOR):
            effects.add(node.name)
    return effects
