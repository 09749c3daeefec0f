"""An author who knows the format: any permitted operator, on operands of any shape and with any indices in them."""

from contextlib import suppress
from random import Random
from typing import Any

from torch import Argument

from sambasim.errors import SambasimError
from sambasim.ir.operators import OPERATORS
from sambasim.ir.types import TensorType
from sambasim.pef.decode import decode_node
from sambasim.runtime.instructions import find_operator
from sambasim.runtime.rehearsal import result_types

_OPERATORS = tuple(name for name in OPERATORS if not name.startswith("sambasim."))
_WHOLE = (0, 1, 2, -1, 5, 100, 10**6, -(10**6), 1 << 40, -(1 << 40), -(1 << 63))
_SMALL = (0, 1, 1, 1, 2, 2, 3, 4, -1)
_TEXTS = ("none", "mean", "sum", "tanh", "trunc", "floor", "constant", "reflect", "ij", "i,j->ij", "amax", "fro")


def authored(random: Random, graph: Any) -> None:
    """Writes one to three nodes, and those that make their operands, before the first node of `graph`."""
    author = _Author(random, graph)
    for _ in range(random.choice([1, 1, 2, 3])):
        author.write(random.choice(_OPERATORS))
    author.insert()


class _Author:
    def __init__(self, random: Random, graph: Any) -> None:
        self._random, self._graph = random, graph
        self._rows: list[list[Any]] = []
        self._types: dict[str, TensorType] = {}
        self._base: tuple[int, ...] = ()

    def write(self, operator: str) -> None:
        """One node of `operator`, its results stated as torch works them out, or else at random."""
        random = self._random
        self._base = tuple(random.choice([1, 2, 2, 3, 4, 6]) for _ in range(random.choice([1, 2, 2, 3, 4, 4, 5])))
        schema = find_operator(operator)._schema
        arguments = [self._argument(argument) for argument in schema.arguments if not argument.kwarg_only]
        keywords = [
            [argument.name, self._argument(argument)]
            for argument in schema.arguments
            if argument.kwarg_only and (not argument.has_default_value() or random.random() < 0.3)
        ]
        self._node(operator, arguments, keywords, len(schema.returns))

    def insert(self) -> None:
        """Puts what was written into the graph, whose sections begin that much later."""
        graph, count = self._graph, len(self._rows)
        graph["nodes"][:0] = self._rows
        graph["values"] += [[name, type_.dtype, list(type_.shape)] for name, type_ in self._types.items()]
        for index, section in enumerate(graph["sections"]):
            section["start"] += count if index else 0
            section["stop"] += count

    def _node(self, operator: str, arguments: list[Any], keywords: list[Any], results: int) -> str:
        name = f"foreign_{len(self._types)}_{len(self._rows)}"
        names: list[str | None] = [f"{name}_{index}" for index in range(results)]
        row: list[Any] = [name, operator, arguments, keywords, names, "", None]
        given: list[TensorType | None] = []
        with suppress(SambasimError, ValueError):
            given = list(result_types(decode_node(row, ()), self._types))
        if len(given) != results and given:
            names = row[4] = [f"{name}_{index}" for index in range(min(len(given), 64))]
        given += [TensorType("float32", self._base)] * (len(names) - len(given))
        for index, (result, type_) in enumerate(zip(names, given, strict=False)):
            if result is not None and type_ is not None:
                self._types[result] = type_
            else:
                names[index] = None
        self._rows.append(row)
        return str(names[0]) if names else name

    def _tensor(self) -> str:
        """A reference to a tensor: one that is there, or one that is made for it."""
        random = self._random
        if self._types and random.random() < 0.25:
            return f"%{random.choice(list(self._types))}"
        shape, kind = list(self._shape()), random.random()
        if kind < 0.5:
            made = self._node("aten.randn.default", [shape], [["device", "@device:cpu"]], 1)
        else:
            dtype = random.choice(["int64", "int64", "int64", "int32", "uint8", "bool", "float32", "bfloat16"])
            fill: int | bool = random.choice(_WHOLE) if dtype in ("int64", "float32") else 1
            fill = fill if random.random() < 0.5 else random.choice([0, 1, 2])
            keywords = [["dtype", f"@dtype:{dtype}"], ["device", "@device:cpu"]]
            made = self._node("aten.full.default", [shape, fill], keywords, 1)
        return f"%{made}"

    def _shape(self) -> tuple[int, ...]:
        base = self._base
        others = [base[1:2], base[:1], base[:2], base[:-1], (), (0,), (*base[:-1], 0), base[::-1]]
        return base if self._random.random() < 0.4 else self._random.choice(others)

    def _argument(self, argument: Argument) -> Any:
        return self._of(str(argument.real_type))

    def _of(self, kind: str) -> Any:
        random = self._random
        if kind.startswith("Optional["):
            return None if random.random() < 0.4 else self._of(kind[9:-1])
        if kind.startswith("List["):
            if kind == "List[int]" and random.random() < 0.4:
                return list(self._base)
            return [self._of(kind[5:-1]) for _ in range(random.choice([0, 1, 1, 2, 2, 2, 3, 4]))]
        match kind:
            case "Tensor":
                return self._tensor()
            case "int":
                return random.choice(_SMALL if random.random() < 0.9 else _WHOLE)
            case "float":
                return random.choice([0.0, 1.0, 0.5, -1.0, 1e-5, "=nan", "=inf"])
            case "number":
                return random.choice([0, 1, 2, -1, 0.5, 1e10, "=nan", 1 << 62])
            case "bool":
                return random.random() < 0.5
            case "str":
                return f"'{random.choice(_TEXTS)}"
            case "ScalarType":
                return f"@dtype:{random.choice(['float32', 'int64', 'bool', 'float64', 'bfloat16'])}"
            case "MemoryFormat":
                return f"@memory_format:{random.choice(['contiguous_format', 'preserve_format', 'channels_last'])}"
            case "Layout":
                return "@layout:strided"
            case "Device":
                return "@device:cpu"
        return None
