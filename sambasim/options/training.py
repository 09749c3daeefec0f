"""The tables of a config that say what is trained and evaluated, and how."""

import copy
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, ValidationError, create_model, model_validator

from sambasim.errors import LARGEST_FACTOR
from sambasim.optimizers import OPTIMIZERS
from sambasim.options import grammar
from sambasim.options.base import Options
from sambasim.options.fields import DataFields, EmaFields, EvaluationFields, LossFields, OptimizerFields, TrainingFields
from sambasim.options.grammar import LOSS_ARGUMENTS, METRICS, JsonTable
from sambasim.options.problem import Count, Factor, PositiveFactor, Problem, Refused, Text, broken, one_of, suggested
from sambasim.options.schedules import ArgumentOptions, LossScaleOptions, ScheduleOptions, Share

MOST_PREFETCHED = 1024  # batches of one worker


class ModelOptions(Options):
    """The `[model]` table: an `nn.Module` class, or a function that returns a module, and its arguments."""

    target: grammar.Target | None = None
    args: JsonTable = Field(default_factory=dict)


class DataOptions(DataFields, Options):
    """The `[data]` table. `source` is a data set of sambasim, a `module:function` that is called with `args`, a file,
    or `synthetic`. `collate` names a function that makes a batch of a list of samples. `evaluation_fraction` is held
    out, the same samples in every run. `buckets` are lengths of samples: a PEF has a graph for each, and batches are
    padded to the next one, by `padding` of each input. The rest are options of PyTorch's DataLoader; training drops the
    last partial batch."""

    args: JsonTable = Field(default_factory=dict)
    collate: grammar.Target | None = None
    buckets: list[Count] = Field(default_factory=list)
    padding: dict[str, float] = Field(default_factory=dict)
    evaluation_fraction: float = Field(default=0.0, ge=0, lt=1)
    inputs: grammar.Inputs | None = None
    samples: Count | None = None
    shuffle: bool = True
    prefetch_factor: int | None = Field(default=None, ge=1, le=MOST_PREFETCHED)
    persistent_workers: bool = False

    def problems(self) -> Iterator[Problem]:
        is_synthetic, needs_workers = self.source == grammar.SYNTHETIC, ("needs workers", "--set data.workers=1")
        for field in ("inputs", "samples"):
            if getattr(self, field) is not None and not is_synthetic:
                yield Problem(field, "is for synthetic data only", '--set data.source="synthetic"')
        if len({*self.buckets}) == 1 or 0 in self.buckets or len({*self.buckets}) < len(self.buckets):
            yield Problem("buckets", "must be several lengths of samples, each once", "--set 'data.buckets=[64, 128]'")
        if self.padding and not self.buckets:
            yield Problem("padding", "is for samples of several lengths", "--set 'data.buckets=[64, 128]'")
        unknown = [name for name in self.args if name != "seed"]
        if self.args and (self.source or "").endswith(grammar.DATA_SUFFIXES):
            yield Problem("args", "are for a data function, and a file takes none", "leave out data.args")
        elif is_synthetic and unknown:
            yield Problem(f"args.{unknown[0]}", "is not an argument of synthetic data, which takes seed only")
        elif is_synthetic and not (type(seed := self.args.get("seed", 0)) is int and seed >= 0):
            yield Problem("args.seed", "must be a whole number of at least 0")
        yield from broken(
            (self.workers == 0 and self.prefetch_factor is not None, "prefetch_factor", *needs_workers),
            (self.workers == 0 and self.persistent_workers, "persistent_workers", *needs_workers),
        )


class LossOptions(LossFields, Options):
    """The `[loss]` table: a key of LOSS_ARGUMENTS, or a callable of outputs and target, without a loss per sample. The
    mean is over each batch, and then over batches and replicas; or over all elements that they count."""

    args: JsonTable = Field(default_factory=dict)
    mean_over: Literal["batch", "elements"] = "batch"

    @model_validator(mode="before")
    @classmethod
    def _counts_by_name(cls, given: object) -> object:
        if isinstance(given, Mapping) and given.get("mean_over") == "elements" and ":" in str(given.get("name", ":")):
            remedy = 'leave it out, and return {"loss_sum": …, "count": …}; or in a function losses.sum(), mask.sum()'
            raise Refused(Problem("mean_over", "is for losses such as cross_entropy", remedy, "elements"))
        return given

    def problems(self) -> Iterator[Problem]:
        known = LOSS_ARGUMENTS.get(self.name, tuple(self.args))
        takes = f"it takes {one_of(known)}" if known else "it takes no arguments"
        for name in self.args:
            if name not in known:
                yield Problem(f"args.{name}", f"is not an argument of {self.name}; {takes}")


