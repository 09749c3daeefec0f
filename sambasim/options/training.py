"""The tables of a config that say what is trained: the fields without a flag, and what must fit together."""

import copy
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, field_validator, model_validator

from sambasim.bounded import MOST_MICRO_STEPS
from sambasim.optimizers import OPTIMIZERS
from sambasim.options.base import Count, JsonTable, Options, Problem, Refused, did_you_mean, nearest, one_of, show
from sambasim.options.flag import DATA, MODEL, TRAINING, Flag
from sambasim.options.grammar import (
    SYNTHETIC,
    InputSpec,
    SourceKind,
    Target,
    absolute_names,
    parse_input,
    source_kind,
    source_problem,
    target_problem,
)
from sambasim.options.schedule import LossScaleOptions, ScheduleOptions, Share

MOST_WORKERS = 256
"""The most worker processes of one rank: a PEF can ask for them, and each takes memory."""

SYNTHETIC_ARGUMENTS = ("seed",)


class ModelOptions(Options):
    """The `[model]` table: an `nn.Module` class, or a function that returns a module, and its arguments."""

    target: Target | None = None
    args: JsonTable = Field(default_factory=dict)


class DataOptions(Options):
    """The `[data]` table. `source` is a data set of sambasim, a `module:function` that is called with `args`, a file,
    or `synthetic`. `evaluation_fraction` is held out, the same samples in every run. The rest are options of PyTorch's
    DataLoader; training drops the last partial batch."""

    panel = DATA

    source: Annotated[str | None, Flag("--data")] = None
    """The data source: module:function, file.py:NAME, FILE.npz, FILE.safetensors or synthetic."""
    workers: Annotated[int, Field(ge=0, le=MOST_WORKERS), Flag("--workers")] = 0
    """Worker processes of each rank that read data."""
    args: JsonTable = Field(default_factory=dict)
    evaluation_fraction: float = Field(default=0.0, ge=0, lt=1)
    inputs: dict[str, str] | None = None
    samples: Count | None = None
    shuffle: bool = True
    prefetch_factor: Count | None = None
    persistent_workers: bool = False

    @property
    def kind(self) -> SourceKind | None:
        return None if self.source is None else source_kind(self.source)

    def input_specs(self) -> tuple[InputSpec, ...] | None:
        return None if self.inputs is None else tuple(parse_input(name, text) for name, text in self.inputs.items())

    @field_validator("source")
    @classmethod
    def _check_source(cls, source: str | None) -> str | None:
        if source is not None and (problem := source_problem(source)):
            raise Refused(problem)
        return source

    @field_validator("inputs")
    @classmethod
    def _check_inputs(cls, inputs: dict[str, str] | None) -> dict[str, str] | None:
        for name, text in (inputs or {}).items():
            parse_input(name, text)
        return inputs

    def problems(self) -> Iterator[Problem]:
        synthetic = self.source == SYNTHETIC
        for field in ("inputs", "samples"):
            if getattr(self, field) is not None and not synthetic:
                yield Problem(field, "is for synthetic data only", '--set data.source="synthetic"')
        unknown = [name for name in self.args if name not in SYNTHETIC_ARGUMENTS]
        if self.args and self.kind is SourceKind.FILE:
            yield Problem("args", "are for a data function, and a file takes none", "leave out data.args")
        elif synthetic and unknown:
            yield Problem(f"args.{unknown[0]}", "is not an argument of synthetic data, which takes seed only")
        elif synthetic and not (type(seed := self.args.get("seed", 0)) is int and seed >= 0):
            yield Problem("args.seed", "must be a whole number of at least 0")
        if self.workers == 0:
            if self.prefetch_factor is not None:
                yield Problem("prefetch_factor", "needs workers", "--set data.workers=1")
            if self.persistent_workers:
                yield Problem("persistent_workers", "needs workers", "--set data.workers=1")


LOSS_ARGUMENTS: Mapping[str, tuple[str, ...]] = {
    "cross_entropy": ("ignore_index", "label_smoothing"),
    "mse": (),
    "l1": (),
    "smooth_l1": ("beta",),
    "huber": ("delta",),
    "bce_with_logits": (),
    "nll": ("ignore_index",),
    "kl_div": ("log_target",),
}
"""The losses of `torch.nn.functional` that have a name here, and the arguments that each takes."""


