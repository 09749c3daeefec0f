"""Which checkpoint a run goes on from: the newest of its folder, the newest that is whole, or the one that is named."""

from dataclasses import dataclass, field
from pathlib import Path

from sambasim.errors import CheckpointError, OptionError
from sambasim.options.problems import nearest
from sambasim.runtime.checkpoint import folder
from sambasim.runtime.checkpoint.reader import Checkpoint, check_content, read
from sambasim.runtime.checkpoint.rules import MANIFEST_FILE
from sambasim.runtime.ranks import Communicator

AUTO = "auto"
NEWEST = "newest"
"""What `--resume` stands for without a value."""
IF_ANY = "if-any"
"""AUTO, or to begin anew: for a job script that says the same each time it is started."""


@dataclass(slots=True)
class Chosen:
    """The checkpoint that is taken, and what is to be told of those that were not."""

    checkpoint: Checkpoint
    notices: list[str] = field(default_factory=list)


def choose(resume: str, checkpoint_dir: Path | None, communicator: Communicator) -> Chosen:
    """Collective. The checkpoint to go on from, every byte of it checked, the ranks sharing the work.

    resume: AUTO, NEWEST, or the path of a checkpoint or of a folder of them
    checkpoint_dir: where this run writes its own

    Raises CheckpointError if the one that is named, or the newest, is damaged, and under AUTO if all are; OptionError
    if there is none.
    """
    candidates = _candidates(resume, checkpoint_dir)
    first = communicator.broadcast_object(candidates)
    if first != candidates:
        raise OptionError(
            f"rank {communicator.rank} sees other checkpoints than rank 0",
            where=f"host {communicator.host_name}",
            remedy="--checkpoint-dir must be a folder that all hosts share",
        )
    if resume != AUTO:
        return Chosen(_whole(candidates[0], communicator))
    damaged: list[CheckpointError] = []
    for path in candidates:
        try:
            return Chosen(_whole(path, communicator), _put_aside(damaged, candidates, communicator))
        except CheckpointError as error:
            if not error.is_damage:
                raise
            damaged.append(error)
    raise CheckpointError(
        f"none of the {len(candidates)} checkpoints in {checkpoint_dir} is whole; the newest: {damaged[0].what}",
        where=damaged[0].where,
        remedy="leave out --resume and name a new --checkpoint-dir, to begin anew",
    )


def settled(resume: str | None, checkpoint_dir: Path | None, communicator: Communicator) -> str | None:
    """Collective. `resume`, with what IF_ANY stands for in its place: AUTO, or None where rank 0 sees no checkpoint in
    the folder, and none that was put aside."""
    if resume != IF_ANY or checkpoint_dir is None:
        return resume
    found: str | None = None
    fault: OptionError | None = None
    if communicator.rank == 0:
        try:
            found = AUTO if _in_folder(checkpoint_dir) or folder.put_aside_in(checkpoint_dir) else None
        except OptionError as error:
            fault = error
    found, fault = communicator.broadcast_object((found, fault))
    if fault is not None:
        raise fault
    return found


def nothing_in(checkpoint_dir: Path) -> OptionError:
    """The error for a folder from which a run cannot go on."""
    aside = folder.put_aside_in(checkpoint_dir)
    damaged = f", but damaged ones: {', '.join(path.name for path in aside[-3:])}" if aside else ""
    return OptionError(
        f"there is no checkpoint in {checkpoint_dir} to resume from{damaged}",
        remedy="leave out --resume to begin anew, or name the right --checkpoint-dir",
    )


def check_new(checkpoint_dir: Path) -> None:
    """Raises OptionError if a run that is to begin anew would write among the checkpoints of another."""
    there = folder.checkpoints_in(checkpoint_dir)
    if there:
        raise OptionError(
            f"{checkpoint_dir} holds checkpoints of an earlier run, the newest {there[0].name}",
            remedy="add --resume to go on from it, or name another --checkpoint-dir",
        )


def check_last(chosen: Checkpoint, checkpoint_dir: Path) -> None:
    """Raises OptionError if there are later checkpoints in the folder than the one that is gone on from: of two courses
    of one run, nobody could tell which is which."""
    step = chosen.manifest.position.step
    later = [path for path in folder.checkpoints_in(checkpoint_dir) if folder.step_of(path) > step]
    if later:
        raise OptionError(
            f"{checkpoint_dir} holds {len(later)} later checkpoints than that of step {step}, the last {later[0].name}",
            remedy="name another --checkpoint-dir for the new course of the run, or move the later ones away",
        )


def _candidates(resume: str, checkpoint_dir: Path | None) -> list[Path]:
    """The newest first. Raises OptionError if there is none."""
    if resume in (AUTO, NEWEST):
        if checkpoint_dir is None:
            raise OptionError(
                "--resume does not know where the checkpoints are", remedy="add --checkpoint-dir DIR, or --resume PATH"
            )
        found = _in_folder(checkpoint_dir)
        if not found:
            raise nothing_in(checkpoint_dir)
        return found
    path = Path(resume)
    if not path.exists() and not path.is_symlink():
        there = _in_folder(checkpoint_dir) if checkpoint_dir is not None else []
        named = f"; the newest in {checkpoint_dir}: --resume {there[0]}" if there else ""
        guess = nearest(resume, (AUTO, IF_ANY, NEWEST))
        remedy = f"did you mean --resume {guess}?" if guess else "--resume auto, or --resume DIR/step-…"
        raise OptionError(f"there is no checkpoint {path}", remedy=remedy + named)
    if (path / MANIFEST_FILE).exists() or not path.is_dir():
        return [path]
    found = _in_folder(path)
    if not found:
        raise OptionError(f"{path} is no checkpoint and holds none", remedy="name one: --resume DIR/step-…")
    return found[:1]


def _in_folder(path: Path) -> list[Path]:
    try:
        return list(folder.checkpoints_in(path))
    except OSError as error:
        raise OptionError(f"{path} cannot be read: {error.strerror}", remedy="look at its permissions") from error


def _whole(path: Path, communicator: Communicator) -> Checkpoint:
    """Collective. The checkpoint at `path`; raises the same on all ranks if any of them finds something wrong."""
    failed: CheckpointError | None = None
    checkpoint: Checkpoint | None = None
    try:
        checkpoint = read(path)
        check_content(checkpoint, range(communicator.rank, len(checkpoint.manifest.shards), communicator.world_size))
    except CheckpointError as error:
        failed = error
    told = None if failed is None else (failed.what, failed.where, failed.remedy, failed.is_damage)
    faults = [fault for fault in communicator.all_gather_object(told) if fault is not None]
    if faults or checkpoint is None:
        what, where, remedy, _ = faults[0]
        raise CheckpointError(what, where=where, remedy=remedy, is_damage=all(fault[3] for fault in faults)) from failed
    return checkpoint


def _put_aside(damaged: list[CheckpointError], candidates: list[Path], communicator: Communicator) -> list[str]:
    """Rename the damaged ones, the first of `candidates`, so that they are taken for none any more."""
    notices = []
    for error, path in zip(damaged, candidates, strict=False):
        kept = ""
        if communicator.rank == 0:
            try:
                kept = f"; it is now {folder.put_aside(path).name}"
            except OSError as failure:
                kept = f"; it cannot be renamed: {failure.strerror}"
        notices.append(f"{error.what}{kept}")
    communicator.barrier()  # nobody looks at the folder before that
    return notices
