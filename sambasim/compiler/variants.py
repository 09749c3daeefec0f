"""Programs of one model for many strategies of parallelism, from one capture."""

from collections.abc import Mapping
from dataclasses import replace

from torch import nn

from sambasim.compiler.passes import Fits, Pass
from sambasim.compiler.strategy import pipeline
from sambasim.ir.dataflow import pass_and_update
from sambasim.ir.program import Program
from sambasim.ir.types import SymbolKind
from sambasim.options.compile import CompileOptions


class Variants:
    """Runs the passes that `options` ask for, with changes, on a program of one rank, as captured of `model` or
    compiled. The result of the first pass is kept for all pipelines that begin with it. Evaluation graphs are left
    out, and nothing is verified: `sambasim compile` does."""

    def __init__(self, program: Program, options: CompileOptions, model: nn.Module | None = None) -> None:
        self._captured = _as_captured(program)
        self._options = options
        self._model = model
        self._made: list[tuple[Pass, Program]] = []

    def program(self, changes: Mapping[str, object], samples: int) -> Program:
        """The program with `changes` of options, cut into sections for passes of `samples`. Raises OptionError for
        what is impossible."""
        options = self._options.model_copy(update=changes)
        first, *others = pipeline(options, model=self._model, samples=samples)
        program = self._after(first)
        for step in others:
            if not isinstance(step, Fits):
                program = step(program)
        return program

    def _after(self, first: Pass) -> Program:
        for known, program in self._made:
            if known == first:
                return program
        program = first(self._captured)
        self._made.append((first, program))
        return program


_OF_UPDATES = (SymbolKind.OPTIMIZER_STATE, SymbolKind.ACCUMULATION_GROUP, SymbolKind.REDUCE_BUFFER)


def _as_captured(program: Program) -> Program:
    """`program` without its update, its addresses and its evaluation graphs. A graph must have a node, so that of the
    evaluation keeps the first."""
    training, whole = program.training, program.evaluation
    if training is not None:
        sections, _ = pass_and_update(training)
        training = replace(training, nodes=training.nodes[: sections[-1].stop], sections=sections)
    first = whole.nodes[:1]
    values = {name: whole.values[name] for node in first for name in node.results if name is not None}
    evaluation = replace(whole, nodes=first, outputs=(), values=values, sections=(replace(whole.sections[0], stop=1),))
    symbols = {
        name: replace(symbol, offset=None) for name, symbol in program.symbols.items() if symbol.kind not in _OF_UPDATES
    }
    return replace(
        program,
        symbols=symbols,
        training=training,
        evaluation=evaluation,
        single=None,
        optimizers=(),
        groups=(),
        runtime_arguments=(),
        data_parallel=None,
        device_bytes=0,
        mesh=(),
    )
