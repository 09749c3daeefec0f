"""What `sambasim run` checks before any slow work: whether flags, PEF, ranks and the simulated machine fit together."""

import shlex
from collections.abc import Sequence
from pathlib import Path

from sambasim.commands.outputs import check_output_file, check_output_folder
from sambasim.errors import LaunchError, OptionError, PeerError
from sambasim.hardware.placement import inventory_of, place_replicas
from sambasim.ir.mesh import DATA_PARALLEL, PIPELINE, Mesh
from sambasim.options.run import RunOptions
from sambasim.pef import PefHeader, locate, peek
from sambasim.runtime.machine.communicator import Communicator
from sambasim.runtime.machine.launcher import (
    WHOLE_REPLICAS,
    check_emulation,
    check_world_size,
    ranks_of_process,
    replicas_of,
)
from sambasim.runtime.watch.supervisor import Failure


def checked_pef(
    options: RunOptions, output_folder: Path, communicator: Communicator, command: Sequence[str]
) -> tuple[Path, Mesh]:
    """Collective. The path of the PEF, and the mesh of the processes: one without axes where each plays all ranks of a
    replica. Raises an error for flags that do not fit the PEF, before any slow work.

    All ranks raise the same error, except that a rank raises an error about its own files alone.
    """
    path = locate(options.pef, output_folder)
    header = peek(path)
    digests = communicator.all_gather_object(header.digest)
    apart = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
    if apart:
        raise PeerError(
            f"rank {apart[0]} reads another PEF than rank 0: {digests[apart[0]][:12]} and {digests[0][:12]}",
            remedy="copy the same PEF to every host, or keep it in a shared folder",
        )
    if not options.inference:
        _check_replicas(options, header, communicator.world_size, command)
    place_replicas(
        inventory_of(header.compile_options, cluster=options.cluster),
        communicator.node_of[: communicator.world_size - (options.parameter_servers or 0)],
        ranks_of_process(
            communicator.world_size,
            header.ranks_of_replica,
            options.emulate_replicas,
            whole=options.one_process_per_replica,
        ),
        command=shlex.join(command),
        or_else="name a cluster with more RDUs a node: --cluster FILE.toml",
    )
    _check_outputs(options, communicator.rank)
    of_replicas = options.inference or options.one_process_per_replica
    return path, Mesh({}) if of_replicas else header.mesh(communicator.world_size)


def _check_replicas(options: RunOptions, header: PefHeader, ranks: int, command: Sequence[str]) -> None:

    emulated = options.emulate_replicas or 1
    check_emulation(ranks, emulated, command=command)
    in_slices = header.zero >= 2 and not options.reduce_on_rdu and max(ranks, emulated) > 1
    _check_host_sync(options, header, in_slices)
    _check_engine(options, header, in_slices)
    _check_watched(options, header, in_slices)
    _check_ranks(options, header, ranks, command)


def _check_host_sync(options: RunOptions, header: PefHeader, in_slices: bool) -> None:
    """Gloo and parameter servers have whole gradients of replicas of one rank. `in_slices`: replicas keep slices."""
    if options.host_sync not in ("gloo", "parameter-server"):
        return
    if header.ranks_of_replica > 1:
        what = (
            f"syncs replicas of one rank, and a replica of the PEF {header.name} has {header.ranks_of_replica} "
            f"({header.replica})"
        )
    elif in_slices:
        what = f"keeps gradients whole, and the replicas of the PEF {header.name} keep slices (--zero {header.zero})"
    else:
        return
    servers = "" if options.parameter_servers is None else " and --parameter-servers"
    raise OptionError(
        f"--host-sync {options.host_sync} {what}",
        remedy=f"leave out --host-sync{servers}: MPI through the host; or sync between devices: --reduce-on-rdu",
    )


def _check_engine(options: RunOptions, header: PefHeader, in_slices: bool) -> None:

    within_replica = header.ranks_of_replica > header.replica.size(DATA_PARALLEL)
    if options.engine == "plain" or not (within_replica or in_slices):
        return
    why = (
        f"between the {header.ranks_of_replica} ranks of a replica" if within_replica else f"with --zero {header.zero}"
    )
    raise OptionError(
        f"--engine {options.engine} cannot compile a pass that communicates, and that of the PEF {header.name} does, "
        f"{why}",
        remedy="run it with --engine plain",
    )


def _check_watched(options: RunOptions, header: PefHeader, in_slices: bool) -> None:

    given = {"--record-digests": options.record_digests is not None, "--debug-numerics": options.debug_numerics}
    flag = next((flag for flag, is_given in given.items() if is_given), None)
    if flag is not None and header.replica.size(PIPELINE) > 1:
        raise OptionError(
            f"{flag} cannot watch a pipeline yet, and the PEF {header.name} is one ({header.replica})",
            remedy=f"leave out {flag}, or compile without --pipeline-stages and use --grad-accumulation-steps",
        )
    if flag is not None and in_slices:
        raise OptionError(
            f"{flag} needs whole gradients, and the replicas of the PEF {header.name} keep slices "
            f"(--zero {header.zero})",
            remedy=f"add --reduce-on-rdu, which keeps them whole, or leave out {flag}",
        )


def _check_ranks(options: RunOptions, header: PefHeader, ranks: int, command: Sequence[str]) -> None:
    """Whether `ranks` ranks are whole replicas, enough of them, and synced if they are several."""

    servers, minimum, whole = options.parameter_servers or 0, header.world_size, options.one_process_per_replica
    chips = header.replica.size(DATA_PARALLEL)
    if whole and chips > 1 and ranks > 1:
        replicas = max(ranks, minimum) if header.data_parallel else 1
        left = [word for word in command if word.replace("_", "-") != WHOLE_REPLICAS]
        raise OptionError(
            f"{WHOLE_REPLICAS} runs stages and parts of weights, and a replica of the PEF {header.name} has "
            f"{chips} chips that share its batch ({header.replica})",
            remedy=f"mpirun -np {replicas * header.ranks_of_replica} {shlex.join(left)}",
        )
    if servers and ranks - servers < minimum:
        started = "1 rank was started" if ranks == 1 else f"{ranks} ranks were started"
        raise LaunchError(
            f"{started}, and --parameter-servers {servers} leaves {max(ranks - servers, 0) or 'none'} for replicas, "
            f"of which this PEF needs at least {minimum} (-ws {minimum})",
            remedy=f"mpirun -np {minimum + servers} {shlex.join(command)}",
        )
    replicas = replicas_of(ranks - servers, header.replica, minimum, command=command, whole=whole)
    check_world_size(
        options.emulate_replicas or replicas,
        minimum,
        replica=None if whole else header.replica,
        processes=ranks - servers,
        command=command,
        data_parallel=header.data_parallel,
        emulated=options.emulate_replicas is not None,
    )
    if options.data_parallel and not header.data_parallel and chips == 1:
        raise OptionError(
            f"--data-parallel needs REDUCE and GATHER sections, and the PEF {header.name} has none",
            remedy="compile it with --data-parallel, or run it without",
        )


def _check_outputs(options: RunOptions, rank: int) -> None:
    """Raises OptionError if an output cannot be written; call it before the training."""

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


def log_of(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.log"


def failure_details(failure: Failure, options: RunOptions) -> list[tuple[str, str]]:
    """What a rank was doing, and its log, by title."""
    lines = [("doing", failure.doing)] if failure.doing else []
    if options.log_dir is not None and not failure.alike and log_of(options.log_dir, failure.about).is_file():
        lines.append(("log", str(log_of(options.log_dir, failure.about))))
    return lines
