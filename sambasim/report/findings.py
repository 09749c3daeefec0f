"""What reports say about a prediction, each part computed once, when it is first needed."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import cached_property

from sambasim.costs.work import Work, at_batch_size, work_of
from sambasim.report.headline import headline
from sambasim.report.stages import Stages, costliest_line, seconds_of, stages_of
from sambasim.simulation.advice import Advice, advise
from sambasim.simulation.folds import Fold, Run, folds_of, runs_of_step
from sambasim.simulation.prediction import Prediction

_MOST_LINES = 3


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
        graph, pairs = self.prediction.graph, zip(self.stages.rows, self.step.sections, strict=True)
        found = (costliest_line(graph, rows, section) for rows, section in pairs)
        return ["" if line is None else f"{line.file}:{line.line}" for line in found]

    @cached_property
    def line_s(self) -> Mapping[str, float]:
        """Seconds of the device in a step by line, the most first."""
        graph, found = self.prediction.graph, defaultdict[str, float](float)
        for rows, section in zip(self.stages.rows, self.step.sections, strict=True):
            for row, seconds in zip(rows, seconds_of(rows, graph, section), strict=True):
                if line := graph.nodes[row.node].source:
                    found[f"{line.file}:{line.line}"] += self.step.runs(section) * seconds
        return dict(sorted(found.items(), key=lambda pair: -pair[1]))

    @property
    def costliest_lines(self) -> str:
        """`models.py:26 36%, models.py:36 31%`, of the device time; empty without source lines."""
        shown = list(self.line_s.items())[:_MOST_LINES]
        return ", ".join(f"{line} {seconds / self.step.device_s:.0%}" for line, seconds in shown)

    @cached_property
    def runs(self) -> Sequence[Run]:
        return runs_of_step(self.step, self.prediction.graph)

    @cached_property
    def folds(self) -> Sequence[Fold]:
        return folds_of(self.step, self.prediction.graph)

    @cached_property
    def fold_of(self) -> Sequence[int]:
        """The number of the fold of each section."""
        of_section = {section: number for number, fold in enumerate(self.folds) for section in fold.numbers}
        return [of_section[section] for section in range(len(self.step.sections))]

    def runs_in_step(self, fold: Fold) -> int:
        """How often sections of `fold` run in a step, micro-steps included."""
        return sum(self.step.runs(self.step.sections[number]) for number in fold.numbers)

    def fold_s(self, fold: Fold) -> float:
        """Seconds of all these runs."""
        return self.runs_in_step(fold) * self.step.sections[fold.numbers[0]].price.predicted_s
