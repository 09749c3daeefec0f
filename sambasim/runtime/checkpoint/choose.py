"""Which checkpoint a run resumes from, whether it fits the run, and what each rank takes of it (`restore`), also if the
number of replicas or the mesh has changed."""

from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from sambasim.errors import CheckpointError, OptionError
from sambasim.ir.types import Symbol, SymbolKind
from sambasim.runtime.checkpoint import folder
from sambasim.runtime.checkpoint.changes import changes, check_epoch, check_exact, check_pef
from sambasim.runtime.checkpoint.content import Checkpoint, buffer_name, check, describe
from sambasim.runtime.checkpoint.saver import pieces_of
from sambasim.runtime.machine.communicator import Communicator
from sambasim.runtime.run.setup import Setup, Team
from sambasim.runtime.run.training import Totals
from sambasim.runtime.values.memory import DeviceMemory

AUTO = "auto"
"""`--resume auto`: the newest checkpoint that is undamaged."""
NEWEST = "newest"
"""`--resume` without a value: the newest checkpoint, which must be undamaged."""
IF_ANY = "if-any"
"""AUTO, or from the beginning if there is no checkpoint: for a job script that is started again and again."""


def choose(resume: str, checkpoint_dir: Path | None, communicator: Communicator) -> tuple[Checkpoint, list[str]]:
    """Collective. The checkpoint that `resume` means, a path or a constant from above, checked by all ranks together,
    and notices about those passed over. Raises CheckpointError for damage, OptionError if there is none."""
    candidates = _candidates(resume, checkpoint_dir)
    if communicator.broadcast_object(candidates) != candidates:
        raise OptionError(
            f"rank {communicator.rank} sees other checkpoints than rank 0",
            where=f"host {communicator.host_name}",
            remedy="--checkpoint-dir must be a folder that all hosts share",
        )
    damaged: dict[Path, CheckpointError] = {}
    for path in candidates:
        try:
            checkpoint = _checked(path, communicator)
        except CheckpointError as error:
            if resume != AUTO or not error.is_damage:
                raise
            damaged[path] = error
        else:
            notices = [f"{error.what}{_put_aside(path, communicator)}" for path, error in damaged.items()]
            communicator.barrier()  # no rank reads the folder before
            return checkpoint, notices
    newest = damaged[candidates[0]]
    raise CheckpointError(
        f"all {len(candidates)} checkpoints in {checkpoint_dir} are damaged; the newest: {newest.what}",
        where=newest.where,
        remedy="leave out --resume and name a new --checkpoint-dir, to start from the beginning",
    )


def settle_if_any(resume: str | None, checkpoint_dir: Path | None, communicator: Communicator) -> str | None:
    """Collective. `resume`, but AUTO or None instead of IF_ANY. Rank 0 decides; a damaged checkpoint counts as one."""
    if resume != IF_ANY or checkpoint_dir is None:
        return resume
    settled, fault = None, None
    if communicator.rank == 0:
        try:
            settled = AUTO if _in_folder(checkpoint_dir) or folder.damaged_in(checkpoint_dir) else None
        except OptionError as error:
            fault = error
    communicator.raise_first(fault)
    return communicator.broadcast_object(settled)


def nothing_in(checkpoint_dir: Path) -> OptionError:
    aside = folder.damaged_in(checkpoint_dir)
    damaged = f", only damaged ones: {', '.join(path.name for path in aside[-3:])}" if aside else ""
    return OptionError(
        f"there is no checkpoint in {checkpoint_dir} to resume from{damaged}",
        remedy="leave out --resume to start from the beginning, or name the right --checkpoint-dir",
    )


def _candidates(resume: str, checkpoint_dir: Path | None) -> list[Path]:
    if resume in (AUTO, NEWEST) and checkpoint_dir is not None:
        if not (checkpoints := _in_folder(checkpoint_dir)):
            raise nothing_in(checkpoint_dir)
        return checkpoints if resume == AUTO else checkpoints[:1]
    path = Path(resume)
    if not path.exists() and not path.is_symlink():
        raise OptionError(f"there is no checkpoint {path}", remedy="--resume auto, or --resume DIR/step-…")
    if (path / folder.MANIFEST_FILE).exists() or not path.is_dir():
        return [path]
    if not (checkpoints := _in_folder(path)):
        raise OptionError(f"{path} is no checkpoint and holds none", remedy="name one: --resume DIR/step-…")
    return checkpoints[:1]


def _in_folder(path: Path) -> list[Path]:
    try:
        return list(folder.checkpoints_in(path))
    except OSError as error:
        raise OptionError(f"{path} cannot be read: {error.strerror}", remedy="check its permissions") from error


def _checked(path: Path, communicator: Communicator) -> Checkpoint:
    """Collective. The checkpoint at `path`, every byte of it checked. Raises CheckpointError, the same on all ranks."""
    fault: CheckpointError | None = None
    try:
        checkpoint = check(path, communicator.rank, communicator.world_size)
    except CheckpointError as error:
        fault = error
    faults = [fault for fault in communicator.all_gather_object(fault) if fault is not None]
    if not faults:
        return checkpoint
    faults[0].is_damage = all(fault.is_damage for fault in faults)
    raise faults[0]


