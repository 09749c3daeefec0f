"""The graphs of a PEF, one for each length of samples, as a run uses them: the shortest samples first. The program of
the document is the last one: it has the memory of all, and the update."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from sambasim.data.buckets import Shapes, check_padding
from sambasim.ir.program import Program
from sambasim.options.run import ResolvedRun
from sambasim.pef import PefDocument, map_weights
from sambasim.runtime.run.replica import input_specs
from sambasim.runtime.values.memory import DeviceMemory, TensorOf


def as_it_is(program: Program) -> Program:
    return program


@dataclass(frozen=True, slots=True)
class Graphs:
    """Those of the PEF at `path`, after `change`, for a run."""

    path: Path
    document: PefDocument
    run: ResolvedRun
    change: Callable[[Program], Program] = as_it_is

    @property
    def program(self) -> Program:
        return self.change(self.document.program)

    def shapes(self) -> Shapes:
        """Raises OptionError for padding that does not fit the inputs."""
        check_padding(self.run.data.padding, input_specs(self.document.program))
        inputs = [input_specs(self.change(graph.program)) for graph in self.document.graphs.values()]
        return Shapes(inputs[::-1], self.run.padded_data.padding)

    def in_memory(self, memory: DeviceMemory) -> Iterator[tuple[Program, TensorOf]]:
        """All graphs, with the tensors of each by symbol. The program of `memory` has had the `change`, too."""
        _, *further = self.document.graphs
        weights = map_weights(self.path, self.document, check=False) if further else {}
        for name in reversed(further):
            own = {symbol: weights[key] for symbol, key in self.document.stored_as(name).items()}
            yield (program := self.change(self.document.graphs[name].program)), memory.of_graph(program, own)
        yield memory.program, memory.tensor
