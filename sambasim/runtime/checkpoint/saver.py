"""The checkpoints of one run: when they are written, how many are kept, and what it means if one cannot be written."""

import time
from contextlib import suppress
from pathlib import Path

from sambasim.errors import InternalError, MachineError
from sambasim.records.metrics import CheckpointRecord
from sambasim.runtime.checkpoint import folder, snapshot
from sambasim.runtime.checkpoint.cadence import Clock
from sambasim.runtime.checkpoint.claim import Claim
from sambasim.runtime.checkpoint.describe import at, describe
from sambasim.runtime.checkpoint.writer import write
from sambasim.runtime.listener import Listener
from sambasim.runtime.nonfinite import LossWatch
from sambasim.runtime.plan import Plan, Position
from sambasim.runtime.setup import Setup
from sambasim.runtime.team import Team
from sambasim.runtime.training import Totals
from sambasim.runtime.watch.activity import Activity


class Saver:
    """Writes checkpoints where the options of `setup` say. Collective: every rank has one, and calls it alike.

    `losses` judges what may be saved; `held` is the claim of rank 0 on that place.
    """

    def __init__(
        self,
        setup: Setup,
        team: Team,
        plan: Plan,
        listener: Listener,
        activity: Activity,
        losses: LossWatch,
        held: Claim | None,
    ) -> None:
        if setup.options.checkpoint.dir is None:
            raise InternalError("checkpoints of a run that asks for none")
        self._folder = setup.options.checkpoint.dir
        self._claim = held
        self._activity = activity
        self._setup = setup
        self._team = team
        self._beginning = describe(setup, plan.samples)
        self._listener = listener
        self._losses = losses
        self._failure: MachineError | None = None
        self._clock = Clock(setup.options.checkpoint.cadence)
        # What a run goes on from need not be written again, if it takes no step.
        self._saved_step = plan.start.step if plan.start.step else None
        self.failed = 0
        self.last: Path | None = None
        """The newest that was written."""

    def is_time(self) -> bool:
        """Whether a checkpoint is due by time, by this rank's clock."""
        return self._clock.is_time()

    def after_step(self, position: Position, totals: Totals, *, wished: bool) -> None:
        """A step has been taken, and the epoch goes on. `wished`: a rank's clock says that it is time."""
        if wished or self._clock.after_step(position.step):
            self.save(position, totals)

    def after_epoch(self, position: Position, totals: Totals, *, wished: bool) -> None:
        """An epoch has ended, and was evaluated; `position` is the beginning of the next one."""
        if wished or self._clock.after_step(position.step) or self._clock.after_epoch(position.epoch):
            self.save(position, totals)

    def at_end(self, position: Position, totals: Totals) -> None:
        """The run is over."""
        if self._saved_step != position.step:
            self.save(position, totals, goes_on=False)

    def check_end(self) -> None:
        """Of a run that keeps its weights nowhere else. Raises MachineError if its end could not be saved."""
        if self._failure is not None:
            raise MachineError(
                f"the run is over, and its end is not saved: {self._failure.what}; {self.kept()}",
                where=self._failure.where,
                remedy="make room there, and go on with --resume; --save FILE keeps the weights elsewhere",
            )

    def newest(self) -> str | None:
        """The name of what there is to go on from, whoever has written it."""
        with suppress(OSError):
            for path in folder.checkpoints_in(self._folder):
                return path.name
        return None

    def kept(self) -> str:
        """The same in words."""
        newest = self.newest()
        return f"the last checkpoint is {newest}" if newest else "there is no checkpoint yet"

    def save(self, position: Position, totals: Totals, *, goes_on: bool = True) -> Path | None:
        """Write a checkpoint now; returns its path. Training `goes_on` after it, or this is the end.

        Where that fails, what is there stays; the run goes on, and this is None, or ends with MachineError, as
        --on-checkpoint-failure says. Raises NumericsError for parameters that are not finite, as --on-nonfinite says.
        """
        began_s = time.perf_counter()
        setup, team = self._setup, self._team
        self._losses.look_at_parameters(snapshot.nonfinite_parameter(setup, team, self._activity), position)
        path = self._folder / folder.name_of(position.step)
        manifest = at(self._beginning, position, totals)
        try:
            written = write(
                path,
                manifest,
                snapshot.spans_of(setup.program, team),
                tuple(replica.rank for replica in team.replicas),
                snapshot.take(setup, team),
                setup.communicator,
                self._activity,
                self._claim,
            )
        except MachineError as error:
            self.failed += 1
            self._failure = error
            if setup.options.checkpoint.on_failure == "stop":
                raise
            after = "training goes on, and " if goes_on else ""
            self._listener.noted(f"warning: {error.what} ({error.where}); {after}{self.kept()}")
            return None
        finally:
            self._clock.restart()
        self._saved_step, self._failure = position.step, None
        self._prune(position.step)
        self.last = path
        size_bytes = sum(shard.size_bytes for shard in written.shards)
        checkpoint_s = time.perf_counter() - began_s
        self._listener.saved(
            CheckpointRecord(
                step=position.step,
                epoch=position.epoch + bool(position.used),
                path=str(path),
                size_bytes=size_bytes,
                checkpoint_s=checkpoint_s,
            )
        )
        return path

    def _prune(self, step: int) -> None:
        """Delete the oldest ones, once that of `step` is safe. What cannot be deleted stays, and nothing is lost by
        it."""
        if not self._setup.is_first:
            return
        with suppress(OSError):
            for path in folder.older_than(self._folder, step)[self._setup.options.checkpoint.kept - 1 :]:
                folder.remove(path)
