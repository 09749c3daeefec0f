"""The `[evaluation]` table of a config: on what, how often and by what a run is evaluated, and what follows from it."""

from collections.abc import Iterator

from pydantic import Field

from sambasim.options.base import Options
from sambasim.options.fields import EvaluationFields
from sambasim.options.grammar import METRICS, Cadence, JsonTable, is_top_k, parse_interval
from sambasim.options.problem import Problem, broken, suggested


class EvaluationOptions(EvaluationFields, Options):
    """The `[evaluation]` table. `data` is a source as `data.source`, called with `args`, in place of what the data
    holds out. `metrics`: names or functions, each with its options: those of torchmetrics, or keyword arguments."""

    args: JsonTable = Field(default_factory=dict)

    @property
    def cadence(self) -> Cadence:
        return parse_interval(self.every)

    @property
    def watched(self) -> str | None:
        """The metric by which an evaluation is the best; None if it does not matter which."""
        return self.keep_best or (None if self.stop_after is None else "loss")

    @property
    def largest_is_best(self) -> bool | None:
        """Of the watched metric; None if that is not known."""
        name = self.watched or ""
        known = {"loss": "min", **METRICS}.get(name, "max" if is_top_k(name) else None)
        return None if (mode := self.mode or known) is None else mode == "max"

    def problems(self) -> Iterator[Problem]:
        needs_best, name_one = "needs a metric that says which evaluation is the best", "--keep-best loss"
        unknown = self.watched is not None and self.largest_is_best is None
        off = not self.enabled and self.watched is not None
        names = ["loss", *METRICS, *(name.rpartition(":")[2] for name in self.metrics or ())]
        guess = suggested(self.keep_best or "", set(names) - {self.keep_best}) if unknown else None
        yield from broken(
            (self.load_best and self.keep_best is None, "load_best", needs_best, name_one),
            (self.mode is not None and self.keep_best is None, "mode", needs_best, name_one, self.mode),
            (guess, "keep_best", "is no metric that has a name here",
             f"{guess} For one that has, by the model or a function: --best-mode max, or min", self.keep_best),
            (unknown and not guess, "mode", f"is missing: it is not known whether the largest {self.keep_best} is best",
             "--best-mode max, or min"),
            (off, "keep_best" if self.keep_best else "stop_after",
             "needs evaluations, which are turned off", "leave out --no-evaluate"),
            (self.args and self.data is None, "args", "are for a data function, and evaluation.data names none"),
        )  # fmt: skip