def _put_aside(path: Path, communicator: Communicator) -> str:
    """Rank 0 renames the damaged checkpoint; the end of the notice of it."""
    if communicator.rank:
        return ""
    try:
        return f"; renamed to {folder.put_aside(path).name}"
    except OSError as failure:
        return f"; it cannot be renamed: {failure.strerror}"


class Resumption(NamedTuple):
    """What a run resumes from, and notices for the user. `keeps_loss_scale`: its options for it are those of the
    run."""

    checkpoint: Checkpoint
    notices: tuple[str, ...]
    keeps_loss_scale: bool

    def carry_over(self, totals: Totals) -> None:
        progress = self.checkpoint.manifest.progress
        totals.samples, totals.skipped_steps = progress.samples, progress.skipped_steps
        totals.first_nonfinite_step = progress.first_nonfinite_step
        if progress.loss_scale is not None and self.keeps_loss_scale:
            totals.loss_scale = replace(progress.loss_scale)
        if progress.loss_first is not None:
            totals.loss_first = progress.loss_first


def find(setup: Setup, samples: int) -> Resumption | None:
    """Collective. The checkpoint that the options ask to resume from, if any. Raises CheckpointError or OptionError."""
    options, communicator = setup.options.checkpoint, setup.communicator
    if options.resume is None:
        if options.dir is not None and (earlier := _in_folder(options.dir)):
            raise OptionError(
                f"{options.dir} holds checkpoints of an earlier run, the newest {earlier[0].name}",
                remedy="add --resume to continue that run, or name another --checkpoint-dir",
            )
        if options.dir is not None:
            communicator.barrier()  # no rank writes before all have checked
        return None
    checkpoint, notices = choose(options.resume, options.dir, communicator)
    saved, where = checkpoint.manifest, str(checkpoint.path)
    step = saved.position.step
    # A folder holds one course of a run, because the checkpoints of two could not be distinguished.
    later = [path for path in _in_folder(options.dir) if folder.step_of(path) > step] if options.dir else []
    if later:
        raise OptionError(
            f"{options.dir} holds {len(later)} later checkpoints than that of step {step}, the last {later[0].name}",
            remedy="name another --checkpoint-dir for the new course of the run, or move the later ones away",
        )
    if options.dir is not None:
        communicator.barrier()
    now = describe(setup, samples)
    differing = [*check_pef(saved, now, setup.path, where), *changes(saved, now)]
    check_epoch(saved, now, differing, where)
    if options.exact:
        check_exact(differing, where)
    notices = [*notices, f"resumes after step {step}, from {where}"]
    notices += [f"changed since the checkpoint: {change}" for change in differing]
    if any(change.alters_bits for change in differing):
        notices.append("from here on, the bits may differ from those of an uninterrupted run")
    was, wanted = (manifest.options["training"] for manifest in (saved, now))
    same_scaling = (
        isinstance(was, dict) and isinstance(wanted, dict) and was.get("loss_scale") == wanted.get("loss_scale")
    )
    return Resumption(checkpoint, tuple(notices), same_scaling)


def restore(setup: Setup, team: Team, checkpoint: Checkpoint) -> None:
    """Collective. Make `checkpoint` the state of `team`: the parameters in each memory, and the optimizer states of the
    slices that a rank updates. Additional replicas get the buffers of replica 0, additional chips those of the
    first."""
    program, run = setup.program, checkpoint.manifest.run

    def read(symbol: Symbol, memory: DeviceMemory, rank: int, prefix: str = "") -> None:
        if symbol.name in memory.program.symbols:
            flat = memory.tensor(symbol.name).view(-1)
            checkpoint.read_part(symbol.name, symbol.cuts, setup.mesh.coordinates(rank), 0, flat, prefix=prefix)

    own = {id(rank.memory): rank for rank in team.replicas if rank.memory.has_own_parameters}
    memories = [(rank.memory, rank.rank) for rank in own.values()]
    updated = [(rank.transport.sync.memory, rank) for rank in team.first]
    memories += [(memory, rank.rank) for memory, rank in updated if memory is not rank.memory]
    for symbol in program.symbols.values():
        if symbol.kind is SymbolKind.PARAMETER:
            for memory, number in memories:
                read(symbol, memory, number)
        elif symbol.kind is SymbolKind.BUFFER:
            for rank in team.replicas:
                replica, chip = divmod(rank.replica, program.chips)
                prefix = buffer_name(replica if replica < run.replicas else 0, chip if chip < run.chips else 0, "")
                read(symbol, rank.memory, rank.rank, prefix)
    for rank in team.first:
        sync, at = rank.transport.sync, setup.mesh.coordinates(rank.rank)
        for piece in pieces_of(rank.memory.program, sync.memory, sync.current, at):
            if piece.kind is SymbolKind.OPTIMIZER_STATE:
                cuts = program.symbols[piece.symbol].cuts
                checkpoint.read_part(piece.symbol, cuts, at, piece.start, piece.data)
    setup.communicator.node_barrier()  # another rank may have restored memory that this one reads
