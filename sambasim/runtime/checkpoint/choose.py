"""Which checkpoint a run resumes from, and what differs between the two, and may change bits."""

import math
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path, PurePath
from typing import NamedTuple

from pydantic import JsonValue

from sambasim.errors import CheckpointError, OptionError, SambasimError
from sambasim.ir.types import SymbolKind
from sambasim.options.compile import ParallelOptions
from sambasim.options.given import as_table, changed_values, leaves
from sambasim.options.run import CheckpointOptions
from sambasim.options.schedules import WITH_END
from sambasim.options.training import TrainingOptions
from sambasim.pef import digest_of
from sambasim.pef.digests import PARTS
from sambasim.runtime.checkpoint import folder
from sambasim.runtime.checkpoint.content import EXACT_SYNC, Checkpoint, Manifest, describe, states_of
from sambasim.runtime.machine.communicator import Communicator
from sambasim.runtime.run.plan import plan
from sambasim.runtime.run.setup import Setup
from sambasim.runtime.run.training import Totals
from sambasim.units import first_of

_WITHOUT_EFFECT = ("data.workers", "data.prefetch_factor", "data.persistent_workers")
_LENGTH = ("training.epochs", "training.steps")
"""The length of a run changes no step of it, unless the learning rate schedule depends on it."""
_SAMPLE_ORDER = (
    "training.seed", "data.source", "data.args", "data.samples", "data.evaluation_fraction", "data.shuffle",
)  # fmt: skip
"""Options that determine which samples are left of an epoch."""
_SAMPLES = "samples of the data"
_RUN_FIELDS = {
    "replicas_and_chips": "replicas",
    "samples": _SAMPLES,
    "data": "identity of the data",
    "threads": "threads of a rank",
    "engine": "engine",
    "gradient_sync": "gradient sync",
    "torch": "torch",
    "cpu": "kind of CPU",
}
_MOST_OPTIONS = 4

_OF_MESH = frozenset({*ParallelOptions.model_fields, "opt_level", "arch", "num_tiles"})
"""Compile options that do not change the model: a PEF that differs in them goes on where the other was."""
_OF_RANKS = frozenset({"pipeline_stages", "schedule", "zero", "recompute"})
"""Those of them that change no bit: see "What is equal" in docs/parallelism.md."""
_OF_MICRO_STEPS = frozenset({"micro_batches", "training.batch_size", "training.accumulation_steps"})
"""Options that together change no bit if the micro-steps stay what they were."""


class Change(NamedTuple):
    """`name` was `before` and is `now`, which may change the bits of training if `alters_bits`."""

    name: str
    before: str
    now: str
    alters_bits: bool

    def __str__(self) -> str:
        return f"{self.name} = {self.now} (checkpoint: {self.before})"


def check_pef(saved: Manifest, now: Manifest, pef: Path, where: str) -> list[Change]:
    """The compile options that differ. Raises CheckpointError if they change the model: for another PEF, which it names
    if it is near `pef`, that of `now`."""
    if saved.pef.digest == now.pef.digest:
        if saved.tensors != now.tensors:
            what = f"the checkpoint names the PEF {now.pef.name}, but does not hold the tensors of that PEF"
            raise CheckpointError(what, where=where, remedy="use another checkpoint")
        return []
    compiled = changed_values(saved.pef.compile_options, now.pef.compile_options)
    compiled.pop("pef_name", None)
    is_near = compiled or saved.tensors.keys() != now.tensors.keys()  # which are those of optimizers
    if is_near and _is_same_model(saved, now) and all(name.split(".")[0] in _OF_MESH for name in compiled):
        counts = (f"{len(states_of(of))} parameters" for of in (saved, now))
        changed = [Change(name, *values, _alters_bits(name, saved, now)) for name, values in compiled.items()]
        return [*changed, *_changed([("optimizer states", *counts)])]
    named: list[dict[str, JsonValue]] = [{"name": of.pef.name, "batch size": of.pef.batch_size} for of in (saved, now)]
    others = changed_values(*named) | compiled
    reasons = [f"{name}: {before} → {after}" for name, (before, after) in others.items()]
    if not reasons:
        training = (
            change
            for change in _options(saved, now)
            if change.name.startswith(("loss", "optimizer", "ema", "training"))
        )
        defaults = ", ".join(f"{change.name}: {change.before} → {change.now}" for change in training)
        texts = PARTS | ({"training_defaults": defaults} if defaults else {})
        parts = [text for part, text in texts.items() if saved.pef.parts.get(part) != now.pef.parts.get(part)]
        reasons = [f"these differ: {', '.join(parts) or 'the version of sambasim'}"]
    right = "the PEF that it was trained with"
    for path in sorted({*pef.parent.glob("*.pef"), *pef.parent.parent.glob("*/*.pef")}):
        with suppress(SambasimError, OSError):  # of a file that is no PEF
            if digest_of(path) == saved.pef.digest:
                right = f"--pef {path}, {right}"
                break
    raise CheckpointError(
        f"the checkpoint is of another PEF than {now.pef.name}: {'; '.join(reasons)}",
        where=where,
        remedy=f"run {right}, or compile it as it was; or start from the beginning with another --checkpoint-dir",
    )


