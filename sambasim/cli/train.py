"""`sambasim compile` makes a PEF. `sambasim run` trains it, or predicts with it, as one process or a rank. `sambasim
demo` compiles the quick start, and trains it by both kinds of sync. Flags: `options/fields.py`."""

import os
import shlex
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING

import click

from sambasim.cli import shared
from sambasim.errors import InternalError, Interrupted, MachineError, OptionError, exit_code, say, say_json
from sambasim.options.fields import COMPILE_FLAGS, RUN_FLAGS
from sambasim.options.flag import MODEL, TRAINING
from sambasim.runtime.machine.launcher import check_compiles_alone, find_launcher, mpirun_instead
from sambasim.terminal.output import phases, report_error, scores, show, survive_closed_stdout
from sambasim.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from sambasim.records.metrics import InferenceRecord, SummaryRecord
    from sambasim.report.tables import Table
    from sambasim.runtime.watch.supervisor import Failure

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

    MODEL is package.module:Name or path/file.py:Name, an nn.Module class or a function that returns one, or a TOML file
    as --config takes it. Without both, the built-in quick start is compiled: a small network that classifies digits.

    \b
    Examples:
      sambasim compile --data-parallel -ws 2
      sambasim compile configs/char_gpt.toml --set optimizer.lr=3e-4
      sambasim compile net.py:Net --data net.py:samples --loss cross_entropy --optimizer adamw --lr 3e-4 -b 32
    """
    check_compiles_alone()
    from sambasim.options.compile import compile_options

    options = compile_options(config, model, overrides, flags)
    with shared.kept_imports():
        from sambasim.commands.compile import compile_named
        from sambasim.report.summaries import compilation_json, compilation_report

    with phases(quiet=as_json) as on_phase:
        compiled = compile_named(options, on_phase)
    shared.answer(as_json, lambda: compilation_json(compiled), lambda: compilation_report(compiled, details=verbose))


_FIRST_OF_RUN = ("--pef", "--reduce-on-rdu", "--epochs", "--lr", "--save", "--metrics")
_SET = "Change any field of the config that is not compiled in, such as optimizer.lr=1e-3."


class _RunCommand(shared.PanelCommand):
    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, [*args])
        except click.NoSuchOption as error:
            flag = error.option_name
            if all(flag not in setting.flag.names for setting in COMPILE_FLAGS.values()):
                raise
            typed = " ".join(args[args.index(flag) :][:2]) if flag in args else flag
            what = f"{flag} is for compile: a run takes what the PEF was compiled with"
            shown = "sambasim inspect PEF --all shows how it was compiled"
            raise OptionError(what, remedy=f"sambasim compile … {typed}, and then run without it; {shown}") from None


def _no_world_size(ctx: click.Context, parameter: click.Parameter, value: int | None) -> None:
    if value is not None:
        what = "-ws is for compile, as the smallest number of replicas; a run has as many as mpirun starts"
        raise OptionError(what, remedy=f"mpirun -np {value} sambasim run … without -ws")


@click.command("run", cls=_RunCommand, first=_FIRST_OF_RUN)
@shared.pef()
@shared.field_options(RUN_FLAGS)
@shared.overrides(_SET, TRAINING)
@click.option("-ws", "--world-size", type=int, hidden=True, expose_value=False, callback=_no_world_size)
def run_command(overrides: tuple[str, ...], output_folder: Path, **flags: object) -> None:
    """Train the model of a PEF with as many replicas as mpirun starts, or predict with it.

    \b
    Examples, after `sambasim compile --data-parallel -ws 2`:
      mpirun -np 2 sambasim run --reduce-on-rdu --pef digits
      mpirun -np 2 sambasim run --pef digits --metrics run.jsonl --save digits.safetensors
      mpirun -np 3 sambasim run --host-sync parameter-server --parameter-servers 1 --pef digits
      sambasim run --pef digits --emulate-replicas 4 --steps 10
    """
    instead = mpirun_instead(os.environ, Path(sys.executable), sys.argv[1:])
    if instead:  # under torchrun: the first process becomes mpirun, and the others are done
        os.execv(instead[0], instead)
    if instead is not None:
        raise SystemExit(0)
    with shared.kept_imports():
        from sambasim.commands.run import checked_pef, failure_details, train
        from sambasim.options.given import given_overrides
        from sambasim.options.run import run_options
        from sambasim.runtime.machine.mpi import connect
        from sambasim.runtime.run.run_observer import print_whole_lines
        from sambasim.runtime.watch.supervisor import StopSignals, Supervisor, limit_time
        from sambasim.terminal.progress import RunProgress, RunWarnings

    options = run_options(flags, given_overrides(overrides))
    if not (options.inference or options.json_output):  # what these print comes last, and is what was asked for
        survive_closed_stdout()

    launcher, command, screen = find_launcher(), ["sambasim", *sys.argv[1:]], ExitStack()
    if launcher is not None and launcher.world_size != 1:
        limit_time(options.sync_timeout, launcher.rank)
    # Signals count from here on, to the end of --save.
    signals = StopSignals()
    if not options.inference:
        click.get_current_context().with_resource(signals)
    communicator = connect(command)
    if communicator.world_size > 1:
        print_whole_lines()

    def report(failure: "Failure") -> None:
        screen.close()  # the watchdog reports while progress is shown
        report_error(failure.error, failure.reporter, failure_details(failure, options))

    interruption: Interrupted | None = None
    with Supervisor(communicator, report=report) as supervisor:
        path, mesh = checked_pef(options, output_folder, communicator, command)
        supervisor.start(path, options.log_dir, options.sync_timeout, mesh)
        prints = communicator.rank == 0 and not options.json_output
        # Nothing else is left if every rank is killed.
        if supervisor.file is not None and prints:
            say(f"status file: {supervisor.file.path} says what each rank does, and stays if one dies")
        with shared.kept_imports():
            from sambasim.runtime.inference import infer
        if options.inference:
            prediction, _ = infer(path, options, communicator, supervisor.activity)
            printed = prediction.model_dump_json() if options.json_output else _in_words(prediction)
        else:
            with screen:
                shown = [screen.enter_context(closing(RunProgress(predicts=options.predict)))] if prints else []
                warned = [RunWarnings()] if communicator.rank == 0 and options.json_output else []
                observers = [*shown, *warned]
                summary, *_, interruption = train(
                    path, options, communicator, supervisor.activity, command, observers, signals=signals
                )
            printed = summary.model_dump_json() if options.json_output else ""
        if communicator.rank == 0 and printed:
            (say_json if options.json_output else say)(printed)
        if interruption is not None:
            raise interruption
        supervisor.finish()
    try:
        communicator.finish()
        supervisor.release()
    except Exception as error:  # ranks cannot agree any more on who reports; the status file stays
        if communicator.world_size == 1:
            raise
        report_error(error, supervisor.who)
        raise SystemExit(exit_code(error)) from None


def _in_words(report: "InferenceRecord") -> str:
    which = f"the {report.samples} held-out samples" if report.held_out else f"all {report.samples} samples"
    lines = [f"predicted {which} of {report.data} in {format_seconds(report.prediction_s)} (measured)"]
    if report.weights is None:
        lines.append("notice: with the weights of the PEF, as they were compiled; --weights FILE reads trained ones")
    lines += [f"notice: {notice}" for notice in report.notices]
    lines += scores(report)
    lines += [f"outputs written to {report.predictions}"] if report.predictions else []
    return "\n".join(lines)


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
    import subprocess

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
    from sambasim.report.tables import text_table

    cells: dict[str, Callable[[SummaryRecord], str]] = {
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
    title = f"The quick start, {_REPLICAS} replicas, measured on this machine"
    rows = [(name, *map(cell, summaries.values())) for name, cell in cells.items()]
    return text_table(title, ["gradient sync"], [*summaries], rows)
