"""The pass that cuts a program's tensors over the axis tp: `--tensor-parallel weight`."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from sambasim.compiler.names import GRADIENT_SUFFIX
from sambasim.compiler.sharding.layouts import WHOLE, Layout, cut_of, part_type
from sambasim.compiler.sharding.plan import find_plan, propagate
from sambasim.errors import OptionError
from sambasim.ir.graph import Graph
from sambasim.ir.mesh import TENSOR, Axis
from sambasim.ir.program import Program
from sambasim.ir.types import Symbol, SymbolKind
from sambasim.ir.verify import Progress


@dataclass(frozen=True, slots=True)
class TensorParallel:
    """Add the axis tp with `ranks` ranks, cut what `find_plan` finds, and shard every graph. Raises OptionError if
    nothing can be cut."""

    title: ClassVar[str] = "cut tensors over the ranks of a replica"
    reaches: ClassVar[Progress] = Progress.CAPTURED
    ranks: int

    def __call__(self, program: Program) -> Program:
        leading = program.training or program.evaluation
        plan = find_plan(program, leading, TENSOR, self.ranks)
        if not plan:
            raise OptionError(
                f"no tensor of {program.name} can be cut over {self.ranks} ranks: no two products with only "
                "operators between them that work on parts, in sizes that divide evenly",
                remedy="change --n-chips, or leave out --tensor-parallel",
            )
        symbols = dict(program.symbols)
        for name, layout in plan.items():
            symbols[name] = self._cut(symbols[name], layout)

        def sharded(graph: Graph | None) -> Graph | None:
            if graph is None:
                return None
            found = propagate(program, graph, TENSOR, self.ranks, plan)
            for output in graph.outputs:
                symbol = symbols[output.symbol]
                if symbol.kind is SymbolKind.GRADIENT:
                    symbols[symbol.name] = self._cut(symbol, plan.get(symbol.name.removesuffix(GRADIENT_SUFFIX), WHOLE))
                elif symbol.kind is SymbolKind.OUTPUT and graph is program.training:
                    symbols[symbol.name] = self._cut(symbol, _given_out(found.graph, symbol, found.layouts))
            return found.graph

        training, evaluation, single = map(sharded, (program.training, program.evaluation, program.single))
        return replace(
            program,
            symbols=symbols,
            training=training,
            evaluation=evaluation or program.evaluation,
            single=single,
            mesh=(*program.mesh, Axis(TENSOR, self.ranks)),
        )

    def _cut(self, symbol: Symbol, layout: Layout) -> Symbol:
        type_ = part_type(symbol.type, layout, self.ranks)
        return replace(symbol, type=type_, cuts=cut_of(layout, TENSOR, self.ranks))


def _given_out(graph: Graph, symbol: Symbol, layouts: Mapping[str, Layout]) -> Layout:
    (value,) = [output.value for output in graph.outputs if output.symbol == symbol.name]
    return layouts[value]
