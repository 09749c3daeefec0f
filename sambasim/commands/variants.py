"""Programs of one model for many strategies of parallelism, from one capture."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from torch import nn

from sambasim.commands.fewer_layers import fewer_layers
from sambasim.compiler.configured import inferred_options
from sambasim.compiler.passes import Fits, Pass, Place, Recompute, pipeline
from sambasim.compiler.sharding.tensor_parallel import TensorParallel
from sambasim.ir.dataflow import pass_and_update
from sambasim.ir.program import Program
from sambasim.ir.types import SymbolKind
from sambasim.options.compile import CompileOptions
from sambasim.simulation.planning.layers import Shorter
from sambasim.simulation.planning.strategy import Strategy


class Variants:
    """Runs the passes of a strategy, and of `options`, on a program of one rank, as captured of `model` or
    compiled. Evaluation graphs and addresses are left out, and nothing is verified: `sambasim compile` does."""

    def __init__(self, program: Program, options: CompileOptions, model: nn.Module | None = None) -> None:
        self._captured = _as_captured(program)
        self._options = options
        self._model = model
        self._made: list[tuple[Sequence[Pass], Program]] = []
        self._shorter: dict[int, tuple[Shorter, Variants] | None] = {}

    def program(self, strategy: Strategy) -> Program:
        """The program that is compiled for `strategy`. Raises OptionError for what is impossible."""
        options = self._options.model_copy(update=_of_strategy(strategy, self._options))
        found = pipeline(options, model=self._model, samples=strategy.samples)
        passes = [one for one in found if not isinstance(one, (Place, Fits))]
        start, program = self._known(passes)
        for number, step in enumerate(passes[start:], start + 1):
            program = step(program)
            if all(isinstance(one, _KEPT) for one in passes[:number]):
                self._made.append((passes[:number], program))
        return program

    def repeated_layers(self) -> int:
        """How many equal layers the model repeats; 0 if they cannot be left out."""
        known = self._with_layers(2)
        return 0 if known is None else known[0].layers

    def shorter(self, strategy: Strategy, layers: int) -> Shorter | None:
        """The same with so many of its repeated layers; None if it has no more. Raises OptionError."""
        known = self._with_layers(layers)
        return known and replace(known[0], program=known[1].program(strategy))

    def _with_layers(self, layers: int) -> "tuple[Shorter, Variants] | None":
        if layers not in self._shorter:
            found = None if self._options.tensor_plan else fewer_layers(self._captured, layers)  # it may name a layer
            self._shorter[layers] = None
            if found is not None:
                self._shorter[layers] = found, Variants(found.program, self._options, self._model)
        return self._shorter[layers]

    def _known(self, passes: Sequence[Pass]) -> tuple[int, Program]:
        """The longest beginning of `passes` whose result is kept, and that."""
        for made, program in reversed(self._made):
            if made == passes[: len(made)]:
                return len(made), program
        return 0, self._captured


class OfDtypes:
    """The same for strategies of any dtype: `capture` gives those of one."""

    def __init__(self, capture: Callable[[str], Variants]) -> None:
        self._capture = capture
        self._captured: dict[str, Variants] = {}

    def of(self, dtype: str) -> Variants:
        if dtype not in self._captured:
            self._captured[dtype] = self._capture(dtype)
        return self._captured[dtype]

    def program(self, strategy: Strategy) -> Program:
        return self.of(strategy.dtype).program(strategy)

    def repeated_layers(self, dtype: str) -> int:
        return self.of(dtype).repeated_layers()

    def shorter(self, strategy: Strategy, layers: int) -> Shorter | None:
        return self.of(strategy.dtype).shorter(strategy, layers)


def changes_of(strategy: Strategy, options: CompileOptions) -> Mapping[str, object]:
    """The options that `strategy` sets, and those of data that were inferred for the capture."""
    chosen = _of_strategy(strategy, options)
    return {**chosen, **inferred_options(options.model_copy(update=chosen))}


def _of_strategy(strategy: Strategy, options: CompileOptions) -> Mapping[str, object]:
    steps = {"batch_size": strategy.batch_size, "accumulation_steps": strategy.accumulation_steps}
    return {
        "data_parallel": strategy.replicas > 1,
        "world_size": strategy.replicas,
        "tensor_parallel": None if strategy.tensor == "none" else strategy.tensor,
        "n_chips": strategy.chips,
        "pipeline_stages": strategy.stages,
        "micro_batches": strategy.micro_batches,
        "schedule": strategy.schedule,
        "zero": strategy.zero,
        "recompute": strategy.recompute,
        "dtype": strategy.dtype,
        "master_weights": options.master_weights and strategy.dtype != "fp32",
        "stochastic_rounding": options.stochastic_rounding and strategy.dtype == "bf16",
        "tensor_plan": options.tensor_plan if strategy.tensor == "weight" else None,
        "num_tiles": strategy.tiles,
        "training": options.training.model_copy(update=steps),
    }


_KEPT = (TensorParallel, Recompute)
"""Passes that many strategies begin with."""

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
    inputs = tuple(name for name in whole.inputs if any(name in node.reads for node in first))
    section = replace(whole.sections[0], stop=1)
    evaluation = replace(whole, inputs=inputs, nodes=first, outputs=(), values=values, sections=(section,))
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
        device_bytes=0,
        mesh=(),
        reduce_buffer=None,
        zero=0,
    )
