"""What is trained, on which loss, by which optimizer, for how long."""

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from sambasim.options.base import JsonTable, Options, Seed, Target
from sambasim.options.problems import Problem, Refused, nearest, one_of, show
from sambasim.options.targets import target_problem

MOST_MICRO_STEPS = 4096
"""More are not accumulated in one step: a prediction has a time for each section of each of them."""


class ModelOptions(Options):
    """The `[model]` table: an `nn.Module` class, or a function that returns one, and what it is called with."""

    target: Target | None = None
    args: JsonTable = Field(default_factory=dict)


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
"""The losses with a name, which PyTorch has under `torch.nn.functional`, and the arguments that each takes here."""


class LossOptions(Options):
    """The `[loss]` table, for a model that returns outputs alone.

    `name` is one of LOSS_ARGUMENTS, or the target of a callable `(outputs, target) -> mean loss`; such a callable gives
    no loss for each sample.
    """

    name: str
    args: JsonTable = Field(default_factory=dict)

    @property
    def is_named(self) -> bool:
        """Whether the loss is one of PyTorch's, which can be had for each sample."""
        return self.name in LOSS_ARGUMENTS

    @field_validator("name")
    @classmethod
    def _name_is_known(cls, name: str) -> str:
        if ":" in name:
            problem = target_problem(name)
        elif name in LOSS_ARGUMENTS:
            problem = None
        else:
            guess = nearest(name.removesuffix("_loss").removesuffix("loss"), LOSS_ARGUMENTS)
            remedy = f"did you mean {guess}?" if guess else None
            problem = Problem("", f"must be {one_of([*LOSS_ARGUMENTS, 'module:function'])}", remedy, show(name))
        if problem:
            raise Refused(problem)
        return name

    @model_validator(mode="after")
    def _arguments_belong_to_the_loss(self) -> "LossOptions":
        if not self.is_named:
            return self
        known = LOSS_ARGUMENTS[self.name]
        takes = f"it takes {one_of(known)}" if known else "it takes no arguments"
        unknown = [name for name in self.args if name not in known]
        if unknown:
            raise Refused(*(Problem(f"args.{name}", f"is no argument of {self.name}; {takes}") for name in unknown))
        return self


OPTIMIZER_DEFAULTS: Mapping[str, Mapping[str, object]] = {
    "sgd": {"lr": 1e-3, "momentum": 0.0, "dampening": 0.0, "nesterov": False, "weight_decay": 0.0},
    "adam": {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0},
    "adamw": {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 1e-2},
}
"""What each optimizer takes, with the defaults of torch.optim; a test compares them with its signatures."""

_Beta = Annotated[float, Field(ge=0, lt=1)]


class OptimizerOptions(Options):
    """The `[optimizer]` table. A field of another kind of optimizer is None here, and refused where it is given.

    `max_grad_norm` bounds the norm of all gradients together; without it nothing is clipped.
    """

    name: Literal["sgd", "adam", "adamw"]
    lr: float = Field(default=1e-3, ge=0)
    momentum: float | None = Field(default=None, ge=0)
    dampening: float | None = None
    nesterov: bool | None = None
    weight_decay: float = Field(default=0.0, ge=0)
    betas: Annotated[tuple[_Beta, _Beta], Field(strict=False)] | None = None
    eps: float | None = Field(default=None, gt=0)
    max_grad_norm: float | None = Field(default=None, gt=0)

    def hyperparameters(self) -> dict[str, float | bool]:
        """Every number that the optimizer's kernel takes, by the name of its runtime argument.

        sgd: lr, momentum, dampening, nesterov, weight_decay. adam and adamw: lr, beta1, beta2, eps, weight_decay.
        With clipping also max_grad_norm.
        """
        numbers: dict[str, float | bool] = {}
        for field in OPTIMIZER_DEFAULTS[self.name]:
            value = getattr(self, field)
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
            return {**OPTIMIZER_DEFAULTS.get(name, {}), **given}
        return given

    @model_validator(mode="after")
    def _fields_belong_to_the_kind(self) -> "OptimizerOptions":
        takes = (*OPTIMIZER_DEFAULTS[self.name], "max_grad_norm")
        problems = [
            Problem(
                field,
                f"is not for {self.name}, which takes {', '.join(takes)}",
                f"leave it out; of what a config or a PEF says, --set optimizer.{field}= takes it away",
            )
            for field in OptimizerOptions.model_fields
            if field not in ("name", *takes) and getattr(self, field) is not None
        ]
        missing = [field for field in OPTIMIZER_DEFAULTS[self.name] if getattr(self, field) is None]
        problems += (Problem(field, "must have a value") for field in missing)
        if self.nesterov and (not self.momentum or self.dampening):
            problems.append(
                Problem(
                    "nesterov",
                    f"needs momentum above 0 and dampening 0; here they are {self.momentum} and {self.dampening}",
                    "--set optimizer.momentum=0.9",
                )
            )
        if problems:
            raise Refused(*problems)
        return self


class ScheduleOptions(Options):
    """The `[training.schedule]` table: what the learning rate is multiplied by at optimizer step `s`, counted from 0.

        warm-up     (s + 1) / warmup_steps                              while s < warmup_steps; then
        constant    1
        linear      1 + (final_factor - 1) · t
        cosine      final_factor + (1 - final_factor) · (1 + cos(π t)) / 2
        step        gamma ** ((s - warmup_steps) // step_size)

    where t = (s - warmup_steps) / (total_steps - warmup_steps), at most 1 (and 1 where nothing is left after the
    warm-up), and total_steps is the run's own number of steps unless it is given.
    """

    name: Literal["constant", "linear", "cosine", "step"] = "constant"
    warmup_steps: int = Field(default=0, ge=0)
    total_steps: int | None = Field(default=None, ge=1)
    final_factor: float = Field(default=0.0, ge=0, le=1)
    step_size: int | None = Field(default=None, ge=1)
    gamma: float = Field(default=0.1, gt=0)

    @model_validator(mode="after")
    def _fields_fit_together(self) -> "ScheduleOptions":
        problems: list[Problem] = []
        if self.name == "step" and self.step_size is None:
            problems.append(Problem("step_size", "is missing", "--set training.schedule.step_size=…"))
        if self.name != "step" and self.step_size is not None:
            remedy = "--set training.schedule.name=step"
            problems.append(Problem("step_size", f"is not for {self.name}", remedy, str(self.step_size)))
        if self.total_steps is not None and self.warmup_steps >= self.total_steps:
            problems.append(
                Problem("warmup_steps", f"must be below total_steps, {self.total_steps}", None, str(self.warmup_steps))
            )
        if problems:
            raise Refused(*problems)
        return self


class TrainingOptions(Options):
    """The `[training]` table. `batch_size` is that of one replica and is compiled in; the rest a run may change.

    Either `epochs` or `steps` says how long; with neither, one epoch.
    """

    batch_size: int = Field(default=1, ge=1)
    accumulation_steps: int = Field(default=1, ge=1, le=MOST_MICRO_STEPS)
    epochs: int | None = Field(default=None, ge=1)
    steps: int | None = Field(default=None, ge=1)
    seed: Seed = 0
    evaluate: bool = True
    schedule: ScheduleOptions = ScheduleOptions()

    @model_validator(mode="after")
    def _one_length(self) -> "TrainingOptions":
        if self.epochs is not None and self.steps is not None:
            what = f"cannot be given beside epochs, {self.epochs}: one of them says how long to train"
            remedy = "leave out one: --epochs or --steps, training.epochs or training.steps"
            raise Refused(Problem("steps", what, remedy, str(self.steps)))
        return self
