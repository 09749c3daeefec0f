"""The fields of a DeepSpeed config that are options here: one row each, for reading and for writing. And its rule for
batches: train_batch_size = train_micro_batch_size_per_gpu × gradient_accumulation_steps × world size."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeAlias

from sambasim.bounded import LARGEST_COUNT, shortened
from sambasim.options.base import Given, Problem, show

AUTO = "auto"
"""The value of a field that another config or a flag fills in, as in Hugging Face's Trainer."""


Kind: TypeAlias = Literal["number", "whole", "switch", "rate", "share", "warmup", "curve", "total"]
"""How a value is given: of a schedule, `rate` is the highest learning rate, `share` a rate that is a factor of it here,
`warmup` its steps, `curve` its form, `total` the steps of the run."""


class Row(NamedTuple):
    """A field `key` of a table, and the option of the same meaning. `default` is DeepSpeed's; None: there is none."""

    key: str
    option: str
    kind: Kind
    default: Any = None
    least: int = 0
    above: float | None = None


LOSS_SCALE = (
    Row("loss_scale_window", "window", "whole", 1000, least=1),
    Row("hysteresis", "hysteresis", "whole", 2, least=1),
    Row("consecutive_hysteresis", "consecutive", "switch", False),
    Row("min_loss_scale", "minimum", "number", 1.0, above=0),
)
"""Of `fp16`, where the loss scale is not fixed."""


class Scheduler(NamedTuple):
    """A scheduler of DeepSpeed: its name here, its parameters, and others, which are read by themselves."""

    name: str
    rows: Sequence[Row]
    others: Sequence[str] = ()

    @property
    def keys(self) -> list[str]:
        return [*(row.key for row in self.rows), *self.others]


_RATES = (Row("warmup_max_lr", "lr", "rate", 1e-3), Row("warmup_min_lr", "start_factor", "share", 0.0))
_WARMUP = (Row("warmup_num_steps", "warmup_steps", "warmup", 1000), Row("warmup_type", "warmup_curve", "curve", "log"))
_TOTAL = Row("total_num_steps", "total_steps", "total")
_RATIOS = (Row("warmup_min_ratio", "start_factor", "number", 0.0), Row("cos_min_ratio", "final_factor", "number", 1e-4))
_CYCLE = (
    Row("cycle_max_lr", "lr", "rate"),
    Row("cycle_min_lr", "start_factor", "share"),
    Row("cycle_first_step_size", "up_steps", "whole", 2000, least=1),
    Row("cycle_second_step_size", "down_steps", "whole", least=1),
    Row("decay_lr_rate", "rate", "number", 0.0),
    Row("decay_step_size", "step_size", "whole", 0),
)
_CYCLED = (
    "cycle_first_stair_count", "cycle_second_stair_count", "cycle_momentum", "cycle_min_mom", "cycle_max_mom",
    "decay_mom_rate",
)  # fmt: skip
_TEST = (
    Row("lr_range_test_min_lr", "lr", "rate", 1e-3),
    Row("lr_range_test_step_size", "step_size", "whole", 2000, least=1),
    Row("lr_range_test_step_rate", "rate", "number", 1.0),
    Row("lr_range_test_staircase", "staircase", "switch", False),
)
SCHEDULERS: Mapping[str, Scheduler] = {
    "WarmupLR": Scheduler("warmup", (*_RATES, *_WARMUP)),
    "WarmupDecayLR": Scheduler("warmup_decay", (*_RATES, *_WARMUP, _TOTAL)),
    "WarmupCosineLR": Scheduler("warmup_cosine", (*_RATIOS, *_WARMUP, _TOTAL)),
    "OneCycle": Scheduler("one_cycle", _CYCLE, _CYCLED),
    "LRRangeTest": Scheduler("range_test", _TEST),
}


class Optimizer(NamedTuple):
    """An optimizer of DeepSpeed: its name here, its defaults where they are other than torch's, and switches with the
    one value that can be imitated."""

    name: str
    defaults: Mapping[str, object] = {}
    switches: Mapping[str, bool] = {}


ADAM = Optimizer("adamw", {"weight_decay": 0.0}, {"bias_correction": True, "amsgrad": False})
OPTIMIZERS_BY_TYPE: Mapping[str, Optimizer] = {
    "Adam": ADAM,
    "AdamW": ADAM,
    "SGD": Optimizer("sgd", switches={"maximize": False}),
    "Lion": Optimizer("lion", {"lr": 1e-3}),
    "Adagrad": Optimizer("adagrad", switches={"maximize": False}),
}


@dataclass(frozen=True, slots=True)
class Table:
    """One table of the file, at `name`: reads fields with a type, and collects in `problems` what is wrong."""

    name: str
    fields: Mapping[str, object]
    problems: list[Problem] = field(default_factory=list)

    def table(self, key: str) -> "Table":
        value = self.fields.get(key) or {}
        name = f"{self.name}.{key}" if self.name else key
        if not isinstance(value, Mapping):
            self.wrong(key, "must be a table, {…}", None)
            value = {}
        return Table(name, value, self.problems)

    def wrong(self, key: str, what: str, remedy: str | None = None) -> None:
        value = show(self.fields[key]) if key in self.fields else None
        name = shortened(f"{self.name}.{key}" if self.name else key)
        self.problems.append(Problem(name, what, remedy, value))

    def says_auto(self, key: str) -> bool:
        return self.fields.get(key) == AUTO

    def number(self, key: str, default: float | None, *, above: float | None = None) -> float | None:
        """The number at `key`, at least 0, or above `above`; `default` if it is not given; None if it is `auto`.
        Without a default it must be given."""
        if default is None and key not in self.fields:
            self.wrong(key, "is missing", f'"{key}": 1e-3')
        value = self.fields.get(key, default)
        if value is None or value == AUTO:
            return None
        if not isinstance(value, int | float) or isinstance(value, bool):
            self.wrong(key, "must be a number, or auto")
        elif above is not None and value <= above:
            self.wrong(key, f"must be above {above:g}")
        elif not 0 <= value <= sys.float_info.max:
            self.wrong(key, "must be at least 0" if value < 0 else "must be a finite number")
        else:
            return float(value)
        return default

    def whole(self, key: str, default: int | None, *, least: int = 0) -> int | None:
        """As `number`, for a whole number of at least `least`; it need not be given."""
        value = self.fields.get(key, default)
        if value is None or value == AUTO:
            return None
        if type(value) is not int:
            is_quoted = isinstance(value, str) and value.isdigit()
            self.wrong(
                key, "must be a whole number, or auto", f'"{key}": {value}, without quotes' if is_quoted else None
            )
        elif not least <= value <= LARGEST_COUNT:
            self.wrong(key, f"must be at least {least}" if value < least else f"must be at most {LARGEST_COUNT:,}")
        else:
            return value
        return default

    def switch(self, key: str, default: bool) -> bool | None:
        """True or false; None if it is `auto`."""
        value = self.fields.get(key, default)
        if value == AUTO:
            return None
        if isinstance(value, bool):
            return value
        self.wrong(key, "must be true or false, or auto")
        return default


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
