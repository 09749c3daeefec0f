"""What `sambasim run` does: it checks whether all fits together, then trains, and writes the files of its options."""

import shlex
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING

from sambasim.errors import LaunchError, OptionError, one_line
from sambasim.files import check_output_file, check_output_folder
from sambasim.hardware.placement import inventory_of, place_replicas
from sambasim.ir.mesh import DATA_PARALLEL, PIPELINE, Mesh, mesh_of, replica_mesh
from sambasim.ir.program import Program
from sambasim.options.given import leaves
from sambasim.options.run import RunOptions, resolve_run
from sambasim.pef import locate, read
from sambasim.records.metrics import CheckpointRecord, EvaluationRecord, StepRecord, SummaryRecord
from sambasim.runtime.machine import launcher
from sambasim.runtime.machine.agreement import check_equal, check_job
from sambasim.runtime.machine.communicator import Communicator
from sambasim.runtime.run.run_observer import LineFile, RunObserver, RunObservers, Start, metrics_files
from sambasim.runtime.watch.status_file import Activity
from sambasim.runtime.watch.supervisor import Failure, StopSignals
from sambasim.units import format_seconds

if TYPE_CHECKING:
    from sambasim.data.datasets import Given
    from sambasim.runtime.job import Trained


def checked_pef(
    options: RunOptions, output_folder: Path, communicator: Communicator, command: Sequence[str]
) -> tuple[Path, Mesh]:
    """Collective. The path of the PEF, and the mesh of the processes: one without axes where each plays all ranks of a
    replica. All ranks raise the same error, except that a rank raises an error about its own files alone."""
    check_job(communicator, options.threads, _flags_of(options))
    path, ranks = locate(options.pef, output_folder), communicator.world_size
    document = read(path)
    program = document.program
    if document.has_several and not document.data_source.get("buckets"):
        what = f"the PEF {program.name} has several graphs, and sambasim run takes one"
        raise OptionError(what, remedy=f"run the app that it was compiled from: sambasim app APP.py run --pef {path}")
    check_equal(communicator, {"PEF": document.digest[:12], **_files_of(options)})
    whole = options.one_process_per_replica
    if not options.inference:
        launcher.check_emulation(ranks, options.emulate_replicas or 1, command=command)
        in_slices = program.zero >= 2 and not options.reduce_on_rdu and max(ranks, options.emulate_replicas or 1) > 1
        _check_features(options, program, in_slices, several=document.has_several)
        _check_ranks(options, program, ranks, command)
    elif options.data_parallel and not program.training:
        launcher.check_world_size(ranks, program.world_size, command=command, data_parallel=True)
    inventory = inventory_of(document.compile_options, cluster=options.cluster)
    nodes = communicator.node_of[: ranks - (options.parameter_servers or 0)]
    own = launcher.ranks_of_process(ranks, program.ranks_of_replica, options.emulate_replicas, whole=whole)
    or_else = "name a cluster with more RDUs a node: --cluster FILE.toml"
    place_replicas(inventory, nodes, own, command=shlex.join(command), or_else=or_else)
    if options.deepspeed is None:  # before torch is imported, which takes seconds
        resolve_run(options, document.training_defaults, document.data_source)
    outputs = (
        (check_output_file, "--metrics FILE", "the metrics file", options.metrics),
        (check_output_file, "--trace FILE", "the trace", options.trace),
        (check_output_file, "--save FILE.safetensors", "the trained weights", options.save),
        (check_output_file, "--predictions FILE.safetensors", "the predictions", options.predictions),
        (check_output_folder, "--checkpoint-dir DIR", "the checkpoints", options.checkpoint.dir),
        (check_output_folder, "--tensorboard DIR", "the events for TensorBoard", options.tensorboard),
        (check_output_folder, "--log-dir FOLDER", "the logs", options.log_dir),
        (check_output_folder, "--record-digests FOLDER", "the digests", options.record_digests),
    )
    for check, flag, what, output in outputs:
        if output is not None and (check is check_output_folder or communicator.rank == 0):  # rank 0 writes the files
            check(output, what, f"another place: {flag}")
    return path, Mesh({}) if options.inference or own > 1 else mesh_of(program.mesh, ranks)


_OF_RANKS = {
    "pef", "weights", "deepspeed", "cluster", "threads", "predict", "json_output", "verbose", "metrics", "tensorboard",
    "trace", "save", "predictions", "log_dir", "record_digests",
}  # fmt: skip
"""Options that may differ between ranks: paths, what is only printed, and what is compared by itself."""


