"""`sambasim app --check`: all checks at full strength over a few steps, told as a report.

What ends a run is kept for the report, and the run goes on as if the app were right, so that one check finds all. It
ends after some optimizer steps, or forwards of an inference PEF. Half of that makes an epoch of a DistributedSampler,
so that a second one is seen too.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from sambasim.ir.graph import SectionKind
from sambasim.ir.program import Program
from sambasim.samba import context
from sambasim.samba.checks import conversions, meeting, samples, watching
from sambasim.samba.checks.findings import Finding
from sambasim.samba.checks.place import app_line
from sambasim.samba.checks.telling import telling


class CheckIsOver(BaseException):
    """The steps of a check have been run. No Exception, so that apps let it through."""


@dataclass(frozen=True, slots=True)
class Report:
    """What a check has found, on all ranks, and over how many steps and replicas; and whether epochs were cut, so that
    what the app prints of its losses is not what a run prints."""

    findings: Sequence[Finding]
    steps: int
    replicas: int
    epochs_cut: bool


class Check:
    """The check that this process is run for."""

    def __init__(self, steps: int) -> None:
        self.steps = 0
        self._wanted = steps
        self._fed: list[tuple[str, ...]] = []
        self._forward: tuple[str, ...] = ()
        self._where: str | None = None
        self._epochs_cut = False

    def note(
        self, program: Program, kinds: Collection[SectionKind], batch: Mapping[str, Tensor], *, trains: bool
    ) -> None:
        """Sections of `kinds` are about to be run on `batch`. Raises CheckIsOver if there were enough steps.

        trains: whether the command is one in which replicas must have samples of their own
        """
        if SectionKind.OPT in kinds or program.training is None:
            if self.steps == self._wanted:
                raise CheckIsOver
            self.steps += 1
        self._where = app_line()
        if SectionKind.FWD in kinds:
            for finding in conversions.lossy(program, batch, self._where):
                telling.tell(finding)
            self._forward = samples.sample_digests(batch) if trains else ()
        if SectionKind.BCKWD in kinds:  # a forward without it was an evaluation
            self._fed.append(self._forward)

    def short_epoch(self, batch_size: int) -> Callable[[Iterator[Any]], Iterable[Any]]:
        """Of the indices of an epoch, what makes half as many optimizer steps as are wanted; and the last ones, by
        which the data set is no multiple of the batch."""
        batches_of_a_step = int(getattr(context.current().arguments, "grad_accumulation_steps", None) or 1)
        wanted = max(self._wanted // 2, 1) * batches_of_a_step * batch_size

        def shortened(indices: Iterator[Any]) -> Iterable[Any]:
            whole = list(indices)
            rest = len(whole) % batch_size
            kept = min(len(whole) - rest, wanted)
            self._epochs_cut |= kept + rest < len(whole)
            return [*whole[:kept], *whole[len(whole) - rest :]]

        return shortened

    def own_report(self) -> Report:
        """What this rank has found so far. Not collective."""
        communicator = context.current().communicator
        replicas = communicator.world_size if communicator else 1
        return Report(telling.findings, self.steps, replicas, self._epochs_cut)

    def report(self) -> Report:
        """The findings of all ranks, each once. Collective, where the ranks have met."""
        communicator = context.current().communicator
        if communicator is None:
            return self.own_report()
        # A rank that still takes steps ends at its next, and comes here then.
        while not meeting.together(meeting.meet(communicator, meeting.Point(self.steps, ended=True), None)[0]):
            pass
        watched = watching.current()
        divided = watched is not None and watched.samplers.division() is not None
        # Samplers of torch tell themselves which samples they give to whom; without them, the samples must.
        fed = communicator.all_gather_object(None if divided else self._fed)
        known = [one for one in fed if one is not None]
        if len(known) == len(fed) > 1 and not telling.has("DP04"):
            telling.tell(samples.shared_samples(known, self._where))
        watching.finish()
        everybody = communicator.all_gather_object(telling.findings)
        found = {(one.code, one.what): one for findings in reversed(everybody) for one in findings}
        findings = [found[key] for key in sorted(found)]
        return Report(findings, self.steps, communicator.world_size, self._epochs_cut)


_check: Check | None = None


def begin(steps: int) -> Check:
    """From now on this process is checked, for this many steps."""
    global _check
    telling.on_demand = True
    _check = Check(steps)
    return _check


def current() -> Check | None:
    """The check that this process is run for; None for a run."""
    return _check
