"""What `run` does after its checks: it trains, and writes the files that its options name."""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from sambasim.commands.run_checks import log_of
from sambasim.errors import MachineError, OptionError
from sambasim.options.run import RunOptions
from sambasim.records.metrics import CheckpointRecord, EvaluationRecord, SummaryRecord
from sambasim.runtime.job import TrainingJob
from sambasim.runtime.machine.communicator import Communicator
from sambasim.runtime.run.run_observer import LineFile, MetricsFile, RunObserver, RunObservers, Start, Step
from sambasim.runtime.run.setup import set_up
from sambasim.runtime.watch.status_file import Activity
from sambasim.units import format_seconds


class Trained(NamedTuple):
    """`weights`: by the names of the model's state_dict, if they were to be kept."""

    summary: SummaryRecord
    weights: Mapping[str, Tensor]


def train(
    path: Path,
    options: RunOptions,
    communicator: Communicator,
    activity: Activity,
    command: Sequence[str],
    observers: Sequence[RunObserver],
    data: object = None,
    *,
    keeps_weights: bool = False,
) -> Trained:
    """Collective. Train the PEF at `path`, which `checked_pef` has checked; the arguments are those of TrainingJob."""
    rank, members = communicator.rank, [*observers]
    if rank == 0 and options.metrics is not None:
        members.append(MetricsFile(options.metrics))
    if options.log_dir is not None:
        members.append(RankLog(options.log_dir, rank))
    setup = set_up(path, options, communicator)
    job = TrainingJob(setup, RunObservers(members), activity, command, data, keeps_weights=keeps_weights)
    summary = job.run()
    return Trained(summary, job.weights)


class RankLog(RunObserver):
    """A log file of one rank: every step with its times, written at once. It is made when training starts."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._path = log_of(folder, rank)
        self._file: LineFile | None = None

    def started(self, start: Start) -> None:
        try:
            self._file = LineFile(self._path, append=bool(start.plan.start.step))
        except OSError as error:
            raise OptionError(
                f"no log can be written to {self._path.parent}: {error.strerror}", remedy="--log-dir FOLDER"
            ) from error
        rank = start.rank and f"{start.rank}; "
        self._write(f"start {start.name}: {rank}sync {start.sync}, {start.threads} threads, {start.data}")

    def stepped(self, step: Step) -> None:
        times = f"step {format_seconds(step.step_s)}, sync {format_seconds(step.sync_s)}"
        self._write(f"step {step.step} epoch {step.epoch} loss {step.loss!r} {times}")

    def evaluated(self, record: EvaluationRecord) -> None:
        self._write(f"evaluation after step {record.step}: loss {record.loss!r} accuracy {record.accuracy!r}")

    def saved(self, record: CheckpointRecord) -> None:
        self._write(f"checkpoint after step {record.step}: {record.path} in {format_seconds(record.checkpoint_s)}")

    def noted(self, what: str) -> None:
        self._write(what)

    def ended(self, summary: SummaryRecord) -> None:
        self._write(f"end weights_sha256 {summary.weights_sha256} state_sha256 {summary.state_sha256}")
        if self._file is not None:
            self._file.close()

    def _write(self, line: str) -> None:
        try:
            if self._file is not None:
                self._file.write(f"{time.strftime('%Y-%m-%dT%H:%M:%S')} {line}\n")
        except OSError as error:
            what = f"the log {self._path} cannot be written any more: {error.strerror}"
            raise MachineError(what, remedy="free space there, or name another place: --log-dir FOLDER") from error
