"""The graphs of a PEF, one for each length of samples, as a run uses them: the shortest samples first. The program of
the document is the last one: it has the memory of all, and the update."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TypeAlias

from sambasim.data.buckets import Shapes
from sambasim.ir.program import Program
from sambasim.options.grammar import TARGET, ignored_class
from sambasim.options.run import ResolvedRun
from sambasim.pef import PefDocument, map_weights
from sambasim.runtime.run.replica import input_specs
from sambasim.runtime.values.memory import DeviceMemory, TensorOf

Graphs: TypeAlias = Callable[[DeviceMemory], Iterable[tuple[Program, TensorOf]]]
"""The graphs that share a memory, with the tensors of each by symbol."""


def as_it_is(program: Program) -> Program:
    return program


def graphs_of(document: PefDocument) -> Mapping[str, PefDocument]:
    return dict(reversed([*document.graphs.items()]))


def shapes_of(document: PefDocument, run: ResolvedRun, change: Callable[[Program], Program] = as_it_is) -> Shapes:
    """Labels are filled up with the class that the loss leaves out, other inputs with 0, if options do not say it."""
    loss, padding = run.loss, run.data.padding
    if loss is not None and loss.name in ("cross_entropy", "nll"):
        padding = {TARGET: ignored_class(loss.args), **padding}
    return Shapes([input_specs(change(graph.program)) for graph in graphs_of(document).values()], padding)


def bound_graphs(
    path: Path, document: PefDocument, memory: DeviceMemory, change: Callable[[Program], Program] = as_it_is
) -> Iterator[tuple[Program, TensorOf]]:
    """The graphs, with the tensors of each by symbol, after `change`, which that in `memory` has had too."""
    *further, _ = graphs_of(document).items()
    weights = map_weights(path, document, check=False) if further else {}
    for name, graph in further:
        own = {symbol: weights[key] for symbol, key in document.stored_as(name).items()}
        yield (program := change(graph.program)), memory.of_graph(program, own)
    yield memory.program, memory.tensor
