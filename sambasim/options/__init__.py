"""The options of `compile` and `run`: one schema that flags, TOML and the Python API fill. No torch."""

from sambasim.options.compile import COMPILE_FLAGS, QUICK_START, CompileOptions, compile_options
from sambasim.options.data import DataOptions
from sambasim.options.inputs import InputSpec, parse_input
from sambasim.options.load import apply_overrides, build, read_toml
from sambasim.options.run import RUN_FLAGS, ResolvedRun, RunOptions, resolve_run, run_options
from sambasim.options.targets import SourceKind
from sambasim.options.training import (
    LOSS_ARGUMENTS,
    OPTIMIZER_DEFAULTS,
    LossOptions,
    ModelOptions,
    OptimizerOptions,
    ScheduleOptions,
    TrainingOptions,
)

__all__ = [
    "COMPILE_FLAGS",
    "LOSS_ARGUMENTS",
    "OPTIMIZER_DEFAULTS",
    "QUICK_START",
    "RUN_FLAGS",
    "CompileOptions",
    "DataOptions",
    "InputSpec",
    "LossOptions",
    "ModelOptions",
    "OptimizerOptions",
    "ResolvedRun",
    "RunOptions",
    "ScheduleOptions",
    "SourceKind",
    "TrainingOptions",
    "apply_overrides",
    "build",
    "compile_options",
    "parse_input",
    "read_toml",
    "resolve_run",
    "run_options",
]