def _flags_of(options: RunOptions) -> dict[str, str]:
    """What must be the same on all ranks, by flag."""
    tables = {"--set": options.overrides, "--checkpoint-…": options.checkpoint.model_dump(exclude={"dir"})}
    flags = {
        flag: ", ".join(f"{name}={value}" for name, value in leaves(table).items()) for flag, table in tables.items()
    }
    for name in RunOptions.model_fields.keys() - _OF_RANKS - {"overrides", "checkpoint"}:
        flags[f"--{name.replace('_', '-')}"] = str(getattr(options, name))
    return {flag: text or "not given" for flag, text in flags.items()}


def _files_of(options: RunOptions) -> dict[str, str]:
    """The identities of the files that every rank reads, but for the PEF, by flag."""
    named = {"--weights": options.weights, "--deepspeed": options.deepspeed, "--cluster": options.cluster}
    files = {flag: Path(name) for flag, name in named.items() if name is not None and Path(name).is_file()}
    if files:
        from sambasim.data.identity import identity_of_file  # torch
    return {flag: identity_of_file(path) for flag, path in files.items()}


def _check_features(options: RunOptions, program: Program, in_slices: bool, *, several: bool) -> None:
    """Raises OptionError if sync, engine or observers lack what the PEF needs. `in_slices`: replicas keep slices;
    `several`: it has several graphs."""
    name, ranks, replica = program.name, program.ranks_of_replica, replica_mesh(program.mesh)
    if options.host_sync in ("gloo", "parameter-server") and (ranks > 1 or in_slices):
        what = f"keeps gradients whole, and the replicas of the PEF {name} keep slices (--zero {program.zero})"
        if ranks > 1:
            what = f"syncs replicas of one rank, and a replica of the PEF {name} has {ranks} ({replica})"
        servers = "" if options.parameter_servers is None else " and --parameter-servers"
        remedy = f"leave out --host-sync{servers}: MPI through the host; or sync between devices: --reduce-on-rdu"
        raise OptionError(f"--host-sync {options.host_sync} {what}", remedy=remedy)
    within_replica = ranks > replica.size(DATA_PARALLEL)
    if options.engine != "plain" and (within_replica or in_slices):
        why = f"between the {ranks} ranks of a replica" if within_replica else f"with --zero {program.zero}"
        what = f"cannot compile a pass that communicates, and that of the PEF {name} does, {why}"
        raise OptionError(f"--engine {options.engine} {what}", remedy="run it with --engine plain")
    given = {"--record-digests": options.record_digests is not None, "--debug-numerics": options.debug_numerics}
    flag = next((flag for flag, is_given in given.items() if is_given), None)
    if flag is not None and several:
        raise OptionError(f"{flag} watches one graph, and the PEF {name} has several", remedy=f"leave out {flag}")
    if flag is not None and replica.size(PIPELINE) > 1:
        what = f"{flag} cannot watch a pipeline yet, and the PEF {name} is one ({replica})"
        remedy = f"leave out {flag}, or compile without --pipeline-stages and use --grad-accumulation-steps"
        raise OptionError(what, remedy=remedy)
    if flag is not None and in_slices:
        what = f"{flag} needs whole gradients, and the replicas of the PEF {name} keep slices (--zero {program.zero})"
        raise OptionError(what, remedy=f"add --reduce-on-rdu, which keeps them whole, or leave out {flag}")


def _check_ranks(options: RunOptions, program: Program, ranks: int, command: Sequence[str]) -> None:
    """Raises OptionError or LaunchError unless ranks make whole replicas, as many as the PEF needs, that can sync."""
    servers, minimum, whole = options.parameter_servers or 0, program.world_size, options.one_process_per_replica
    chips, remaining, replica = program.chips, ranks - servers, replica_mesh(program.mesh)
    if whole and chips > 1 and ranks > 1:
        replicas = max(ranks, minimum) if program.chooses_replicas else 1
        left = [word for word in command if word.replace("_", "-") != launcher.WHOLE_REPLICAS]
        splits = f"a replica of the PEF {program.name} splits its batch over {chips} chips ({replica})"
        what = f"{launcher.WHOLE_REPLICAS} allows only stages and cut weights, and {splits}"
        raise OptionError(what, remedy=f"mpirun -np {replicas * program.ranks_of_replica} {shlex.join(left)}")
    if servers and remaining < minimum:
        started = "1 rank was started" if ranks == 1 else f"{ranks} ranks were started"
        left_over = f"leaves {max(remaining, 0) or 'none'} for replicas"
        needs = f"of which this PEF needs at least {minimum} (-ws {minimum})"
        what = f"{started}, and --parameter-servers {servers} {left_over}, {needs}"
        raise LaunchError(what, remedy=f"mpirun -np {minimum + servers} {shlex.join(command)}")
    replicas = launcher.replicas_of(remaining, replica, minimum, command=command, whole=whole)
    launcher.check_world_size(
        options.emulate_replicas or replicas,
        minimum,
        replica=None if whole else replica,
        processes=remaining,
        command=command,
        data_parallel=program.chooses_replicas,
        emulated=options.emulate_replicas is not None,
    )
    if options.data_parallel and not program.chooses_replicas and chips == 1:
        what = f"--data-parallel needs REDUCE and GATHER sections, and the PEF {program.name} has none"
        raise OptionError(what, remedy="compile it with --data-parallel, or run it without")


