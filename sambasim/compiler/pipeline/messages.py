"""The pass that cuts a program into pipeline stages, `--pipeline-stages`.

The graph of a pipeline has operators in the order of stages, with a send and a recv node for each value that another
rank reads."""

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import count, pairwise
from typing import ClassVar

from sambasim.compiler.pipeline.assign import (
    Assignment,
    Sizes,
    Values,
    assign,
    assign_forward,
    only_output,
    updaters,
    values_of,
)
from sambasim.errors import OptionError
from sambasim.hardware.budget import Budget
from sambasim.ir.graph import Argument, Graph, Node, Output, Ref, Section, SectionKind, renamed
from sambasim.ir.mesh import PIPELINE, Axis
from sambasim.ir.operators import OPERATORS
from sambasim.ir.program import Program
from sambasim.ir.schedule import Schedule
from sambasim.ir.types import TensorType, gradient_name, parameter_of
from sambasim.ir.verify import Progress

_Segment = tuple[SectionKind, int, bool]  # kind, stage, and whether it only computes gradients of weights

GENERATOR = TensorType("uint8", (5056,))
"""The state of torch's generator of random numbers on the CPU."""


class Connected:
    """`graph` cut into `stages` stages on `ranks` ranks, by `assignment`. With `splits`, what only leads to the
    gradient of one weight is in sections of its own."""

    def __init__(
        self,
        program: Program,
        graph: Graph,
        values: Values,
        assignment: Assignment,
        stages: int,
        ranks: int,
        splits: bool,
    ) -> None:
        self._program, self._graph, self._values = program, graph, values
        self._stage_of, self._owner = assignment.stage_of, assignment.owner
        self._updater = assignment.updater
        self._stages, self._ranks = stages, ranks
        self._nodes: dict[_Segment, list[Node]] = defaultdict(list)
        self._first: dict[_Segment, list[Node]] = defaultdict(list)  # sends of what an earlier segment has made
        self._behind: dict[str, list[Node]] = defaultdict(list)  # by node: sends of its results
        self._local: dict[tuple[str, int], str] = {}  # the name on a rank of a value that another rank makes
        self._types = dict(graph.values)
        self._tags = count()
        kinds = {node.name: section.kind for section in graph.sections for node in graph.section_nodes(section)}
        later = _weight_gradients(graph, assignment) if splits else frozenset()
        self._segment = {
            node.name: (kinds[node.name], self._stage_of[node.name], node.name in later) for node in graph.nodes
        }
        self._check_buffers(assignment.buffers)

    def graph(self, gathered: Callable[[Output], int | None]) -> Graph:
        """The graph. `gathered`: the stage at which an output must be, None for where it is made."""
        order = sorted(self._graph.nodes, key=lambda node: self._place(self._segment[node.name]))
        made = {
            output.value for output in self._graph.outputs if gathered(output) in (None, self._stage_made(output.value))
        }
        for node in order:
            if not any(map(self._is_taken_where_read, node.results)):
                self._add(node, self._segment[node.name])
            for name in made.intersection(node.results):
                self._at(name, self._segment[node.name])  # a view too, or its gradient is complete at the end only
        outputs = []
        for one in self._graph.outputs:
            maker, stage = self._values.maker.get(one.value), gathered(one)
            kind, made_at, later = (SectionKind.FWD, self._stages - 1, False)  # what is no result is given out last
            if maker is not None:
                kind, made_at, later = self._segment[maker.name]
            value = self._at(one.value, (kind, made_at if stage is None else stage, later))
            outputs.append(replace(one, value=value))
        self._thread_generator()
        return self._assembled(tuple(outputs))

    def _stage_made(self, name: str) -> int | None:
        maker = self._values.maker.get(name)
        return None if maker is None else self._stage_of[maker.name]

    def _place(self, segment: _Segment) -> tuple[bool, int, bool]:
        kind, stage, later = segment
        return (True, -stage, later) if kind is SectionKind.BCKWD else (False, stage, later)

    def _add(self, node: Node, segment: _Segment) -> None:
        names = {name: self._at(name, segment) for name in dict.fromkeys(node.reads)}
        self._nodes[segment].append(renamed(node, names))

    def _at(self, name: str, segment: _Segment) -> str:
        """The name by which the rank of `segment` has the value `name`, which is made or received there if need be."""
        stage = segment[1]
        maker = self._values.maker.get(name)
        made_at = self._owner.get(name) if maker is None else self._stage_of[maker.name]
        if made_at is None:
            return name
        if maker is not None and self._is_taken_where_read(name):
            if (name, stage) not in self._local:
                self._repeat(maker, segment)
            return self._local[name, stage]
        held_at = (made_at,) if maker is not None else (made_at, self._updater[name])
        if stage % self._ranks in (one % self._ranks for one in held_at):
            return name
        if (name, stage) not in self._local:
            self._receive(name, maker, made_at, segment)
        return self._local[name, stage]

    def _is_taken_where_read(self, name: str | None) -> bool:
        return name is not None and (name in self._values.free or self._values.is_view(name))

    def _repeat(self, node: Node, segment: _Segment) -> None:
        """Adds a copy of `node` to `segment`, in other stages than its own under another name."""
        stage = segment[1]
        ends = "" if stage == self._stage_of[node.name] else f"__stage_{stage}"
        results = tuple(None if name is None else name + ends for name in node.results)
        for old, new in zip(node.results, results, strict=True):
            if old is not None and new is not None:
                self._local[old, stage] = new
                self._types[new] = self._types[old]
        self._add(replace(node, name=node.name + ends, results=results), segment)

    def _receive(self, name: str, maker: Node | None, made_at: int, segment: _Segment) -> None:
        kind, stage, later = segment
        made_in = SectionKind.FWD if maker is None else self._segment[maker.name][0]
        if made_in is SectionKind.FWD and made_at < stage:
            kind, later = SectionKind.FWD, False
        here = f"{name}__stage_{stage}"
        self._local[name, stage] = here
        self._types[here] = self._types.get(name) or self._program.symbols[name].type
        tag = next(self._tags)

        def shift(by: int) -> tuple[tuple[str, Argument], ...]:
            return (("axis", PIPELINE), ("shift", by % self._ranks), ("tag", tag))

        module = maker.module if maker is not None else ""
        source = maker.source if maker is not None else None
        sent = Node(f"{name}__to_stage_{stage}", "comm.send", (Ref(name),), shift(stage - made_at), (), module, source)
        received = Node(here, "comm.recv", (), shift(made_at - stage), (here,), module, source)
        if maker is not None and made_in is kind:
            self._behind[maker.name].append(sent)
        else:
            self._first[kind, made_at, False].append(sent)
        self._nodes[kind, stage, later].append(received)

    def _thread_generator(self) -> None:
        """Hand the state of the random number generator from each segment that draws to the next."""
        drawing = sorted(
            {self._segment[node.name] for node in self._graph.nodes if OPERATORS[node.operator].draws_random_numbers},
            key=self._place,
        )
        for before, after in pairwise(drawing):
            state = f"$generator_{next(self._tags)}"
            self._types[state] = GENERATOR
            self._nodes[before].append(Node(state, "random.state", (), (), (state,)))
            stage = after[1]
            here = state
            if before[1] % self._ranks != stage % self._ranks:
                here, tag = f"{state}__stage_{stage}", next(self._tags)
                self._types[here] = GENERATOR
                axis, by = ("axis", PIPELINE), stage - before[1]
                there, back = ("shift", by % self._ranks), ("shift", -by % self._ranks)
                self._nodes[before].append(
                    Node(f"{state}__sent", "comm.send", (Ref(state),), (axis, there, ("tag", tag)))
                )
                self._first[after].append(Node(here, "comm.recv", (), (axis, back, ("tag", tag)), (here,)))
            self._first[after].append(Node(f"{here}__set", "random.set_state", (Ref(here),)))

    def _assembled(self, outputs: tuple[Output, ...]) -> Graph:
        nodes: list[Node] = []
        sections: list[Section] = []
        for segment in sorted({*self._nodes, *self._first}, key=self._place):
            kind, stage, later = segment
            start = len(nodes)
            for node in (*self._first[segment], *self._nodes[segment]):
                nodes += (node, *self._behind.get(node.name, ()))
            name = f"stage {stage} {'forward' if kind is SectionKind.FWD else 'backward'}"
            sections.append(Section(len(sections), kind, name, start, len(nodes), stage=stage, weights_only=later))
        return replace(self._graph, nodes=tuple(nodes), outputs=outputs, values=self._types, sections=tuple(sections))

    def _check_buffers(self, buffers: Mapping[str, int]) -> None:
        """Raises OptionError if a stage reads a buffer that another changes."""
        for node in self._graph.nodes if buffers else ():
            reader = self._stage_of[node.name]
            for name in self._values.buffers_read_by(node) & buffers.keys():
                if buffers[name] != reader:
                    names = self._program.symbols[name].torch_names
                    raise OptionError(
                        f"the stages {buffers[name]} and {reader} share the buffer {names[0] if names else name}, "
                        "which a step changes",
                        where=None if node.source is None else str(node.source),
                        remedy="use fewer --pipeline-stages, or give each module a buffer of its own",
                    )


