"""Resuming a run: choosing the checkpoint, checking that it fits the run, and restoring the state of training."""

import math
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePath

from pydantic import JsonValue

from sambasim.errors import CheckpointError, OptionError, SambasimError
from sambasim.ir.types import SymbolKind
from sambasim.options.load import show
from sambasim.pef import peek
from sambasim.runtime.checkpoint import folder
from sambasim.runtime.checkpoint.format import (
    Checkpoint,
    Manifest,
    buffer_name,
    check_content,
    describe,
    pieces_of,
)
from sambasim.runtime.loss_scale import LossScale
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


_WITHOUT_EFFECT = ("training.evaluate", "data.workers", "data.prefetch_factor", "data.persistent_workers")

_SOURCE = "data.source"
_LENGTH = ("training.epochs", "training.steps")
"""The length of a run changes no step of it, unless the learning rate schedule depends on it."""

_SAMPLE_ORDER = (
    "data.source",
    "data.args",
    "data.samples",
    "data.evaluation_fraction",
    "data.shuffle",
    "training.seed",
)
"""Options that determine which samples are left of an epoch."""

_SAMPLES = "samples of the data"
_RUN_FIELDS = {
    "world_size": "replicas",
    "samples": _SAMPLES,
    "threads": "threads of a rank",
    "engine": "engine",
    "gradient_sync": "gradient sync",
    "torch": "torch",
    "cpu": "vector instructions",
}
_PEF_PARTS = {
    "graph": "its graph",
    "source": "source lines of its model",
    "weights": "its initial weights",
    "data_source": "its data source",
    "compile_options": "the options it was compiled with",
    "training_defaults": "its training defaults",
    "metadata": "its metadata",
}

_MOST_OPTIONS = 4


@dataclass(frozen=True, slots=True)
class Resumption:
    """The checkpoint that a run resumes from, its position, and notices for the user. `keeps_loss_scale`: its options
    for it are those of the run."""

    checkpoint: Checkpoint
    position: Position
    notices: tuple[str, ...]
    keeps_loss_scale: bool

    def carry_over(self, totals: Totals) -> None:
        progress = self.checkpoint.manifest.progress
        totals.samples = progress.samples
        totals.first_nonfinite_step = progress.first_nonfinite_step
        totals.skipped_steps = progress.skipped_steps
        if progress.loss_scale is not None and self.keeps_loss_scale:
            totals.loss_scale = LossScale(**progress.loss_scale.model_dump())
        if progress.loss_first is not None:
            totals.loss_first = progress.loss_first


def find(setup: Setup, samples: int) -> Resumption | None:
    """Collective. The checkpoint that the options ask to resume from; None for a run that starts from the beginning.
    Raises CheckpointError or OptionError."""
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
    found = [*check_pef(saved, now, setup.path, where), *changes(saved, now)]
    check_epoch(saved, now, found, where)
    if options.exact:
        check_exact(found, where)
    notices = [*notices, f"resumes after step {at.step}, from {where}"]
    notices += [f"changed since the checkpoint: {change}" for change in found]
    if any(change.alters_bits for change in found):
        notices.append("from here on, the bits may differ from those of an uninterrupted run")
    return Resumption(checkpoint, Position(at.step, at.epoch, at.used), tuple(notices), _same_scaling(saved, now))


def _same_scaling(saved: Manifest, now: Manifest) -> bool:
    was, wanted = saved.options["training"], now.options["training"]
    return isinstance(was, dict) and isinstance(wanted, dict) and was.get("loss_scale") == wanted.get("loss_scale")


