"""Where samples come from, and how they are fed."""

from pydantic import Field, field_validator, model_validator

from sambasim.options.base import JsonTable, Options
from sambasim.options.inputs import InputSpec, parse_input
from sambasim.options.problems import Problem, Refused
from sambasim.options.targets import SYNTHETIC, SourceKind, source_kind, source_problem

MOST_WORKERS = 256
"""Processes that read data for one rank: a PEF names them too, and each takes memory."""

SYNTHETIC_ARGUMENTS = ("seed",)


class DataOptions(Options):
    """The `[data]` table.

    `source` is the name of a built-in data set, a `module:function` called with `args`, an `.npz` or `.safetensors`
    file, or `synthetic`: random `samples` of the declared `inputs` (when compiling) or of the PEF's inputs (when
    running). `evaluation_fraction` holds out that share of the samples, the same ones in every run. The rest are
    options of PyTorch's DataLoader; training always drops a last partial batch.
    """

    source: str | None = None
    args: JsonTable = Field(default_factory=dict)
    evaluation_fraction: float = Field(default=0.0, ge=0, lt=1)
    inputs: dict[str, str] | None = None
    samples: int | None = Field(default=None, ge=1)
    shuffle: bool = True
    workers: int = Field(default=0, ge=0, le=MOST_WORKERS)
    prefetch_factor: int | None = Field(default=None, ge=1)
    persistent_workers: bool = False

    @property
    def kind(self) -> SourceKind | None:
        return None if self.source is None else source_kind(self.source)

    def input_specs(self) -> tuple[InputSpec, ...] | None:
        """The declared inputs, parsed; None where none are declared."""
        return None if self.inputs is None else tuple(parse_input(name, text) for name, text in self.inputs.items())

    @field_validator("source")
    @classmethod
    def _source_can_be_one(cls, source: str | None) -> str | None:
        problem = None if source is None else source_problem(source)
        if problem:
            raise Refused(problem)
        return source

    @field_validator("inputs")
    @classmethod
    def _inputs_parse(cls, inputs: dict[str, str] | None) -> dict[str, str] | None:
        problems: list[Problem] = []
        for name, text in (inputs or {}).items():
            try:
                parse_input(name, text)
            except Refused as error:
                problems += error.problems
        if problems:
            raise Refused(*problems)
        return inputs

    @model_validator(mode="after")
    def _fields_belong_to_the_source(self) -> "DataOptions":
        problems: list[Problem] = []
        synthetic = self.source == SYNTHETIC
        for field in ("inputs", "samples"):
            if getattr(self, field) is not None and not synthetic:
                problems.append(Problem(field, "is for synthetic data only", '--set data.source="synthetic"'))
        unknown = [name for name in self.args if name not in SYNTHETIC_ARGUMENTS]
        if self.args and self.kind is SourceKind.FILE:
            problems.append(Problem("args", "are for a data function, and a file takes none", "leave out data.args"))
        elif synthetic and unknown:
            problems.append(Problem(f"args.{unknown[0]}", "is no argument of synthetic data, which takes seed alone"))
        elif synthetic and not _is_seed(self.args.get("seed", 0)):
            problems.append(Problem("args.seed", "must be a whole number of at least 0"))
        if self.workers == 0:
            if self.prefetch_factor is not None:
                problems.append(Problem("prefetch_factor", "needs workers", "--set data.workers=1"))
            if self.persistent_workers:
                problems.append(Problem("persistent_workers", "needs workers", "--set data.workers=1"))
        if problems:
            raise Refused(*problems)
        return self


def _is_seed(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
