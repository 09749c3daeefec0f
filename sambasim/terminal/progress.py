"""Progress of a run: a progress bar on a terminal, plain lines if the output is piped; and what a run prints at the
end, from the SummaryRecord that `runtime/outcome.py` makes."""

import sys
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING

from sambasim.errors import one_line, printable, say
from sambasim.records.metrics import CheckpointRecord, EvaluationRecord, StepRecord, SummaryRecord
from sambasim.runtime.run.run_observer import RunObserver, Start
from sambasim.terminal.output import console_of, is_terminal, scores, show
from sambasim.units import counted, format_bytes, format_seconds

if TYPE_CHECKING:
    from rich.progress import Progress

    from sambasim.terminal.curve import Curve

_PLAIN_INTERVAL_S = 2.0
_LIVE_INTERVAL_S = 0.5
"""Seconds of training between two plain lines, and the window of the averages beside the bar."""


class RunWarnings(RunObserver):
    """Prints warnings to stderr, where stdout is for JSON alone."""

    def noted(self, what: str) -> None:
        if what.startswith("warning: "):
            say(what, sys.stderr)


class RunProgress(RunObserver):
    """On a terminal one line with a bar, else a line every few seconds; with `predicts`, predictions at the end."""

    def __init__(self, *, predicts: bool = False, words: Callable[[str], str] = str) -> None:
        self._predicts, self._words = predicts, words
        self._start: Start | None = None
        self._bar = _progress_bar() if is_terminal(sys.stdout) else None
        self._curve = _curve() if _in_notebook() else None
        self._averages = _Averages()
        self._evaluation: EvaluationRecord | None = None

    def close(self) -> None:
        if self._bar:
            self._bar.stop()

    def preparing(self, what: str) -> None:
        say(what)

    def started(self, start: Start) -> None:
        self._start, plan = start, start.plan
        chips = f" of {start.chips} chips" if start.chips > 1 else ""
        accumulation = f" × {plan.accumulation_steps} accumulated" if plan.accumulation_steps > 1 else ""
        of_epoch = f"{plan.steps_per_epoch} steps per epoch; " if plan.samples else ""
        lines = [
            one_line(f"{start.name}: {start.data}"),
            f"batch {plan.batch_size} × {counted(plan.world_size, 'replica')}{chips} = global batch "
            f"{plan.global_batch_size}{accumulation}; {of_epoch}sync: {start.sync}; "
            f"{start.threads} thread{'s' * (start.threads > 1)} per rank",
        ]
        if start.placement:
            lines.append(f"simulated: {start.placement}")
        if plan.left_out:
            lines.append(f"each epoch leaves out {plan.left_out} of {plan.samples} samples, which do not fill a step")
        lines += [f"notice: {one_line(self._words(notice))}" for notice in start.notices]
        say("\n".join(lines))
        if self._bar:
            self._bar.start()
            self._bar.start_task(self._bar.task_ids[0])
            self._bar.update(self._bar.task_ids[0], total=plan.steps)

    def stepped(self, step: StepRecord) -> None:
        self._averages.add(step)
        if self._bar:
            facts = self._averages.facts(step)
            if self._evaluation is not None and self._evaluation.accuracy is not None:
                facts += f"  accuracy {self._evaluation.accuracy:.1%}"
            self._bar.update(self._bar.task_ids[0], completed=step.step, facts=facts)
            if self._averages.step_s > _LIVE_INTERVAL_S:
                self._averages = _Averages()
        elif self._start:
            steps, interval_s = self._start.plan.steps, _LIVE_INTERVAL_S if self._curve else _PLAIN_INTERVAL_S
            if self._curve:
                self._curve.losses.append(step.loss)
            if step.step in (self._start.plan.start.step + 1, steps) or self._averages.step_s > interval_s:
                (self._curve.show if self._curve else say)(f"step {step.step}/{steps}  {self._averages.facts(step)}")
                self._averages = _Averages()

    def evaluated(self, record: EvaluationRecord) -> None:
        self._evaluation = record
        facts = ", ".join(scores(record))
        line = f"after step {record.step}, epoch {record.epoch}: held out {record.samples} samples: {facts}"
        (self._curve.evaluated if self._curve else self.noted)(line)

    def saved(self, record: CheckpointRecord) -> None:
        took = f"{format_bytes(record.size_bytes)} in {format_seconds(record.checkpoint_s)}"
        self.noted(f"checkpoint after step {record.step}: {record.path} ({took})")

    def noted(self, what: str) -> None:
        what = self._words(what)
        if self._bar:
            self._bar.console.print(printable(what), markup=False, highlight=False)
        else:
            say(what)

    def ended(self, summary: SummaryRecord) -> None:
        self.close()
        if summary.steps_here:
            self._print_result(summary)
        else:
            beyond = self._start.plan.beyond if self._start else None
            where = f"beyond {beyond}" if beyond else "the last one of the run"
            say(f"nothing was left to do: the checkpoint is at step {summary.steps}, {where}")
            say(self._words("to train longer: --epochs N or --steps N"))
        if summary.best is not None:
            loaded = "; the weights are those of it" if summary.weights_of_step else ""
            say(f"best: after step {summary.best.step}: {', '.join(scores(summary.best))}{loaded}")
        if self._start and self._start.placement:
            say(f"weights_sha256 {summary.weights_sha256}")
            say(f"state_sha256   {summary.state_sha256}")

    def _print_result(self, summary: SummaryRecord) -> None:
        from sambasim.report.summaries import step_times

        steps, hidden_s = summary.steps_here, summary.hidden_sync_s
        hidden = f" ({format_seconds(hidden_s)} more overlapped with the backward)" if hidden_s else ""
        sync = "" if summary.sync == "none" else f", {summary.sync_share:.0%} in sync{hidden}"
        pace = f"{summary.samples_per_s:.0f} samples/s{sync}"
        loss = f"loss {summary.loss_first:.4f} -> {summary.loss_last:.4f}"
        say(f"{steps} step{'s' * (steps != 1)} in {format_seconds(summary.training_s)} (measured): {pace}; {loss}")
        peaks = sorted((size_bytes, rank) for rank, size_bytes in enumerate(summary.peak_memory_bytes))
        ends = dict.fromkeys((*peaks[-1:], *peaks[:1]))  # the most and the least
        peak = ", ".join(f"{format_bytes(size_bytes)} on rank {rank}" for size_bytes, rank in ends)
        say(f"memory at the peak (measured): {peak}")
        bytes_of = asdict(summary.bytes).items()
        if moved := [f"{format_bytes(count)} {kind.replace('_', ' ')}" for kind, count in bytes_of if count]:
            sent = "sent in" if summary.bytes.network else "rounded to"  # devices of a node read each other's memory
            say(f"sync moved {', '.join(moved)}{f', gradients {sent} {summary.wire}' if summary.wire else ''}")
        show(*step_times(summary, predicts=self._predicts))
        skipped = f"{summary.skipped_steps} of {summary.steps} steps were skipped"
        if summary.skipped_steps and summary.loss_scale is None:
            say(f"warning: {skipped}: their loss was not finite, first at step {summary.first_nonfinite_step}")
        elif summary.skipped_steps:
            mark = "warning: " if summary.skipped_steps == summary.steps else ""
            what = "gradients were" if summary.first_nonfinite_step is None else "the loss or gradients were"
            say(f"{mark}{skipped}: {what} not finite in float16; the loss scale is {summary.loss_scale:g}")
        if summary.first_nonfinite_step is not None and not (summary.skipped_steps and summary.loss_scale is None):
            say(f"warning: the loss was not finite at step {summary.first_nonfinite_step}, the first such step")
        if failed := summary.failed_checkpoints:
            say(f"warning: {failed} checkpoint{'s' * (failed > 1)} could not be written")
        for exempt in summary.exempt_from_exactness:
            say(f"not exact: {exempt}")


