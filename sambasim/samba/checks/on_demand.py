"""`sambasim app --check`: all checks at full strength over a few steps, with one report at the end.

Nothing ends the run early: it continues as if the app were right, so that one check finds everything. It ends after a
given number of optimizer steps, or of forwards of an inference PEF. An epoch of a DistributedSampler is cut to half of
these steps, so that a second epoch is seen too.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from sambasim.ir.graph import SectionKind
from sambasim.ir.program import Program
from sambasim.samba import context
from sambasim.samba.checks import data, job
from sambasim.samba.checks.findings import Finding, reporter
from sambasim.samba.checks.place import app_line


class CheckIsOver(BaseException):
    """The steps of a check have been run. No Exception, so that apps do not catch it."""


@dataclass(frozen=True, slots=True)
class Report:
    """The findings of all ranks, and what they cover. If `epochs_cut`, the losses that the app prints are not those of
    a run."""

    findings: Sequence[Finding]
    steps: int
    replicas: int
    epochs_cut: bool


class Check:
    """The check of this process, over at most `steps` steps."""

    def __init__(self, steps: int) -> None:
        self.steps = 0
        self._limit = steps
        self._fed: list[tuple[str, ...]] = []
        self._forward: tuple[str, ...] = ()
        self._where: str | None = None
        self._epochs_cut = False

    def note(
        self, program: Program, kinds: Collection[SectionKind], batch: Mapping[str, Tensor], *, trains: bool
    ) -> None:
        """Sections of `kinds` are about to run on `batch`. Raises CheckIsOver after the last step.

        trains: whether the replicas should have samples of their own
        """
        if SectionKind.OPT in kinds or program.training is None:
            if self.steps == self._limit:
                raise CheckIsOver
            self.steps += 1
        self._where = app_line()
        if SectionKind.FWD in kinds:
            for finding in data.lossy(program, batch, self._where):
                reporter.report(finding)
            self._forward = data.sample_digests(batch) if trains else ()
        if SectionKind.BCKWD in kinds:  # a forward without it was an evaluation
            self._fed.append(self._forward)

    def short_epoch(self, batch_size: int) -> Callable[[Iterator[Any]], Iterable[Any]]:
        """Cuts the indices of an epoch to half of the steps, and keeps the remainder that fills no batch."""
        batches_of_a_step = int(getattr(context.current().arguments, "grad_accumulation_steps", None) or 1)
        wanted = max(self._limit // 2, 1) * batches_of_a_step * batch_size

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
        return Report(reporter.findings, self.steps, replicas, self._epochs_cut)

    def report(self) -> Report:
        """The findings of all ranks, each once. Collective if the ranks are connected."""
        communicator = context.current().communicator
        if communicator is None:
            return self.own_report()
        # A rank that is still taking steps raises CheckIsOver at its next, and then comes here.
        while not job.together(job.meet(communicator, job.Point(self.steps, ended=True), None)[0]):
            pass
        watched = job.current()
        divided = watched is not None and watched.samplers.division() is not None
        # Without a DistributedSampler, only the samples themselves show who got which.
        fed = communicator.all_gather_object(None if divided else self._fed)
        known = [one for one in fed if one is not None]
        if len(known) == len(fed) > 1 and not reporter.has("DP04"):
            reporter.report(data.shared_samples(known, self._where))
        job.finish()
        of_all_ranks = communicator.all_gather_object(reporter.findings)
        found = {(one.code, one.what): one for findings in reversed(of_all_ranks) for one in findings}
        findings = [found[key] for key in sorted(found)]
        return Report(findings, self.steps, communicator.world_size, self._epochs_cut)


_check: Check | None = None


def begin(steps: int) -> Check:
    """Check this process from now on, for this many steps."""
    global _check
    reporter.on_demand = True
    _check = Check(steps)
    return _check


def current() -> Check | None:
    """The check of this process; None in a run."""
    return _check
