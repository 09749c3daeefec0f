"""What is otherwise in the run that goes on from a checkpoint than in the run that wrote it."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import PurePath

from pydantic import JsonValue

from sambasim.errors import CheckpointError, OptionError
from sambasim.options.problems import show
from sambasim.runtime.checkpoint.manifest import Manifest
from sambasim.runtime.checkpoint.rules import ANOTHER

_NO_BITS = ("training.evaluate", "data.workers", "data.prefetch_factor", "data.persistent_workers")
"""Options that change no bit of what is trained."""

_SOURCE = "data.source"

_LENGTH = ("training.epochs", "training.steps")
"""How long a run trains changes no step of it, unless its schedule goes by that."""

_WHOLE_EPOCH = ("data.source", "data.args", "data.samples", "data.evaluation_fraction", "data.shuffle", "training.seed")
"""What may not change in the midst of an epoch: which samples are left of it would not be known."""

_PARTS = {
    "graph": "its graph",
    "source": "source lines of its model",
    "weights": "its initial weights",
    "data_source": "its data source",
    "compile_options": "the options it was compiled with",
    "training_defaults": "its defaults of training",
    "metadata": "its metadata",
}
"""The parts of a PEF, in words."""

_MOST_OPTIONS = 4
"""Options that are named."""

_OF_RUNS = frozenset({"data_source", "training_defaults"})
"""Parts that a run can be told otherwise."""


@dataclass(frozen=True, slots=True)
class Change:
    """`name` was `before`, and is `now`. `alters_bits` says whether that can be seen in what is trained."""

    name: str
    before: str
    now: str
    alters_bits: bool

    def __str__(self) -> str:
        return f"{self.name} = {self.now} (checkpoint: {self.before})"


def check_pef(saved: Manifest, now: Manifest, where: str) -> None:
    """Raises CheckpointError if they are of two PEFs, with what differs; or if what it says of this one is not so."""
    if saved.pef.digest == now.pef.digest:
        if (saved.groups, saved.buffers, saved.untrained) != (now.groups, now.buffers, now.untrained):
            raise CheckpointError(
                f"the checkpoint says that it is of the PEF {now.pef.name}, and holds other tensors than that has",
                where=where,
                remedy=ANOTHER,
            )
        return
    reasons = []
    if saved.pef.name != now.pef.name:
        reasons.append(f"that one is called {saved.pef.name[:80]!r}")
    if saved.pef.batch_size != now.pef.batch_size:
        reasons.append(f"its batch is {saved.pef.batch_size} and not {now.pef.batch_size}")
    ours, theirs = _parameters(now), _parameters(saved)
    apart = [name for name in {**theirs, **ours} if ours.get(name) != theirs.get(name)]
    if apart:
        reasons.append(f"parameters differ: {len(apart)} of them, {apart[0][:80]!r} for one")
    elif {group.states for group in saved.groups} != {group.states for group in now.groups}:
        reasons.append("its optimizer keeps other state")
    parts = [part for part in _PARTS if getattr(saved.pef.parts, part) != getattr(now.pef.parts, part)]
    if not reasons:
        reasons.append(f"what differs: {', '.join(map(_PARTS.__getitem__, parts)) or 'what wrote it'}")
    if "training_defaults" in parts:
        reasons += [str(change) for change in _of_options(saved, now)][:_MOST_OPTIONS]
    of_run = ", and tell run what is to be otherwise: --set NAME=VALUE" if parts and _OF_RUNS.issuperset(parts) else ""
    raise CheckpointError(
        f"the checkpoint is of another PEF than {now.pef.name}: {'; '.join(reasons)}",
        where=where,
        remedy=f"name the PEF that it was trained with, or compile it as it was{of_run}; or begin anew: another "
        "--checkpoint-dir",
    )


def changes(saved: Manifest, now: Manifest) -> list[Change]:
    """What differs between the run that wrote a checkpoint and this one, the weightiest first."""
    return [*_of_run(saved, now), *_of_options(saved, now)]


def differences(a: Manifest, b: Manifest) -> list[Change]:
    """The same of any two checkpoints, with their PEFs and positions: `before` is of `a`, and `now` of `b`."""
    of_pef = [] if a.pef == b.pef else [Change("PEF", _pef(a), _pef(b), alters_bits=True)]
    of_position = [
        Change(field, str(getattr(a.position, field)), str(getattr(b.position, field)), alters_bits=True)
        for field in ("step", "epoch", "used")
        if getattr(a.position, field) != getattr(b.position, field)
    ]
    return [*of_pef, *of_position, *changes(a, b)]


def _pef(manifest: Manifest) -> str:
    return f"{manifest.pef.name[:80]} {manifest.pef.digest[:12]}"


def check_epoch(saved: Manifest, now: Manifest, found: list[Change], where: str) -> None:
    """Raises OptionError if something `found` decides which samples are left of an epoch that was begun."""
    if not saved.position.used:
        return
    for change in found:
        if change.name == _SOURCE and _has_moved(saved, now):
            continue
        if change.name == "samples of the data" or change.name.startswith(_WHOLE_EPOCH):
            raise OptionError(
                f"the checkpoint lies in the midst of epoch {saved.position.epoch + 1}, and {change}: "
                "which samples are left of the epoch cannot be told",
                where=where,
                remedy="resume with what the checkpoint was written with, or from one that ends an epoch",
            )


def check_exact(found: list[Change], where: str) -> None:
    """Raises OptionError if the bits would not be those of a run that was never interrupted."""
    bits = [change for change in found if change.alters_bits]
    if bits:
        raise OptionError(
            f"--exact: the run would not go on with the bits it would have had: {'; '.join(map(str, bits[:4]))}"
            + (f"; and {len(bits) - 4} more" if len(bits) > 4 else ""),
            where=where,
            remedy="run with what the checkpoint was written with, or leave out --exact",
        )


def _of_run(saved: Manifest, now: Manifest) -> Iterator[Change]:
    names = {
        "world_size": "replicas",
        "samples": "samples of the data",
        "threads": "threads of a rank",
        "engine": "engine",
        "gradient_sync": "gradient sync",
        "torch": "torch",
        "cpu": "vector instructions",
    }
    for field, name in names.items():
        before, after = getattr(saved.run, field), getattr(now.run, field)
        if before != after:
            yield Change(name, str(before)[:80], str(after), alters_bits=True)


def _of_options(saved: Manifest, now: Manifest) -> Iterator[Change]:
    before, after = dict(_leaves(saved.options)), dict(_leaves(now.options))
    for name in {**before, **after}:
        if before.get(name) != after.get(name):
            seen = name not in _NO_BITS and (name not in _LENGTH or _goes_by_length(after))
            yield Change(name, _told(before.get(name)), _told(after.get(name)), alters_bits=seen)


def _has_moved(saved: Manifest, now: Manifest) -> bool:
    """Whether the data sources are one file, or one function of one file, in two folders: as far as a name can tell.
    That is enough to go on, and not to promise bits."""
    before, after = (dict(_leaves(manifest.options)).get(_SOURCE) for manifest in (saved, now))
    return PurePath(str(before)).name == PurePath(str(after)).name


def _goes_by_length(options: Mapping[str, JsonValue]) -> bool:
    """Whether the schedule depends on how long the run is."""
    by_progress = options.get("training.schedule.name") in ("linear", "cosine")
    return by_progress and options.get("training.schedule.total_steps") is None


def _told(value: JsonValue) -> str:
    return "none" if value is None else show(value)[:80]


def _leaves(table: Mapping[str, JsonValue], prefix: str = "") -> Iterator[tuple[str, JsonValue]]:
    for name, value in table.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _parameters(manifest: Manifest) -> Mapping[str, object]:
    """By name: what is known of each parameter."""
    trained = {m.parameter: (group.dtype, m.numel) for group in manifest.groups for m in group.members}
    return trained | {one.name: (one.dtype, one.shape) for one in manifest.untrained}