class _Averages:
    """Samples per second and share of sync since the last printed line: those of one step vary too much."""

    def __init__(self) -> None:
        self._samples = self._sync_s = self.step_s = 0.0

    def add(self, step: StepRecord) -> None:
        self._samples += step.samples_per_s * step.step_s
        self._sync_s += step.sync_s
        self.step_s += step.step_s

    def facts(self, step: StepRecord) -> str:
        norm = f"  grad norm {step.grad_norm:.3g}" if step.grad_norm is not None else ""
        sync = f"  sync {self._sync_s / self.step_s:.0%}" if self._sync_s else ""
        pace = f"{self._samples / self.step_s:.0f} samples/s{sync}"
        logged = "".join(f"  {printable(name)} {value:.4g}" for name, value in step.logged.items())
        return f"loss {step.loss:.4f}{logged}  lr {step.lr:.3g}{norm}  {pace}"


def _in_notebook() -> bool:
    ipython = sys.modules.get("IPython")
    return ipython is not None and hasattr(ipython.get_ipython(), "kernel")


def _curve() -> "Curve":
    from sambasim.terminal.curve import Curve  # rich, which a run needs no sooner than it ends

    return Curve()


def _progress_bar() -> "Progress":
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
    from rich.table import Column

    facts = TextColumn("{task.fields[facts]}", table_column=Column(no_wrap=True, overflow="ellipsis"))
    left = TimeRemainingColumn(compact=True, elapsed_when_finished=True)
    bar = Progress(BarColumn(bar_width=12), MofNCompleteColumn(), facts, left, console=console_of(sys.stdout))
    bar.add_task("", start=False, total=None, facts="")
    return bar
