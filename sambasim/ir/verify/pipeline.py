"""Stages, their schedule and their messages: invariant 16."""

from sambasim.errors import InvariantError, OptionError
from sambasim.ir.dataflow import axis_of, groups_of, pass_and_update
from sambasim.ir.graph import Argument, SectionKind
from sambasim.ir.mesh import PIPELINE
from sambasim.ir.program import Program
from sambasim.ir.schedule import check
from sambasim.ir.stages import copied, ends_of, pipeline_ranks, ranks_of_values
from sambasim.ir.types import TensorType
from sambasim.ir.verify.values import require

_LARGEST_TAG = 30_000
"""MPI has tags up to 32,767 everywhere."""


def verify_pipeline(program: Program) -> None:
    schedule, ranks = program.schedule, pipeline_ranks(program)
    require((schedule is None) == all(axis.name != PIPELINE for axis in program.mesh), 16, "a pipeline has a schedule")
    if schedule is None:
        return
    require(schedule.ranks == ranks, 16, f"the schedule is for {schedule.ranks} ranks, and the axis pp has {ranks}")
    try:
        check(schedule)
    except OptionError as error:
        raise InvariantError(16, f"the schedule cannot run: {error.what}") from None
    for graph in program.graphs:
        in_pass, _ = pass_and_update(graph)
        made: dict[str, int] = {}
        messages: dict[tuple[int, int], TensorType] = {}
        tags: set[tuple[int, int]] = set()
        order = [
            (one.kind is SectionKind.BCKWD, -one.stage if one.kind is SectionKind.BCKWD else one.stage)
            for one in in_pass
        ]
        require(order == sorted(order), 16, f"the sections of {graph.name} are not in the order of stages")
        for section in in_pass:
            rank = section.stage % ranks
            require(0 <= section.stage < schedule.stages, 16, f"section {section.index} is of stage {section.stage}")
            for node in graph.section_nodes(section):
                for name in node.reads:
                    require(made.get(name, rank) == rank, 16, f"{node.name} reads {name}, which another rank makes")
                made.update((name, rank) for name in node.results if name is not None)
                if axis_of(node) != PIPELINE:
                    continue
                given = dict(node.kwargs)
                peer, tag = (rank + _whole(given.get("shift"))) % ranks, _whole(given.get("tag"))
                require(0 <= tag <= _LARGEST_TAG, 16, f"{node.name} has the tag {tag}")
                if node.operator == "comm.send":
                    names = node.reads
                    require(len(names) == 1 and (peer, tag) not in tags, 16, f"{node.name} sends {len(names)} values")
                    tags.add((peer, tag))
                    messages[peer, tag] = graph.values.get(names[0]) or program.symbols[names[0]].type
                elif node.operator == "comm.recv":
                    sent = messages.pop((rank, tag), None)
                    require(sent == graph.values[node.results[0] or ""], 16, f"nothing sends what {node.name} receives")
        require(not messages, 16, f"nothing receives {len(messages)} messages of {graph.name}")


def verify_copies(program: Program) -> None:
    training, ranks = program.training, pipeline_ranks(program)
    if training is None or ranks == 1:
        return
    made, _ = ranks_of_values(training, ranks)
    source_of = {output.symbol: made.get(output.value, 0) for output in training.outputs}
    reads = [ranks_of_values(graph, ranks)[1] for graph in program.graphs]
    copies = {symbol: node for node in training.nodes if (symbol := copied(node)) is not None}
    expected = []
    for group in program.groups:
        for member in group.members:
            source = source_of[member.gradient]
            others = set().union(*(read.get(member.parameter, ()) for read in reads)) - {source}
            if not others:
                continue
            (target, *more), alone = others, len(group.members) == 1
            require(alone and not more, 16, f"{member.parameter} is read on the ranks {sorted({source, *others})}")
            for symbol, ends in ((member.gradient, (source, target)), (member.parameter, (target, source))):
                node = copies.get(symbol)
                right = node is not None and groups_of(node) == (group.name,) and ends_of(node) == ends
                require(right, 16, f"{symbol} is not copied from rank {ends[0]} to rank {ends[1]}")
                expected.append(symbol)
    require(sorted(copies) == sorted(expected), 16, f"the update copies {sorted(copies)}, not {sorted(expected)}")
    for node in copies.values():
        tag = _whole(dict(node.kwargs).get("tag"))
        require(0 <= tag <= _LARGEST_TAG, 16, f"{node.name} has the tag {tag}")


def _whole(argument: Argument) -> int:
    if isinstance(argument, int):
        return argument
    raise InvariantError(16, f"a message with the shift or tag {argument!r}")
