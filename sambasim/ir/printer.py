"""The printed form of a graph, for people and for golden files: one line for each node, sections as headings."""

from collections.abc import Iterator

from sambasim.ir.graph import Argument, ComplexNumber, Graph, Node, Ref, Section, TorchConstant
from sambasim.ir.program import Program

_CONTROLS = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160))}
"""Names come from files: what is printed must not move the cursor of the reader's terminal."""


def format_graph(program: Program, graph: Graph) -> str:
    lines = [f"graph {graph.name}(", *(f"  {line}" for line in _inputs(program, graph)), ")"]
    for section in graph.sections:
        lines += format_section(graph, section)
    lines += ["return", *(f"  {line}" for line in _outputs(program, graph))]
    return "".join(f"{line.translate(_CONTROLS)}\n" for line in lines)


def format_section(graph: Graph, section: Section) -> list[str]:
    heading = f"section {section.index} {section.kind} {section.name}"
    return [heading.translate(_CONTROLS), *(f"  {format_node(graph, node)}" for node in graph.section_nodes(section))]


def format_node(graph: Graph, node: Node) -> str:
    """One line: results, operator, arguments, types of the results, file and line of the user's program."""
    arguments = [format_argument(argument) for argument in node.args]
    arguments += [f"{key}={format_argument(argument)}" for key, argument in node.kwargs]
    line = f"{node.operator}({', '.join(arguments)})"
    if node.results:
        names = ", ".join("_" if result is None else f"%{result}" for result in node.results)
        types = ", ".join("_" if result is None else str(graph.values[result]) for result in node.results)
        line = f"{names} = {line} : {types}"
    if node.source is not None:
        line += f"  # {node.source.file}:{node.source.line}"
    return line.translate(_CONTROLS)


def format_argument(argument: Argument) -> str:
    """`%x` for a reference, `torch.float32` for a constant of torch, `(1, 2)` for a tuple, the rest as in Python."""
    if isinstance(argument, ComplexNumber):
        return repr(complex(argument.real, argument.imaginary))
    if isinstance(argument, Ref):
        return f"%{argument.name}"
    if isinstance(argument, TorchConstant):
        return f'device("{argument.name}")' if argument.kind == "device" else f"torch.{argument.name}"
    if isinstance(argument, tuple):
        items = ", ".join(format_argument(item) for item in argument)
        return f"({items},)" if len(argument) == 1 else f"({items})"
    return repr(argument)


def _inputs(program: Program, graph: Graph) -> Iterator[str]:
    for name in graph.inputs:
        symbol = program.symbols[name]
        yield f"%{name} : {symbol.type} {symbol.kind}"


def _outputs(program: Program, graph: Graph) -> Iterator[str]:
    for output in graph.outputs:
        type_ = graph.values.get(output.value) or program.symbols[output.value].type
        yield f"%{output.value} -> {output.symbol} : {type_}"