def restore(setup: Setup, team: Team, checkpoint: Checkpoint) -> None:
    """Collective. Make `checkpoint` the state of `team`. A replica that it does not have gets the buffers of replica 0.
    A rank restores the parameters in its memory, and the optimizer states of the slices that it updates."""
    program = setup.program
    kept = {id(one.memory): one for one in team.replicas if one.memory.has_own_parameters}
    own = [(one.memory, one.rank) for one in kept.values()]
    own += [(one.transport.memory, one.rank) for one in team.first if one.transport.memory is not one.memory]
    for symbol in program.symbols.values():
        if symbol.kind is SymbolKind.PARAMETER:
            for memory, rank in own:
                if symbol.name not in memory.program.symbols:
                    continue
                at, flat = setup.mesh.coordinates(rank), memory.tensor(symbol.name).view(-1)
                checkpoint.read_part(symbol.name, symbol.cuts, at, 0, flat)
        elif symbol.kind is SymbolKind.BUFFER:
            for one in team.replicas:
                if symbol.name not in one.memory.program.symbols:
                    continue
                saved = one.replica if one.replica < checkpoint.manifest.run.world_size else 0
                at, flat = setup.mesh.coordinates(one.rank), one.memory.tensor(symbol.name).view(-1)
                checkpoint.read_part(symbol.name, symbol.cuts, at, 0, flat, prefix=buffer_name(saved, ""))
    for one in team.first:
        transport, at = one.transport, setup.mesh.coordinates(one.rank)
        for piece in pieces_of(one.memory.program, transport.memory, transport.kept, at):
            if piece.kind is SymbolKind.OPTIMIZER_STATE:
                cuts = program.symbols[piece.symbol].cuts
                checkpoint.read_part(piece.symbol, cuts, at, piece.start, piece.data)
    setup.communicator.node_barrier()  # another rank may have restored memory that this one reads


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


def _check_empty(checkpoint_dir: Path) -> None:
    if found := _in_folder(checkpoint_dir):
        raise OptionError(
            f"{checkpoint_dir} holds checkpoints of an earlier run, the newest {found[0].name}",
            remedy="add --resume to continue that run, or name another --checkpoint-dir",
        )


def _check_newest(step: int, checkpoint_dir: Path) -> None:
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


@dataclass(frozen=True, slots=True)
class Change:
    """`name` was `before` and is `now`, which may change the bits of training if `alters_bits`."""

    name: str
    before: str
    now: str
    alters_bits: bool

    def __str__(self) -> str:
        return f"{self.name} = {self.now} (checkpoint: {self.before})"


_OF_MESH = frozenset(
    {
        *("data_parallel", "world_size", "tensor_parallel", "n_chips", "pipeline_stages", "micro_batches", "schedule"),
        *("tensor_plan", "zero", "recompute", "gradient_groups", "opt_level", "arch", "num_tiles"),
    }
)
"""Compile options that do not change the model: a PEF that differs in them goes on where the other was."""


def check_pef(saved: Manifest, now: Manifest, pef: Path, where: str) -> list[Change]:
    """The compile options that differ, where they do not change the model. Raises CheckpointError if the two are of
    different PEFs otherwise, and says what differs. `pef` is the file of `now`: if that of `saved` is near it, the
    error names it."""
    if saved.pef.digest == now.pef.digest:
        if saved.tensors != now.tensors:
            what = f"the checkpoint names the PEF {now.pef.name}, but does not hold the tensors of that PEF"
            raise CheckpointError(what, where=where, remedy="use another checkpoint")
        return []
    if found := _other_mesh(saved, now):
        return found
    reasons = []
    if saved.pef.name != now.pef.name:
        reasons.append(f"its name is {saved.pef.name!r}")
    if saved.pef.batch_size != now.pef.batch_size:
        reasons.append(f"its batch size is {saved.pef.batch_size} and not {now.pef.batch_size}")
    right = "the PEF that it was trained with"
    for path in sorted({*pef.parent.glob("*.pef"), *pef.parent.parent.glob("*/*.pef")}):
        with suppress(SambasimError, OSError):  # of a file that is no PEF
            if peek(path).digest == saved.pef.digest:
                right = f"--pef {path}, {right}"
                break
    before, after = saved.pef.compile_options, now.pef.compile_options
    reasons += [f"{name}: {old} → {new}" for name, old, new in _compile_options(before, after)]
    parts = [
        text for part, text in _PEF_PARTS.items() if getattr(saved.pef.parts, part) != getattr(now.pef.parts, part)
    ]
    if not reasons:
        reasons.append(f"these differ: {', '.join(parts) or 'the version of sambasim'}")
    raise CheckpointError(
        f"the checkpoint is of another PEF than {now.pef.name}: {'; '.join(reasons)}",
        where=where,
        remedy=f"run {right}, or compile it as it was; or start from the beginning with another --checkpoint-dir",
    )


def _other_mesh(saved: Manifest, now: Manifest) -> list[Change]:
    """The compile options that differ, if they do not change the model, its loss, its optimizer, or how many samples a
    replica takes in a step."""
    differ = _compile_options(saved.pef.compile_options, now.pef.compile_options)
    same_tensors = {name: one.whole for name, one in saved.tensors.items()} == {
        name: one.whole for name, one in now.tensors.items()
    }
    same_model = same_tensors and saved.pef.operators_sha256 == now.pef.operators_sha256
    if (
        not same_model
        or _fixed(saved) != _fixed(now)
        or any(name.split(".")[0] not in _OF_MESH for name, _, _ in differ)
    ):
        return []
    return [Change(name, before, after, alters_bits=True) for name, before, after in differ]


