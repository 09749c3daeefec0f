"""Every exception of sambasim, as a tree; each family says who must act. And the limits of what is read and quoted.

    family          who must act                               exit code
    UserError       you: flags, config, model, data, launch    2
    ArtifactError   you: this PEF or these weights are wrong   3
    PeerError       you: another rank failed first             4
    InternalError   us: please report it                       70
    Interrupted     nobody: a signal stopped the run           128 + the number of the signal

A message has three parts: `what` is wrong, `where` it is, and the `remedy`: what to type next. Each class has a
`code` that stays the same between releases, so that scripts can tell errors apart. Only `cli` prints them.

Quoted text can come from any file, with lines that look like a remedy. So all lines of a part are indented further than
its title, and control characters are escaped.
"""

import copyreg
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any, ClassVar, TextIO

from sambasim.units import MIB

LARGEST_TOML_BYTES = 4 * MIB
DEEPEST_TABLES = 32  # levels of tables and arrays in a TOML file; real ones have four
LARGEST_RECORDS_BYTES = 1024 * MIB  # a run of three million steps
LONGEST_MESSAGE = 1000
LONGEST_LINE = 4000
LARGEST_COUNT = 10**9  # of steps, samples and the like: more than any run has
LARGEST_BYTES = 1 << 46  # 64 TiB: more than any machine has, and far from where arithmetic on sizes could overflow
LARGEST_INTEGER = (1 << 63) - 1
LARGEST_FACTOR = 1e38  # of a hyperparameter: float32 holds it
HIGHEST_RATE = 1e18  # bytes or FLOP a second, of one link or unit
LONGEST_WAIT_S = 31_536_000  # a year
MOST_REPLICAS = 16_384  # more than any published job has; a placement lists each
MOST_RDUS = 1024  # of a node
MOST_TILES = 64  # of an RDU
MOST_UNITS = 10**6  # of an RDU
MOST_MICRO_STEPS = 4096  # of one optimizer step: a prediction has a time for each section of each of them
MOST_THREADS = 4096  # more than any node has cores; each thread has a stack

_OUT_OF_MEMORY = ("can't allocate memory", "cannot allocate memory", "not enough memory", "out of memory")


def shortened(text: str) -> str:
    """`text`, or its beginning and end if it is long."""
    if len(text) <= LONGEST_MESSAGE:
        return text
    return f"{text[: LONGEST_MESSAGE // 2]} … {text[-LONGEST_MESSAGE // 2 :]}"


def printable(text: str, *, kept: str = "\n\t") -> str:
    """`text` with control characters and other unprintable ones escaped, apart from those in `kept`."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in kept else ascii(c)[1:-1] for c in text)


def one_line(text: str) -> str:
    """`text`, or its beginning if it is long, on one line without control characters."""
    spelled = printable(text[: LONGEST_LINE + 1], kept="")
    return spelled if len(spelled) <= LONGEST_LINE else f"{spelled[:LONGEST_LINE]}…"


def say(text: str, file: TextIO | None = None) -> None:
    """Print `text` at once, with control characters escaped: names in it may come from any file or argument."""
    print(printable(text), file=file, flush=True)


def say_json(line: str, file: TextIO | None = None) -> None:
    """As `say`, in the escapes of JSON, for one line or several."""
    import json  # which most commands do not need

    print("".join(c if c.isprintable() or c == "\n" else json.dumps(c)[1:-1] for c in line), file=file, flush=True)


def is_too_deep(tables: object) -> bool:
    """Whether the content of a TOML file has more than DEEPEST_TABLES levels of tables and arrays."""
    level: list[object] = [tables]
    for _ in range(DEEPEST_TABLES + 1):
        inner = (list(outer.values()) if isinstance(outer, dict) else outer for outer in level)
        level = list(chain.from_iterable(values for values in inner if isinstance(values, list)))
    return bool(level)


class SambasimError(Exception):
    """The root of the tree; never raised itself."""

    code: ClassVar[str] = "error"
    exit_code: int = 70

    def __init_subclass__(cls, *, code: str | None = None, exit_code: int | None = None) -> None:
        cls.code, cls.exit_code = code or cls.code, exit_code or cls.exit_code

    def __init__(self, what: str, *, where: str | None = None, remedy: str | None = None) -> None:
        super().__init__(what)
        self.what, self.where, self.remedy = what, where, remedy

    def __reduce__(self) -> tuple[Any, ...]:
        """For another process: classes are made from different arguments, so it is made again without `__init__`."""
        new = copyreg.__newobj__  # type: ignore[attr-defined]  # the stubs lack it
        return new, (type(self), *self.args), vars(self)

    def __str__(self) -> str:
        where = f"\n  where: {_indented(self.where, 9)}" if self.where else ""
        remedy = f"\n  try:   {_indented(self.remedy, 9)}" if self.remedy else ""
        return printable(f"{_indented(self.what, 4)}{where}{remedy}")


class UserError(SambasimError, code="user", exit_code=2):
    """Something that was typed, configured or programmed cannot work."""


class OptionError(UserError, code="option"):
    """A flag, a `--set` or a field of a TOML config is wrong."""


@contextmanager
def failing_with(kind: type[SambasimError], what: str, remedy: str, where: str | None = None) -> Iterator[None]:
    """Raises an error of `kind` for a file within that fails, or is not UTF-8: `what`, and the reason."""
    try:
        yield
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror or error if isinstance(error, OSError) else "it is not UTF-8 text"
        raise kind(f"{what}: {reason}", where=where, remedy=remedy) from error


def is_out_of_memory(error: BaseException) -> bool:
    """Whether there was not enough memory, in the words of Python, torch or safetensors."""
    return isinstance(error, MemoryError) or any(words in str(error).lower() for words in _OUT_OF_MEMORY)


class ModelError(UserError, code="model"):
    """The model cannot be found, built or called."""


class CaptureError(ModelError, code="capture"):
    """The model runs in PyTorch, but its training step cannot be captured as a graph."""


class OperatorError(CaptureError, code="operator"):
    """The captured graph holds an operator that a PEF may not hold."""


class DataError(UserError, code="data"):
    """The data source cannot be found or read, or does not fit the model's inputs."""


