"""DeepSpeed's rule for batches: train_batch_size = train_micro_batch_size_per_gpu × gradient_accumulation_steps × world
size. Of what is missing, DeepSpeed works out the rest."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from sambasim.options.base import Given, Problem
from sambasim.options.deepspeed.tables import AUTO, Table

TRAIN, MICRO, STEPS = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"
_OPTIONS = {MICRO: "batch_size", STEPS: "accumulation_steps"}


class World(NamedTuple):
    """How many replicas there are, and by what: `-ws 2`. `remedy` starts another number, which follows it. `compiled`:
    the batch of a replica, if it cannot change any more."""

    size: int
    by: str
    remedy: str
    compiled: int | None = None


class _Size(NamedTuple):
    value: int
    by: str = ""


def batch_of(
    top: Table, training: Mapping[str, object], given: Sequence[Given], world: World, origin: str
) -> tuple[list[Given], list[Problem]]:
    """`training.batch_size` and `training.accumulation_steps` by the config `top`, and what does not fit together.
    `training`: that table without the config, which fills in `auto`; `given`: what was typed, which overrides it."""
    typed = {".".join(entry.path): entry for entry in given}
    sizes: dict[str, _Size | None] = {}
    for key, option in _OPTIONS.items():
        in_file, other = top.whole(key, None, least=1), training.get(option)
        if (entry := typed.get(f"training.{option}")) is not None and type(entry.value) is int:
            also = f"; the file has {in_file}" if in_file not in (None, entry.value) else ""
            sizes[key] = _Size(entry.value, f" (from {entry.origin}{also})")
        elif in_file is not None:
            sizes[key] = _Size(in_file)
        else:
            sizes[key] = _Size(other, " (auto)") if top.says_auto(key) and type(other) is int else None
    train, micro, steps, problems = top.whole(TRAIN, None, least=1), sizes[MICRO], sizes[STEPS], list[Problem]()
    if world.compiled is not None:
        if micro is not None and micro.value != world.compiled and not micro.by:
            what = f"the PEF was compiled for batches of {world.compiled} samples"
            problems.append(Problem(MICRO, what, given=str(micro.value)))
        micro = micro or _Size(world.compiled, " (of the PEF)")
    if {problem.name for problem in top.problems} & {TRAIN, MICRO, STEPS}:
        return [], problems  # of a size that cannot be read, nothing follows
    if train is None and micro is None:
        other = training.get("batch_size")
        if type(other) is not int:
            what = f"is missing, and so is {MICRO}: DeepSpeed needs one of them"
            if auto := [key for key in (MICRO, TRAIN) if top.says_auto(key)]:
                return [], [Problem(auto[0], "needs a value from elsewhere", "--batch-size 8", AUTO)]
            return [], [Problem(TRAIN, what, f'"{MICRO}": 8, or --batch-size 8')]
        micro = _Size(other)
    if not {TRAIN, MICRO, STEPS} & top.fields.keys():
        return [], problems
    if train is not None:
        micro, steps, problem = _worked_out(train, micro, steps, world)
        problems += [] if problem is None else [problem]
    result = [(MICRO, micro), (STEPS, steps or _Size(1))]
    keys = {key: origin.format(key if key in top.fields else TRAIN) for key in sizes}
    return [
        Given(("training", _OPTIONS[key]), size.value, keys[key])
        for key, size in result
        if size is not None and f"training.{_OPTIONS[key]}" not in typed
    ], problems


def _worked_out(
    train: int, micro: _Size | None, steps: _Size | None, world: World
) -> tuple[_Size | None, _Size | None, Problem | None]:
    """Both sizes as DeepSpeed works them out, and what is wrong if they do not divide `train`."""
    if micro is None and steps is None:
        steps = _Size(1)
    known = (micro.value if micro else 1) * (steps.value if steps else 1)
    rest, left = divmod(train, known * world.size)
    if not left and rest and micro is None:
        return _Size(rest), steps, None
    if not left and rest and steps is None:
        return micro, _Size(rest), None
    if not left and rest == 1:
        return micro, steps, None
    parts = [f"{key} {size.value}{size.by}" for key, size in ((MICRO, micro), (STEPS, steps)) if size is not None]
    parts.append(f"world size {world.size} ({world.by})")
    relation = "is not" if micro and steps else "is no multiple of"
    what = f"{relation} {' × '.join(parts)} = {known * world.size}"
    fits = train // known if train % known == 0 and micro is not None else None
    remedy = f'"{TRAIN}": {known * world.size}' + (f"; or {world.remedy} {fits}" if fits else "")
    return micro, steps, Problem(TRAIN, what, remedy, str(train))
