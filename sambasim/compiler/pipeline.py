"""The pass that cuts a program into pipeline stages, `--pipeline-stages`.

The graph of a pipeline has operators in the order of stages, with a send and a recv node for each value that another
rank reads."""

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import count, pairwise
from typing import ClassVar

from sambasim.compiler.stages import Assignment, Values, assign, assign_forward, only_output, updaters, values_of
from sambasim.errors import OptionError
from sambasim.hardware.budget import Budget
from sambasim.ir.graph import Graph, Node, Output, Ref, Section, SectionKind, renamed, with_sections
from sambasim.ir.mesh import PIPELINE, Axis
from sambasim.ir.operators import OPERATORS
from sambasim.ir.program import Program
from sambasim.ir.schedule import Schedule
from sambasim.ir.types import TensorType, gradient_name, parameter_of
from sambasim.ir.verify import Progress


def _segment(kind: SectionKind, stage: int, weights_only: bool = False) -> Section:
    """A section that gets its nodes and its number later."""
    name = f"stage {stage} {'forward' if kind is SectionKind.FWD else 'backward'}"
    return Section(0, kind, name, 0, 0, stage, weights_only)


def _place(segment: Section) -> tuple[bool, int, bool]:
    is_backward = segment.kind is SectionKind.BCKWD
    return is_backward, -segment.stage if is_backward else segment.stage, segment.weights_only


GENERATOR = TensorType("uint8", (5056,))  # the state of torch's generator of random numbers on the CPU


class Connected:
    """`graph` cut into the stages of `schedule`, by `assignment`. Where the schedule splits the backward, what only
    leads to the gradient of one weight is in sections of its own. Raises OptionError if a stage reads a buffer that
    another changes."""

    def __init__(
        self, program: Program, graph: Graph, values: Values, assignment: Assignment, schedule: Schedule
    ) -> None:
        self._program, self._graph, self._values, self._assignment = program, graph, values, assignment
        self._stage_of, self._stages, self._ranks = assignment.stage_of, schedule.stages, schedule.ranks
        self._nodes: dict[Section, list[Node]] = defaultdict(list)
        self._first: dict[Section, list[Node]] = defaultdict(list)  # sends of what an earlier segment has made
        self._behind: dict[str, list[Node]] = defaultdict(list)  # by node: sends of its results
        self._local: dict[tuple[str, int], str] = {}  # the name on a rank of a value that another rank makes
        self._types = dict(graph.values)
        self._tags = count()
        later = _weight_gradients(graph, assignment) if schedule.splits_backward else frozenset()
        self._segment = {
            node.name: _segment(section.kind, self._stage_of[node.name], node.name in later)
            for section, node in graph.nodes_in(graph.sections)
        }
        self._check_buffers(assignment.buffers)

    def graph(self, gathered: Callable[[Output], int | None]) -> Graph:
        """The graph. `gathered`: the stage at which an output must be, None for where it is made."""
        graph, maker = self._graph, self._values.maker
        made_at = {name: self._stage_of[node.name] for name, node in maker.items()}
        made = {out.value for out in graph.outputs if gathered(out) in (None, made_at.get(out.value))}
        for node in sorted(graph.nodes, key=lambda node: _place(self._segment[node.name])):
            if not any(map(self._is_taken_where_read, node.results)):
                self._add(node, self._segment[node.name])
            for name in made.intersection(node.results):
                self._at(name, self._segment[node.name])  # a view too, or its gradient is complete at the end only
        outputs = []
        for output in graph.outputs:
            segment = _segment(SectionKind.FWD, self._stages - 1)  # what is no result is given out last
            if output.value in maker:
                segment = self._segment[maker[output.value].name]
            if (stage := gathered(output)) is not None:
                segment = _segment(segment.kind, stage, segment.weights_only)
            outputs.append(replace(output, value=self._at(output.value, segment)))
        self._thread_generator()
        return self._assembled(tuple(outputs))

    def _add(self, node: Node, segment: Section) -> None:
        names = {name: self._at(name, segment) for name in dict.fromkeys(node.reads)}
        self._nodes[segment].append(renamed(node, names))

    def _at(self, name: str, segment: Section) -> str:
        """The name by which the rank of `segment` has the value `name`, which is made or received there if need be."""
        stage, maker = segment.stage, self._values.maker.get(name)
        made_at = self._assignment.owner.get(name) if maker is None else self._stage_of[maker.name]
        if made_at is None:
            return name
        if maker is not None and self._is_taken_where_read(name):
            if (name, stage) not in self._local:
                self._repeat(maker, segment)
            return self._local[name, stage]
        held_at = (made_at,) if maker is not None else (made_at, self._assignment.updater[name])
        if stage % self._ranks in (at % self._ranks for at in held_at):
            return name
        if (name, stage) not in self._local:
            self._receive(name, maker, made_at, segment)
        return self._local[name, stage]

    def _is_taken_where_read(self, name: str | None) -> bool:
        return name is not None and (name in self._values.free or self._values.is_view(name))

    def _repeat(self, node: Node, segment: Section) -> None:
        """Adds a copy of `node` to `segment`, in other stages than its own under another name."""
        stage = segment.stage
        ends = "" if stage == self._stage_of[node.name] else f"__stage_{stage}"
        results = tuple(None if name is None else name + ends for name in node.results)
        for name in node.makes:
            self._local[name, stage] = name + ends
            self._types[name + ends] = self._types[name]
        self._add(replace(node, name=node.name + ends, results=results), segment)

    def _receive(self, name: str, maker: Node | None, made_at: int, segment: Section) -> None:
        made_in = SectionKind.FWD if maker is None else self._segment[maker.name].kind
        if made_in is SectionKind.FWD and made_at < segment.stage:
            segment = _segment(SectionKind.FWD, segment.stage)
        here = self._local[name, segment.stage] = f"{name}__stage_{segment.stage}"
        self._types[here] = self._types.get(name) or self._program.symbols[name].type
        sent, received = self._message(name, f"{name}__to_stage_{segment.stage}", here, made_at, segment.stage)
        if maker is not None:
            sent, received = (replace(one, module=maker.module, source=maker.source) for one in (sent, received))
        if maker is not None and made_in is segment.kind:
            self._behind[maker.name].append(sent)
        else:
            self._first[_segment(segment.kind, made_at)].append(sent)
        self._nodes[segment].append(received)

    def _message(self, value: str, name: str, here: str, source: int, target: int) -> tuple[Node, Node]:
        axis, tag, shift = ("axis", PIPELINE), ("tag", next(self._tags)), target - source
        there, back = ("shift", shift % self._ranks), ("shift", -shift % self._ranks)
        sent = Node(name, "comm.send", (Ref(value),), (axis, there, tag))
        return sent, Node(here, "comm.recv", (), (axis, back, tag), (here,))

    def _thread_generator(self) -> None:
        """Hand the state of the random number generator from each segment that draws to the next."""
        drawing = [node for node in self._graph.nodes if OPERATORS[node.operator].draws_random_numbers]
        segments = {self._segment[node.name] for node in drawing}
        for before, after in pairwise(sorted(segments, key=_place)):
            state = here = f"$generator_{next(self._tags)}"
            self._types[state] = GENERATOR
            self._nodes[before].append(Node(state, "random.state", (), (), (state,)))
            if before.stage % self._ranks != after.stage % self._ranks:
                here = f"{state}__stage_{after.stage}"
                self._types[here] = GENERATOR
                sent, received = self._message(state, f"{state}__sent", here, before.stage, after.stage)
                self._nodes[before].append(sent)
                self._first[after].append(received)
            self._first[after].append(Node(f"{here}__set", "random.set_state", (Ref(here),)))

    def _assembled(self, outputs: tuple[Output, ...]) -> Graph:
        parts = []
        for segment in sorted({*self._nodes, *self._first}, key=_place):
            own = (*self._first[segment], *self._nodes[segment])
            nodes = [part for node in own for part in (node, *self._behind.get(node.name, ()))]
            parts.append((segment, nodes))
        return with_sections(replace(self._graph, outputs=outputs, values=self._types), parts)

    def _check_buffers(self, buffers: Mapping[str, int]) -> None:
        for node in self._graph.nodes if buffers else ():
            reader = self._stage_of[node.name]
            for name in self._values.buffers_read_by(node) & buffers.keys():
                if buffers[name] != reader:
                    buffer = (*self._program.symbols[name].torch_names, name)[0]
                    what = f"the stages {buffers[name]} and {reader} share the buffer {buffer}, which a step changes"
                    remedy = "use fewer --pipeline-stages, or give each module a buffer of its own"
                    raise OptionError(what, where=None if node.source is None else str(node.source), remedy=remedy)


