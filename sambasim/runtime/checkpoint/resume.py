"""Resuming a run: choosing the checkpoint, checking that it fits, and restoring the state of training from it."""

from dataclasses import dataclass
from pathlib import Path

from sambasim.errors import CheckpointError, OptionError
from sambasim.ir.types import SymbolKind
from sambasim.options.problems import nearest
from sambasim.runtime.checkpoint import folder
from sambasim.runtime.checkpoint.changes import changes, check_epoch, check_exact, check_pef
from sambasim.runtime.checkpoint.manifest import buffer_name, describe, pieces_of
from sambasim.runtime.checkpoint.reader import Checkpoint, check_content, read
from sambasim.runtime.plan import Position
from sambasim.runtime.ranks import Communicator
from sambasim.runtime.setup import Setup
from sambasim.runtime.team import Team
from sambasim.runtime.training import Totals

AUTO = "auto"
"""`--resume auto`: the newest checkpoint that is undamaged."""
NEWEST = "newest"
"""`--resume` without a value: the newest checkpoint, which must be undamaged."""
IF_ANY = "if-any"
"""AUTO, or from the beginning if there is no checkpoint: for a job script that is started again and again."""


@dataclass(frozen=True, slots=True)
class Resumption:
    """The checkpoint that a run resumes from, and its position. `notices` are for the user."""

    checkpoint: Checkpoint
    position: Position
    notices: tuple[str, ...]

    def carry_over(self, totals: Totals) -> None:
        """Continue the counts of the summary."""
        progress = self.checkpoint.manifest.progress
        totals.samples = progress.samples
        totals.first_nonfinite_step = progress.first_nonfinite_step
        totals.skipped_steps = progress.skipped_steps
        if progress.loss_first is not None:
            totals.loss_first = progress.loss_first


def find(setup: Setup, samples: int) -> Resumption | None:
    """Collective. The checkpoint that the options ask to resume from; None for a run that starts from the beginning.

    samples: the size of the training data

    Raises CheckpointError if it is damaged or of another PEF; OptionError if there is none, or if the run cannot resume
    from it as the options ask.
    """
    options, communicator = setup.options.checkpoint, setup.communicator
    if options.resume is None:
        if options.dir is not None:
            _check_empty(options.dir)
            communicator.barrier()  # no rank writes before all have checked
        return None
    checkpoint, notices = choose(options.resume, options.dir, communicator)
    saved, where = checkpoint.manifest, str(checkpoint.path)
    at = saved.position
    if options.dir is not None:
        _check_newest(at.step, options.dir)
        communicator.barrier()
    now = describe(setup, samples)
    check_pef(saved, now, where)
    found = changes(saved, now)
    check_epoch(saved, now, found, where)
    if options.exact:
        check_exact(found, where)
    notices = [*notices, f"resumes after step {at.step}, from {where}"]
    notices += [f"changed since the checkpoint: {change}" for change in found]
    if any(change.alters_bits for change in found):
        notices.append("from here on, the bits may differ from those of an uninterrupted run")
    return Resumption(checkpoint, Position(at.step, at.epoch, at.used), tuple(notices))


def restore(setup: Setup, team: Team, checkpoint: Checkpoint) -> None:
    """Collective. Make `checkpoint` the state of `team`. A replica that it does not have gets the buffers of replica 0.

    A rank restores parameters in every memory of its own, and of the optimizer's states the slices that it updates.
    """
    program, transport = setup.program, team.transport
    memories = {
        id(memory): memory for memory in (*team.memories, transport.memory) if memory.has_own_parameters
    }.values()
    for symbol in program.symbols.values():
        if symbol.kind is SymbolKind.PARAMETER:
            for memory in memories:
                checkpoint.read(symbol.name, 0, memory.tensor(symbol.name).view(-1))
        elif symbol.kind is SymbolKind.BUFFER:
            for replica in team.replicas:
                saved = replica.rank if replica.rank < checkpoint.manifest.run.world_size else 0
                checkpoint.read(buffer_name(saved, symbol.name), 0, replica.memory.tensor(symbol.name).view(-1))
    for piece in pieces_of(program, transport.memory, transport.kept):
        if piece.kind is SymbolKind.OPTIMIZER_STATE:
            checkpoint.read(piece.name, piece.start, piece.data)
    setup.communicator.node_barrier()  # another rank may have restored memory that this one reads


def choose(resume: str, checkpoint_dir: Path | None, communicator: Communicator) -> tuple[Checkpoint, list[str]]:
    """Collective. The checkpoint to resume from, and notices about those that were passed over.

    The ranks share the work of checking every byte of it.

    resume: AUTO, NEWEST, or the path of a checkpoint or of a folder of checkpoints
    checkpoint_dir: where this run writes its own

    Raises CheckpointError if the one that is named, or the newest, is damaged, and for AUTO if all are; OptionError
    if there is none.
    """
    candidates = _candidates(resume, checkpoint_dir)
    if communicator.broadcast_object(candidates) != candidates:
        raise OptionError(
            f"rank {communicator.rank} sees other checkpoints than rank 0",
            where=f"host {communicator.host_name}",
            remedy="--checkpoint-dir must be a folder that all hosts share",
        )
    damaged: list[CheckpointError] = []
    for path in candidates:
        try:
            checkpoint = _checked(path, communicator)
        except CheckpointError as error:
            if resume != AUTO or not error.is_damage:
                raise
            damaged.append(error)
        else:
            return checkpoint, _put_aside(damaged, candidates, communicator)
    raise CheckpointError(
        f"all {len(candidates)} checkpoints in {checkpoint_dir} are damaged; the newest: {damaged[0].what}",
        where=damaged[0].where,
        remedy="leave out --resume and name a new --checkpoint-dir, to start from the beginning",
    )


