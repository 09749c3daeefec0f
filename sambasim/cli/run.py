"""`sambasim run`: train a PEF, or predict with it, as one process or a rank. Flags: `options/fields.py`."""

import os
import sys
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING

import click

from sambasim.cli.shared import PanelCommand, field_options, kept_imports, output_folder, overrides, pef
from sambasim.errors import Interrupted, OptionError, exit_code, say, say_json
from sambasim.options.fields import COMPILE_FLAGS, RUN_FLAGS
from sambasim.options.flag import DATA, TRAINING
from sambasim.runtime.machine.launcher import find_launcher, mpirun_instead
from sambasim.terminal.output import report_error, scores, survive_closed_stdout
from sambasim.units import format_seconds

if TYPE_CHECKING:
    from sambasim.records.metrics import InferenceRecord
    from sambasim.runtime.watch.supervisor import Failure

_FIRST = ("--pef", "--reduce-on-rdu", "--epochs", "--lr", "--save", "--metrics")
_SET = "Change any field of the config that is not compiled in, such as optimizer.lr=1e-3."


class _RunCommand(PanelCommand):
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


@click.command("run", cls=_RunCommand, first=_FIRST)
@pef()
@field_options(RUN_FLAGS)
@output_folder(panel=DATA)
@overrides(_SET, TRAINING)
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
    from sambasim.options.given import given_overrides
    from sambasim.options.run import run_options

    options = run_options(flags, given_overrides(overrides))
    if not (options.inference or options.json_output):  # what these print comes last, and is what was asked for
        survive_closed_stdout()

    from sambasim.commands.run import checked_pef, failure_details, train
    from sambasim.runtime.machine.mpi import connect
    from sambasim.runtime.run.run_observer import print_whole_lines
    from sambasim.runtime.watch.supervisor import StopSignals, Supervisor, limit_time
    from sambasim.terminal.progress import RunProgress, RunWarnings

    launcher, command, screen = find_launcher(os.environ), ["sambasim", *sys.argv[1:]], ExitStack()
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
        if supervisor.path is not None and prints:
            say(f"status file: {supervisor.path} says what each rank does, and stays if one dies")
        with kept_imports():
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
