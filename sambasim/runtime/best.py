"""The best evaluation of a run so far: its weights, and whether the run ends because none is better any more."""

import math
from pathlib import Path

from sambasim.errors import CheckpointError, OptionError
from sambasim.records.metrics import EvaluationRecord
from sambasim.runtime.checkpoint.choose import choose
from sambasim.runtime.checkpoint.folder import mark_best, name_of
from sambasim.runtime.checkpoint.saver import Saver, restore
from sambasim.runtime.metrics import missing
from sambasim.runtime.outcome import trained_state
from sambasim.runtime.run.plan import Position
from sambasim.runtime.run.run_observer import RunObserver
from sambasim.runtime.run.setup import Setup, Team
from sambasim.runtime.run.training import Totals
from sambasim.runtime.values.memory import State


class Watch:
    """Compares evaluations by the metric that the options watch, and keeps the weights of the best: in a checkpoint, or
    without a folder in memory. What it has seen is in the progress of the run, on all ranks alike. `resumed`: the
    folder of the checkpoint that the run began with."""

    def __init__(
        self, setup: Setup, team: Team, totals: Totals, saver: Saver | None, observer: RunObserver, resumed: Path | None
    ) -> None:
        self._setup, self._team, self._totals, self._saver, self._observer = setup, team, totals, saver, observer
        self._options, self._folder = setup.resolved.evaluation, setup.options.checkpoint.dir or resumed
        self._best: State | None = None

    def take(self, record: EvaluationRecord, position: Position) -> None:
        """Collective. After an evaluation. Raises OptionError if it has no such metric."""
        name, progress = self._options.watched, self._totals.progress
        progress.evaluated_after = record.step
        if name is None:
            return
        if name not in record.numbers:
            raise missing(name, record.numbers)
        sign = 1 if self._options.largest_is_best else -1
        before = {} if progress.best is None else progress.best.numbers
        is_better = sign * record.numbers[name] > sign * before.get(name, -sign * math.inf)  # not so of NaN
        progress.best, progress.not_better = (record, 0) if is_better else (progress.best, progress.not_better + 1)
        if is_better and self._saver is not None and self._options.keep_best is not None:
            path = self._saver.save(position, progress)
            if path is not None and self._setup.is_first:
                mark_best(path)
        elif is_better and self._options.load_best:
            self._best = trained_state(self._setup, self._team, self._totals.updates, keeps_tensors=True)

    @property
    def stops(self) -> str | None:
        """Why the run ends here, if it does."""
        most, progress = self._options.stop_after, self._totals.progress
        if most is None or progress.not_better < most:
            return None
        best = f"the best is that of step {progress.best.step}" if progress.best else "none was a number"
        since = f"{progress.not_better} evaluations without a better {self._options.watched}"
        return f"stopped after step {progress.evaluated_after}: {since}; {best}"

    def load(self) -> State | None:
        """Collective. The state of the best evaluation, if it is asked for and is not that of the end."""
        setup, best = self._setup, self._totals.progress.best
        if best is None or not self._options.load_best or best.step == self._totals.steps:
            return None
        if self._best is not None or self._folder is None:
            return self._best
        try:
            checkpoint, _ = choose(str(self._folder / name_of(best.step)), None, setup.communicator)
        except (CheckpointError, OptionError) as error:
            self._observer.noted(f"warning: the weights are the last, not those of step {best.step}: {error.what}")
            return None
        restore(setup, self._team, checkpoint)
        self._team.release_parameters()
        updates = best.step - checkpoint.manifest.progress.skipped_steps
        return trained_state(setup, self._team, updates, keeps_tensors=True)
