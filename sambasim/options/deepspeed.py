"""What the values of a DeepSpeed config mean, as options of `compile` and `run`: a method of `_Reading` for each table.

Its values lie between flags with `--set`, which override them, and the TOML config or the PEF, whose values fill in
where the file says `auto`, or nothing. An optimizer, a scheduler or a loss scale in the file is complete: what it
leaves out has DeepSpeed's default, and not the value of another config.
"""

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from sambasim.optimizers import OPTIMIZERS
from sambasim.options.deepspeed_file import LOSS_SCALE, OPTIMIZERS_BY_TYPE, SCHEDULERS, Row, Table, read_deepspeed
from sambasim.options.given import leaves
from sambasim.options.problem import Given, Problem, one_of, refusal, show, suggested
from sambasim.options.schedules import LossScaleOptions, ScheduleOptions

TRAIN, MICRO, STEPS = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"
_SIZES = {MICRO: "training.batch_size", STEPS: "training.accumulation_steps"}

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


def deepspeed_options(
    path: Path,
    others: Mapping[str, object],
    typed: Sequence[Given],
    world: World,
    compiled: Mapping[str, object] | None = None,
) -> tuple[list[Given], list[str]]:
    """The options that the file at `path` sets, in order, and notes on what it cannot set. `others`: the tables of
    options without it, which fill in `auto`; `typed`: those of them that override it; `compiled`: those in the PEF of a
    run, which sets only what a run may set. Raises OptionError for all that is wrong, or compiled otherwise."""
    reading = _Reading(path, others, {entry.name: entry for entry in typed})
    for read in (reading.precision, reading.optimizer, reading.scheduler, reading.clipping, reading.zero):
        read()
    reading.batch(world)
    otherwise = [] if compiled is None else [*_compiled_otherwise(reading.given, leaves(compiled))]
    if problems := [*reading.top.problems, *otherwise]:
        error = refusal(problems, where=str(path))
        if otherwise:
            error.remedy = f"compile it with --deepspeed {path}"
        elif len(problems) > 1:
            error.remedy = "correct each of them"
        raise error
    given = reading.given
    if compiled is not None:
        given = {name: entry for name, entry in given.items() if name not in _FIXED and entry.value is not None}
    return [*given.values()], reading.notes


def _compiled_otherwise(given: Mapping[str, Given], stored: Mapping[str, object]) -> Iterator[Problem]:
    for name, (_, value, origin) in given.items():
        key, was = origin.partition(": ")[2], stored.get(name)
        compiled = "without it" if was is None else f"with {show(was)}"
        if name in _FIXED and value != was:
            yield Problem(key, f"the PEF was compiled {compiled}, and not {show(value)}, for {_FIXED[name]}")
        if name in ("optimizer.max_grad_norm", "optimizer.momentum") and bool(value) != bool(was):
            yield Problem(key, f"the PEF was compiled {compiled}", None, value or 0)


