"""What reports say about a prediction, each part computed once, when it is first needed."""

from collections.abc import Sequence
from functools import cached_property

from sambasim.costs.work import Work, at_batch_size, work_of
from sambasim.report.headline import headline
from sambasim.report.stages import Stages, costliest_line, stages_of
from sambasim.simulation.advice import Advice, advise
from sambasim.simulation.prediction import Prediction


class Findings:
    def __init__(self, prediction: Prediction) -> None:
        self.prediction = prediction
        self.step = prediction.alone

    @cached_property
    def advice(self) -> Advice:
        return advise(self.prediction)

    @cached_property
    def headline(self) -> str:
        return headline(self.prediction, self.advice)

    @cached_property
    def work(self) -> Work:
        """Of the batch that is predicted."""
        program, graph = self.prediction.program, self.prediction.graph
        return at_batch_size(work_of(graph, program.symbols), program.batch_size, self.step.batch_size)

    @cached_property
    def stages(self) -> Stages:
        return stages_of(self.work, self.step.sections)

    @cached_property
    def lines(self) -> Sequence[str]:
        """FILE:LINE of the costliest operator of each section; empty where none has a line, as in an update."""
        graph, budget = self.prediction.graph, self.step.budget
        found = (costliest_line(graph, rows, budget) for rows in self.stages.rows)
        return ["" if line is None else f"{line.file}:{line.line}" for line in found]