class CallbackError(UserError, code="callback"):
    """A callback cannot be called, or has raised an exception."""


class NumericsError(UserError, code="numerics"):
    """A loss, a gradient or a parameter is no longer finite."""


class AssertionFailedError(UserError, code="assertion"):
    """An assertion of the model does not hold."""


class LaunchError(UserError, code="launch"):
    """The job was started with a number of ranks, or by a launcher, that cannot work."""


class DataParallelError(UserError, code="data-parallel"):
    """An app's replicas would train without sync, from different weights, or on the same samples."""


class MachineError(UserError, code="machine"):
    """This machine lacks something: disk, shared memory, a compiler, a device."""


class ArtifactError(SambasimError, code="artifact", exit_code=3):
    """A file made by sambasim cannot be used. Each part of the message is one line of bounded length, as names in the
    file can be of any length."""

    def __init__(self, what: str, *, where: str | None = None, remedy: str | None = None) -> None:
        super().__init__(one_line(what), where=where and one_line(where), remedy=remedy and one_line(remedy))


class IncompleteError(ArtifactError, code="incomplete"):
    """Lines of a record are missing, or in another order."""


class PefError(ArtifactError, code="pef"):
    """A PEF is damaged, breaks a rule of the format, or was not compiled for what is asked of it."""


class WeightsError(ArtifactError, code="weights"):
    """A weights file does not fit the PEF it is used with."""


class CheckpointError(ArtifactError, code="checkpoint"):
    """A checkpoint is damaged, breaks a rule of its format, or is of another run. `is_damage` says that no release will
    ever be able to use it."""

    def __init__(self, what: str, *, is_damage: bool = False, **parts: str | None) -> None:
        super().__init__(what, **parts)
        self.is_damage = is_damage


class PeerError(SambasimError, code="peer", exit_code=4):
    """Another rank failed, or has another state than this rank. `rank` is the first such rank, where it is known."""

    def __init__(self, what: str, *, rank: int | None = None, **parts: str | None) -> None:
        super().__init__(what, **parts)
        self.rank = rank


class StallError(PeerError, code="stall"):
    """The job hangs: a rank does not arrive where the others wait for it."""


class Interrupted(SambasimError, code="interrupted"):
    """A run has stopped because a signal asked it to."""

    def __init__(self, signal_number: int, what: str, *, remedy: str | None = None) -> None:
        super().__init__(what, remedy=remedy)
        self.exit_code = 128 + signal_number


class InternalError(SambasimError, code="internal"):
    """A mistake of sambasim's own. Please report it."""


class InvariantError(InternalError, code="invariant"):
    """A graph breaks one of the numbered invariants of `ir.verify`."""

    def __init__(self, number: int, what: str) -> None:
        super().__init__(f"invariant {number}: {what}")
        self.number = number


def _indented(text: str, width: int) -> str:
    """`text`; long lines are shortened, and those after the first begin with `width` spaces at least."""
    first, *others = map(shortened, text.split("\n"))
    indentation = " " * width
    return "\n".join((first, *(line if line.startswith(indentation) else indentation + line for line in others)))


def exit_code(error: BaseException, other: int = 70) -> int:
    """The exit code of a process that ends with `error`; `other` for an error of another library."""
    if isinstance(error, SambasimError):
        return error.exit_code
    if isinstance(error, KeyboardInterrupt):
        return 130  # 128 + SIGINT, as in shells
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    return other