class _Reading:
    """One file while it is read; `others`: the tables of options without it, `typed`: options that override it."""

    def __init__(self, path: Path, others: Mapping[str, object], typed: Mapping[str, Given]) -> None:
        self.path, self.others, self.typed = path, leaves(others), typed
        self.top, self.notes = read_deepspeed(path)
        self.given: dict[str, Given] = {}

    def set(self, name: str, value: object, key: str) -> None:
        self.given[name] = Given(name.split("."), value, f"{self.path.name}: {key}")

    def note(self, text: str) -> None:
        self.notes.append(f"{self.path.name}: {text}")

    def of_optimizer(self, name: str) -> Any:
        """The option of the optimizer that the file sets, else that of another config."""
        given = self.given.get(f"optimizer.{name}")
        return self.others.get(f"optimizer.{name}") if given is None else given.value

    def precision(self) -> None:
        half = self.top.table("fp16")
        brain = self.top.table("bf16" if "bf16" in self.top.fields else "bfloat16")
        is_half, is_brain = (table.read("enabled", "switch", False) for table in (half, brain))
        if is_half and is_brain:
            half.wrong("enabled", f"does not go with {brain.name}.enabled", '"enabled": false for one of them')
            return
        for table, dtype, is_on in ((brain, "bf16", is_brain), (half, "fp16", is_half)):
            if is_on or (is_on is None and self.others.get("compile.dtype") == dtype):
                self.set("compile.dtype", dtype, f"{table.name}.enabled")
                if (typed := self.typed.get("compile.dtype")) is not None and typed.value != dtype:
                    return
                if dtype == "fp16":
                    self._loss_scale(half)
                else:
                    self.set("compile.master_weights", True, f"{brain.name}.enabled")
                return

    def _loss_scale(self, half: Table) -> None:
        fixed = half.read("loss_scale", "number", 0.0)
        fields = {row.option: self.value(half, row) for row in LOSS_SCALE}
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
            decoupled = params.read("adam_w_mode", "switch", True) is not False
            torchs = params.read("torch_adam", "switch", False)
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
                imitated = optimizer.switches[key]
                if params.read(key, "switch", imitated) is (not imitated):
                    params.wrong(key, "cannot be imitated", f'"{key}": {show(imitated)}')
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
            case "number" | "positive" | "whole" | "switch":
                return table.read(key, row.kind, default, least=row.least)
            case "power":
                power = table.read(key, "whole", default, most=32)
                return None if power is None else 2.0**power
            case "rate":  # which a scheduler sets, whatever the optimizer says
                rate = table.read(key, "positive", default)
                if rate is not None:
                    self.set("optimizer.lr", rate, f"{table.name}.{key}")
                return rate
            case "share":
                low, rate = table.read(key, "number", default) or 0.0, self.of_optimizer("lr")
                has_rate = type(rate) in (int, float) and rate > 0
                if low and not has_rate:
                    table.wrong(key, "needs the highest learning rate, which is auto and not given", "--lr 1e-3")
                return low / rate if has_rate else None
            case "warmup":
                steps = table.read(key, "whole", default)
                steps = self.others.get(f"training.schedule.{row.option}") if steps is None else steps
                return max(steps if type(steps) is int else 0, 2)  # DeepSpeed's warm-up takes two steps at least
            case "curve":
                curve = table.fields.get(key, default)
                if curve not in ("log", "linear"):
                    table.wrong(key, "must be log or linear")
                return curve
            case "total":
                if key not in table.fields:
                    table.wrong(key, "is missing", f'"{key}": 1000, or "auto" for the steps of the run')
                total = table.read(key, "whole", least=1)
                return total if total is not None else self.others.get(f"training.schedule.{row.option}")

    def cycled(self, params: Table) -> object:
        """The lowest and highest beta1 of OneCycle; None if it does not change."""
        if any(params.read(key, "whole", 0) for key in ("cycle_first_stair_count", "cycle_second_stair_count")):
            ignored = "the learning rate has no stairs, as in DeepSpeed, which reads but ignores them"
            self.note(f"scheduler.params: {ignored}")
        if params.read("cycle_momentum", "switch", True) is False:
            return None
        name = self.of_optimizer("name")
        if name in OPTIMIZERS and "betas" not in OPTIMIZERS[name].defaults:
            self.note(f"scheduler.params.cycle_momentum has no effect: {name} has no betas, as in DeepSpeed")
            return None
        if params.read("decay_mom_rate", "number", 0.0):
            params.wrong("decay_mom_rate", "makes beta1 grow without a bound after the cycle", '"decay_mom_rate": 0')
        low, high = params.read("cycle_min_mom", "number", 0.8), params.read("cycle_max_mom", "number", 0.9)
        low, high = 0.8 if low is None else low, 0.9 if high is None else high
        self.set("optimizer.betas", [high, _CYCLED_BETA2], "scheduler.params.cycle_max_mom")
        return [low, high]

    def clipping(self) -> None:
        if "gradient_clipping" in self.top.fields:
            norm = self.top.read("gradient_clipping", "number", 0.0)
            if norm is not None:
                self.set("optimizer.max_grad_norm", norm or None, "gradient_clipping")

    def zero(self) -> None:
        level, key = self.top.fields.get("zero_optimization"), "zero_optimization"
        if isinstance(level, bool):  # as before DeepSpeed had stages
            stage: int | None = int(level)
        else:
            table, key = self.top.table("zero_optimization"), "zero_optimization.stage"
            stage = table.read("stage", "whole", 0 if "zero_optimization" in self.top.fields else None)
            if stage is not None and stage > 3:
                table.wrong("stage", "must be 0, 1, 2 or 3")
        if stage is None:
            return
        if self.others.get("parallel.data_parallel") or self.others.get("parallel.tensor_parallel") == "batch":
            self.set("parallel.zero", stage, key)
        elif stage:
            self.note(f"{key} = {stage} has no effect: nothing is cut without --data-parallel")

    def batch(self, world: World) -> None:
        """Sets both sizes by DeepSpeed's rule, train_batch_size = train_micro_batch_size_per_gpu ×
        gradient_accumulation_steps × world size: of what is missing, it works out the rest."""
        sizes, by = dict[str, int](), dict[str, str]()  # `by`: where one comes from, if not from the file
        for key, option in _SIZES.items():
            in_file, other = self.top.read(key, "whole", least=1), self.others.get(option)
            typed = self.typed.get(option)
            if typed is not None and type(typed.value) is int:
                also = f"; the file has {in_file}" if in_file not in (None, typed.value) else ""
                sizes[key], by[key] = typed.value, f" (from {typed.origin}{also})"
            elif in_file is not None:
                sizes[key] = in_file
            elif self.top.says_auto(key) and type(other) is int:
                sizes[key], by[key] = other, " (auto)"
        train = self.top.read(TRAIN, "whole", least=1)
        is_readable = {TRAIN, MICRO, STEPS}.isdisjoint(problem.name for problem in self.top.problems)
        if world.compiled is not None:
            if MICRO not in sizes:
                sizes[MICRO], by[MICRO] = world.compiled, " (of the PEF)"
            elif sizes[MICRO] != world.compiled and MICRO not in by:
                self.top.wrong(MICRO, f"the PEF was compiled for batches of {world.compiled} samples")
        if not is_readable:
            return  # of a size that cannot be read, nothing follows
        if train is None and MICRO not in sizes:
            other = self.others.get(_SIZES[MICRO])
            if type(other) is not int:
                if auto := [key for key in (MICRO, TRAIN) if self.top.says_auto(key)]:
                    self.top.wrong(auto[0], "needs a value from elsewhere", "--batch-size 8")
                else:
                    what = f"is missing, and so is {MICRO}: DeepSpeed needs one of them"
                    self.top.wrong(TRAIN, what, f'"{MICRO}": 8, or --batch-size 8')
                return
            sizes[MICRO] = other
        if not {TRAIN, MICRO, STEPS} & self.top.fields.keys():
            return
        if train is not None:
            self._work_out(train, sizes, by, world)
        for key, option in _SIZES.items():
            if option not in self.typed:
                self.set(option, sizes.get(key, 1), key if key in self.top.fields else TRAIN)

    def _work_out(self, train: int, sizes: dict[str, int], by: Mapping[str, str], world: World) -> None:
        """Adds the size that is missing; they must divide `train`."""
        if MICRO not in sizes:
            sizes.setdefault(STEPS, 1)
        known = prod(sizes.values())
        rest, left = divmod(train, known * world.size)
        if not left and rest and (len(sizes) == 1 or rest == 1):
            for key in _SIZES:
                sizes.setdefault(key, rest)
            return
        parts = [f"{key} {sizes[key]}{by.get(key, '')}" for key in _SIZES if key in sizes]
        parts.append(f"world size {world.size} ({world.by})")
        relation = "is not" if len(sizes) == 2 else "is no multiple of"
        fits = train // known if train % known == 0 and MICRO in sizes else None
        remedy = f'"{TRAIN}": {known * world.size}' + (f"; or {world.remedy} {fits}" if fits else "")
        self.top.wrong(TRAIN, f"{relation} {' × '.join(parts)} = {known * world.size}", remedy)


def _whole(options: type[ScheduleOptions | LossScaleOptions], fields: Mapping[str, object]) -> dict[str, object]:
    """`fields` with the defaults of all others, so that none of another config stays."""
    known = {name: value for name, value in fields.items() if value is not None}
    return {name: field.default for name, field in options.model_fields.items()} | known
