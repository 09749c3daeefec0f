"""What reports say about a prediction, each part computed once, when it is first needed."""

from functools import cached_property

from sambasim.report.headline import headline
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
