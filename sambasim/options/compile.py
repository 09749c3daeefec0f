"""The options of `sambasim compile`: a TOML config, flags and the Python API all fill CompileOptions."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal, get_args

from pydantic import Field, JsonValue

from sambasim.errors import MOST_REPLICAS, ModelError, OptionError
from sambasim.options.base import Options, build, dotted_names
from sambasim.options.deepspeed import World, deepspeed_options
from sambasim.options.fields import COMPILE_FLAGS, BuildFields, ParallelFields, ScheduleName
from sambasim.options.given import as_table, assign, given_flags, given_overrides, given_settings, leaves, read_toml
from sambasim.options.grammar import absolute_names, missing, split_target
from sambasim.options.problem import Given, Problem, broken, suggested
from sambasim.options.training import ModelOptions, Sections, TrainingOptions, unreplaced

QUICK_START = Path(__file__).parent.parent / "quickstart" / "digits.toml"


class BuildOptions(BuildFields, Options):
    """How it is compiled: the `[compile]` table. `num_tiles` None is all tiles."""

    def problems(self) -> Iterator[Problem]:
        off, no_master = "leave out --enable-stoc-rounding", "leave out --master-weights"
        stochastic, master = self.stochastic_rounding, self.master_weights
        without_step = "does not go with inference, which has no optimizer step"
        yield from broken(
            (stochastic and self.dtype != "bf16", "stochastic_rounding",
             f"needs bf16; with {self.dtype} nothing is rounded to bf16", f"add --dtype bf16, or {off}"),
            (master and self.dtype == "fp32", "master_weights",
             "needs 16-bit parameters; with fp32 they are float32 themselves", f"add --dtype bf16, or {no_master}"),
            (stochastic and master and self.dtype == "bf16", "stochastic_rounding",
             "does not go with master_weights, from which parameters are rounded to nearest",
             f"{off} or --master-weights"),
            (stochastic and self.inference, "stochastic_rounding", without_step, f"{off} or --inference"),
            (master and self.inference, "master_weights", without_step, f"{no_master} or --inference"),
        )  # fmt: skip

    @property
    def keeps_master_weights(self) -> bool:
        return self.master_weights or self.dtype == "fp16"  # whose small gradients would underflow in states


_PREFIXES = ("", "packed_", "local_", "embedding_")
TENSOR_STYLES: Mapping[str, Literal["columns", "rows", "whole"]] = {
    **dict.fromkeys((*(f"{before}colwise" for before in _PREFIXES), "colwise_rep", "colwise_gather_output"), "columns"),
    **dict.fromkeys((*(f"{before}rowwise" for before in _PREFIXES), "rowwise_rep", "rowwise_split_input"), "rows"),
    **dict.fromkeys(("replicate", "replicated_with_grad_allreduce"), "whole"),
}
"""Hugging Face's styles of tensor parallelism that say how a weight lies; the layouts of activations follow from it."""


def plan_entry(pattern: str) -> str:
    """The name of an option in `[parallel]`: of the style of `pattern`."""
    return f'tensor_plan."{pattern}"'


