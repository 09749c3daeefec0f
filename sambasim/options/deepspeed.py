"""What the values of a DeepSpeed config mean, as options of `compile` and `run`: a method of `_Reading` for each table.

Its values lie between flags with `--set`, which override them, and the TOML config or the PEF, whose values fill in
where the file says `auto`, or nothing. An optimizer, a scheduler or a loss scale in the file is complete: what it
leaves out has DeepSpeed's default, and not the value of another config.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from sambasim.optimizers import OPTIMIZERS
from sambasim.options.deepspeed_file import AUTO, LOSS_SCALE, OPTIMIZERS_BY_TYPE, SCHEDULERS, DeepSpeedFile, Row, Table
from sambasim.options.given import assign, leaf_paths, leaves
from sambasim.options.problem import Given, Problem, one_of, show, suggested
from sambasim.options.training import LossScaleOptions, ScheduleOptions

TRAIN, MICRO, STEPS = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"
_SIZES = {MICRO: "batch_size", STEPS: "accumulation_steps"}

_FIXED = {
    "optimizer.name": "the optimizer", "compile.dtype": "the dtype", "compile.master_weights": "master_weights",
    "parallel.zero": "--zero",
}  # fmt: skip
"""What a PEF was compiled with, in words."""

_ADAM_MODES = ("adam_w_mode", "torch_adam")
_CYCLED_BETA2 = 0.99  # DeepSpeed's OneCycle sets both betas if it cycles the first


class World(NamedTuple):
    """How many replicas there are, `by` what, a `remedy` for another number; `compiled`: the batch of one, if fixed."""

    size: int
    by: str
    remedy: str
    compiled: int | None = None


class Mapped(NamedTuple):
    """What a file sets, in order, and notes on what it cannot set."""

    given: list[Given]
    notes: list[str]


class _Size(NamedTuple):
    value: int
    by: str = ""


def deepspeed_options(
    file: DeepSpeedFile,
    others: Mapping[str, object],
    typed: Sequence[Given],
    world: World,
    compiled: Mapping[str, object] | None = None,
) -> Mapped:
    """The options that `file` sets. `others`: the tables of options without it, which fill in `auto`; `typed`: those of
    them that override it; `compiled`: those in the PEF of a run. Raises OptionError for all that is wrong, or compiled
    otherwise."""
    reading = _Reading(file, others, {".".join(entry.path): entry for entry in typed})
    for read in (reading.precision, reading.optimizer, reading.scheduler, reading.clipping, reading.zero):
        read()
    of_batch = reading.batch(world)
    checked = [] if compiled is None else [_compiled_otherwise(entry, compiled) for entry in reading.given]
    otherwise = list(filter(None, checked))
    if problems := [*file.refused, *reading.top.problems, *of_batch, *otherwise]:
        error = file.error(problems)
        error.remedy = f"compile it with --deepspeed {file.path}" if otherwise else error.remedy
        raise error
    return Mapped(reading.given, reading.notes)


def deepspeed_overrides(
    file: DeepSpeedFile, stored: Mapping[str, object], overrides: Mapping[str, object], world: World
) -> tuple[dict[str, object], Mapped]:
    """The overrides of a run with those of `file` below them. `stored`: the tables of options in the PEF. Raises as
    `deepspeed_options`."""
    typed = [Given(path, value, "a flag, or --set") for path, value in leaf_paths(overrides)]
    mapped = deepspeed_options(file, assign(stored, typed), typed, world, stored)
    chosen = [entry for entry in mapped.given if ".".join(entry.path) not in _FIXED and entry.value is not None]
    return assign({}, [*chosen, *typed]), Mapped(chosen, mapped.notes)


def _compiled_otherwise(entry: Given, stored: Mapping[str, object]) -> Problem | None:
    name, key = ".".join(entry.path), entry.origin.partition(": ")[2]
    was = leaves(stored).get(name)
    compiled = "without it" if was is None else f"with {show(was)}"
    if name in _FIXED and entry.value != was:
        return Problem(key, f"the PEF was compiled {compiled}, and not {show(entry.value)}, for {_FIXED[name]}")
    if name in ("optimizer.max_grad_norm", "optimizer.momentum") and bool(entry.value) != bool(was):
        return Problem(key, f"the PEF was compiled {compiled}", None, entry.value or 0)
    return None


@dataclass
class _Reading:
    """One file while it is read; `others`: the tables of options without it, `typed`: options that override it."""

    file: DeepSpeedFile
    others: Mapping[str, object]
    typed: Mapping[str, Given]

    def __post_init__(self) -> None:
        self.top = Table("", self.file.config)
        self.given: list[Given] = []
        self.notes = list(self.file.notes)

    def set(self, name: str, value: object, key: str) -> None:
        self.given.append(Given(tuple(name.split(".")), value, self.file.origin(key)))

    def note(self, text: str) -> None:
        self.notes.append(f"{self.file.path.name}: {text}")

    def other(self, name: str) -> Any:
        """An option without the file."""
        return leaves(self.others).get(name)

    def of_optimizer(self, name: str) -> Any:
        """The option of the optimizer that the file sets, else that of another config."""
        values = [entry.value for entry in self.given if entry.path == ("optimizer", name)]
        return values[-1] if values else self.other(f"optimizer.{name}")

    def precision(self) -> None:
        half = self.top.table("fp16")
        brain = self.top.table("bf16" if "bf16" in self.top.fields else "bfloat16")
        is_half, is_brain, other = half.switch("enabled"), brain.switch("enabled"), self.other("compile.dtype")
        if is_half and is_brain:
            half.wrong("enabled", f"does not go with {brain.name}.enabled", '"enabled": false for one of them')
            return
        for table, dtype, is_on in ((brain, "bf16", is_brain), (half, "fp16", is_half)):
            if is_on or (is_on is None and other == dtype):
                self.set("compile.dtype", dtype, f"{table.name}.enabled")
                if (typed := self.typed.get("compile.dtype")) is not None and typed.value != dtype:
                    return
                if dtype == "fp16":
                    self._loss_scale(half)
                else:
                    self.set("compile.master_weights", True, f"{brain.name}.enabled")
                return

    def _loss_scale(self, half: Table) -> None:
        fixed, power = half.number("loss_scale", 0.0), half.whole("initial_scale_power", 16)
        if power is not None and power > 32:
            half.wrong("initial_scale_power", "must be at most 32")
            return
        fields: dict[str, object] = {"start": 2.0 ** (16 if power is None else power)}
        fields |= {row.option: self.value(half, row) for row in LOSS_SCALE}
        if fixed:  # then the rest says nothing
            fields = {"dynamic": False, "start": fixed}
        self.set("training.loss_scale", _whole(LossScaleOptions, fields), "fp16")

    def optimizer(self) -> None:
        table = self.top.table("optimizer")
        if "optimizer" not in self.top.fields:
            return
        kind, params = table.fields.get("type"), table.table("params")
        by_folded = {name.casefold(): optimizer for name, optimizer in OPTIMIZERS_BY_TYPE.items()}
        optimizer = by_folded.get(str(kind).casefold())
        if optimizer is None:
            names, guess = one_of(OPTIMIZERS_BY_TYPE), suggested(str(kind), OPTIMIZERS_BY_TYPE)
            wrong = f"must be {names}: sambasim has no other of DeepSpeed's", guess
            table.wrong("type", *(("is missing", f'"type": {names}') if kind is None else wrong))
            return
        name = optimizer.name
        known = {**OPTIMIZERS[name].defaults, **optimizer.defaults}
        defaults = {field: value for field, value in known.items() if field not in optimizer.switches}
        modes = _ADAM_MODES if name == "adamw" else ()
        if modes:
            decoupled, torchs = params.switch("adam_w_mode", True) is not False, params.switch("torch_adam")
            # DeepSpeed's Adam is AdamW, unless adam_w_mode is false; torch's AdamW has a weight decay by default.
            name = "adamw" if decoupled or str(kind).casefold() == "adamw" else "adam"
            if torchs and name == "adamw":
                defaults["weight_decay"] = OPTIMIZERS["adamw"].defaults["weight_decay"]
        self.set("optimizer.name", name, "optimizer.type")
        for key in params.fields:
            if key == "max_grad_norm":
                remedy = '"gradient_clipping": … at the top of the file, and without it here'
                params.wrong(key, "is not a parameter of DeepSpeed's optimizers", remedy)
            elif key in optimizer.switches:
                if params.switch(key, optimizer.switches[key]) is (not optimizer.switches[key]):
                    params.wrong(key, "cannot be imitated", f'"{key}": {show(optimizer.switches[key])}')
            elif key not in (*defaults, *modes):
                guess = suggested(key, defaults)
                params.wrong(key, f"is not for {kind}, which takes {', '.join(defaults)}", guess)
        for field, default in defaults.items():
            if not params.says_auto(field):
                self.set(f"optimizer.{field}", params.fields.get(field, default), f"optimizer.params.{field}")

    def scheduler(self) -> None:
        table = self.top.table("scheduler")
        if "scheduler" not in self.top.fields:
            return
        kind, params = str(table.fields.get("type", "")), table.table("params")
        if kind not in SCHEDULERS:
            guess = suggested(kind, SCHEDULERS)
            remedy = guess or "leave it out, and use --lr-schedule cosine, linear or step"
            table.wrong("type", f"must be {one_of(SCHEDULERS)}", remedy)
            return
        scheduler = SCHEDULERS[kind]
        for key in params.fields:
            if key not in (*scheduler.keys, "last_batch_iteration"):
                guess = suggested(key, scheduler.keys)
                params.wrong(key, f"is not for {kind}, which takes {', '.join(scheduler.keys)}", guess)
        if params.fields.get("last_batch_iteration", -1) != -1:
            params.wrong("last_batch_iteration", "must be -1: a run resumes from a checkpoint", "--resume")
        fields: dict[str, object] = {"name": scheduler.name}
        fields |= {row.option: self.value(params, row) for row in scheduler.rows}
        if kind == "OneCycle":
            if not (fields["rate"] and fields["step_size"]):
                fields |= {"rate": None, "step_size": None}
            fields["momentum"] = self.cycled(params)
        fields.pop("lr", None)
        self.set("training.schedule", _whole(ScheduleOptions, fields), "scheduler")

    def value(self, table: Table, row: Row) -> object:
        """The value of an option by `row` of `table`; None if it is `auto`, and nothing else gives it."""
        key, default = row.key, row.default
        match row.kind:
            case "number":
                return table.number(key, default, above=row.above)
            case "whole":
                return table.whole(key, default, least=row.least)
            case "switch":
                return table.switch(key, default)
            case "rate":  # which a scheduler sets, whatever the optimizer says
                rate = table.number(key, default, above=0)
                if rate is not None:
                    self.set("optimizer.lr", rate, f"{table.name}.{key}")
                return rate
            case "share":
                low, rate = table.number(key, default) or 0.0, self.of_optimizer("lr")
                has_rate = type(rate) in (int, float) and rate > 0
                if low and not has_rate:
                    table.wrong(key, "needs the highest learning rate, which is auto and not given", "--lr 1e-3")
                return low / rate if has_rate else None
            case "warmup":
                steps = table.whole(key, default)
                steps = self.other(f"training.schedule.{row.option}") if steps is None else steps
                return max(steps if type(steps) is int else 0, 2)  # DeepSpeed's warm-up takes two steps at least
            case "curve":
                curve = table.fields.get(key, default)
                if curve not in ("log", "linear"):
                    table.wrong(key, "must be log or linear")
                return curve
            case "total":
                if key not in table.fields:
                    table.wrong(key, "is missing", f'"{key}": 1000, or "auto" for the steps of the run')
                total = table.whole(key, None, least=1)
                return total if total is not None else self.other(f"training.schedule.{row.option}")

    def cycled(self, params: Table) -> object:
        """The lowest and highest beta1 of OneCycle; None if it does not change."""
        if any(params.whole(key, 0) for key in ("cycle_first_stair_count", "cycle_second_stair_count")):
            ignored = "the learning rate has no stairs, as in DeepSpeed, which reads but ignores them"
            self.note(f"scheduler.params: {ignored}")
        if params.switch("cycle_momentum", True) is False:
            return None
        name = self.of_optimizer("name")
        if name in OPTIMIZERS and "betas" not in OPTIMIZERS[name].defaults:
            self.note(f"scheduler.params.cycle_momentum has no effect: {name} has no betas, as in DeepSpeed")
            return None
        if params.number("decay_mom_rate", 0.0):
            params.wrong("decay_mom_rate", "makes beta1 grow without a bound after the cycle", '"decay_mom_rate": 0')
        low, high = params.number("cycle_min_mom", 0.8), params.number("cycle_max_mom", 0.9)
        low, high = 0.8 if low is None else low, 0.9 if high is None else high
        self.set("optimizer.betas", [high, _CYCLED_BETA2], "scheduler.params.cycle_max_mom")
        return [low, high]

    def clipping(self) -> None:
        if "gradient_clipping" in self.top.fields:
            norm = self.top.number("gradient_clipping", 0.0)
            if norm is not None:
                self.set("optimizer.max_grad_norm", norm or None, "gradient_clipping")

    def zero(self) -> None:
        level, key = self.top.fields.get("zero_optimization"), "zero_optimization"
        if isinstance(level, bool):  # as before DeepSpeed had stages
            stage: int | None = int(level)
        else:
            table, key = self.top.table("zero_optimization"), "zero_optimization.stage"
            stage = table.whole("stage", 0 if "zero_optimization" in self.top.fields else None)
            if stage is not None and stage > 3:
                table.wrong("stage", "must be 0, 1, 2 or 3")
        if stage is None:
            return
        if self.other("parallel.data_parallel") or self.other("parallel.tensor_parallel") == "batch":
            self.set("parallel.zero", stage, key)
        elif stage:
            self.note(f"{key} = {stage} has no effect: nothing is cut without --data-parallel")

    def batch(self, world: World) -> list[Problem]:
        """Sets both sizes by DeepSpeed's rule, train_batch_size = train_micro_batch_size_per_gpu ×
        gradient_accumulation_steps × world size: of what is missing, it works out the rest. Returns what is wrong."""
        sizes = {key: self._size(key, option) for key, option in _SIZES.items()}
        train, micro, steps = self.top.whole(TRAIN, None, least=1), sizes[MICRO], sizes[STEPS]
        problems: list[Problem] = []
        if world.compiled is not None:
            if micro is not None and micro.value != world.compiled and not micro.by:
                what = f"the PEF was compiled for batches of {world.compiled} samples"
                problems.append(Problem(MICRO, what, given=micro.value))
            micro = micro or _Size(world.compiled, " (of the PEF)")
        if {problem.name for problem in self.top.problems} & {TRAIN, MICRO, STEPS}:
            return problems  # of a size that cannot be read, nothing follows
        if train is None and micro is None:
            other = self.other("training.batch_size")
            if type(other) is not int:
                if auto := [key for key in (MICRO, TRAIN) if self.top.says_auto(key)]:
                    return [Problem(auto[0], "needs a value from elsewhere", "--batch-size 8", AUTO)]
                what = f"is missing, and so is {MICRO}: DeepSpeed needs one of them"
                return [Problem(TRAIN, what, f'"{MICRO}": 8, or --batch-size 8')]
            micro = _Size(other)
        if not {TRAIN, MICRO, STEPS} & self.top.fields.keys():
            return problems
        if train is not None:
            micro, steps, problem = _worked_out(train, micro, steps, world)
            problems += [] if problem is None else [problem]
        for key, size in ((MICRO, micro), (STEPS, steps or _Size(1))):
            name = f"training.{_SIZES[key]}"
            if size is not None and name not in self.typed:
                self.set(name, size.value, key if key in self.top.fields else TRAIN)
        return problems

    def _size(self, key: str, option: str) -> _Size | None:
        in_file, other = self.top.whole(key, None, least=1), self.other(f"training.{option}")
        typed = self.typed.get(f"training.{option}")
        if typed is not None and type(typed.value) is int:
            also = f"; the file has {in_file}" if in_file not in (None, typed.value) else ""
            return _Size(typed.value, f" (from {typed.origin}{also})")
        if in_file is not None:
            return _Size(in_file)
        return _Size(other, " (auto)") if self.top.says_auto(key) and type(other) is int else None


def _worked_out(
    train: int, micro: _Size | None, steps: _Size | None, world: World
) -> tuple[_Size | None, _Size | None, Problem | None]:
    """Both sizes, and what is wrong if they do not divide `train`."""
    steps = steps or (None if micro else _Size(1))
    known = (micro.value if micro else 1) * (steps.value if steps else 1)
    rest, left = divmod(train, known * world.size)
    if not left and rest and (micro is None or steps is None or rest == 1):
        return micro or _Size(rest), steps or _Size(rest), None
    parts = [f"{key} {size.value}{size.by}" for key, size in ((MICRO, micro), (STEPS, steps)) if size is not None]
    parts.append(f"world size {world.size} ({world.by})")
    relation = "is not" if micro and steps else "is no multiple of"
    what = f"{relation} {' × '.join(parts)} = {known * world.size}"
    fits = train // known if train % known == 0 and micro is not None else None
    remedy = f'"{TRAIN}": {known * world.size}' + (f"; or {world.remedy} {fits}" if fits else "")
    return micro, steps, Problem(TRAIN, what, remedy, train)


def _whole(options: type[ScheduleOptions | LossScaleOptions], fields: Mapping[str, object]) -> dict[str, object]:
    """`fields` with the defaults of all others, so that none of another config stays."""
    known = {name: value for name, value in fields.items() if value is not None}
    return {name: field.default for name, field in options.model_fields.items()} | known