class LossOptions(Options):
    """The `[loss]` table: a key of LOSS_ARGUMENTS, or a callable of what the model returns and the target, which gives
    no loss per sample."""

    panel = TRAINING

    name: Annotated[str, Flag("--loss", only="compile", values=(*LOSS_ARGUMENTS, "module:function"))]
    """Loss of outputs and target: {values}."""
    args: JsonTable = Field(default_factory=dict)

    @field_validator("name")
    @classmethod
    def _check_name(cls, name: str) -> str:
        problem = None
        if ":" in name:
            problem = target_problem(name)
        elif name not in LOSS_ARGUMENTS:
            guess = nearest(name.removesuffix("_loss").removesuffix("loss"), LOSS_ARGUMENTS)
            what = f"must be {one_of([*LOSS_ARGUMENTS, 'module:function'])}"
            problem = Problem("", what, did_you_mean(guess), show(name))
        if problem:
            raise Refused(problem)
        return name

    def problems(self) -> Iterator[Problem]:
        known = LOSS_ARGUMENTS.get(self.name, tuple(self.args))
        takes = f"it takes {one_of(known)}" if known else "it takes no arguments"
        for name in self.args:
            if name not in known:
                yield Problem(f"args.{name}", f"is not an argument of {self.name}; {takes}")


_OF_TORCH = "that of the optimizer in torch"


class OptimizerOptions(Options):
    """The `[optimizer]` table. A field that the optimizer does not take is None."""

    panel = TRAINING

    name: Annotated[str, Flag("--optimizer", only="compile", values=tuple(OPTIMIZERS))]
    """Optimizer: {values}."""
    lr: Annotated[float, Field(ge=0), Flag("--lr", default=_OF_TORCH)] = 1e-3
    """Learning rate."""
    momentum: Annotated[float | None, Field(ge=0), Flag("--momentum")] = None
    """Momentum of SGD."""
    weight_decay: Annotated[float, Field(ge=0), Flag("--weight-decay", default=_OF_TORCH)] = 0.0
    """Weight decay."""
    max_grad_norm: Annotated[float | None, Field(gt=0), Flag("--max-grad-norm")] = None
    """Clip the norm of all gradients to this; a run needs a PEF with clipping."""
    dampening: float | None = None
    nesterov: bool | None = None
    betas: Annotated[tuple[Share, Share], Field(strict=False)] | None = None
    eps: float | None = Field(default=None, gt=0)
    lr_decay: float | None = Field(default=None, ge=0)

    @field_validator("name")
    @classmethod
    def _check_name(cls, name: str) -> str:
        if name not in OPTIMIZERS:
            remedy = did_you_mean(nearest(name, OPTIMIZERS))
            raise Refused(Problem("", f"must be {one_of(OPTIMIZERS)}", remedy, show(name)))
        return name

    def hyperparameters(self) -> dict[str, float | bool]:
        """Every number that the optimizer's update takes, by the name of its runtime argument: `betas` as `beta1` and
        `beta2`, and with clipping also `max_grad_norm`."""
        numbers: dict[str, float | bool] = {}
        for field in OPTIMIZERS[self.name].defaults:
            value: Any = getattr(self, field)
            if field == "betas":
                numbers |= {"beta1": value[0], "beta2": value[1]}
            else:
                numbers[field] = value
        if self.max_grad_norm is not None:
            numbers["max_grad_norm"] = self.max_grad_norm
        return numbers

    @model_validator(mode="before")
    @classmethod
    def _fill_in_defaults(cls, given: object) -> object:
        name = given.get("name") if isinstance(given, Mapping) else None
        if isinstance(given, Mapping) and isinstance(name, str):
            return {**(OPTIMIZERS[name].defaults if name in OPTIMIZERS else {}), **given}
        return given

    def problems(self) -> Iterator[Problem]:
        takes = (*OPTIMIZERS[self.name].defaults, "max_grad_norm")
        for field in OptimizerOptions.model_fields:
            if field not in ("name", *takes) and getattr(self, field) is not None:
                remedy = f"leave it out; --set optimizer.{field}= removes what a config or a PEF says"
                yield Problem(field, f"is not for {self.name}, which takes {', '.join(takes)}", remedy)
        for field in OPTIMIZERS[self.name].defaults:
            if getattr(self, field) is None:
                yield Problem(field, "must have a value")
        if self.nesterov and (not self.momentum or self.dampening):
            what = f"needs momentum above 0 and dampening 0; here they are {self.momentum} and {self.dampening}"
            yield Problem("nesterov", what, "--set optimizer.momentum=0.9")