class ParallelOptions(ParallelFields, Options):
    """On how many ranks it runs, and how: the `[parallel]` table. `tensor_plan`: styles of weights, by module names."""

    tensor_plan: dict[str, str] | None = None

    def problems(self) -> Iterator[Problem]:
        for pattern, style in (self.tensor_plan or {}).items():
            if style not in TENSOR_STYLES:
                remedy = suggested(style, TENSOR_STYLES)
                yield Problem(plan_entry(pattern), "must be colwise, rowwise or replicate", remedy, style)
        stages, parts, cut, chips = self.pipeline_stages, self.micro_batches, self.tensor_parallel, self.n_chips
        add_stages = "add --pipeline-stages 2"
        add_order = f"--lr-schedule {self.schedule}" if self.schedule in get_args(ScheduleName) else add_stages
        yield from broken(
            (self.tensor_plan and cut != "weight", "tensor_plan",
             "needs weights to be cut", "add --tensor-parallel weight --n-chips 2"),
            (self.world_size > 1 and not self.data_parallel, "world_size",
             "needs data parallelism", "add --data-parallel", self.world_size),
            (cut is not None and chips == 1, "tensor_parallel", "needs several chips", "add --n-chips 2", cut),
            (cut is None and chips > 1, "n_chips", "does nothing: no tensor is cut over the chips of a replica",
             "add --tensor-parallel weight, or batch", chips),
            (stages == 1 and parts > 1, "micro_batches",
             "needs a pipeline; without one, batches are taken one after another by --grad-accumulation-steps",
             add_stages, parts),
            (stages == 1 and self.schedule != "1f1b", "schedule", "needs a pipeline", add_order, self.schedule),
            (1 < parts < stages and not self.schedule.endswith(".csv"), "micro_batches",
             f"cannot keep {stages} stages busy",
             f"--micro-batches N of at least {stages}; 1 is plain model parallelism", parts),
            (self.world_size * chips * stages > MOST_REPLICAS, "world_size",
             f"takes {self.world_size * chips * stages:,} ranks, and at most {MOST_REPLICAS:,} are possible",
             "fewer replicas, --n-chips or --pipeline-stages", self.world_size),
            (self.zero != 1 and not (self.data_parallel or self.chips > 1), "zero",
             "needs data parallelism", "add --data-parallel", self.zero),
        )  # fmt: skip

    @property
    def chips(self) -> int:
        """The chips that share the batch of a replica."""
        return self.n_chips if self.tensor_parallel == "batch" else 1


BUILD_FIELDS = frozenset({*BuildOptions.model_fields, *ParallelOptions.model_fields})
"""The fields of `[compile]` and `[parallel]`, which a PEF stores in one table."""


class CompileFile(Sections):
    """The layout of a TOML config. What does not fit together is for CompileOptions, which list it all."""

    model: ModelOptions = Field(default_factory=ModelOptions)
    compile: BuildOptions = Field(default_factory=BuildOptions)
    parallel: ParallelOptions = Field(default_factory=ParallelOptions)

    def problems(self) -> Iterator[Problem]:
        yield from ()


class CompileOptions(Sections, ParallelOptions, BuildOptions):
    """Everything that `compile` needs, flat. `loss` is None for a model that returns its loss. `notes`: on what a
    DeepSpeed config has that no option says."""

    model: ModelOptions = Field(default_factory=ModelOptions)
    notes: tuple[str, ...] = Field(default=(), exclude=True)

    def problems(self) -> Iterator[Problem]:
        for part in (BuildOptions, ParallelOptions, Sections):
            yield from part.problems(self)
        if self.inference:
            without = "does not go with inference, which has no"
            yield from broken(
                (self.data_parallel and self.zero != 1, "parallel.zero",
                 f"{without} states to keep in slices", "leave out --zero or --inference", self.zero),
                (self.chips > 1, "parallel.tensor_parallel",
                 f"{without} gradients to sum over chips", "leave out --tensor-parallel or --inference", "batch"),
                (self.pipeline_stages > 1, "parallel.pipeline_stages",
                 "does not go with inference: a pipeline is for training",
                 "leave out --pipeline-stages or --inference"),
                (self.recompute != "none", "parallel.recompute",
                 f"{without} backward", "leave out --recompute or --inference", self.recompute),
            )  # fmt: skip
        several = self.n_chips > 1 or self.pipeline_stages > 1 or self.inference
        if self.data.buckets and several:
            what = "are for training on replicas of one chip, without a pipeline"
            yield Problem("data.buckets", what, "--set 'data.buckets=[]', and pad samples to one length")
        batch_size, passes = self.training.batch_size, self.chips * self.micro_batches
        of_chips = bool(batch_size % self.chips)
        name, parts = ("n_chips", self.chips) if of_chips else ("micro_batches", self.micro_batches)
        divided = f"batch of {batch_size} samples"
        if not of_chips and self.chips > 1:
            divided = f"{batch_size // self.chips} samples of a chip"
        remedy = f"another number of them, or --batch-size {-(-batch_size // passes) * passes}"
        yield from broken(
            (batch_size % passes, f"parallel.{name}", f"does not divide the {divided}", remedy, parts),
            (self.training.loss_scale != TrainingOptions().loss_scale and self.dtype != "fp16", "training.loss_scale",
             f"is for fp16; with {self.dtype} the loss is not scaled", "add --dtype fp16, or leave it out"),
        )  # fmt: skip
        if self.optimizer is None and not self.inference:
            remedy = "--set optimizer.name=adamw (for inference: --set compile.inference=true)"
            yield Problem("optimizer.name", "is missing, and training needs one", remedy)

    @property
    def name(self) -> str:
        """The name of the PEF: `pef_name`, or the name of the model in lower case."""
        if self.pef_name is not None:
            return self.pef_name
        target = split_target(self.model.target or "")[1]
        return target.rpartition(".")[2].lower() or "model"

    @property
    def pef_path(self) -> Path:
        """`out/NAME/NAME.pef`."""
        return self.output_folder / self.name / f"{self.name}.pef"

    @property
    def micro_batch_size(self) -> int:
        """The samples of one pass of the graph."""
        return self.training.batch_size // (self.chips * self.micro_batches)

    def training_defaults(self) -> dict[str, JsonValue]:
        """The tables of a run as the PEF stores them, in JSON; None for what a PEF for inference has not."""
        dumped = self.model_dump(mode="json", include={*Sections.model_fields} - {"data"})
        return dumped | ({"loss": None, "optimizer": None, "ema": None} if self.inference else {})


