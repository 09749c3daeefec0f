"""Findings: mistakes of an app, with a code, and how they are reported.

In a run a finding is a notice on stderr or, for DP09, an error. `sambasim app --check` collects all of them. The table
of all codes is in `samba/README.md`; codes stay the same between releases.
"""

import atexit
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

from sambasim.bounded import one_line
from sambasim.errors import DataParallelError, UserError
from sambasim.runtime.launcher import launched_rank

_ENDS_RUN = "DP09"
"""The code of findings that are errors in a run. All others are notices."""


@dataclass(frozen=True, slots=True)
class Finding:
    """What is wrong, where in the app (`file:line: code`), and what to type there."""

    code: str
    what: str
    where: str | None
    remedy: str

    @property
    def words(self) -> str:
        """Code and description in one line."""
        return f"{self.code}: {self.what}"


class KeywordError(UserError, TypeError):
    """A call of a library function with arguments that it does not have."""

    code = "keyword"


@dataclass(slots=True)
class Reporter:
    """Reports findings in this process: each once when it is found, and all again in a summary at the end.

    on_demand: collect findings for a `--check`, print nothing and raise nothing
    at_exit: the run is over, so new findings appear in the summary only
    """

    on_demand: bool = False
    at_exit: bool = False
    _found: dict[tuple[str, str], tuple[Finding, str]] = field(default_factory=dict)
    _printed: set[tuple[str, str]] = field(default_factory=set)

    @property
    def findings(self) -> Sequence[Finding]:
        """Those of this rank so far, each once."""
        return tuple(finding for finding, _ in self._found.values())

    def report(self, finding: Finding | None, *, notice_only: bool = False) -> None:
        """Report a finding of this rank; rank 0 prints it.

        notice_only: do not raise, because the run is over or can go on

        Raises DataParallelError for a finding that ends the run, except during a check.
        """
        if finding is None:
            return
        if finding.code == _ENDS_RUN and not (self.on_demand or notice_only):
            raise DataParallelError(finding.words, where=finding.where, remedy=finding.remedy)
        self._add(finding)

    def report_from(self, rank: int, findings: Sequence[Finding]) -> None:
        """Report those findings of another rank that this rank does not have."""
        for finding in findings:
            if (finding.code, finding.what) not in self._found:
                self._add(finding, f" (rank {rank})")

    def has(self, code: str) -> bool:
        """Whether a finding with this code was reported."""
        return any(found == code for found, _ in self._found)

    def summarize(self) -> None:
        """Print all findings again, on rank 0: in short those that were printed before."""
        if self._found and not self.on_demand and launched_rank(os.environ) == 0:
            count = "1 finding" if len(self._found) == 1 else f"{len(self._found)} findings"
            lines = [f"summary: {count}; sambasim app --check checks every step"]
            for key, (finding, source) in self._found.items():
                shown = _short if key in self._printed else _full
                lines.append(shown(f"  {finding.code}{source}", finding))
            sys.stdout.flush()
            sys.stderr.write("\n".join(lines) + "\n")
            sys.stderr.flush()

    def _add(self, finding: Finding, source: str = "") -> None:
        key = finding.code, finding.what
        is_new = key not in self._found
        self._found[key] = finding, source
        if is_new and not (self.on_demand or self.at_exit) and launched_rank(os.environ) == 0:
            self._printed.add(key)
            sys.stderr.write(_full(f"notice{source}: {finding.code}", finding) + "\n")
            sys.stderr.flush()


def _short(start: str, finding: Finding) -> str:
    place = f" ({one_line(finding.where.partition(': ')[0])})" if finding.where else ""
    return f"{start}: {one_line(finding.what)}{place}"


def _full(start: str, finding: Finding) -> str:
    where = f"\n  where: {one_line(finding.where)}" if finding.where else ""
    return f"{start}: {one_line(finding.what)}{where}\n  try:   {one_line(finding.remedy)}"


reporter = Reporter()
"""Of this process."""

# Registered first, so that it runs last: after the final comparison of the ranks.
atexit.register(lambda: reporter.summarize())
