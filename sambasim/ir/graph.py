"""The graph: functional ATen operators in execution order, and the sections that cut it. Arguments are a small closed
language, so a graph can be written, read and compared without torch."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property

from typing_extensions import TypeAliasType

from sambasim.ir.types import VALUE_BYTES, TensorType

MADE_AGAIN = "__again"
"""The end of the names of nodes and values that recomputation repeats."""


@dataclass(frozen=True, slots=True)
class Ref:
    """The value called `name`: a symbol, or the result of an earlier node."""

    name: str


@dataclass(frozen=True, slots=True)
class TorchConstant:
    """`torch.float32`, `torch.strided`, `torch.channels_last`, `torch.device("cpu")`: `kind` and `name`."""

    kind: str  # dtype | layout | memory_format | device
    name: str


@dataclass(frozen=True, slots=True)
class ComplexNumber:
    real: float
    imaginary: float


TORCH_CONSTANTS: Mapping[str, frozenset[str]] = {
    "dtype": frozenset(VALUE_BYTES),
    "layout": frozenset({"strided"}),
    "memory_format": frozenset({"contiguous_format", "preserve_format", "channels_last", "channels_last_3d"}),
    "device": frozenset({"cpu"}),
}
"""By kind: the names that a constant of torch may have. Closed, since a reader looks them up in torch."""

Argument = TypeAliasType(
    "Argument", "bool | int | float | str | Ref | TorchConstant | ComplexNumber | tuple[Argument, ...] | None"
)


@dataclass(frozen=True, slots=True)
class SourceLine:
    file: str
    line: int
    code: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.code}"


@dataclass(frozen=True)
class Node:
    """One operator. `results` name the values it defines, None where nobody reads one. `module` is the dotted path of
    the `nn.Module` that ran it; a backward operator has its forward's."""

    name: str
    operator: str
    args: tuple[Argument, ...] = ()
    kwargs: tuple[tuple[str, Argument], ...] = ()
    results: tuple[str | None, ...] = ()
    module: str = ""
    source: SourceLine | None = None

    @cached_property
    def reads(self) -> tuple[str, ...]:
        """The names of all values that it reads, in order, repeats included."""
        return tuple(references((*self.args, *(argument for _, argument in self.kwargs))))


class SectionKind(StrEnum):
    """The purpose of a section, by SambaFlow's names. Sections are ordered by what they read and write, not by kind."""

    FWD = "FWD"
    BCKWD = "BCKWD"
    REDUCE = "REDUCE"
    GRADNORM = "GRADNORM"
    OPT = "OPT"
    GATHER = "GATHER"


@dataclass(frozen=True, slots=True)
class Section:
    """A unit of execution: nodes `start` up to `stop` of its graph. `stage`: of a pipeline, for sections of a
    pass; `weights_only`: of a backward, the gradients of weights, which a schedule may run later than the rest."""

    index: int
    kind: SectionKind
    name: str
    start: int
    stop: int
    stage: int = 0
    weights_only: bool = False


@dataclass(frozen=True, slots=True)
class Output:
    """After the graph has run, `symbol` holds `value`."""

    value: str
    symbol: str


@dataclass(frozen=True, slots=True)
class Graph:
    """One executable graph. `values` holds the type of every result; symbols have their own."""

    name: str
    inputs: tuple[str, ...]
    nodes: tuple[Node, ...]
    outputs: tuple[Output, ...]
    values: Mapping[str, TensorType]
    sections: tuple[Section, ...] = field(default=())

    @property
    def section_counts(self) -> Mapping[str, int]:
        """How many sections there are of each kind."""
        return Counter(section.kind.value for section in self.sections)

    def section_nodes(self, section: Section) -> tuple[Node, ...]:
        return self.nodes[section.start : section.stop]

    def nodes_of(self, kind: SectionKind) -> list[Node]:
        """The nodes of all sections of `kind`, in order."""
        return [node for section in self.sections if section.kind is kind for node in self.section_nodes(section)]


def references(arguments: tuple[Argument, ...]) -> list[str]:
    """The names of all values in `arguments`, in order, repeats included."""
    found: list[str] = []
    for argument in arguments:
        if isinstance(argument, Ref):
            found.append(argument.name)
        elif isinstance(argument, tuple):
            found += references(argument)
    return found


def renamed(node: Node, names: Mapping[str, str]) -> Node:
    """`node`, reading values by other names: `names` has the new one of each value that changes."""
    if all(names.get(name, name) == name for name in node.reads):
        return node
    kwargs = tuple((key, _renamed(value, names)) for key, value in node.kwargs)
    return replace(node, args=tuple(_renamed(argument, names) for argument in node.args), kwargs=kwargs)


def _renamed(argument: Argument, names: Mapping[str, str]) -> Argument:
    if isinstance(argument, Ref):
        return Ref(names.get(argument.name, argument.name))
    return tuple(_renamed(one, names) for one in argument) if isinstance(argument, tuple) else argument
