"""`sambasim demo`: compiles the quick start, trains it with sync on the device and through the host, and compares the
two."""

import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from sambasim.cli.shared import FILE
from sambasim.errors import InternalError, MachineError
from sambasim.terminal.output import show
from sambasim.units import format_bytes

if TYPE_CHECKING:
    from rich.table import Table

    from sambasim.records.metrics import SummaryRecord

REPLICAS = 2
LEAST_ACCURACY = 0.97
"""The quick start reaches this on held-out digits after its default training."""

_NAME = "digits-demo"
_TIMEOUT_S = 900.0
_SYNCS = {"device": ("--reduce-on-rdu",), "host": ()}


@click.command("demo")
@click.option(
    "--output-folder", type=FILE, default=Path("out"), show_default=True, help="Folder for the PEF and the metrics."
)
@click.option("--smoke", is_flag=True, help="Train only three steps, and check the bits but not the accuracy.")
@click.pass_context
def demo_command(context: click.Context, output_folder: Path, smoke: bool) -> None:
    """Compile the quick start, train it with both kinds of sync, and compare the two.

    The exit code is not 0 if device sync and host sync give other bits, or if the accuracy is too low.

    \b
    Example:
      sambasim demo --smoke
    """
    from rich.text import Text

    summaries = demonstrate(output_folder, smoke=smoke)
    show(_side_by_side(summaries))
    failures = _failures(summaries, least_accuracy=None if smoke else LEAST_ACCURACY)
    for failure in failures:
        show(Text.assemble(("FAILED", "red"), f" {failure}"))
    if not failures:
        show(Text.assemble(("PASSED", "green"), " device sync and host sync gave the same weights, bit for bit."))
    context.exit(1 if failures else 0)


def demonstrate(output_folder: Path, *, smoke: bool) -> "Mapping[str, SummaryRecord]":
    """Compile once and train with each kind of sync; return the summary of each. Raises MachineError if a command
    fails."""
    folder = output_folder / _NAME
    compile_line = ["sambasim", "compile", "--data-parallel", "-ws", str(REPLICAS)]
    _run([*compile_line, "--pef-name", _NAME, "--output-folder", str(output_folder)])
    summaries = {}
    for sync, flags in _SYNCS.items():
        metrics = folder / f"{sync}.jsonl"
        metrics.unlink(missing_ok=True)
        run_line = ["mpirun", "-np", str(REPLICAS), "sambasim", "run", "--data-parallel", *flags]
        files = ["--pef", str(folder / f"{_NAME}.pef"), "--metrics", str(metrics)]
        _run([*run_line, *files, *(("--steps", "3") if smoke else ())])
        summaries[sync] = _read_summary(metrics)
    return summaries


def _run(command: Sequence[str]) -> None:
    print(f"\n$ {shlex.join(command)}")
    environ = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"}
    try:
        subprocess.run(command, env=environ, timeout=_TIMEOUT_S, check=True)
    except FileNotFoundError as error:
        raise MachineError(f"there is no {command[0]} here", remedy="sambasim doctor") from error
    except subprocess.TimeoutExpired as error:
        what = f"{command[0]} did not end within {_TIMEOUT_S:.0f} s"
        raise MachineError(what, remedy="is the machine busy? `sambasim doctor` shows its cores") from error
    except subprocess.CalledProcessError as error:
        what = f"the command above ended with exit code {error.returncode}"
        remedy = "read its error, and `sambasim doctor` for what this machine lacks"
        raise MachineError(what, remedy=remedy) from None


def _read_summary(metrics: Path) -> "SummaryRecord":
    from sambasim.records.metrics import SummaryRecord

    if not metrics.exists():
        raise InternalError(f"the run wrote no metrics to {metrics}")
    return SummaryRecord.model_validate_json(metrics.read_text(encoding="utf-8").splitlines()[-1])


def _failures(summaries: "Mapping[str, SummaryRecord]", *, least_accuracy: float | None) -> tuple[str, ...]:
    failures = []
    both = " and ".join(f"{sync} sync" for sync in summaries)
    if len({summary.weights_sha256 for summary in summaries.values()}) > 1:
        failures.append(f"the weights differ between {both}")
    if len({summary.state_sha256 for summary in summaries.values()}) > 1:
        failures.append(f"buffers or optimizer state differ between {both}")
    for sync, summary in summaries.items():
        accuracy = summary.evaluation.accuracy if summary.evaluation else None
        if least_accuracy is not None and (accuracy is None or accuracy < least_accuracy):
            reached = _accuracy_text(summary)
            failures.append(f"accuracy with {sync} sync is {reached}, and should be at least {least_accuracy:.0%}")
    return tuple(failures)


def _accuracy_text(summary: "SummaryRecord") -> str:
    accuracy = summary.evaluation.accuracy if summary.evaluation else None
    return "none" if accuracy is None else f"{accuracy:.2%}"


def _side_by_side(summaries: "Mapping[str, SummaryRecord]") -> "Table":
    from rich.table import Table

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
        "held-out accuracy": _accuracy_text,
        "weights_sha256": lambda s: f"{s.weights_sha256[:16]}...",
        "state_sha256": lambda s: f"{s.state_sha256[:16]}...",
    }
    for name, cell in rows.items():
        table.add_row(name, *(cell(summary) for summary in summaries.values()))
    return table