def _weight_gradients(graph: Graph, assignment: Assignment) -> frozenset[str]:
    """Backward operators that lead to nothing but the gradient of one weight, and that no other stage reads."""
    backward = graph.nodes_of(SectionKind.BCKWD)
    stage_of = assignment.stage_of
    read_at: dict[str, set[int]] = {}
    for output in graph.outputs:
        if (owner := assignment.owner.get(parameter_of(output.symbol))) is not None:
            read_at.setdefault(output.value, set()).add(owner)
    for node in backward:
        for name in node.reads:
            read_at.setdefault(name, set()).add(stage_of[node.name])
    to_one = only_output(graph, backward)
    return frozenset(
        node.name
        for node in backward
        if node.name in to_one
        and all(read_at.get(name, set()) <= {stage_of[node.name]} for name in node.results if name)
    )


@dataclass(frozen=True, slots=True)
class PipelineParallel:
    """Add the axis pp and cut every graph into the stages of `schedule`, balanced by the seconds that `budget`'s device
    needs for a pass of `samples`, by default those of the program. `state_bytes`, of the optimizer states of a
    gradient, of which each of `shards` replicas keeps a slice, decides where a tied parameter is updated; without it,
    that is where its gradient is completed. Raises OptionError if there are fewer places to cut."""

    title: ClassVar[str] = "cut into pipeline stages"
    reaches: ClassVar[Progress] = Progress.CAPTURED
    schedule: Schedule
    budget: Budget
    state_bytes: Callable[[str, Program], int] | None = None
    shards: int = 1
    samples: int | None = None

    def __call__(self, program: Program) -> Program:
        training, schedule = program.step, self.schedule
        stages, ranks = schedule.stages, schedule.ranks
        values = values_of(training, program)
        assignment = assign(program, training, values, stages, ranks, self.budget, self.samples)
        owner = assignment.owner
        if (state_bytes := self.state_bytes) is not None:
            sizes = {
                name: Sizes(
                    program.symbols[name].type.size_bytes, state_bytes(gradient_name(name), program) / self.shards
                )
                for name in owner
            }
            assignment = replace(assignment, updater=updaters(assignment, sizes, ranks))

        def stage_of(output: Output) -> int | None:
            if output.symbol == program.loss:
                return stages - 1
            return owner.get(parameter_of(output.symbol))

        def cut(graph: Graph) -> Graph:
            if graph is training:
                splits = schedule.splits_backward
                return Connected(program, graph, values, assignment, stages, ranks, splits).graph(stage_of)
            own = values_of(graph, program)
            at = assign_forward(graph, own, assignment)
            return Connected(program, graph, own, at, stages, ranks, False).graph(lambda output: stages - 1)

        mesh = (Axis(PIPELINE, ranks), *program.mesh)
        return replace(program.map_graphs(cut), mesh=mesh, schedule=schedule)