BOUNDS = ("max_grad_norm", "max_grad_value")
_OF_ALL = (*BOUNDS, "no_decay")
"""The options that hold for all parameters together."""


class UpdateOptions(OptimizerFields, Options):
    """How parameters are updated. A field that the optimizer does not take is None. One of the user's own has defaults
    of its own, and `args` beside `lr` and `weight_decay`."""

    dampening: float | None = Field(default=None, ge=-LARGEST_FACTOR, le=LARGEST_FACTOR)
    nesterov: bool | None = None
    betas: Annotated[tuple[Share, Share], Field(strict=False)] | None = None
    eps: PositiveFactor | None = None
    lr_decay: Factor | None = None
    alpha: Factor | None = None
    centered: bool | None = None
    momentum_decay: Factor | None = None
    decoupled_weight_decay: bool | None = None
    amsgrad: bool | None = None
    maximize: bool | None = None
    args: JsonTable | None = None

    @property
    def is_own(self) -> bool:
        return ":" in self.name

    @property
    def _takes(self) -> tuple[str, ...]:
        return (*(("lr", "weight_decay", "args") if self.is_own else OPTIMIZERS[self.name].defaults), *BOUNDS)

    def hyperparameters(self) -> dict[str, float | bool]:
        """The numbers of its update by runtime argument: `betas` as `beta1` and `beta2`; if clipped, the bound."""
        numbers: dict[str, float | bool] = {}
        for name in self._takes:
            value: Any = getattr(self, name)
            if value is not None:
                several = {"beta1": value[0], "beta2": value[1]} if name == "betas" else value
                numbers |= several if name in ("betas", "args") else {name: value}
        return numbers

    @model_validator(mode="before")
    @classmethod
    def _fill_in_defaults(cls, given: object) -> object:
        if not isinstance(given, Mapping):
            return given
        entry = OPTIMIZERS.get(str(given.get("name")))
        return {**(entry.defaults if entry else {}), **given}

    def problems(self) -> Iterator[Problem]:
        defaults, takes = () if self.is_own else OPTIMIZERS[self.name].defaults, self._takes
        for name, number in (self.args or {}).items():
            if name in takes or type(number) not in (int, float):
                what = f"is the option {name} of the optimizer" if name in takes else "must be a number"
                yield Problem(f"args.{name}", what, given=number)
        for field in UpdateOptions.model_fields:
            value = getattr(self, field)
            if field not in (*_OF_ALL, "name", *takes) and value is not None:
                own = f"--set optimizer.args.{field.replace('betas', 'beta1')}=… for its keyword, or " * self.is_own
                remedy = f"{own}leave it out; --set optimizer.{field}= removes what a config or a PEF says"
                yield Problem(field, f"is not for {self.name}, which takes {', '.join(takes)}", remedy)
            if field in defaults and value is None:
                yield Problem(field, "must have a value")
        what = f"needs momentum above 0 and dampening 0; here they are {self.momentum} and {self.dampening}"
        is_plain = not self.momentum or self.dampening
        yield from broken((self.nesterov and is_plain, "nesterov", what, "--set optimizer.momentum=0.9"))


def _optional(field: Any) -> Any:
    """The type of an option of a group: None is that of the optimizer."""
    return Annotated[(field.annotation | None, *field.metadata)] if field.metadata else field.annotation | None


if TYPE_CHECKING:

    class _Differences(Options):
        name: str | None
else:
    _of_group = {name: (_optional(f), None) for name, f in UpdateOptions.model_fields.items() if name not in _OF_ALL}
    _Differences = create_model("_Differences", __base__=Options, **_of_group)


