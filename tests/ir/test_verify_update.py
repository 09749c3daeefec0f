"""What the verifier refuses in an update: each change would be executed wrongly."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from sambasim.errors import InvariantError
from sambasim.ir.graph import Node, Ref, Section, SectionKind
from sambasim.ir.mesh import Axis
from sambasim.ir.program import Program
from sambasim.ir.verify import verify
from tests.pef.samples import sample_program


def changed(
    change: Callable[[Node], Node | None], kinds: Callable[[SectionKind], SectionKind] = lambda k: k
) -> Program:
    """The sample program after `change` of each node, which None leaves out, and of each section's kind."""
    program = sample_program()
    training = program.training
    assert training is not None
    nodes: list[Node] = []
    sections: list[Section] = []
    for section in training.sections:
        start = len(nodes)
        nodes += [node for one in training.section_nodes(section) if (node := change(one)) is not None]
        if len(nodes) > start:
            kind = kinds(section.kind)
            sections.append(Section(len(sections), kind, section.name, start, len(nodes)))
    return replace(program, training=replace(training, nodes=tuple(nodes), sections=tuple(sections)))


def with_keywords(operator: str, **keywords: str) -> Callable[[Node], Node]:
    def change(node: Node) -> Node:
        if node.operator != operator:
            return node
        return replace(node, kwargs=tuple((dict(node.kwargs) | keywords).items()))

    return change


def without_sum(node: Node) -> Node | None:
    if node.operator == "comm.all_reduce":
        return None
    return replace(node, args=(Ref("sums"),)) if node.operator == "opt.total_norm" else node


def without_norm(node: Node) -> Node:
    return replace(node, args=node.args[:1]) if node.operator == "opt.sgd" else node


def without_gather(node: Node) -> Node | None:
    return None if node.operator == "comm.all_gather" else node


SWAPPED = {SectionKind.FWD: SectionKind.BCKWD, SectionKind.BCKWD: SectionKind.FWD}


@pytest.mark.parametrize(
    ("number", "program"),
    [
        (11, changed(without_sum)),
        (11, changed(without_norm)),
        (11, changed(with_keywords("comm.all_reduce", op="mean"))),
        (10, changed(with_keywords("comm.reduce_scatter", op="sum"))),
        (10, changed(with_keywords("comm.reduce_scatter", axis="tp"))),
        (10, changed(without_gather)),
        (13, changed(lambda node: node, lambda kind: SWAPPED.get(kind, kind))),
        (13, changed(lambda node: node, lambda kind: SectionKind.OPT if kind is SectionKind.FWD else kind)),
        (10, replace(sample_program(), mesh=())),
        (10, replace(sample_program(), mesh=(Axis("dp", 0),))),
    ],
)
def test_an_update_that_would_be_executed_wrongly_is_refused(number: int, program: Program) -> None:
    verify(sample_program())
    with pytest.raises(InvariantError) as caught:
        verify(program)
    assert caught.value.number == number
