"""The deeds of `sambasim demo`: type the command lines of the quick start, read what they leave behind, judge it."""

import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from pydantic import ValidationError
from rich.table import Table

from sambasim.errors import InternalError, MachineError, SambasimError
from sambasim.records.metrics import SummaryRecord
from sambasim.units import format_bytes

REPLICAS = 2
LEAST_ACCURACY = 0.97
"""What the quick start reaches on held-out digits after its default training."""

_NAME = "digits-demo"
_STEP_TIMEOUT_S = 900.0
_SMOKE_ARGUMENTS = ("--steps", "3")
_SYNCS = {"device": ("--reduce-on-rdu",), "host": ()}

Execute = Callable[[Sequence[str]], int]
"""Runs a command line and returns its exit code."""


def demonstrate(output_folder: Path, *, smoke: bool, execute: Execute) -> Mapping[str, SummaryRecord]:
    """Compile once and train by each kind of sync; the summary of each.

    Raises MachineError if one of the commands fails: it has said why.
    """
    folder = output_folder / _NAME
    compile_line = ["sambasim", "compile", "--data-parallel", "-ws", str(REPLICAS)]
    _must(execute, [*compile_line, "--pef-name", _NAME, "--output-folder", str(output_folder)])
    summaries = {}
    for sync, flags in _SYNCS.items():
        metrics = folder / f"{sync}.jsonl"
        metrics.unlink(missing_ok=True)
        run_line = ["mpirun", "-np", str(REPLICAS), "sambasim", "run", "--data-parallel", *flags]
        files = ["--pef", str(folder / f"{_NAME}.pef"), "--metrics", str(metrics)]
        _must(execute, [*run_line, *files, *(_SMOKE_ARGUMENTS if smoke else ())])
        summaries[sync] = read_summary(metrics)
    return summaries


def read_summary(metrics: Path) -> SummaryRecord:
    """The summary in the last line of a metrics file. Raises InternalError if there is none."""
    lines = metrics.read_text(encoding="utf-8").splitlines() if metrics.exists() else []
    if not lines:
        raise InternalError(f"the run wrote no metrics to {metrics}")
    try:
        return SummaryRecord.model_validate_json(lines[-1])
    except ValidationError as error:
        raise InternalError(f"the last line of the metrics is no summary: {error}", where=str(metrics)) from error


def judge(summaries: Mapping[str, SummaryRecord], *, least_accuracy: float | None) -> tuple[str, ...]:
    """What is wrong with the runs, in sentences; empty if nothing is. `least_accuracy` None asks for none."""
    complaints = []
    if len({summary.weights_sha256 for summary in summaries.values()}) > 1:
        complaints.append("the weights differ between " + " and ".join(f"{sync} sync" for sync in summaries))
    if len({summary.state_sha256 for summary in summaries.values()}) > 1:
        complaints.append("buffers or optimizer state differ between " + " and ".join(f"{s} sync" for s in summaries))
    for sync, summary in summaries.items():
        accuracy = _accuracy(summary)
        if least_accuracy is not None and (accuracy is None or accuracy < least_accuracy):
            reached = "none" if accuracy is None else f"{accuracy:.2%}"
            complaints.append(f"accuracy with {sync} sync is {reached}, and should be at least {least_accuracy:.0%}")
    return tuple(complaints)


def _accuracy(summary: SummaryRecord) -> float | None:
    return summary.evaluation.accuracy if summary.evaluation else None


def side_by_side(summaries: Mapping[str, SummaryRecord]) -> Table:
    """One column for each kind of sync. All times in it were measured."""
    table = Table(title=f"The quick start, {REPLICAS} replicas, measured on this machine", title_justify="left")
    table.add_column("gradient sync")
    for sync in summaries:
        table.add_column(sync, justify="right")
    rows: dict[str, Callable[[SummaryRecord], str]] = {
        "steps": lambda s: str(s.steps),
        "samples/s": lambda s: f"{s.samples_per_s:,.0f}",
        "share of sync": lambda s: f"{s.sync_share:.1%}",
        "device to host": lambda s: format_bytes(s.bytes.device_to_host),
        "host to device": lambda s: format_bytes(s.bytes.host_to_device),
        "between devices": lambda s: format_bytes(s.bytes.peer),
        "network": lambda s: format_bytes(s.bytes.network),
        "loss, first to last": lambda s: f"{s.loss_first:.4f} to {s.loss_last:.4f}",
        "held-out accuracy": lambda s: "none" if _accuracy(s) is None else f"{_accuracy(s):.2%}",
        "weights_sha256": lambda s: f"{s.weights_sha256[:16]}...",
        "state_sha256": lambda s: f"{s.state_sha256[:16]}...",
    }
    for name, cell in rows.items():
        table.add_row(name, *(cell(summary) for summary in summaries.values()))
    return table


def _must(execute: Execute, command: Sequence[str]) -> None:
    print(f"\n$ {shlex.join(command)}")
    status = execute(command)
    if status != 0:
        raise MachineError(
            f"the command above ended with exit code {status}",
            remedy="read what it said, and `sambasim doctor` for what this machine lacks",
        )


def execute_here(command: Sequence[str]) -> int:
    """Run it with the programs beside this Python first on PATH, and let it talk to the terminal."""
    programs = Path(sys.executable).parent
    environ = {**os.environ, "PATH": f"{programs}{os.pathsep}{os.environ.get('PATH', '')}"}
    try:
        return subprocess.run(command, env=environ, timeout=_STEP_TIMEOUT_S, check=False).returncode
    except FileNotFoundError as error:
        raise MachineError(f"there is no {command[0]} here", remedy="sambasim doctor") from error
    except subprocess.TimeoutExpired as error:
        raise _late(command) from error


def _late(command: Sequence[str]) -> SambasimError:
    return MachineError(
        f"{command[0]} did not end within {_STEP_TIMEOUT_S:.0f} s",
        remedy="is the machine busy? `sambasim doctor` shows its cores",
    )
