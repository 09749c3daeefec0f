"""What `sambasim compile` is asked for: the TOML file, the flags and the Python API all fill CompileOptions."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, JsonValue, model_validator

from sambasim.errors import OptionError
from sambasim.options.base import FilePath, Options
from sambasim.options.data import DataOptions
from sambasim.options.load import absolute_names, apply_flags, apply_overrides, build, override_name, read_toml
from sambasim.options.problems import Problem, Refused, show
from sambasim.options.targets import split_target
from sambasim.options.training import LossOptions, ModelOptions, OptimizerOptions, TrainingOptions

QUICK_START = Path(__file__).parent.parent / "quickstart" / "digits.toml"
"""The config that is compiled where neither a model nor a config is named."""

_FILE_NAME = re.compile(r"\w[\w.+-]*")


def _plain_file_name(name: str) -> str:
    if not _FILE_NAME.fullmatch(name):
        what = "must be a plain file name: letters, digits and . _ + -, without a folder"
        raise Refused(Problem("", what, "--output-folder says where it goes", show(name)))
    if name.endswith(".pef"):
        raise Refused(Problem("", "must be given without .pef", f"--pef-name {name[:-4] or 'NAME'}", show(name)))
    return name


class Sections(Options):
    """What is compiled: the tables of a config but the last."""

    model: ModelOptions = ModelOptions()
    data: DataOptions = DataOptions()
    loss: LossOptions | None = None
    optimizer: OptimizerOptions | None = None
    training: TrainingOptions = TrainingOptions()


class BuildOptions(Options):
    """How it is compiled: the `[compile]` table.

    `world_size` is the least number of replicas that may run the PEF. `arch` names the device that is
    compiled for, and `num_tiles` how many tiles of it a replica has; None for all. `dtype` is what parameters,
    activations and gradients are stored in; with bf16 and `stochastic_rounding`, optimizer steps round at random, in
    the mean without error. `gradient_groups` says what is reduced in one exchange: all gradients that a backward
    section completes, or the gradient of each parameter by itself, as SambaFlow's compiler was seen to do.
    """

    pef_name: Annotated[str, AfterValidator(_plain_file_name)] | None = None
    output_folder: FilePath = Path("out")
    data_parallel: bool = False
    world_size: int = Field(default=1, ge=1)
    inference: bool = False
    opt_level: Literal["o0", "o1", "o3"] = "o3"
    arch: Literal["sn10", "sn30", "sn40"] = "sn30"
    num_tiles: int | None = Field(default=None, ge=1)
    dtype: Literal["fp32", "bf16"] = "fp32"
    stochastic_rounding: bool = False
    gradient_groups: Literal["section", "parameter"] = "section"

    @model_validator(mode="after")
    def _flags_fit_together(self) -> "BuildOptions":
        problems: list[Problem] = []
        if self.world_size > 1 and not self.data_parallel:
            problems.append(
                Problem("world_size", "needs data parallelism", "add --data-parallel", given=str(self.world_size))
            )
        if self.inference and self.data_parallel:
            what = "cannot be with inference, which has no gradients to reduce"
            problems.append(Problem("data_parallel", what, "leave out --data-parallel or --inference"))
        if self.stochastic_rounding and self.dtype != "bf16":
            what = f"would round nothing: in {self.dtype} no number is rounded to bf16"
            remedy = "add --dtype bf16, or leave out --enable-stoc-rounding"
            problems.append(Problem("stochastic_rounding", what, remedy))
        if self.stochastic_rounding and self.inference:
            what = "cannot be with inference, which has no optimizer step that would round"
            problems.append(Problem("stochastic_rounding", what, "leave out --enable-stoc-rounding or --inference"))
        if problems:
            raise Refused(*problems)
        return self


class CompileFile(Sections):
    """The layout of a TOML config."""

    compile: BuildOptions = BuildOptions()


class CompileOptions(Sections, BuildOptions):
    """Everything that `compile` needs, as one flat whole. A training PEF has an optimizer; `loss` is None for a model
    that returns its own."""

    @model_validator(mode="after")
    def _training_has_an_optimizer(self) -> "CompileOptions":
        if self.optimizer is None and not self.inference:
            remedy = "--set optimizer.name=adamw (or --inference)"
            raise Refused(Problem("optimizer.name", "is missing, and training needs one", remedy))
        return self

    @property
    def name(self) -> str:
        """The name of the PEF: `pef_name`, or else the model's in lower case."""
        if self.pef_name is not None:
            return self.pef_name
        target = split_target(self.model.target or "")[1]
        return target.rpartition(".")[2].lower() or "model"

    @property
    def pef_path(self) -> Path:
        """`out/NAME/NAME.pef`."""
        return self.output_folder / self.name / f"{self.name}.pef"

    def training_defaults(self) -> dict[str, JsonValue]:
        """What the PEF carries of loss, optimizer and training, as JSON: what a run starts from. An inference PEF has
        neither loss nor optimizer, whatever the config says."""
        loss, optimizer = (None, None) if self.inference else (self.loss, self.optimizer)
        return {
            "loss": None if loss is None else loss.model_dump(mode="json"),
            "optimizer": None if optimizer is None else optimizer.model_dump(mode="json"),
            "training": self.training.model_dump(mode="json"),
        }

    def data_source(self) -> dict[str, JsonValue]:
        """What the PEF carries of the data, as JSON."""
        return self.data.model_dump(mode="json")


