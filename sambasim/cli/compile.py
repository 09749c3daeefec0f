"""`sambasim compile` makes a PEF; `sambasim demo` that of the quick start, which it trains by both kinds of sync."""

import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from sambasim.cli import shared
from sambasim.errors import InternalError, LaunchError, MachineError, say
from sambasim.options.fields import COMPILE_FLAGS
from sambasim.options.flag import MODEL
from sambasim.runtime.machine.launcher import find_launcher
from sambasim.terminal.output import phases, show
from sambasim.units import format_bytes

if TYPE_CHECKING:
    from rich.table import Table

    from sambasim.records.metrics import SummaryRecord

_FIRST = ("--config", "--data", "--loss", "--optimizer", "--batch-size", "--data-parallel")
_CONFIG = "A TOML file with the model, data, loss, optimizer and training."


@click.command("compile", cls=shared.PanelCommand, first=_FIRST)
@click.argument("model", required=False)
@click.option("--config", type=shared.FILE, cls=shared.PanelOption, panel=MODEL, help=_CONFIG)
@shared.overrides("Set any field of the config, such as optimizer.lr=1e-3.", MODEL)
@shared.field_options(COMPILE_FLAGS)
@click.option("-v", "--verbose", is_flag=True, help="Print a table too, with the times of all phases.")
@shared.as_json("Print one JSON line instead.")
def compile_command(
    model: str | None, config: Path | None, overrides: tuple[str, ...], verbose: bool, as_json: bool, **flags: object
) -> None:
    """Compile a PyTorch model into a PEF.

    MODEL is package.module:Name or path/file.py:Name, an nn.Module class or a function that returns one. Without MODEL
    and --config, the built-in quick start is compiled: a small network that classifies real images of digits.

    \b
    Examples:
      sambasim compile --data-parallel -ws 2
      sambasim compile --config configs/char_gpt.toml --set optimizer.lr=3e-4
      sambasim compile net.py:Net --data net.py:samples --loss cross_entropy --optimizer adamw --lr 3e-4 -b 32
    """
    launcher = find_launcher(os.environ)
    if launcher and launcher.world_size > 1:
        what = f"{launcher.name} started {launcher.world_size} ranks, but a PEF is compiled by one process"
        raise LaunchError(what, remedy="sambasim compile … without mpirun; -ws says the smallest number of replicas")
    from sambasim.options.compile import options_and_notes

    options, notes = options_and_notes(config, model, overrides, flags)
    with shared.kept_imports():
        from sambasim.commands.compile import compile_named
        from sambasim.report.summaries import compilation_json, compilation_report

    with phases(quiet=as_json) as on_phase:
        compiled = compile_named(options, on_phase)
    done = replace(compiled, notices=(*compiled.notices, *notes))
    shared.answer(as_json, lambda: compilation_json(done), lambda: compilation_report(done, details=verbose))


_LEAST_ACCURACY = 0.97  # the quick start reaches this on held-out digits after its default training

_NAME, _REPLICAS, _TIMEOUT_S = "digits-demo", "2", 900.0


@click.command("demo")
@shared.output_folder("Folder for the PEF and the metrics.")
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

    from sambasim.records.metrics import SummaryRecord

    folder, summaries = output_folder / _NAME, {}
    named = "--pef-name", _NAME, "--output-folder", str(output_folder)
    _run("sambasim", "compile", "--data-parallel", "-ws", _REPLICAS, *named)
    for sync, flags in {"device": ["--reduce-on-rdu"], "host": []}.items():
        metrics = folder / f"{sync}.jsonl"
        metrics.unlink(missing_ok=True)
        files = "--pef", str(folder / f"{_NAME}.pef"), "--metrics", str(metrics), *(("--steps", "3") if smoke else ())
        _run("mpirun", "-np", _REPLICAS, "sambasim", "run", "--data-parallel", *flags, *files)
        if not metrics.exists():
            raise InternalError(f"the run wrote no metrics to {metrics}")
        last = metrics.read_text(encoding="utf-8").splitlines()[-1]
        summaries[sync] = SummaryRecord.model_validate_json(last)
    show(_side_by_side(summaries))
    failures = _failures(summaries, least_accuracy=0.0 if smoke else _LEAST_ACCURACY)
    for failure in failures:
        show(Text.assemble(("FAILED", "red"), f" {failure}"))
    if failures:
        context.exit(1)
    show(Text.assemble(("PASSED", "green"), " device sync and host sync gave the same weights, bit for bit."))


def _run(*command: str) -> None:
    """Raises MachineError if the command fails."""
    say(f"\n$ {shlex.join(command)}")
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


def _failures(summaries: "Mapping[str, SummaryRecord]", *, least_accuracy: float) -> list[str]:
    failures, both = [], " and ".join(f"{sync} sync" for sync in summaries)
    for what, digest in (("the weights", "weights_sha256"), ("buffers or optimizer state", "state_sha256")):
        if len({getattr(summary, digest) for summary in summaries.values()}) > 1:
            failures.append(f"{what} differ between {both}")
    for sync, summary in summaries.items():
        if ((summary.evaluation and summary.evaluation.accuracy) or 0.0) < least_accuracy:
            reached = _accuracy_text(summary)
            failures.append(f"accuracy with {sync} sync is {reached}, and should be at least {least_accuracy:.0%}")
    return failures


def _accuracy_text(summary: "SummaryRecord") -> str:
    accuracy = summary.evaluation.accuracy if summary.evaluation else None
    return "none" if accuracy is None else f"{accuracy:.2%}"


def _side_by_side(summaries: "Mapping[str, SummaryRecord]") -> "Table":
    from rich.table import Table

    table = Table(title=f"The quick start, {_REPLICAS} replicas, measured on this machine", title_justify="left")
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
