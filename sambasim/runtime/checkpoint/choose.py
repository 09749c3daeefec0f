"""Which checkpoint a run resumes from, and that the folder of checkpoints fits the run."""

from pathlib import Path

from sambasim.errors import CheckpointError, OptionError
from sambasim.runtime.checkpoint import folder
from sambasim.runtime.checkpoint.content import Checkpoint, check_content
from sambasim.runtime.ranks import Communicator

AUTO = "auto"
"""`--resume auto`: the newest checkpoint that is undamaged."""
NEWEST = "newest"
"""`--resume` without a value: the newest checkpoint, which must be undamaged."""
IF_ANY = "if-any"
"""AUTO, or from the beginning if there is no checkpoint: for a job script that is started again and again."""


def choose(resume: str, checkpoint_dir: Path | None, communicator: Communicator) -> tuple[Checkpoint, list[str]]:
    """Collective. The checkpoint to resume from, checked by all ranks together, and notices about those that were
    passed over. `resume`: AUTO, NEWEST, or the path of a checkpoint or of a folder of them. Raises CheckpointError for
    damage, OptionError if there is none."""
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
    found: bool | OptionError = False
    if communicator.rank == 0:
        try:
            found = bool(_in_folder(checkpoint_dir) or folder.damaged_in(checkpoint_dir))
        except OptionError as error:
            found = error  # all ranks raise it
    agreed = communicator.broadcast_object(found)
    if isinstance(agreed, OptionError):
        raise agreed
    return AUTO if agreed else None


def nothing_in(checkpoint_dir: Path) -> OptionError:
    aside = folder.damaged_in(checkpoint_dir)
    damaged = f", only damaged ones: {', '.join(path.name for path in aside[-3:])}" if aside else ""
    return OptionError(
        f"there is no checkpoint in {checkpoint_dir} to resume from{damaged}",
        remedy="leave out --resume to start from the beginning, or name the right --checkpoint-dir",
    )


def check_empty(checkpoint_dir: Path) -> None:
    if found := _in_folder(checkpoint_dir):
        raise OptionError(
            f"{checkpoint_dir} holds checkpoints of an earlier run, the newest {found[0].name}",
            remedy="add --resume to continue that run, or name another --checkpoint-dir",
        )


def check_newest(step: int, checkpoint_dir: Path) -> None:
    """A folder holds one course of a run, because the checkpoints of two could not be distinguished."""
    later = [path for path in _in_folder(checkpoint_dir) if folder.step_of(path) > step]
    if later:
        raise OptionError(
            f"{checkpoint_dir} holds {len(later)} later checkpoints than that of step {step}, the last {later[0].name}",
            remedy="name another --checkpoint-dir for the new course of the run, or move the later ones away",
        )


def _candidates(resume: str, checkpoint_dir: Path | None) -> list[Path]:
    if resume in (AUTO, NEWEST) and checkpoint_dir is not None:
        found = _in_folder(checkpoint_dir)
        if not found:
            raise nothing_in(checkpoint_dir)
        return found if resume == AUTO else found[:1]
    path = Path(resume)
    if not path.exists() and not path.is_symlink():
        raise OptionError(f"there is no checkpoint {path}", remedy="--resume auto, or --resume DIR/step-…")
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
    """Collective. The checkpoint at `path`, every byte of it checked. Raises CheckpointError, the same on all ranks."""
    own: CheckpointError | None = None
    try:
        checkpoint = Checkpoint(path)
        check_content(checkpoint, list(checkpoint.manifest.shards)[communicator.rank :: communicator.world_size])
    except CheckpointError as error:
        own = error
    faults = [fault for fault in communicator.all_gather_object(own) if fault is not None]
    if not faults:
        return checkpoint
    faults[0].is_damage = all(fault.is_damage for fault in faults)
    raise faults[0]


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
    communicator.barrier()  # no rank reads the folder before
    return notices