def _is_same_model(saved: Manifest, now: Manifest) -> bool:
    """Whether they have the same model, loss, kind of optimizer, and samples of a replica in a step, whatever their
    mesh, and whichever parameters are trained."""

    def facts(manifest: Manifest) -> list[object]:
        options = leaves(manifest.options)
        loss = [value for name, value in options.items() if name.startswith("loss")]
        tensors = manifest.tensors.items()
        wholes = {name: (one.kind, one.whole) for name, one in tensors if one.kind is not SymbolKind.OPTIMIZER_STATE}
        return [wholes, manifest.pef.operators_sha256, loss, options.get("optimizer.name"), _samples(manifest)]

    same_integers = saved.pef.integers_sha256 == now.pef.integers_sha256 or saved.pef.batch_size != now.pef.batch_size
    old, new = states_of(saved), states_of(now)
    same_states = all(old[name].keys() == new[name].keys() for name in old.keys() & new.keys())
    return same_integers and same_states and facts(saved) == facts(now)


def _alters_bits(name: str, saved: Manifest, now: Manifest) -> bool:
    """Whether the option called `name` decides more than which rank computes what, and when."""
    runs = saved.run, now.run
    if any(run.engine != "plain" or not run.gradient_sync.startswith(EXACT_SYNC) for run in runs):
        return True
    same_micro_steps = saved.pef.batch_size == now.pef.batch_size and _samples(saved) == _samples(now)
    return name not in _OF_RANKS and not (name in _OF_MICRO_STEPS and same_micro_steps)


def _samples(manifest: Manifest) -> int:
    """The samples of a replica in a step."""
    options = leaves(manifest.options)
    sizes = (options.get(f"training.{name}") for name in ("batch_size", "accumulation_steps"))
    return math.prod(size for size in sizes if isinstance(size, int))


def check_epoch(saved: Manifest, now: Manifest, differing: list[Change], where: str) -> None:
    """Raises OptionError if a change affects which samples are left of the epoch of `saved`."""
    before, after = (PurePath(str(leaves(manifest.options).get("data.source"))) for manifest in (saved, now))
    for change in differing if saved.position.used else ():
        if change.name == "data.source" and before.name == after.name:
            continue  # in another folder: enough to resume, not to promise bits
        if change.name == _SAMPLES or change.name.startswith(_SAMPLE_ORDER):
            raise OptionError(
                f"the checkpoint lies within epoch {saved.position.epoch + 1}, and {change}: "
                "which samples are left of that epoch is unknown",
                where=where,
                remedy="resume with the options that the checkpoint was written with, or from the end of an epoch",
            )


def check_exact(differing: list[Change], where: str) -> None:
    bits = [str(change) for change in differing if change.alters_bits]
    if bits:
        others = f"; and {len(bits) - _MOST_OPTIONS} more" if len(bits) > _MOST_OPTIONS else ""
        raise OptionError(
            "--exact: the run would not have the bits of an uninterrupted run: "
            f"{'; '.join(bits[:_MOST_OPTIONS])}{others}",
            where=where,
            remedy="resume with the options that the checkpoint was written with, or leave out --exact",
        )


def changes(saved: Manifest, now: Manifest) -> list[Change]:
    """What differs between the run that wrote a checkpoint and this one, of the same PEF."""
    pairs = [(name, *(str(getattr(one.run, field)) for one in (saved, now))) for field, name in _RUN_FIELDS.items()]
    return [*_changed(pairs), *_options(saved, now)]