class GroupOptions(_Differences):
    """A table of `[[optimizer.groups]]`: the parameters whose names `match` one of the patterns, and the options in
    which they differ from `[optimizer]`. With another `name` they have an optimizer of their own."""

    match: Annotated[tuple[Text, ...], Field(min_length=1, strict=False)]


class OptimizerOptions(UpdateOptions):
    """The `[optimizer]` table. A parameter has the options of the first of its `groups` whose patterns match."""

    groups: Annotated[tuple[GroupOptions, ...], Field(strict=False)] = ()

    def all_groups(self) -> tuple[GroupOptions, ...]:
        patterns = tuple(filter(None, map(str.strip, (self.no_decay or "").split(","))))
        without = {"match": patterns, "weight_decay": 0.0}
        return (*([GroupOptions.model_validate(without)] if patterns else []), *self.groups)

    def updates(self) -> tuple[UpdateOptions, ...]:
        """Of the parameters in no group, then of each group."""
        own = self.model_dump(exclude_none=True, exclude={"groups", "no_decay"})
        updates = [UpdateOptions.model_validate(own)]
        for group in self.all_groups():
            differences = group.model_dump(exclude_none=True, exclude={"match"})
            shared = {name: getattr(self, name) for name in BOUNDS} if "name" in differences else own
            if "args" in differences:
                differences["args"] = {**(shared.get("args") or {}), **differences["args"]}
            updates.append(UpdateOptions.model_validate({**shared, **differences}))
        return tuple(updates)

    def problems(self) -> Iterator[Problem]:
        own = [*super().problems()]
        if self.no_decay is not None and len(self.all_groups()) == len(self.groups):
            own.append(Problem("no_decay", "has no pattern", "--no-decay '*.bias,*norm*'", self.no_decay))
        yield from own
        try:
            self.updates() if not own else ()
        except ValidationError as error:
            for item in error.errors():
                yield from (p._replace(name=f"groups.{p.name}", remedy=None) for p in item["ctx"]["error"].problems)


class EmaOptions(EmaFields, Options):
    """The `[ema]` table: an average of the weights, for evaluations and `--save-ema`. It is the weights of optimizer
    step `start`, and then, `every` so many steps, `decay` of itself and the rest of the weights; without a decay, the
    mean of those weights. With `warmup`, the decay of average n is at most (1 + n) / (10 + n). `buffers`: also average
    those of floating point that training changes."""

    every: Count = 1
    start: Count = 1
    warmup: bool = False
    buffers: bool = False

    def numbers(self) -> dict[str, float | int | bool]:
        """By runtime argument; the decay is 0 where there is none."""
        return self.model_dump(exclude={"buffers"}) | {"decay": self.decay or 0.0}

    def problems(self) -> Iterator[Problem]:
        yield from broken((self.warmup and self.decay is None, "warmup", "needs a decay", "--set ema.decay=0.999"))


class TrainingOptions(TrainingFields, Options):
    """The `[training]` table: `epochs` or `steps`; with neither, one epoch. A run may change all but `batch_size`."""

    schedule: ScheduleOptions = Field(default_factory=ScheduleOptions)
    loss_scale: LossScaleOptions = Field(default_factory=LossScaleOptions)

    def problems(self) -> Iterator[Problem]:
        remedy = "leave out one: --epochs or --steps, training.epochs or training.steps"
        what, both = f"cannot be given together with epochs, {self.epochs}", None not in (self.epochs, self.steps)
        yield from broken((both, "steps", what, remedy, self.steps))


