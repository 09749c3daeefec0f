"""What differs between the run that wrote a checkpoint and the run that resumes it, and what of that is an error."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import PurePath

from pydantic import JsonValue

from sambasim.errors import CheckpointError, OptionError
from sambasim.ir.types import SymbolKind
from sambasim.options.problems import show
from sambasim.runtime.checkpoint.manifest import Manifest

_WITHOUT_EFFECT = ("training.evaluate", "data.workers", "data.prefetch_factor", "data.persistent_workers")
"""Options that change no bit of training."""

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
"""Options that decide which samples an epoch that has begun still has to use."""

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
_OVERRIDABLE = frozenset({"data_source", "training_defaults"})
"""Parts of a PEF that options of a run override."""

_MOST_OPTIONS = 4
"""Options that one message lists."""


@dataclass(frozen=True, slots=True)
class Change:
    """`name` was `before` and is `now`. `alters_bits`: it may change the bits of training."""

    name: str
    before: str
    now: str
    alters_bits: bool

    def __str__(self) -> str:
        return f"{self.name} = {self.now} (checkpoint: {self.before})"


def check_pef(saved: Manifest, now: Manifest, where: str) -> None:
    """Raises CheckpointError if the two are of different PEFs, and says what differs."""
    if saved.pef.digest == now.pef.digest:
        if saved.tensors != now.tensors:
            what = f"the checkpoint names the PEF {now.pef.name}, but does not hold the tensors of that PEF"
            raise CheckpointError(what, where=where, remedy="use another checkpoint")
        return
    reasons = []
    if saved.pef.name != now.pef.name:
        reasons.append(f"its name is {saved.pef.name!r}")
    if saved.pef.batch_size != now.pef.batch_size:
        reasons.append(f"its batch size is {saved.pef.batch_size} and not {now.pef.batch_size}")
    ours, theirs = (_of_kind(manifest, SymbolKind.PARAMETER) for manifest in (now, saved))
    if different := [name for name in {**theirs, **ours} if ours.get(name) != theirs.get(name)]:
        reasons.append(f"{len(different)} parameters differ, such as {different[0]!r}")
    elif _of_kind(saved, SymbolKind.OPTIMIZER_STATE) != _of_kind(now, SymbolKind.OPTIMIZER_STATE):
        reasons.append("its optimizer has other states")
    parts = [part for part in _PEF_PARTS if getattr(saved.pef.parts, part) != getattr(now.pef.parts, part)]
    if not reasons:
        reasons.append(f"these differ: {', '.join(map(_PEF_PARTS.__getitem__, parts)) or 'the version of sambasim'}")
    if "training_defaults" in parts:
        reasons += [str(change) for change in _options(saved, now)][:_MOST_OPTIONS]
    override = ", and override options with run --set NAME=VALUE" if parts and _OVERRIDABLE.issuperset(parts) else ""
    raise CheckpointError(
        f"the checkpoint is of another PEF than {now.pef.name}: {'; '.join(reasons)}",
        where=where,
        remedy=f"run the PEF that it was trained with, or compile it as it was{override}; or start from the beginning "
        "with another --checkpoint-dir",
    )


def check_epoch(saved: Manifest, now: Manifest, found: list[Change], where: str) -> None:
    """Raises OptionError if a change `found` decides which samples are left of the epoch that `saved` is within."""
    if not saved.position.used:
        return
    for change in found:
        if change.name == _SOURCE and _has_moved(saved, now):
            continue
        if change.name == _SAMPLES or change.name.startswith(_SAMPLE_ORDER):
            raise OptionError(
                f"the checkpoint lies within epoch {saved.position.epoch + 1}, and {change}: "
                "which samples are left of that epoch is unknown",
                where=where,
                remedy="resume with the options that the checkpoint was written with, or from the end of an epoch",
            )


def check_exact(found: list[Change], where: str) -> None:
    """Raises OptionError if a change `found` may change the bits of training."""
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
    before, after = dict(_leaves(saved.options)), dict(_leaves(now.options))
    for name in {**before, **after}:
        if before.get(name) != after.get(name):
            alters = name not in _WITHOUT_EFFECT and (name not in _LENGTH or _schedule_needs_length(after))
            yield Change(name, _shown(before.get(name)), _shown(after.get(name)), alters_bits=alters)


def _has_moved(saved: Manifest, now: Manifest) -> bool:
    """Whether the data source has the same file name in another folder: enough to resume, not to promise bits."""
    before, after = (PurePath(str(dict(_leaves(one.options)).get(_SOURCE))) for one in (saved, now))
    return before.name == after.name


def _schedule_needs_length(options: Mapping[str, JsonValue]) -> bool:
    by_progress = options.get("training.schedule.name") in ("linear", "cosine")
    return by_progress and options.get("training.schedule.total_steps") is None


def _leaves(table: Mapping[str, JsonValue], prefix: str = "") -> Iterator[tuple[str, JsonValue]]:
    for name, value in table.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _shown(value: JsonValue) -> str:
    return "none" if value is None else show(value)


def _of_kind(manifest: Manifest, kind: SymbolKind) -> Mapping[str, object]:
    return {name: tensor for name, tensor in manifest.tensors.items() if tensor.kind is kind}