COMPILE_FLAGS: Mapping[str, tuple[str, str]] = {
    "pef_name": ("--pef-name", "compile.pef_name"),
    "output_folder": ("--output-folder", "compile.output_folder"),
    "batch_size": ("--batch-size", "training.batch_size"),
    "grad_accumulation_steps": ("--grad-accumulation-steps", "training.accumulation_steps"),
    "data_parallel": ("--data-parallel", "compile.data_parallel"),
    "world_size": ("--world-size", "compile.world_size"),
    "inference": ("--inference", "compile.inference"),
    "opt_level": ("--o0, --o1 or --o3", "compile.opt_level"),
    "arch": ("--arch", "compile.arch"),
    "num_tiles": ("--num-tiles", "compile.num_tiles"),
    "gradient_groups": ("--gradient-groups", "compile.gradient_groups"),
}
"""By the keyword that `compile_options` takes: the flag, and the name that it sets in the TOML layout."""


def compile_options(
    config: Path | None,
    target: str | None,
    overrides: Sequence[str],
    flags: Mapping[str, object],
) -> CompileOptions:
    """The options of one compile: flags, over `--set`, over the MODEL argument, over the TOML file, over the defaults.

    `flags` has keys of COMPILE_FLAGS; None is a flag that was not given. Paths in the file are seen from its folder,
    those on the command line from the working directory. With neither a model nor a config it is the quick start.
    Raises OptionError, which lists everything that is wrong at once.
    """
    if config is None and target is None and ["model", "target"] not in map(override_name, overrides):
        config = QUICK_START
    written: dict[str, object] = {} if config is None else absolute_names(read_toml(config), config.parent)
    mapping = written
    if target is not None:
        mapping, origins = apply_flags(mapping, {"model": target}, {"model": ("the MODEL argument", "model.target")})
    else:
        origins = {}
    mapping = apply_overrides(mapping, overrides)
    origins |= {".".join(override_name(override)): "--set" for override in overrides}
    mapping, flag_origins = apply_flags(mapping, flags, COMPILE_FLAGS)
    origins |= flag_origins
    where = None if config is None else str(config)
    laid_over = absolute_names(mapping, Path.cwd())
    file = build(CompileFile, laid_over, where=where, origins=origins, config=written)
    if file.model.target is None:
        remedy = "sambasim compile path/file.py:NAME, or model.target in the config"
        raise OptionError("no model is named", where=where, remedy=remedy)
    parts = {name: getattr(file, name) for name in Sections.model_fields}
    parts |= {name: getattr(file.compile, name) for name in BuildOptions.model_fields}
    return build(CompileOptions, parts, where=where, origins=origins, config=written)
