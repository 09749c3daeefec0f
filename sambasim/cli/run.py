"""`sambasim run`: train the model of a PEF, or predict with it, as one process or as a rank under mpirun."""

import os
import shlex
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import click

from sambasim.cli.shared import FILE, PanelCommand, PanelOption, field_options, kept_imports, no_argument
from sambasim.cli.terminal import exit_code_of, report_error, survive_closed_stdout
from sambasim.errors import LaunchError, OptionError, PeerError
from sambasim.options.flags import DATA, TRAINING
from sambasim.units import format_seconds

if TYPE_CHECKING:
    from pydantic import BaseModel

    from sambasim.options.run import RunOptions
    from sambasim.pef import PefHeader
    from sambasim.records.metrics import PredictionRecord
    from sambasim.runtime.ranks import Communicator
    from sambasim.runtime.run_observer import RunObserver
    from sambasim.runtime.supervision.supervisor import Failure

_OUT = "Folder in which a PEF is found by name."
_SET = "Change any field of the config that is not compiled in, such as optimizer.lr=1e-3."


def _no_world_size(ctx: click.Context, parameter: click.Parameter, value: int | None) -> None:
    if value is not None:
        raise OptionError(
            "-ws is for compile, as the smallest number of replicas; a run has as many as mpirun starts",
            remedy=f"mpirun -np {value} sambasim run … without -ws",
        )


@click.command("run", cls=PanelCommand)
@no_argument("--pef")
@field_options("run")
@click.option(
    "--output-folder", type=FILE, default=Path("out"), cls=PanelOption, panel=DATA, help=_OUT, show_default=True
)
@click.option("--set", "overrides", multiple=True, metavar="NAME=VALUE", cls=PanelOption, panel=TRAINING, help=_SET)
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
    from sambasim.options.run import run_options

    options = run_options(flags, overrides)
    if not (options.inference or options.json_output):  # what these print comes last, and is what was asked for
        survive_closed_stdout()

    from sambasim.runtime.communicator import connect
    from sambasim.runtime.launcher import find_launcher
    from sambasim.runtime.run_observer import print_whole_lines
    from sambasim.runtime.supervision.supervisor import Supervisor, limit_time

    launcher, command = find_launcher(os.environ), ["sambasim", *sys.argv[1:]]
    if launcher is not None and launcher.world_size != 1:
        limit_time(options.sync_timeout, launcher.rank)
    communicator = connect(command)
    if communicator.topology.world_size > 1:
        print_whole_lines()

    screen = ExitStack()

    def report(failure: "Failure") -> None:
        screen.close()  # the watchdog reports while progress is shown
        report_error(failure.error, failure.reporter, _details(failure, options))

    with Supervisor(communicator, report=report, exit_code=exit_code_of) as supervisor:
        path = _checked(options, output_folder, communicator, command)
        supervisor.start(
            [options.log_dir or path.resolve().parent, Path(tempfile.gettempdir())], path.stem, options.sync_timeout
        )
        # Nothing else is left if every rank is killed.
        if supervisor.path is not None and communicator.rank == 0 and not options.json_output:
            print(f"if a rank dies: {supervisor.path} says what each was doing")
        with kept_imports():
            from sambasim.runtime.evaluation import PredictionJob
            from sambasim.runtime.job import TrainingJob
            from sambasim.runtime.setup import set_up
        result: BaseModel
        if options.inference:
            result = prediction = PredictionJob(path, options, communicator, supervisor.activity).run()
        else:
            with screen:
                observer = _observer(options, communicator.rank, screen)
                setup = set_up(path, options, communicator)
                result = TrainingJob(setup, observer, supervisor.activity, command).run()
        if communicator.rank == 0 and options.json_output:
            print(result.model_dump_json())
        elif communicator.rank == 0 and options.inference:
            print(_in_words(prediction))
        supervisor.finish()
    try:
        communicator.finish()
        supervisor.release()
    except Exception as error:  # ranks cannot agree any more on who reports; the status file stays
        if communicator.world_size == 1:
            raise
        report_error(error, f"rank {communicator.rank} on {communicator.host_name}")
        raise SystemExit(exit_code_of(error)) from None


