"""What differs between a checkpoint and the run that resumes it: what may differ, and what would change bits."""

import math
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path, PurePath
from typing import NamedTuple

from pydantic import JsonValue

from sambasim.errors import CheckpointError, OptionError, SambasimError
from sambasim.options.base import show
from sambasim.options.given import leaves
from sambasim.pef import peek
from sambasim.runtime.checkpoint.content import EXACT_SYNC, Manifest

_WITHOUT_EFFECT = ("training.evaluate", "data.workers", "data.prefetch_factor", "data.persistent_workers")
_SOURCE = "data.source"
_LENGTH = ("training.epochs", "training.steps")
"""The length of a run changes no step of it, unless the learning rate schedule depends on it."""
_SAMPLE_ORDER = (
    *(f"data.{name}" for name in ("source", "args", "samples", "evaluation_fraction", "shuffle")),
    "training.seed",
)
"""Options that determine which samples are left of an epoch."""
_SAMPLES = "samples of the data"
_RUN_FIELDS = {
    "replicas_and_chips": "replicas",
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

_OF_MESH = frozenset(
    {
        *("data_parallel", "world_size", "tensor_parallel", "n_chips", "pipeline_stages", "micro_batches", "schedule"),
        *("tensor_plan", "zero", "recompute", "gradient_groups", "opt_level", "arch", "num_tiles"),
    }
)
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
    compiled = _differing(saved.pef.compile_options, now.pef.compile_options)
    compiled.pop("pef_name", None)
    if compiled and _is_same_model(saved, now) and all(name.split(".")[0] in _OF_MESH for name in compiled):
        return [Change(name, *values, _alters_bits(name, saved, now)) for name, values in compiled.items()]
    reasons = []
    if saved.pef.name != now.pef.name:
        reasons.append(f"its name is {saved.pef.name!r}")
    if saved.pef.batch_size != now.pef.batch_size:
        reasons.append(f"its batch size is {saved.pef.batch_size} and not {now.pef.batch_size}")
    reasons += [f"{name}: {before} → {after}" for name, (before, after) in compiled.items()]
    if not reasons:
        training = (
            change for change in _options(saved, now) if change.name.startswith(("loss", "optimizer", "training"))
        )
        defaults = ", ".join(f"{change.name}: {change.before} → {change.now}" for change in training)
        texts = _PEF_PARTS | ({"training_defaults": defaults} if defaults else {})
        parts = [text for part, text in texts.items() if getattr(saved.pef.parts, part) != getattr(now.pef.parts, part)]
        reasons = [f"these differ: {', '.join(parts) or 'the version of sambasim'}"]
    right = "the PEF that it was trained with"
    for path in sorted({*pef.parent.glob("*.pef"), *pef.parent.parent.glob("*/*.pef")}):
        with suppress(SambasimError, OSError):  # of a file that is no PEF
            if peek(path).digest == saved.pef.digest:
                right = f"--pef {path}, {right}"
                break
    raise CheckpointError(
        f"the checkpoint is of another PEF than {now.pef.name}: {'; '.join(reasons)}",
        where=where,
        remedy=f"run {right}, or compile it as it was; or start from the beginning with another --checkpoint-dir",
    )


def _is_same_model(saved: Manifest, now: Manifest) -> bool:
    """Whether they have the same model, loss, optimizer, and samples of a replica in a step, whatever their mesh."""

    def facts(manifest: Manifest) -> list[object]:
        options = leaves(manifest.options)
        loss = [value for name, value in options.items() if name.startswith("loss")]
        wholes = {name: tensor.whole for name, tensor in manifest.tensors.items()}
        return [wholes, manifest.pef.operators_sha256, loss, options.get("optimizer.name"), _samples(manifest)]

    same_integers = saved.pef.integers_sha256 == now.pef.integers_sha256 or saved.pef.batch_size != now.pef.batch_size
    return same_integers and facts(saved) == facts(now)


def _alters_bits(name: str, saved: Manifest, now: Manifest) -> bool:
    """Whether the option called `name` decides more than which rank computes what, and when."""
    if any(manifest.run.engine != "plain" or manifest.run.gradient_sync != EXACT_SYNC for manifest in (saved, now)):
        return True
    same_micro_steps = saved.pef.batch_size == now.pef.batch_size and _samples(saved) == _samples(now)
    return name not in _OF_RANKS and not (name in _OF_MICRO_STEPS and same_micro_steps)


def _samples(manifest: Manifest) -> int:
    """The samples of a replica in a step."""
    options = leaves(manifest.options)
    sizes = (options.get(f"training.{name}") for name in ("batch_size", "accumulation_steps"))
    return math.prod(size for size in sizes if isinstance(size, int))


def _differing(before: Mapping[str, JsonValue], now: Mapping[str, JsonValue]) -> dict[str, tuple[str, str]]:
    """The options with other values, as text, before and now."""
    old, new = leaves(before), leaves(now)

    def shown(value: object) -> str:
        return "none" if value is None else show(value)

    names = (name for name in old | new if old.get(name) != new.get(name))
    return {name: (shown(old.get(name)), shown(new.get(name))) for name in names}


def check_epoch(saved: Manifest, now: Manifest, differing: list[Change], where: str) -> None:
    """Raises OptionError if a change affects which samples are left of the epoch of `saved`."""
    before, after = (PurePath(str(leaves(manifest.options).get(_SOURCE))) for manifest in (saved, now))
    for change in differing if saved.position.used else ():
        if change.name == _SOURCE and before.name == after.name:
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
    by_progress = after.get("training.schedule.name") in ("linear", "cosine")
    needs_length = by_progress and after.get("training.schedule.total_steps") is None
    for name, values in _differing(saved.options, now.options).items():
        is_harmless = name in _WITHOUT_EFFECT or (name in _LENGTH and not needs_length)
        yield Change(name, *values, alters_bits=not is_harmless and _alters_bits(name, saved, now))
