"""Programs written by hand as IR text, in the form that `ir.graph` prints."""

import re
from collections.abc import Mapping

from sambasim.ir.graph import Argument, Graph, Node, Output, Ref, Section, SectionKind, TorchConstant
from sambasim.ir.mesh import Axis
from sambasim.ir.program import Program
from sambasim.ir.types import ALIGNMENT_BYTES, Symbol, SymbolKind, TensorType, align

_TYPE = re.compile(r"(\w+)\[([\d, ]*)\]")
_NODE = re.compile(r"(?:(?P<results>%.+?) = )?(?P<operator>[\w.]+)\((?P<arguments>.*)\)(?: : (?P<types>.+))?")
_SECTION = re.compile(r"section (\d+) (\w+) (\w+)")


def parse_program(text: str, *mesh: Axis) -> Program:
    """The program whose evaluation graph is `text`. Raises ValueError if it is none."""
    symbols: dict[str, Symbol] = {}
    nodes: list[Node] = []
    outputs: list[Output] = []
    values: dict[str, TensorType] = {}
    heads: list[tuple[int, SectionKind, str]] = []
    at = 0
    for line in map(str.strip, text.strip().splitlines()):
        if line in ("", "return", ")") or line.startswith("graph"):
            continue
        if heading := _SECTION.fullmatch(line):
            heads.append((len(nodes), SectionKind(heading[2]), heading[3]))
        elif " -> " in line:
            value, _, name = line.partition(" : ")[0].partition(" -> ")
            symbols[name] = Symbol(name, SymbolKind.OUTPUT, values[value.removeprefix("%")])
            outputs.append(Output(value.removeprefix("%"), name))
        elif line.endswith(" input"):
            name, _, type_ = line.removesuffix(" input").removeprefix("%").partition(" : ")
            symbols[name] = Symbol(name, SymbolKind.INPUT, _types(type_)[0], at)
            at = align(at + symbols[name].type.size_bytes, ALIGNMENT_BYTES)
        else:
            nodes.append(_node(line, len(nodes), values))
    stops = [*(start for start, _, _ in heads[1:]), len(nodes)]
    sections = tuple(
        Section(index, kind, name, start, stop)
        for index, ((start, kind, name), stop) in enumerate(zip(heads, stops, strict=True))
    )
    inputs = tuple(name for name, symbol in symbols.items() if symbol.kind is SymbolKind.INPUT)
    graph = Graph("evaluation", inputs, tuple(nodes), tuple(outputs), values, sections)
    batch_size = symbols[inputs[0]].type.shape[0]
    return Program("by_hand", batch_size, symbols, None, graph, None, None, False, (), (), (), at, mesh)


def _node(line: str, number: int, values: dict[str, TensorType]) -> Node:
    found = _NODE.fullmatch(line)
    if found is None:
        raise ValueError(f"no node: {line}")
    results = tuple(name.strip().removeprefix("%") for name in (found["results"] or "").split(",") if name)
    values.update(zip(results, _types(found["types"] or ""), strict=True))
    args, kwargs = _arguments(found["arguments"])
    return Node(results[0] if results else f"node_{number}", found["operator"], args, kwargs, results)


def _arguments(text: str) -> tuple[tuple[Argument, ...], tuple[tuple[str, Argument], ...]]:
    """Python reads them, with `%x` for a reference."""

    def taken(*args: Argument, **kwargs: Argument) -> tuple[tuple[Argument, ...], Mapping[str, Argument]]:
        return args, kwargs

    spelled = re.sub(r"%(\w+)", r'Ref("\1")', text)
    spelled = re.sub(r"torch\.(\w+)", r'TorchConstant("dtype", "\1")', spelled)
    args, kwargs = eval(f"taken({spelled})", {"taken": taken, "Ref": Ref, "TorchConstant": TorchConstant})
    return args, tuple(kwargs.items())


def _types(text: str) -> list[TensorType]:
    return [TensorType(dtype, tuple(map(int, shape.replace(",", " ").split()))) for dtype, shape in _TYPE.findall(text)]
