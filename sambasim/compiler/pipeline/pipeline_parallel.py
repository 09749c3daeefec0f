"""The pass that cuts a program into pipeline stages: `--pipeline-stages`."""

from dataclasses import dataclass, replace
from typing import ClassVar

from sambasim.compiler.pipeline.assign import assign, assign_forward, values_of
from sambasim.compiler.pipeline.messages import Connected
from sambasim.compiler.pipeline.tied import Sizes, updaters
from sambasim.compiler.update import AttachOptimizers
from sambasim.errors import InternalError
from sambasim.hardware.budget import Budget
from sambasim.ir.graph import Graph, Output
from sambasim.ir.mesh import PIPELINE, Axis
from sambasim.ir.program import Program
from sambasim.ir.schedule import Schedule
from sambasim.ir.types import gradient_name, parameter_of
from sambasim.ir.verify import Progress


@dataclass(frozen=True, slots=True)
class PipelineParallel:
    """Add the axis pp and cut every graph into the stages of `schedule`, balanced by the seconds that `budget`'s device
    needs for a pass of `samples`, by default those of the program. The states of `optimizers`, of which each of
    `shards` replicas keeps a slice, decide where a tied parameter is updated; without them, it is where its gradient is
    completed. Raises OptionError if there are fewer places to cut."""

    title: ClassVar[str] = "cut into pipeline stages"
    reaches: ClassVar[Progress] = Progress.CAPTURED
    schedule: Schedule
    budget: Budget
    optimizers: AttachOptimizers | None = None
    shards: int = 1
    samples: int | None = None

    def __call__(self, program: Program) -> Program:
        training, schedule = program.training, self.schedule
        if training is None:
            raise InternalError("pipeline stages of a program without a training step")
        stages, ranks = schedule.stages, schedule.ranks
        values = values_of(training, program)
        assignment = assign(program, training, values, stages, ranks, self.budget, self.samples)
        owner = assignment.owner
        if self.optimizers is not None:
            sizes = {name: self._sizes(name, self.optimizers, program) for name in owner}
            assignment = replace(assignment, updater=updaters(assignment, sizes, ranks))

        def stage_of(output: Output) -> int | None:
            if output.symbol == program.loss:
                return stages - 1
            return owner.get(parameter_of(output.symbol))

        connected = Connected(program, training, values, assignment, stages, ranks, schedule.splits_backward)
        cut = connected.graph(stage_of)

        def forward(graph: Graph | None) -> Graph | None:
            if graph is None:
                return None
            found = values_of(graph, program)
            at = assign_forward(graph, found, assignment)
            return Connected(program, graph, found, at, stages, ranks, False).graph(lambda output: stages - 1)

        return replace(
            program,
            training=cut,
            evaluation=forward(program.evaluation) or program.evaluation,
            single=forward(program.single),
            mesh=(Axis(PIPELINE, ranks), *program.mesh),
            schedule=schedule,
        )

    def _sizes(self, parameter: str, optimizers: AttachOptimizers, program: Program) -> Sizes:
        states_bytes = optimizers.state_bytes(gradient_name(parameter), program)
        return Sizes(program.symbols[parameter].type.size_bytes, states_bytes / self.shards)