def _weight_gradients(graph: Graph, assignment: Assignment) -> frozenset[str]:
    """Backward operators that lead to nothing but the gradient of one weight, and that no other stage reads."""
    backward, stage_of = graph.nodes_of(SectionKind.BCKWD), assignment.stage_of
    read_at: dict[str, set[int]] = defaultdict(set)
    for output in graph.outputs:
        if (owner := assignment.owner.get(parameter_of(output.symbol))) is not None:
            read_at[output.value].add(owner)
    for node in backward:
        for name in node.reads:
            read_at[name].add(stage_of[node.name])
    outputs = only_output(graph, backward)
    to_one = [node for node in backward if node.name in outputs]
    return frozenset(node.name for node in to_one if all(read_at[name] <= {stage_of[node.name]} for name in node.makes))


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
        training, schedule, last = program.step, self.schedule, self.schedule.stages - 1
        values = values_of(training, program)
        assignment = assign(program, values, schedule, self.budget, self.samples)
        owner, of_loss = assignment.owner, {program.loss, program.count, *program.logged.values()}
        if (state_bytes := self.state_bytes) is not None:
            states = {name: state_bytes(gradient_name(name), program) / self.shards for name in owner}
            sizes = {name: (program.symbols[name].type.size_bytes, size) for name, size in states.items()}
            assignment = replace(assignment, updater=updaters(assignment, sizes, schedule.ranks))

        def stage_of(output: Output) -> int | None:
            return last if output.symbol in of_loss else owner.get(parameter_of(output.symbol))

        def divided(graph: Graph) -> Graph:
            if graph is training:
                return Connected(program, graph, values, assignment, schedule).graph(stage_of)
            own = values_of(graph, program)
            at = assign_forward(graph, own, assignment)
            return Connected(program, graph, own, at, schedule).graph(lambda output: last)

        mesh = (Axis(PIPELINE, schedule.ranks), *program.mesh)
        return replace(program.map_graphs(divided), mesh=mesh, schedule=schedule)