def _fixed(manifest: Manifest) -> list[object]:
    """What another mesh must not change: the loss, the optimizer, and the samples of a replica in a step."""
    options = dict(leaves(manifest.options))
    loss = [value for name, value in options.items() if name.startswith("loss")]
    sizes = [options.get(f"training.{name}") for name in ("batch_size", "accumulation_steps")]
    samples = math.prod(size for size in sizes if isinstance(size, int))
    return [loss, options.get("optimizer.name"), samples]


def _compile_options(before: Mapping[str, JsonValue], now: Mapping[str, JsonValue]) -> list[tuple[str, str, str]]:
    """The options with other values, before and now; the name of a PEF is none of them."""
    old, new = dict(leaves(before)), dict(leaves(now))
    names = [name for name in {**old, **new} if old.get(name) != new.get(name) and name != "pef_name"]
    return [(name, _shown(old.get(name)), _shown(new.get(name))) for name in names]


def check_epoch(saved: Manifest, now: Manifest, found: list[Change], where: str) -> None:
    """Raises OptionError if a change `found` affects which samples are left of the epoch of `saved`."""
    if not saved.position.used:
        return
    before, after = (PurePath(str(dict(leaves(one.options)).get(_SOURCE))) for one in (saved, now))
    for change in found:
        if change.name == _SOURCE and before.name == after.name:
            continue  # in another folder: enough to resume, not to promise bits
        if change.name == _SAMPLES or change.name.startswith(_SAMPLE_ORDER):
            raise OptionError(
                f"the checkpoint lies within epoch {saved.position.epoch + 1}, and {change}: "
                "which samples are left of that epoch is unknown",
                where=where,
                remedy="resume with the options that the checkpoint was written with, or from the end of an epoch",
            )


def check_exact(found: list[Change], where: str) -> None:
    bits = [change for change in found if change.alters_bits]
    if bits:
        more = f"; and {len(bits) - _MOST_OPTIONS} more" if len(bits) > _MOST_OPTIONS else ""
        raise OptionError(
            "--exact: the run would not have the bits of an uninterrupted run: "
            f"{'; '.join(map(str, bits[:_MOST_OPTIONS]))}{more}",
            where=where,
            remedy="resume with the options that the checkpoint was written with, or leave out --exact",
        )


def changes(saved: Manifest, now: Manifest) -> list[Change]:
    """What differs between the run that wrote a checkpoint and this one, of the same PEF."""
    pairs = [(name, getattr(saved.run, field), getattr(now.run, field)) for field, name in _RUN_FIELDS.items()]
    run = [Change(name, str(before), str(after), alters_bits=True) for name, before, after in pairs if before != after]
    return [*run, *_options(saved, now)]


def differences(a: Manifest, b: Manifest) -> list[Change]:
    """What differs between any two checkpoints: their PEFs, positions and runs."""
    pairs = [("PEF", *(f"{one.pef.name} {one.pef.digest[:12]}" for one in (a, b)))]
    pairs += [(name, *(str(getattr(one.position, name)) for one in (a, b))) for name in ("step", "epoch", "used")]
    found = [Change(name, before, now, alters_bits=True) for name, before, now in pairs if before != now]
    return [*found, *changes(a, b)]


def _options(saved: Manifest, now: Manifest) -> Iterator[Change]:
    before, after = dict(leaves(saved.options)), dict(leaves(now.options))
    by_progress = after.get("training.schedule.name") in ("linear", "cosine")
    needs_length = by_progress and after.get("training.schedule.total_steps") is None
    for name in {**before, **after}:
        if before.get(name) != after.get(name):
            alters = name not in _WITHOUT_EFFECT and (name not in _LENGTH or needs_length)
            yield Change(name, _shown(before.get(name)), _shown(after.get(name)), alters_bits=alters)


def leaves(table: Mapping[str, JsonValue], prefix: str = "") -> Iterator[tuple[str, JsonValue]]:
    """The values in nested tables, by dotted name."""
    for name, value in table.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _shown(value: JsonValue) -> str:
    return "none" if value is None else show(value)
