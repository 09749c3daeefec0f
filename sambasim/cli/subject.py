"""What `simulate` is asked about: a PEF, or a model that is captured on tensors without memory."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from sambasim.bounded import shortened
from sambasim.costs.cut import Level
from sambasim.errors import OptionError, PefError
from sambasim.hardware.spec import arch_of
from sambasim.ir.program import Program
from sambasim.options.compile import CompileOptions, compile_options
from sambasim.options.training import MOST_MICRO_STEPS
from sambasim.pef import PefDocument, locate, read
from sambasim.pef.rules import COMPILE_AGAIN


@dataclass(frozen=True, slots=True)
class Subject:
    """A program for each batch size that is asked for, and what it was compiled with. A program may be of another batch
    size: then its work is scaled."""

    programs: tuple[tuple[int, Program], ...]
    arch: str
    tiles: int | None
    level: Level
    micro_steps: int


def is_model(name: str) -> bool:
    """Whether `name` is a config or a model, and not a PEF."""
    return name.endswith(".toml") or ":" in name


def refuse_script(name: str) -> None:
    """Raises OptionError for a Python file without the name of a model in it."""
    if name.endswith(".py"):
        raise OptionError(
            f"{name} has no model's name, and is no PEF",
            remedy=f"give {name}:NAME, a class or function in it; of an app, the PEF that it compiles",
        )


def subject_of_pef(name: str, output_folder: Path, batch_sizes: Sequence[int]) -> Subject:
    """The PEF called `name`."""
    document = read(locate(name, output_folder))
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
    """Those that the PEF accumulates in a step. Raises PefError for a number that no run takes."""
    training = document.training_defaults.get("training")
    given = training.get("accumulation_steps") if isinstance(training, dict) else None
    if given is None:
        return 1
    if type(given) is not int or not 1 <= given <= MOST_MICRO_STEPS:
        raise PefError(
            f"the PEF accumulates {shortened(ascii(given))} micro-steps in a step; 1 to {MOST_MICRO_STEPS:,} are taken",
            where="training.accumulation_steps of the PEF",
            remedy=COMPILE_AGAIN,
        )
    return given


def subject_of_model(
    name: str, overrides: Sequence[str], batch_sizes: Sequence[int], hear: Callable[[str], None]
) -> Subject:
    """The model, or the config, called `name`; captured once for each batch size."""
    from sambasim.compiler.front import shapes_from_options

    config, target = (Path(name), None) if name.endswith(".toml") else (None, name)

    def options_at(batch_size: int | None) -> CompileOptions:
        return compile_options(config, target, overrides, {"batch_size": batch_size, "data_parallel": True})

    options = [options_at(size) for size in batch_sizes] or [options_at(None)]
    first = options[0]
    return Subject(
        programs=tuple((each.training.batch_size, shapes_from_options(each, hear)) for each in options),
        arch=first.arch,
        tiles=first.num_tiles,
        level=first.opt_level,
        micro_steps=first.training.accumulation_steps,
    )


def level_of(given: object) -> Level:
    """`given`, or else o3."""
    match given:
        case "o0" | "o1":
            return given
        case _:
            return "o3"
