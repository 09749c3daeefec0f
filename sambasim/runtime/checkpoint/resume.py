"""Going on from a checkpoint: what it was written by, where it is, and what is told of it."""

from dataclasses import dataclass

from sambasim.runtime.checkpoint.changes import changes, check_epoch, check_exact, check_pef
from sambasim.runtime.checkpoint.choose import check_last, check_new, choose
from sambasim.runtime.checkpoint.describe import describe
from sambasim.runtime.checkpoint.reader import Checkpoint
from sambasim.runtime.plan import Position
from sambasim.runtime.setup import Setup
from sambasim.runtime.training import Totals


@dataclass(frozen=True, slots=True)
class Resumption:
    """The checkpoint that a run goes on from, and where that is. `notices` are what to tell before it does."""

    checkpoint: Checkpoint
    position: Position
    notices: tuple[str, ...]

    def carry_over(self, totals: Totals) -> None:
        """What a summary says of the run from its beginning."""
        progress = self.checkpoint.manifest.progress
        totals.samples = progress.samples
        totals.first_nonfinite_step = progress.first_nonfinite_step
        totals.skipped_steps = progress.skipped_steps
        if progress.loss_first is not None:
            totals.loss_first = float(str(progress.loss_first).removeprefix("="))


def find(setup: Setup, samples: int) -> Resumption | None:
    """Collective. The checkpoint that the options ask to go on from; None for a run that begins anew.

    samples: the size of the data set to train on

    Raises CheckpointError if it is damaged, or of another PEF; OptionError if there is none, or if the run cannot go on
    from it as it was asked to.
    """
    options = setup.options.checkpoint
    if options.resume is None:
        if options.dir is not None:
            check_new(options.dir)
            setup.communicator.barrier()  # nobody writes before all have looked
        return None
    chosen = choose(options.resume, options.dir, setup.communicator)
    if options.dir is not None:
        check_last(chosen.checkpoint, options.dir)
        setup.communicator.barrier()
    saved, where = chosen.checkpoint.manifest, str(chosen.checkpoint.path)
    at = saved.position
    position = Position(at.step, at.epoch, at.used)
    now = describe(setup, samples)
    check_pef(saved, now, where)
    found = changes(saved, now)
    check_epoch(saved, now, found, where)
    if options.exact:
        check_exact(found, where)
    notices = [*chosen.notices, f"goes on after step {at.step}, from {where}"]
    notices += [f"changed since the checkpoint: {change}" for change in found]
    if any(change.alters_bits for change in found):
        notices.append("so the bits from here on are not promised to be those of a run that was never interrupted")
    return Resumption(chosen.checkpoint, position, tuple(notices))
