"""The graphs of a PEF, one for each length of samples, as a run uses them: the shortest samples first. The program of
the document is the last one: it has the memory of all, and the update."""

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TypeAlias

from sambasim.data.buckets import Shapes
from sambasim.errors import OptionError
from sambasim.ir.program import Program
from sambasim.ir.types import SymbolKind
from sambasim.options.problem import nearest
from sambasim.options.run import ResolvedRun
from sambasim.pef import PefDocument, map_weights
from sambasim.runtime.run.replica import input_specs
from sambasim.runtime.values.memory import DeviceMemory, TensorOf

Graphs: TypeAlias = Callable[[DeviceMemory], Iterable[tuple[Program, TensorOf]]]
"""The graphs that share a memory, with the tensors of each by symbol."""


def as_it_is(program: Program) -> Program:
    return program


def shapes_of(document: PefDocument, run: ResolvedRun, change: Callable[[Program], Program] = as_it_is) -> Shapes:
    """Raises OptionError for padding of what is no input."""
    inputs = [input_specs(change(graph.program)) for graph in document.graphs.values()]
    padding, names = run.data.padding, document.program.names_of(SymbolKind.INPUT)
    if unknown := next((name for name in padding if name not in names), None):
        what = f"data.padding.{unknown} is of no input: these are {', '.join(names)}"
        raise OptionError(what, remedy=f"--set data.padding.{nearest(unknown, names) or names[0]}={padding[unknown]:g}")
    return Shapes(inputs[::-1], run.padded_data.padding)


def bound_graphs(
    path: Path, document: PefDocument, memory: DeviceMemory, change: Callable[[Program], Program] = as_it_is
) -> Iterator[tuple[Program, TensorOf]]:
    """The graphs, with the tensors of each by symbol, after `change`, which that in `memory` has had too."""
    _, *further = document.graphs
    weights = map_weights(path, document, check=False) if further else {}
    for name in reversed(further):
        own = {symbol: weights[key] for symbol, key in document.stored_as(name).items()}
        yield (program := change(document.graphs[name].program)), memory.of_graph(program, own)
    yield memory.program, memory.tensor
