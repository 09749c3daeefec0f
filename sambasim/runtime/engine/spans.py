"""Which sections of a pass run in a row for one micro-batch, and what they make."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from sambasim.ir.dataflow import pass_and_update, spans_of_actions
from sambasim.ir.graph import Graph, SectionKind
from sambasim.ir.operators import OPERATORS
from sambasim.ir.schedule import Action, ActionKind


@dataclass(frozen=True, slots=True)
class Returned:
    """A symbol that a pass returns, the register of its value, and the section that makes it. An input is there before
    section 0, a tangent behind the last one."""

    symbol: str
    register: int
    section: int


@dataclass(frozen=True, slots=True)
class Changed:
    """A buffer that a section changes, with the registers of its value before and after."""

    before: int
    after: int
    buffer: Tensor
    section: int


@dataclass(frozen=True, slots=True)
class Span:
    """Sections `start` to `stop`, by one or several actions. `begins`, `ends`: they are the first of the micro-batch,
    the last; `draws`: they draw random numbers. `outputs` and `changed` are made in them."""

    micro_batch: int
    start: int
    stop: int
    begins: bool
    ends: bool
    draws: bool
    outputs: tuple[Returned, ...]
    changed: tuple[Changed, ...]


def spans_of(
    graph: Graph,
    actions: Sequence[Action],
    only: ActionKind | None,
    outputs: Sequence[Returned],
    changed: Sequence[Changed],
    *,
    has_stages: bool,
) -> Sequence[Span]:
    """What the `actions` of a rank run, or those of one kind `only`. Without stages, the whole graph is one."""
    sections, _ = pass_and_update(graph)
    forward, behind = sum(section.kind is SectionKind.FWD for section in sections), len(sections)
    range_of = {(ActionKind.FORWARD, 0): (0, forward), (ActionKind.BACKWARD, 0): (forward, behind)}
    if has_stages:
        range_of = dict(spans_of_actions(sections))
    draws = [
        any(OPERATORS[node.operator].draws_random_numbers for node in graph.section_nodes(section))
        for section in sections
    ]
    first = {action.micro_batch: action for action in reversed(actions)}
    last = {action.micro_batch: action for action in actions}
    spans: list[Span] = []
    for action in actions:
        if only not in (None, action.kind):
            continue
        start, stop = range_of.get((action.kind, action.stage), (0, 0))
        begins, ends = action == first[action.micro_batch], action == last[action.micro_batch]
        if spans and (spans[-1].micro_batch, spans[-1].stop) == (action.micro_batch, start):
            before = spans.pop()
            start, begins = before.start, before.begins
        made = {*range(start, stop), *((-1,) if begins else ()), *((behind,) if ends else ())}
        spans.append(
            Span(
                action.micro_batch,
                start,
                stop,
                begins,
                ends,
                draws=any(draws[start:stop]),
                outputs=tuple(returned for returned in outputs if returned.section in made),
                changed=tuple(buffer for buffer in changed if buffer.section in made),
            )
        )
    return spans
