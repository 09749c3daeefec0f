"""Findings: the table of all codes, one finding, and how findings are reported.

In a run a finding is a notice on stderr or, if its row says so, an error. `sambasim app --check` collects all of them.
"""

import atexit
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from sambasim.bounded import one_line
from sambasim.errors import DataParallelError, UserError
from sambasim.runtime.launcher import launched_rank


@dataclass(frozen=True, slots=True)
class Row:
    """What a code means and when it is reported. A finding with `ends_run` is an error, any other a notice."""

    sentence: str
    reported: str
    ends_run: bool = False


FINDINGS: Mapping[str, Row] = {
    "DP01": Row(
        "several replicas of a data parallel PEF train independently, because `--data-parallel` is missing on the "
        "command line or `data_parallel=` in `session.run`",
        "at the first step; ends the run if other replicas sync",
    ),
    "DP02": Row(
        "a flag on the command line is not passed on: `--reduce-on-rdu` to `session.run`; `--data-parallel`, `-ws`, "
        "`--o0`, `--o1` or `--inference` to the `config_dict` of `session.compile`; or the number of backwards in an "
        "optimizer step is not `--grad-accumulation-steps`",
        "at once",
    ),
    "DP03": Row(
        "replicas start from different weights: here all continue from replica 0, on an RDU each keeps its own",
        "at the first step",
    ),
    "DP04": Row(
        "replicas get the same samples: their samplers have the same rank, or their batches are equal in two of the "
        "steps 1, 2 and 8. Batches with one value throughout, such as zeros for a warm-up, are not compared. Batches "
        "from no DataLoader, before a DistributedSampler feeds the first step, count from step 8",
        "at once",
    ),
    "DP05": Row(
        "samples are skipped, or go to several replicas (beyond the padding of the sampler): the samplers of the "
        "replicas differ in seed, epoch, length or number of replicas; or, with `--check` and without such a sampler, "
        "replicas share samples",
        "at once",
    ),
    "DP06": Row(
        "a sampler shuffles every epoch in the same order, because `set_epoch` is not called", "in the second epoch"
    ),
    "DP07": Row(
        "weights or hyperparameters differ between replicas",
        "in steps 1, 2, 8, 64, 512 … and at the end, with `--check` in every step",
    ),
    "DP08": Row(
        "several ranks write the same file; reported once for each line of the app", "at the end at the latest"
    ),
    "DP09": Row(
        "replicas take different numbers of optimizer steps: one ends while another waits for it; or, where learning "
        "rates or orders differ, their epochs have different lengths",
        "in steps 1, 2, 8, 64, 512 …, with `--check` in every step; ends the run if a replica would wait forever",
        ends_run=True,
    ),
    "AP01": Row(
        "a batch has another size than the PEF: it is the last batch of the data set, or `-b` is different",
        "ends the run",
    ),
    "AP02": Row(
        "an argument of the library differs from the compile, according to the app's `pef_metadata`",
        "when the PEF is loaded; if the graph differs too, ends the run, and the error lists the arguments",
    ),
    "AP03": Row(
        "values that an RDU would convert with a loss: labels beyond int16, inputs of type float64",
        "only with `--check`, because they are exact here",
    ),
    "AP04": Row(
        "wrong arguments to a function of the library: a misspelled keyword, too many positional arguments, a "
        "hyperparameter that is not a number. Other unknown keywords and hyperparameters are ignored with a notice",
        "ends the run",
    ),
    "AP05": Row(
        "a change on the host does not reach the device: a hyperparameter of an optimizer that is not passed to "
        "`session.run`, for example from a scheduler; loaded optimizer state; clipping of gradients that the host does "
        "not have; weights; `requires_grad`. The last two are compared in calls 1, 2, 8, 64, 512 … of `session.run`, "
        "the others in every step",
        "at once",
    ),
    "AP06": Row(
        "the app uses weights of the host, and the device has trained since `to_cpu`: it reads `state_dict()`, "
        "saves the model by `torch.save`, predicts on the host with the model or a trained module of it, or loads "
        "another PEF by `trace_graph`",
        "at once; for a prediction in training mode, once no backward has followed",
    ),
    "AP07": Row(
        "nothing is trained: the device runs backwards without an optimizer step, `to_cpu` overwrites weights that "
        "were trained on the host, or an inference PEF gets hyperparameters",
        "at once",
    ),
    "AP08": Row("the loss is NaN or infinite", "at the first such step"),
    "AP09": Row(
        "the model returns no loss and `sn_grad` is not set: the backward starts from the mean of the output. With "
        "several possible outputs, this ends the run",
        "at the first backward",
    ),
}
"""By code. Codes stay the same between releases."""


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

    on_demand: collect findings for a `--check`, print nothing and end no run
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
        if FINDINGS[finding.code].ends_run and not (self.on_demand or notice_only):
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
            lines = [f"summary: {count}; sambasim app --check looks at every step"]
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