def compile_options(
    config: Path | None, target: str | None, overrides: Sequence[str], flags: Mapping[str, object]
) -> CompileOptions:
    """The options of one compile: flags override `--set`, which overrides MODEL, a DeepSpeed config, the TOML file, and
    the defaults. MODEL may be the TOML file; without both it is the quick start. Raises OptionError, which lists all
    mistakes, and ModelError if there is neither an optimizer nor the model."""
    if config is None and target is not None and target.endswith(".toml"):
        config, target = Path(target), None
    given = [*given_overrides(overrides), *given_flags(flags, COMPILE_FLAGS, dotted_names(CompileFile))]
    if target is not None:
        given.insert(0, Given(("model", "target"), target, "the MODEL argument"))
    if config is None and all(entry.name != "model.target" for entry in given):
        config = QUICK_START
    written = {} if config is None else absolute_names(read_toml(config), config.parent)
    where = None if config is None else str(config)
    return _built(written, given, where, names_model=True)


def options_in_python(tables: Mapping[str, object], flags: Mapping[str, object]) -> CompileOptions:
    """The options of a compile in Python: flags by keyword, and `set`, override `tables`. Raises OptionError."""
    others = {name: value for name, value in flags.items() if name != "set"}
    given = [*given_settings(flags.get("set") or {}), *given_flags(others, COMPILE_FLAGS, dotted_names(CompileFile))]
    return _built(tables, given, None, names_model=False)


def _built(
    tables: Mapping[str, object], given: Sequence[Given], where: str | None, *, names_model: bool
) -> CompileOptions:
    """`tables`, of the file `where`, with what is given, also in a DeepSpeed config; if `names_model`, they must name a
    model that is there."""
    files = [entry.value for entry in given if entry.name == "deepspeed"]
    given, notes = [entry for entry in given if entry.name != "deepspeed"], list[str]()
    for path in files:
        if any(entry.name == "compile.inference" and entry.value for entry in given):
            raise OptionError("a DeepSpeed config is for training", remedy="leave out --deepspeed or --inference")
        others = assign(tables, given)
        size = as_table(others.get("parallel")).get("world_size", 1)
        world = World(size if type(size) is int else 1, f"-ws {size}", "--data-parallel -ws")
        by_file, notes = deepspeed_options(Path(str(path)), others, given, world)
        given = [*by_file, *given]
    tables = unreplaced(tables, leaves({entry.name: entry.value for entry in given}))
    file = build(CompileFile, absolute_names(assign(tables, given), Path.cwd()), where=where, given=given)
    target = file.model.target
    if names_model and target is None:
        remedy = "sambasim compile path/file.py:NAME, or model.target in the config"
        raise OptionError("no model is named", where=where, remedy=remedy)
    lacks_optimizer = names_model and file.optimizer is None and not file.compile.inference
    if target and lacks_optimizer and (problem := missing(target)):  # else found only after an optimizer was given
        raise ModelError(f"the model {target}: {problem.what}", remedy=problem.remedy)
    parts = {**dict(file), **dict(file.compile), **dict(file.parallel), "notes": tuple(notes)}
    del parts["compile"], parts["parallel"]
    return build(CompileOptions, parts, where=where, given=given)