class TrainingOptions(Options):
    """The `[training]` table: either `epochs` or `steps`; with neither, one epoch. A run may change all but
    `batch_size`."""

    panel = TRAINING

    batch_size: Annotated[Count, Flag("-b --batch-size", MODEL, only="compile")] = 1
    """Samples that one replica takes in one micro-step."""
    epochs: Annotated[Count | None, Flag("--epochs")] = None
    """Passes over the data."""
    steps: Annotated[Count | None, Flag("--steps")] = None
    """Optimizer steps, instead of epochs."""
    accumulation_steps: Annotated[int, Field(ge=1, le=MOST_MICRO_STEPS), Flag("--grad-accumulation-steps")] = 1
    """Micro-steps in one optimizer step."""
    seed: Annotated[int, Field(ge=0, lt=2**63), Flag("--seed")] = 0
    """Seed of the order of samples, of dropout and of all other random numbers."""
    evaluate: Annotated[bool, Flag("--evaluate/--no-evaluate", only="run")] = True
    """Evaluate on the held-out samples after each epoch."""
    schedule: ScheduleOptions = Field(default_factory=ScheduleOptions)
    loss_scale: LossScaleOptions = Field(default_factory=LossScaleOptions)

    def problems(self) -> Iterator[Problem]:
        if self.epochs is not None and self.steps is not None:
            what = f"cannot be given together with epochs, {self.epochs}"
            remedy = "leave out one: --epochs or --steps, training.epochs or training.steps"
            yield Problem("steps", what, remedy, str(self.steps))


def cycled_problem(optimizer: OptimizerOptions | None, training: TrainingOptions) -> Iterator[Problem]:
    """Whether a schedule that changes beta1 has an optimizer with one."""
    if training.schedule.momentum is not None and optimizer is not None and optimizer.betas is None:
        what = f"changes beta1, which {optimizer.name} does not have"
        yield Problem("training.schedule.momentum", what, "--set training.schedule.momentum=, or another optimizer")


_OF_A_SOURCE = ("source", "args", "inputs", "samples", "evaluation_fraction")
_OF_ANY_SCHEDULE = ("name", "warmup_steps", "total_steps")
_OF_ANY_OPTIMIZER = ("name", "lr", "weight_decay", "max_grad_norm")
_REPLACED: Mapping[str, Sequence[str]] = {
    "data.source": _OF_A_SOURCE,
    "loss.name": ("name", "args"),
    "optimizer.name": [name for name in OptimizerOptions.model_fields if name not in _OF_ANY_OPTIMIZER],
    "training.schedule.name": [name for name in ScheduleOptions.model_fields if name not in _OF_ANY_SCHEDULE],
    "training.steps": ("epochs",),
    "training.epochs": ("steps",),
    "data.workers": ("prefetch_factor", "persistent_workers"),
}
"""What does not go with another value of a field, in the same table; for workers, with none."""


def without_replaced(tables: Mapping[str, object], changes: Mapping[str, object]) -> dict[str, object]:
    """The tables of options without what does not go with `changes`, values by dotted name."""
    result = copy.deepcopy(dict(tables))
    for name, dropped in _REPLACED.items():
        *path, field = name.split(".")
        table: Any = result
        for part in path:
            table = table.get(part) if isinstance(table, dict) else None
        if name not in changes or not isinstance(table, dict):
            continue
        new = absolute_names({path[0]: {field: changes[name]}}, Path.cwd())[path[0]]
        if new != {field: table.get(field)} and not (field == "workers" and changes[name]):
            for key in dropped:
                table.pop(key, None)
    return result