def differences(a: Manifest, b: Manifest) -> list[Change]:
    """What differs between any two checkpoints: their PEFs, positions and runs."""
    pairs = [("PEF", *(f"{manifest.pef.name} {manifest.pef.digest[:12]}" for manifest in (a, b)))]
    pairs += [(name, *(str(getattr(one.position, name)) for one in (a, b))) for name in ("step", "epoch", "used")]
    return [*_changed(pairs), *changes(a, b)]


def _changed(pairs: list[tuple[str, ...]]) -> Iterator[Change]:
    return (Change(name, before, now, alters_bits=True) for name, before, now in pairs if before != now)


def _options(saved: Manifest, now: Manifest) -> Iterator[Change]:
    after = leaves(now.options)
    ends = after.get("training.schedule.name") in WITH_END and after.get("training.schedule.total_steps") is None
    moving = (name for name, value in after.items() if name.endswith(".schedule") and value in ("progress", *WITH_END))
    ends |= any(after[f"{name.removesuffix('schedule')}steps"] is None for name in moving)  # of arguments
    for name, values in changed_values(saved.options, now.options).items():
        is_harmless = name in _WITHOUT_EFFECT or name.startswith("evaluation.") or (name in _LENGTH and not ends)
        yield Change(name, *values, alters_bits=not is_harmless and _alters_bits(name, saved, now))


def _other_rates(saved: Manifest, now: Manifest, training: TrainingOptions) -> Iterator[str]:
    """A notice if the learning rates depend on the number of steps of the whole run, which has changed."""
    earlier = training.model_copy(update=as_table(saved.options.get("training")))
    before = plan(saved.run.samples, saved.run.replicas, earlier).steps
    steps, schedule = plan(now.run.samples, now.run.replicas, training).steps, training.schedule
    if schedule.name in WITH_END and schedule.total_steps is None and before != steps > saved.position.step:
        number = saved.position.step - saved.progress.skipped_steps * schedule.counts_updates
        was, factor = (f"{schedule.factor(number, length):.4g}" for length in (before, steps))
        what = f"the {schedule.name} schedule ends with the run, after {steps} steps and no longer {before}"
        remedy = f"--set training.schedule.total_steps={steps} from the first step on keeps one length"
        yield f"{what}: the factor of the learning rate is {factor} from here, not {was}; {remedy}"


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
            with communicator.alike():
                checkpoint = Checkpoint(path, communicator.rank, communicator.world_size)
        except CheckpointError as error:
            if resume != AUTO or not error.is_damage:
                raise
            damaged[path] = error
        else:
            notices = [error.what + _put_aside(path, communicator.rank) for path, error in damaged.items()]
            communicator.barrier()  # no rank reads the folder before
            return checkpoint, notices
    newest = damaged[candidates[0]]
    raise CheckpointError(
        f"all {len(candidates)} checkpoints in {checkpoint_dir} are damaged; the newest: {newest.what}",
        where=newest.where,
        remedy="leave out --resume and name a new --checkpoint-dir, to start from the beginning",
    )


def settle(asked: CheckpointOptions, communicator: Communicator) -> tuple[CheckpointOptions, list[str]]:
    """Collective. `asked` with AUTO or None for IF_ANY, and a notice if None. Rank 0 decides; damaged ones count.
    Raises OptionError if there is no folder to resume from."""
    resume, path = asked.resume, asked.dir
    if path is None or resume not in (AUTO, NEWEST, IF_ANY):
        return asked, []
    is_there, has_any = communicator.from_first(
        lambda: (path.exists(), bool(folder.checkpoints_in(path) or folder.damaged_in(path)))
    )
    if resume == IF_ANY and not has_any:
        return asked.model_copy(update={"resume": None}), [f"starts from the beginning: {path} holds no checkpoint"]
    if not is_there:
        raise _nothing_in(path)
    return asked.model_copy(update={"resume": AUTO if resume == IF_ANY else resume}), []


def _nothing_in(checkpoint_dir: Path) -> OptionError:
    aside = folder.damaged_in(checkpoint_dir)
    damaged = f", only damaged ones: {', '.join(path.name for path in aside[-3:])}" if aside else ""
    remedy = "leave out --resume to start from the beginning, or name the right --checkpoint-dir"
    return OptionError(f"there is no checkpoint in {checkpoint_dir} to resume from{damaged}", remedy=remedy)