def train(
    path: Path,
    options: RunOptions,
    communicator: Communicator,
    activity: Activity,
    command: Sequence[str],
    observers: Sequence[RunObserver],
    given: "Given | None" = None,
    *,
    keeps_weights: bool = False,
    signals: StopSignals,
) -> "Trained":
    """Collective. Train a PEF that `checked_pef` has checked, until `signals`, which are entered, ask to stop."""
    from sambasim.data.datasets import NOTHING
    from sambasim.data.user_code import load_object
    from sambasim.runtime.job import TrainingJob  # torch
    from sambasim.runtime.run.callbacks import Callbacks, checked
    from sambasim.runtime.run.setup import blamed_on_strangers, set_up
    from sambasim.runtime.run.tensorboard import TensorBoard

    rank, members, warn = communicator.rank, [*observers], RunObservers(observers).noted
    stack = ExitStack()
    if rank == 0 and options.metrics is not None:
        members += metrics_files(options.metrics, warn)
    if rank == 0 and options.tensorboard is not None:
        members.append(stack.enter_context(closing(TensorBoard(options.tensorboard))))
    if options.log_dir is not None:
        members.append(RankLog(options.log_dir, rank, warn))
    given = given or NOTHING
    callbacks = [*given.callbacks, *([] if options.callback is None else [load_object(options.callback, "callback")])]
    check_equal(communicator, {"callbacks": len(callbacks)})
    if callbacks:
        everywhere = options.callback_ranks == "all"
        members.append(Callbacks([*map(checked, callbacks)], communicator, activity, everywhere=everywhere))
    elif options.callback_ranks == "all":
        raise OptionError("--callback-ranks needs a callback", remedy="add --callback module:function")
    setup, told = set_up(path, options, communicator), RunObservers(members)
    job = TrainingJob(setup, told, activity, command, given, keeps_weights=keeps_weights, signals=signals)
    with stack, blamed_on_strangers(setup.document):
        return job.run()


class RankLog(RunObserver):
    """A log file of one rank: every step with its times, written at once. It is made when training starts. `warn`: see
    LineFile."""

    def __init__(self, folder: Path, rank: int, warn: Callable[[str], None]) -> None:
        self._path, self._warn = log_of(folder, rank), warn
        self._file: LineFile | None = None

    def started(self, start: Start) -> None:
        kept = None if start.plan.start.step else ""
        self._file = LineFile(self._path, "the log", "--log-dir FOLDER", self._warn, kept)
        rank = start.rank and f"{start.rank}; "
        self._write(f"start {start.name}: {rank}sync {start.sync}, {start.threads} threads, {start.data}")

    def stepped(self, step: StepRecord) -> None:
        times = f"step {format_seconds(step.step_s)}, sync {format_seconds(step.sync_s)}"
        self._write(f"step {step.step} epoch {step.epoch} loss {step.loss!r} {times}")

    def evaluated(self, record: EvaluationRecord) -> None:
        found = " ".join(f"{name} {number!r}" for name, number in record.numbers.items())
        self._write(f"evaluation after step {record.step}: {found}")

    def saved(self, record: CheckpointRecord) -> None:
        self._write(f"checkpoint after step {record.step}: {record.path} in {format_seconds(record.checkpoint_s)}")

    def noted(self, what: str) -> None:
        self._write(what)

    def ended(self, summary: SummaryRecord) -> None:
        self._write(f"end weights_sha256 {summary.weights_sha256} state_sha256 {summary.state_sha256}")
        if self._file is not None:
            self._file.close()

    def _write(self, line: str) -> None:
        if self._file is not None:
            self._file.write(f"{time.strftime('%Y-%m-%dT%H:%M:%S')} {one_line(line)}\n")


def log_of(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.log"


def failure_details(failure: Failure, options: RunOptions) -> list[tuple[str, str]]:
    """What a rank was doing, and its log, by title."""
    lines = [("doing", failure.doing)] if failure.doing else []
    if options.log_dir is not None and not failure.alike:
        log = log_of(options.log_dir, failure.about)
        lines += [("log", str(log))] if log.is_file() else []
    return lines