def settle_if_any(resume: str | None, checkpoint_dir: Path | None, communicator: Communicator) -> str | None:
    """Collective. `resume`, but AUTO or None instead of IF_ANY. Rank 0 decides; a damaged checkpoint counts as one."""
    if resume != IF_ANY or checkpoint_dir is None:
        return resume
    found: str | None = None
    fault: OptionError | None = None
    if communicator.rank == 0:
        try:
            found = AUTO if _in_folder(checkpoint_dir) or folder.damaged_in(checkpoint_dir) else None
        except OptionError as error:
            fault = error
    found, fault = communicator.broadcast_object((found, fault))
    if fault is not None:
        raise fault
    return found


def nothing_in(checkpoint_dir: Path) -> OptionError:
    """The error for a folder without a checkpoint to resume from."""
    aside = folder.damaged_in(checkpoint_dir)
    damaged = f", only damaged ones: {', '.join(path.name for path in aside[-3:])}" if aside else ""
    return OptionError(
        f"there is no checkpoint in {checkpoint_dir} to resume from{damaged}",
        remedy="leave out --resume to start from the beginning, or name the right --checkpoint-dir",
    )


def _check_empty(checkpoint_dir: Path) -> None:
    if found := _in_folder(checkpoint_dir):
        raise OptionError(
            f"{checkpoint_dir} holds checkpoints of an earlier run, the newest {found[0].name}",
            remedy="add --resume to continue that run, or name another --checkpoint-dir",
        )


def _check_newest(step: int, checkpoint_dir: Path) -> None:
    """A folder holds one course of a run: nobody could tell the checkpoints of two apart."""
    later = [path for path in _in_folder(checkpoint_dir) if folder.step_of(path) > step]
    if later:
        raise OptionError(
            f"{checkpoint_dir} holds {len(later)} later checkpoints than that of step {step}, the last {later[0].name}",
            remedy="name another --checkpoint-dir for the new course of the run, or move the later ones away",
        )


def _candidates(resume: str, checkpoint_dir: Path | None) -> list[Path]:
    """Newest first, and only the one to take unless `resume` is AUTO. Raises OptionError if there is none."""
    if resume in (AUTO, NEWEST) and checkpoint_dir is not None:
        found = _in_folder(checkpoint_dir)
        if not found:
            raise nothing_in(checkpoint_dir)
        return found if resume == AUTO else found[:1]
    path = Path(resume)
    if not path.exists() and not path.is_symlink():
        in_dir = _in_folder(checkpoint_dir) if checkpoint_dir is not None else []
        newest = f"; the newest in {checkpoint_dir}: --resume {in_dir[0]}" if in_dir else ""
        guess = nearest(resume, (AUTO, IF_ANY, NEWEST))
        remedy = f"did you mean --resume {guess}?" if guess else "--resume auto, or --resume DIR/step-…"
        raise OptionError(f"there is no checkpoint {path}", remedy=remedy + newest)
    if (path / folder.MANIFEST_FILE).exists() or not path.is_dir():
        return [path]
    found = _in_folder(path)
    if not found:
        raise OptionError(f"{path} is no checkpoint and holds none", remedy="name one: --resume DIR/step-…")
    return found[:1]


def _in_folder(path: Path) -> list[Path]:
    try:
        return list(folder.checkpoints_in(path))
    except OSError as error:
        raise OptionError(f"{path} cannot be read: {error.strerror}", remedy="check its permissions") from error


def _checked(path: Path, communicator: Communicator) -> Checkpoint:
    """Collective. The checkpoint at `path`; raises the same error on all ranks if any of them finds a fault."""
    failed: CheckpointError | None = None
    checkpoint: Checkpoint | None = None
    try:
        checkpoint = read(path)
        check_content(checkpoint, list(checkpoint.manifest.shards)[communicator.rank :: communicator.world_size])
    except CheckpointError as error:
        failed = error
    own = None if failed is None else (failed.what, failed.where, failed.remedy, failed.is_damage)
    faults = [fault for fault in communicator.all_gather_object(own) if fault is not None]
    if faults or checkpoint is None:
        what, where, remedy, _ = faults[0]
        raise CheckpointError(what, where=where, remedy=remedy, is_damage=all(fault[3] for fault in faults)) from failed
    return checkpoint


def _put_aside(damaged: list[CheckpointError], candidates: list[Path], communicator: Communicator) -> list[str]:
    """Collective. Rename the damaged ones, the first of `candidates`; returns a notice for each."""
    notices = []
    for error, path in zip(damaged, candidates, strict=False):
        kept = ""
        if communicator.rank == 0:
            try:
                kept = f"; renamed to {folder.put_aside(path).name}"
            except OSError as failure:
                kept = f"; it cannot be renamed: {failure.strerror}"
        notices.append(f"{error.what}{kept}")
    communicator.barrier()  # no rank looks at the folder before
    return notices
