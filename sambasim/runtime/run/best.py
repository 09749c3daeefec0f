"""The best evaluation of a run so far, and whether the run ends because none is better any more."""

import math

from sambasim.errors import OptionError
from sambasim.options.evaluation import EvaluationOptions
from sambasim.options.problem import one_of
from sambasim.records.metrics import EvaluationRecord
from sambasim.runtime.run.training import Progress


class Watch:
    """Compares evaluations by the metric that `options` watch. What it has seen is in `progress`, on all ranks."""

    def __init__(self, options: EvaluationOptions, progress: Progress) -> None:
        self._options, self._progress = options, progress

    def is_best(self, record: EvaluationRecord) -> bool:
        """Take an evaluation. Raises OptionError if it has no such metric."""
        name, progress = self._options.watched, self._progress
        progress.evaluated_after = record.step
        if name is None:
            return False
        if name not in record.numbers:
            remedy = f"--keep-best {one_of(record.numbers)}"
            raise OptionError(f"evaluations have no {name}, which is to say which is the best", remedy=remedy)
        value, best = record.numbers[name], None if progress.best is None else progress.best.numbers.get(name)
        ahead = math.inf if best is None else value - best
        is_better = (ahead if self._options.largest_is_best or best is None else -ahead) > 0 and not math.isnan(value)
        progress.best, progress.not_better = (record, 0) if is_better else (progress.best, progress.not_better + 1)
        return is_better

    @property
    def stops(self) -> str | None:
        """Why the run ends here, if it does."""
        most, name, progress = self._options.stop_after, self._options.watched, self._progress
        if most is None or progress.not_better < most:
            return None
        best = f"the best is that of step {progress.best.step}" if progress.best else "none was a number"
        since = f"{progress.not_better} evaluations without a better {name}"
        return f"stopped after step {progress.evaluated_after}: {since}; {best}"