def _details(failure: "Failure", options: "RunOptions") -> Sequence[tuple[str, str]]:
    from sambasim.cli.progress import log_of

    lines = [("doing", failure.doing)] if failure.doing else []
    if options.log_dir is not None and not failure.alike and log_of(options.log_dir, failure.about).is_file():
        lines.append(("log", str(log_of(options.log_dir, failure.about))))
    return lines


def _checked(options: "RunOptions", output_folder: Path, communicator: "Communicator", command: Sequence[str]) -> Path:
    """Collective. The path of the PEF. Raises an error for flags that do not fit it, before any slow work.

    All ranks raise the same error, except that a rank raises an error about its own files alone.
    """
    from sambasim.hardware.placement import inventory_of, place_replicas
    from sambasim.pef import locate, peek
    from sambasim.runtime.launcher import ranks_of_process

    path = locate(options.pef, output_folder)
    header = peek(path)
    digests = communicator.all_gather_object(header.digest)
    apart = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
    if apart:
        raise PeerError(
            f"rank {apart[0]} reads another PEF than rank 0: {digests[apart[0]][:12]} and {digests[0][:12]}",
            remedy="copy the same PEF to every host, or keep it in a shared folder",
        )
    topology = communicator.topology
    if not options.inference:
        _check_replicas(options, header, topology.world_size, command)
    place_replicas(
        inventory_of(header.compile_options, cluster=options.cluster),
        topology.node_of[: topology.world_size - (options.parameter_servers or 0)],
        ranks_of_process(
            topology.world_size,
            header.ranks_of_replica,
            options.emulate_replicas,
            whole=options.one_process_per_replica,
        ),
        command=shlex.join(command),
        or_else="name a cluster with more RDUs a node: --cluster FILE.toml",
    )
    _check_outputs(options, topology.rank)
    return path


def _check_replicas(options: "RunOptions", header: "PefHeader", ranks: int, command: Sequence[str]) -> None:
    from sambasim.ir.mesh import DATA_PARALLEL, PIPELINE
    from sambasim.runtime.launcher import (
        ONE_RANK,
        WHOLE_REPLICAS,
        check_emulation,
        check_world_size,
        replicas_of,
    )

    emulated, servers, minimum = options.emulate_replicas, options.parameter_servers or 0, header.world_size
    check_emulation(ranks, emulated or 1, command=command)
    if header.ranks_of_replica > 1 and options.host_sync in ("gloo", "parameter-server"):
        raise OptionError(
            f"--host-sync {options.host_sync} syncs replicas of one rank, and a replica of the PEF {header.name} has "
            f"{header.ranks_of_replica} ({header.replica})",
            remedy="leave out --host-sync: MPI through the host; or sync between devices: --reduce-on-rdu",
        )
    in_slices = header.zero >= 2 and not options.reduce_on_rdu and max(ranks, emulated or 1) > 1
    if in_slices and options.host_sync in ("gloo", "parameter-server"):
        raise OptionError(
            f"--host-sync {options.host_sync} keeps gradients whole, and the replicas of the PEF {header.name} keep "
            f"slices (--zero {header.zero})",
            remedy="leave out --host-sync: MPI through the host; or sync between devices: --reduce-on-rdu",
        )
    within_replica = header.ranks_of_replica > header.replica.size(DATA_PARALLEL)
    if (within_replica or in_slices) and options.engine != "plain":
        why = (
            f"between the {header.ranks_of_replica} ranks of a replica"
            if within_replica
            else f"with --zero {header.zero}"
        )
        raise OptionError(
            f"--engine {options.engine} cannot compile a pass that communicates, and that of the PEF {header.name} "
            f"does, {why}",
            remedy="run it with --engine plain",
        )
    watched = {"--record-digests": options.record_digests is not None, "--debug-numerics": options.debug_numerics}
    for flag, given in watched.items():
        if given and header.replica.size(PIPELINE) > 1:
            raise OptionError(
                f"{flag} cannot watch a pipeline yet, and the PEF {header.name} is one ({header.replica})",
                remedy=f"leave out {flag}, or compile without --pipeline-stages and use --grad-accumulation-steps",
            )
        if given and in_slices:
            raise OptionError(
                f"{flag} needs whole gradients, and the replicas of the PEF {header.name} keep slices "
                f"(--zero {header.zero})",
                remedy=f"add --reduce-on-rdu, which keeps them whole, or leave out {flag}",
            )
    whole, chips = options.one_process_per_replica, header.replica.size(DATA_PARALLEL)
    if whole and chips > 1 and ranks > 1:
        left = [word for word in command if word.replace("_", "-") != WHOLE_REPLICAS]
        raise OptionError(
            f"{WHOLE_REPLICAS} runs stages and parts of weights, and a replica of the PEF {header.name} has "
            f"{chips} chips that share its batch ({header.replica})",
            remedy=f"mpirun -np {max(ranks, minimum) * header.ranks_of_replica} {shlex.join(left)}",
        )
    replicas = replicas_of(ranks - servers, header.replica, minimum, command=command, whole=whole)
    if servers and ranks - servers < minimum:
        started = "1 rank was started" if ranks == 1 else f"{ranks} ranks were started"
        raise LaunchError(
            f"{started}, and --parameter-servers {servers} leaves {max(ranks - servers, 0) or 'none'} for replicas, "
            f"of which this PEF needs at least {minimum} (-ws {minimum})",
            remedy=f"mpirun -np {minimum + servers} {shlex.join(command)}",
        )
    check_world_size(
        emulated or replicas,
        minimum,
        replica=ONE_RANK if whole else header.replica,
        command=command,
        data_parallel=header.data_parallel,
        emulated=emulated is not None,
    )
    if options.data_parallel and not header.data_parallel and header.replica.size(DATA_PARALLEL) == 1:
        raise OptionError(
            f"--data-parallel needs REDUCE and GATHER sections, and the PEF {header.name} has none",
            remedy="compile it with --data-parallel, or run it without",
        )


