"""What becomes of a finding: in a run a notice or an error, in a check on demand a part of the report."""

import atexit
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

from sambasim.bounded import one_line
from sambasim.errors import DataParallelError
from sambasim.runtime.launcher import launched_rank
from sambasim.samba.checks.findings import FINDINGS, Finding


@dataclass(slots=True)
class Telling:
    """How findings are told in this process: each once when it is found, and together at the end.

    on_demand: whether they are kept for a report, and even those that would end the run do not
    ends: whether the run is over, so that the summary is what comes next
    """

    on_demand: bool = False
    ends: bool = False
    _found: dict[tuple[str, str], tuple[Finding, str]] = field(default_factory=dict)
    _noticed: set[tuple[str, str]] = field(default_factory=set)

    @property
    def findings(self) -> Sequence[Finding]:
        """Those of this rank so far, each once."""
        return tuple(finding for finding, _ in self._found.values())

    def tell(self, finding: Finding | None, *, only_noticed: bool = False) -> None:
        """Raises DataParallelError for a finding that is refused, unless the run is a check on demand.

        only_noticed: whether a notice is enough here, such as when the run is over

        What is compared among ranks is told on each of them, and rank 0 prints it; and so what a rank finds by itself,
        for most often all do. `tell_of` is for the others.
        """
        if finding is None:
            return
        if FINDINGS[finding.code].refused and not (self.on_demand or only_noticed):
            raise DataParallelError(finding.words, where=finding.where, remedy=finding.remedy)
        self._notice(finding)

    def tell_of(self, rank: int, findings: Sequence[Finding]) -> None:
        """What `rank` has found: what this rank has found too is told already."""
        for finding in findings:
            if (finding.code, finding.what) not in self._found:
                self._notice(finding, f" (rank {rank})")

    def summarize(self) -> None:
        """All findings once more, on rank 0."""
        if self._found and not self.on_demand and launched_rank(os.environ) == 0:
            count = "1 finding" if len(self._found) == 1 else f"{len(self._found)} findings"
            lines = [f"summary: {count}; sambasim app --check looks at every step"]
            for key, (finding, whose) in self._found.items():
                told = _short if key in self._noticed else _block
                lines.append(told(f"  {finding.code}{whose}", finding))
            sys.stdout.flush()
            sys.stderr.write("\n".join(lines) + "\n")
            sys.stderr.flush()

    def _notice(self, finding: Finding, behind: str = "") -> None:
        is_new = (finding.code, finding.what) not in self._found
        self._found[finding.code, finding.what] = finding, behind
        if is_new and not (self.on_demand or self.ends) and launched_rank(os.environ) == 0:
            self._noticed.add((finding.code, finding.what))
            sys.stderr.write(_block(f"notice{behind}: {finding.code}", finding) + "\n")  # print writes the end apart
            sys.stderr.flush()

    def has(self, code: str) -> bool:
        """Whether a finding of this code was told."""
        return any(found == code for found, _ in self._found)


def _short(begin: str, finding: Finding) -> str:
    """For what a notice has told in full."""
    place = f" ({one_line(finding.where.partition(': ')[0])})" if finding.where else ""
    return f"{begin}: {one_line(finding.what)}{place}"


def _block(begin: str, finding: Finding) -> str:
    where = f"\n  where: {one_line(finding.where)}" if finding.where else ""
    return f"{begin}: {one_line(finding.what)}{where}\n  try:   {one_line(finding.remedy)}"


telling = Telling()
"""That of this process."""

# What is registered first is called last: behind the last comparison of the ranks.
atexit.register(lambda: telling.summarize())