def _candidates(resume: str, checkpoint_dir: Path | None) -> list[Path]:
    if resume in (AUTO, NEWEST) and checkpoint_dir is not None:
        if not (checkpoints := folder.checkpoints_in(checkpoint_dir)):
            raise _nothing_in(checkpoint_dir)
        return checkpoints if resume == AUTO else checkpoints[:1]
    path = Path(resume)
    if not path.exists() and not path.is_symlink():
        raise OptionError(f"there is no checkpoint {path}", remedy="--resume auto, or --resume DIR/step-…")
    if (path / folder.MANIFEST_FILE).exists() or not path.is_dir():
        return [path]
    if not (checkpoints := folder.checkpoints_in(path)):
        raise OptionError(f"{path} is no checkpoint and holds none", remedy="name one: --resume DIR/step-…")
    return checkpoints[:1]


def _put_aside(path: Path, rank: int) -> str:
    """Rename the damaged checkpoint, on rank 0; the end of the notice of it."""
    try:
        return f"; renamed to {folder.put_aside(path).name}" if rank == 0 else ""
    except OSError as failure:
        return f"; it cannot be renamed: {failure.strerror}"


class Resumption(NamedTuple):
    """What a run resumes from, and notices. `keeps_loss_scale`: the options of the loss scale are those of the run."""

    checkpoint: Checkpoint
    notices: tuple[str, ...]
    keeps_loss_scale: bool

    def carry_over(self, totals: Totals) -> None:
        begun, totals.progress = totals.progress, self.checkpoint.manifest.progress
        if totals.progress.loss_scale is None or not self.keeps_loss_scale:
            totals.progress.loss_scale = begun.loss_scale


def find(setup: Setup, samples: int) -> Resumption | None:
    """Collective. The checkpoint that the options ask to resume from, if any. Raises CheckpointError or OptionError."""
    options, communicator = setup.options.checkpoint, setup.communicator
    if options.resume is None:
        if options.dir is not None and (earlier := folder.checkpoints_in(options.dir)):
            what = f"{options.dir} holds checkpoints of an earlier run, the newest {earlier[0].name}"
            raise OptionError(what, remedy="add --resume to continue that run, or name another --checkpoint-dir")
        if options.dir is not None:
            communicator.barrier()  # no rank writes before all have checked
        return None
    checkpoint, notices = choose(options.resume, options.dir, communicator)
    saved, where, step = checkpoint.manifest, str(checkpoint.path), checkpoint.manifest.position.step
    # A folder holds one course of a run, because the checkpoints of two could not be distinguished.
    later = [path for path in folder.checkpoints_in(options.dir) if folder.step_of(path) > step] if options.dir else []
    if later:
        what = f"{options.dir} holds {len(later)} later checkpoints than that of step {step}, the last {later[0].name}"
        raise OptionError(what, remedy="name another --checkpoint-dir for the new course, or move the later ones away")
    if options.dir is not None:
        communicator.barrier()
    now = describe(setup, samples)
    differing = [*check_pef(saved, now, setup.path, where), *changes(saved, now)]
    check_epoch(saved, now, differing, where)
    taken, was, ema = step - saved.progress.skipped_steps, leaves(saved.options).get("ema.start"), setup.resolved.ema
    if ema is not None and isinstance(was, int) and ema.start <= taken < was:
        what = f"ema.start = {ema.start}, and the checkpoint, after {taken} steps, has no averages"
        raise OptionError(what, where=where, remedy=f"--set ema.start={taken + 1}, or more")
    if options.exact:
        check_exact(differing, where)
    notices = [*notices, f"resumes after step {step}, from {where}"]
    notices += [f"changed since the checkpoint: {change}" for change in differing]
    if new := sorted(states_of(now).keys() - states_of(saved).keys()):
        notices.append(f"the optimizer states of {first_of(new)} are new, and begin at zero; counts of steps go on")
    notices += _other_rates(saved, now, setup.resolved.training)
    if any(change.alters_bits for change in differing):
        notices.append("from here on, the bits may differ from those of an uninterrupted run")
    changes_scale = any(change.name.startswith("training.loss_scale") for change in differing)
    return Resumption(checkpoint, tuple(notices), keeps_loss_scale=not changes_scale)
