"""What a command is about: a PEF, a config or a model. A model is captured on tensors without memory."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from sambasim.bounded import MOST_MICRO_STEPS, shortened
from sambasim.costs.cut import Level
from sambasim.errors import OptionError, PefError
from sambasim.hardware.spec import arch_of
from sambasim.ir.program import Program
from sambasim.options.compile import CompileOptions, compile_options
from sambasim.options.given import read_toml
from sambasim.pef import PefDocument, read
from sambasim.pef.archive import COMPILE_AGAIN

OnPhase: TypeAlias = Callable[[str], None]

DEFAULT_OPTIMIZER = "adamw"
"""That of an estimate of memory."""


@dataclass(frozen=True, slots=True)
class Subject:
    """A program for each requested batch size, and how it was compiled. If a program has another batch size, its work
    is scaled. `recomputed` captures a model again, with recomputation."""

    programs: tuple[tuple[int, Program], ...]
    arch: str
    tiles: int | None
    level: Level
    micro_steps: int
    recomputed: Callable[[int], Program] | None = None


def is_model(name: str) -> bool:
    """Whether `name` is a config or a model, and no PEF. Raises OptionError for a Python file alone."""
    if name.endswith(".py"):
        raise OptionError(
            f"{name} is a Python file, and the name of a model in it is missing",
            remedy=f"{name}:NAME, for a class or function of that file; for an app, the PEF that it compiles",
        )
    return name.endswith(".toml") or ":" in name


def options_of_model(name: str, overrides: Sequence[str], **flags: object) -> CompileOptions:
    """The options of a config or a model. Raises OptionError."""
    config, target = (Path(name), None) if name.endswith(".toml") else (None, name)
    return compile_options(config, target, overrides, flags)


def options_of_estimate(subject: str, overrides: Sequence[str], batch_size: int | None) -> CompileOptions:
    """Raises OptionError for what is neither a model nor a config, for inference, and for a replica of several
    ranks."""
    if not is_model(subject):
        raise OptionError(
            f"{subject} is neither a model nor a config",
            remedy=f"file.py:NAME, module:NAME or FILE.toml; for a PEF: sambasim inspect {subject}",
        )
    flags: dict[str, object] = {"batch_size": batch_size}
    in_config = subject.endswith(".toml") and "optimizer" in read_toml(Path(subject))
    if not in_config and not any(override.startswith("optimizer.name") for override in overrides):
        flags["optimizer"] = DEFAULT_OPTIMIZER
    if options_of_model(subject, [*overrides, "parallel.zero=1"], **flags).inference:
        raise OptionError(
            "the estimate is for training, and compile.inference is true", remedy="--set compile.inference=false"
        )
    options = options_of_model(subject, overrides, **flags, data_parallel=True)
    if options.n_chips > 1 or options.pipeline_stages > 1:
        field = "n_chips" if options.n_chips > 1 else "pipeline_stages"
        whole = "--set parallel.n_chips=1 --set parallel.tensor_parallel=" if field == "n_chips" else None
        raise OptionError(
            f"parallel.{field} = {getattr(options, field)}: the estimate is for a replica of one rank",
            remedy=whole or "--set parallel.pipeline_stages=1 --set parallel.micro_batches=1",
        )
    return options


def subject_of_pef(path: Path, batch_sizes: Sequence[int]) -> Subject:
    document = read(path)
    program, compiled = document.program, document.compile_options
    tiles = compiled.get("num_tiles")
    return Subject(
        programs=tuple((size, program) for size in batch_sizes or (program.batch_size,)),
        arch=arch_of(compiled),
        tiles=tiles if isinstance(tiles, int) else None,
        level=level_of(compiled.get("opt_level")),
        micro_steps=_micro_steps(document) if program.training else 1,
    )


def _micro_steps(document: PefDocument) -> int:
    """The micro-steps that the PEF accumulates in a step. Raises PefError for a number that no run accepts."""
    training = document.training_defaults.get("training")
    stored = training.get("accumulation_steps") if isinstance(training, dict) else None
    if stored is None:
        return 1
    if type(stored) is not int or not 1 <= stored <= MOST_MICRO_STEPS:
        raise PefError(
            f"the PEF accumulates {shortened(ascii(stored))} micro-steps in a step; the most is {MOST_MICRO_STEPS:,}",
            where="training.accumulation_steps of the PEF",
            remedy=COMPILE_AGAIN,
        )
    return stored


def subject_of_model(name: str, overrides: Sequence[str], batch_sizes: Sequence[int], on_phase: OnPhase) -> Subject:
    def options_at(size: int | None) -> CompileOptions:
        return options_of_model(name, overrides, batch_size=size, data_parallel=True)

    options = [options_at(size) for size in batch_sizes or (None,)]
    first = options[0]

    from sambasim.compiler.front import shapes_from_options  # torch

    def recomputed(size: int) -> Program:
        on_phase("capture it again with recomputation")
        return shapes_from_options(options_at(size).model_copy(update={"recompute": "full"}))

    return Subject(
        programs=tuple((each.training.batch_size, shapes_from_options(each, on_phase)) for each in options),
        arch=first.arch,
        tiles=first.num_tiles,
        level=first.opt_level,
        micro_steps=first.training.accumulation_steps,
        recomputed=recomputed if first.recompute == "none" and not first.inference else None,
    )


def level_of(stored: object) -> Level:
    match stored:
        case "o0" | "o1":
            return stored
        case _:
            return "o3"