def _check_outputs(options: "RunOptions", rank: int) -> None:
    """Raises OptionError if an output cannot be written; call it before the training."""
    from sambasim.options.load import check_output_file, check_output_folder

    files = (
        (options.metrics, "the metrics file", "--metrics FILE"),
        (options.trace, "the trace", "--trace FILE"),
        (options.save, "the trained weights", "--save FILE.safetensors"),
        (options.predictions, "the predictions", "--predictions FILE.safetensors"),
    )
    for path, what, flag in files:
        if path is not None and rank == 0:
            check_output_file(path, what, f"another place: {flag}")
    folders = (
        (options.checkpoint.dir, "the checkpoints", "--checkpoint-dir DIR"),
        (options.log_dir, "the logs", "--log-dir FOLDER"),
        (options.record_digests, "the digests", "--record-digests FOLDER"),
    )
    for path, what, flag in folders:
        if path is not None:
            check_output_folder(path, what, f"another place: {flag}")


def _in_words(report: "PredictionRecord") -> str:
    which = f"the {report.samples} held-out samples" if report.held_out else f"all {report.samples} samples"
    lines = [f"predicted {which} of {report.data} in {format_seconds(report.prediction_s)} (measured)"]
    if report.weights is None:
        lines.append("notice: with the weights of the PEF, as they were compiled; --weights FILE reads trained ones")
    lines += [f"loss {report.loss:.4f}"] if report.loss is not None else []
    lines += [f"accuracy {report.accuracy:.2%}"] if report.accuracy is not None else []
    lines += [f"outputs written to {report.predictions}"] if report.predictions else []
    return "\n".join(lines)


def _observer(options: "RunOptions", rank: int, screen: ExitStack) -> "RunObserver":
    from sambasim.cli.progress import RankLog, RunProgress
    from sambasim.runtime.run_observer import MetricsFile, RunObservers

    members: list[RunObserver] = []
    if rank == 0 and not options.json_output:
        progress = RunProgress()
        screen.callback(progress.close)
        members.append(progress)
    if rank == 0 and options.metrics is not None:
        members.append(MetricsFile(options.metrics))
    if options.log_dir is not None:
        members.append(RankLog(options.log_dir, rank))
    return RunObservers(members)
