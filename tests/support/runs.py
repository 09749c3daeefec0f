"""Runs of a PEF in this process."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from sambasim.options.run import RunOptions
from sambasim.records.metrics import SummaryRecord
from sambasim.runtime.job import TrainingJob
from sambasim.runtime.machine.communicator import single_rank
from sambasim.runtime.run.run_observer import RunObserver, RunObservers
from sambasim.runtime.run.setup import set_up

Table = Mapping[str, object]


def run_options(
    pef: Path,
    *,
    data: Table | None = None,
    training: Table | None = None,
    optimizer: Table | None = None,
    evaluation: Table | None = None,
    **flags: object,
) -> RunOptions:
    """A run without evaluation, unless `evaluation` is given. The tables are overrides."""
    tables = {"data": data or {}, "training": training or {}, "optimizer": optimizer or {}}
    tables["evaluation"] = {"enabled": False} if evaluation is None else evaluation
    return RunOptions.model_validate({"pef": str(pef), "threads": 1, "overrides": tables, **flags})


def train_alone(
    pef: Path,
    asked: RunOptions | Mapping[str, object],
    *observers: RunObserver,
    command: Sequence[str] = ("sambasim", "run", "…"),
) -> SummaryRecord:
    """One rank trains `pef` as `asked`: by default with one thread."""
    if not isinstance(asked, RunOptions):
        asked = RunOptions.model_validate({"pef": str(pef), "threads": 1, **asked})
    return TrainingJob(set_up(pef, asked, single_rank("here")), RunObservers(observers), command=command).run().summary