class EvaluationOptions(EvaluationFields, Options):
    """The `[evaluation]` table. `data` is a source as `data.source`, called with `args`, in place of what the data
    holds out. `metrics`: names or functions, each with its options: those of torchmetrics, or keyword arguments."""

    args: JsonTable = Field(default_factory=dict)

    @property
    def cadence(self) -> grammar.Cadence:
        return grammar.parse_interval(self.every)

    @property
    def watched(self) -> str | None:
        """The metric by which an evaluation is the best; None if it does not matter which."""
        return self.keep_best or (None if self.stop_after is None else "loss")

    @property
    def largest_is_best(self) -> bool | None:
        """Of the watched metric; None if that is not known."""
        name = self.watched or ""
        known = {"loss": "min", **METRICS}.get(name, "max" if grammar.is_top_k(name) else None)
        return None if (mode := self.mode or known) is None else mode == "max"

    def problems(self) -> Iterator[Problem]:
        needs_best, name_one = "needs a metric that says which evaluation is the best", "--keep-best loss"
        unknown = self.watched is not None and self.largest_is_best is None
        off = not self.enabled and self.watched is not None
        names = ["loss", *METRICS, *(name.rpartition(":")[2] for name in self.metrics or ())]
        guess = suggested(self.keep_best or "", set(names) - {self.keep_best}) if unknown else None
        yield from broken(
            (self.load_best and self.keep_best is None, "load_best", needs_best, name_one),
            (self.mode is not None and self.keep_best is None, "mode", needs_best, name_one, self.mode),
            (guess, "keep_best", "is no metric that has a name here",
             f"{guess} For one that has, by the model or a function: --best-mode max, or min", self.keep_best),
            (unknown and not guess, "mode", f"is missing: it is not known whether the largest {self.keep_best} is best",
             "--best-mode max, or min"),
            (off, "keep_best" if self.keep_best else "stop_after",
             "needs evaluations, which are turned off", "leave out --no-evaluate"),
            (self.args and self.data is None, "args", "are for a data function, and evaluation.data names none"),
        )  # fmt: skip


class Sections(Options):
    """The tables of a config that a PEF stores for its runs. An inference PEF has no optimizer."""

    data: DataOptions = Field(default_factory=DataOptions)
    loss: LossOptions | None = None
    optimizer: OptimizerOptions | None = None
    ema: EmaOptions | None = None
    training: TrainingOptions = Field(default_factory=TrainingOptions)
    evaluation: EvaluationOptions = Field(default_factory=EvaluationOptions)
    arguments: dict[str, ArgumentOptions] = Field(default_factory=dict)

    @property
    def padded_data(self) -> DataOptions:
        """`data`, whose padding of labels is the class that the loss leaves out, if it says nothing else."""
        loss, given = self.loss, self.data.padding
        leaves_out = loss is not None and loss.name in ("cross_entropy", "nll")
        padding = {grammar.TARGET: grammar.ignored_class(loss.args), **given} if loss and leaves_out else given
        return self.data.model_copy(update={"padding": padding})

    def problems(self) -> Iterator[Problem]:
        optimizer = self.optimizer
        if self.training.schedule.momentum is not None and optimizer is not None and optimizer.betas is None:
            what = f"changes beta1, which {optimizer.name} does not have"
            yield Problem("training.schedule.momentum", what, "--set training.schedule.momentum=, or another optimizer")


_REPLACED: Mapping[str, Collection[str]] = {
    "data.source": ("source", "args", "inputs", "samples", "evaluation_fraction"),
    "loss.name": ("name", "args"),
    "optimizer.name": UpdateOptions.model_fields.keys() - {"name", "lr", "weight_decay", *_OF_ALL},
    "training.schedule.name": ScheduleOptions.model_fields.keys() - {"name", "warmup_steps", "total_steps"},
    "training.steps": ("epochs",),
    "training.epochs": ("steps",),
    "evaluation.data": ("args",),
    "evaluation.keep_best": ("mode",),
    "data.workers": ("prefetch_factor", "persistent_workers"),
}
"""What does not go with another value of a field, in the same table; for workers, with none."""


def unreplaced(tables: Mapping[str, object], changes: Mapping[str, object]) -> dict[str, object]:
    """The tables of options without what does not go with `changes`, values by dotted name."""
    result = copy.deepcopy(dict(tables))
    for name in filter(changes.__contains__, _REPLACED):
        *path, field = name.split(".")
        table: Any = result
        for part in path:
            table = table.get(part) if isinstance(table, dict) else None
        if isinstance(table, dict) and not (field == "workers" and changes[name]):
            new = grammar.absolute_names({path[0]: {field: changes[name]}}, Path.cwd())[path[0]]
            for key in _REPLACED[name] if new != {field: table.get(field)} else ():
                table.pop(key, None)
    return result
