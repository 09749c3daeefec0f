"""Programs of one model for many strategies of parallelism, from one capture, and the `plan` that prices them: by the
device model, or with `--here` by what is measured on this machine; and for all choices of `estimate-memory`.

A search prices models with fewer layers first, whose program is made from that of the whole model. Repeated layers are
a run of operators that repeats in the forward, and one that repeats in the backward. The last layers of the forward are
removed, and the first of the backward. Operators that read their results then read those of the last layer that is
left; in the backward, they read what the first removed layer read.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, cast

import torch
from torch import nn

from sambasim.commands.plan import PlanTask, wanted_of
from sambasim.commands.question import OnPhase
from sambasim.compiler.capture.tensors import default_type
from sambasim.compiler.compile import rare_collections
from sambasim.compiler.front import captured_from_options, inferred_options
from sambasim.compiler.passes import Fits, Pass, Place, Recompute, pipeline
from sambasim.compiler.sharding.tensor_parallel import TensorParallel
from sambasim.errors import CaptureError, ModelError
from sambasim.hardware.budget import available_bytes
from sambasim.ir.dataflow import pass_and_update
from sambasim.ir.graph import Graph, Node, Output, SectionKind, renamed, with_sections
from sambasim.ir.program import AVERAGE, Program
from sambasim.ir.types import SymbolKind, gradient_name, parameter_of
from sambasim.options.compile import CompileOptions
from sambasim.options.training import OptimizerOptions
from sambasim.report.analysis import Run, runs_of
from sambasim.simulation.memory import DTYPES, Choice, Choices
from sambasim.simulation.planning.here import needed_bytes, plan_here, spaced
from sambasim.simulation.planning.one_rank import Shorter
from sambasim.simulation.planning.search import Goal, Plan, Planner
from sambasim.simulation.planning.strategy import Strategy


def plan(task: PlanTask, on_phase: OnPhase, *, with_frontier: bool) -> Plan:
    """`with_frontier`: the frontier of time and memory is compiled and priced too."""
    options = task.options

    @cache
    def programs(dtype: str) -> Variants:
        if task.program is not None:
            return Variants(task.program, options)
        return _captured(options, {"dtype": dtype}, on_phase)

    programs(task.spaces[0].dtypes[0])  # its errors end the command
    if task.asked.here:
        return _plan_this_machine(task, programs, on_phase)
    (space,) = task.spaces
    planner = Planner(programs, task.inventory.device, task.inventory.cluster, options.opt_level)
    wanted = wanted_of(task, programs(space.dtypes[0]).captured)
    with rare_collections():
        chosen = planner.plan(options.name, space, Goal(task.asked.goal), on_phase=on_phase, wanted=wanted)
        if with_frontier:
            on_phase("compile and price the frontier of time and memory")
            chosen = planner.with_priced_frontier(chosen)
    return chosen


def _captured(options: CompileOptions, changes: Mapping[str, object], on_phase: OnPhase) -> "Variants":
    """A capture of the model with `changes` of `options`, before any strategy."""
    plain = {"n_chips": 1, "micro_batches": 1, "tensor_parallel": None}
    chosen = options.model_copy(update={**plain, **changes})
    program, model = captured_from_options(chosen, on_phase)
    return Variants(program, chosen, model)


def _plan_this_machine(task: PlanTask, programs: "Callable[[str], Variants]", on_phase: OnPhase) -> Plan:
    """Measure this machine, and predict all strategies on it. Raises MachineError if the model does not run here."""
    from sambasim.runtime.machine.launcher import cores_of_this_process, mpirun_here
    from sambasim.runtime.measure.machine import Work, measure_machine

    options, spaces = task.options, task.spaces
    optimizer = cast("OptimizerOptions", options.optimizer)  # `plan_task` refuses None
    strategies = [strategy for space in spaces for strategy in space.strategies()]
    most, batch, (dtype,) = len(spaces), spaces[0].global_batch, spaces[0].dtypes
    cores, nodes = len(cores_of_this_process()), task.inventory.cluster.nodes or 1
    of_samples: dict[int, Variants] = {}

    def work_for(count: int) -> Work:
        sizes = spaced({each.samples for each in strategies if min(each.ranks // nodes, cores) == count} or {1})
        if count > cores:  # one that has been captured
            sizes = [max((size for size in of_samples if size <= batch // count // nodes), default=min(of_samples))]
        passes = [whole(Strategy(count, samples=samples, dtype=dtype)) for samples in sizes]
        room_bytes = (available_bytes() or 0) // count
        fitting = [program for program in passes if needed_bytes(program) < room_bytes] or passes[:1]
        return Work(tuple(fitting), options.data, optimizer)

    def whole(strategy: Strategy) -> Program:
        if strategy.samples not in of_samples:
            size = {"batch_size": strategy.samples, "accumulation_steps": 1}
            changes = {"dtype": dtype, "training": options.training.model_copy(update=size)}
            of_samples[strategy.samples] = _captured(options, changes, on_phase)
        return Place()(of_samples[strategy.samples].program(strategy))

    machine = measure_machine(work_for, most, on_phase)
    on_phase("predict all strategies")
    goal, has_mpi = Goal(task.asked.goal), mpirun_here() is not None

    def program_of(strategy: Strategy) -> Program:
        return programs(strategy.dtype).program(strategy)

    return plan_here(options.name, program_of, machine, task.inventory.cluster, spaces, goal, has_mpi=has_mpi)


_KEPT = (TensorParallel, Recompute)  # passes that many strategies begin with


class Variants:
    """Runs the passes of strategies, and of `options`, on a program of one rank, without evaluation and addresses."""

    def __init__(self, program: Program, options: CompileOptions, model: nn.Module | None = None) -> None:
        self.captured = _as_captured(program)
        self._options = options
        self._model = model
        self._made: list[tuple[Sequence[Pass], Program]] = [([], self.captured)]
        self._with_layers = cache(self._with_few)

    def program(self, strategy: Strategy) -> Program:
        """The program that is compiled for `strategy`. Raises OptionError for what is impossible."""
        options = self._options.model_copy(update=_of_strategy(strategy, self._options))
        of_all = pipeline(options, model=self._model, samples=strategy.samples)
        passes = [step for step in of_all if not isinstance(step, Place | Fits)]
        known = ((made, program) for made, program in reversed(self._made) if made == passes[: len(made)])
        made, program = next(known)
        for number, step in enumerate(passes[len(made) :], len(made) + 1):
            program = step(program)
            if all(isinstance(before, _KEPT) for before in passes[:number]):
                self._made.append((passes[:number], program))
        return program

    def shorter(self, strategy: Strategy, layers: int, least: int = 0) -> Shorter | None:
        """The same with so many of its repeated layers; None if it has no more, or fewer than `least`. Raises
        OptionError."""
        known = self._with_layers(layers)
        if known is None or known[0].layers < least:
            return None
        return replace(known[0], program=known[1].program(strategy))

    def _with_few(self, layers: int) -> "tuple[Shorter, Variants] | None":
        # A plan may name a layer.
        less = None if self._options.tensor_plan else _fewer_layers(self.captured, layers)
        return None if less is None else (less, Variants(less.program, self._options, self._model))


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
        **{name: getattr(strategy, name) for name in ("micro_batches", "schedule", "zero", "recompute", "dtype")},
        "master_weights": options.master_weights and strategy.dtype != "fp32",
        "stochastic_rounding": options.stochastic_rounding and strategy.dtype == "bf16",
        "tensor_plan": options.tensor_plan if strategy.tensor == "weight" else None,
        "num_tiles": strategy.tiles,
        "training": options.training.model_copy(update=steps),
    }


_OF_UPDATES = (SymbolKind.OPTIMIZER_STATE, SymbolKind.ACCUMULATION_GROUP, SymbolKind.REDUCE_BUFFER)


def _as_captured(program: Program) -> Program:
    """`program` without update, addresses and evaluation."""
    training, evaluation = program.step, Graph("evaluation", (), (), (), {})
    sections, _ = pass_and_update(training)
    training = replace(training, nodes=training.nodes[: sections[-1].stop], sections=sections)
    symbols = {
        name: replace(symbol, offset=None) for name, symbol in program.symbols.items() if symbol.kind not in _OF_UPDATES
    }
    empty: dict[str, Any] = dict.fromkeys(("optimizers", "groups", "runtime_arguments", "mesh"), ())
    empty |= {"single": None, "reduce_buffer": None, "device_bytes": 0, "zero": 0}
    return replace(program, symbols=symbols, training=training, evaluation=evaluation, **empty)


def _fewer_layers(program: Program, left: int) -> Shorter | None:
    """The training step of `program` as captured, with `left` of its repeated layers; None if it has no more, or if
    something beside a layer's neighbours reads what it computes."""
    graph = program.step

    def covered(run: Run) -> int:
        return run.period * (run.count - 1)

    split = next(section.start for section in graph.sections if section.kind is SectionKind.BCKWD)
    keys = _keys(graph, program)
    forward = max(runs_of(keys[:split]), key=covered)
    gone = forward.count - left
    for run in sorted(runs_of(keys[split:]), key=covered, reverse=True):
        if gone <= 0 or abs(forward.count - run.count) > 1:
            continue
        shorter = _without(program, graph, forward, replace(run, start=split + run.start), gone)
        if shorter is not None:
            starts = [graph.nodes[forward.start + at * forward.period].name for at in range(left)]
            return Shorter(shorter, forward.count, tuple(starts), graph.nodes[forward.stop].name)
    return None


def _keys(graph: Graph, program: Program) -> list[str]:
    """Equal for nodes that do the same with operands of the same types."""
    types = {name: str(type_) for name, type_ in graph.types(program.symbols).items()}
    typed = (renamed(node, types) for node in graph.nodes)
    return [
        repr((node.operator, node.args, node.kwargs, [name and types[name] for name in node.results])) for node in typed
    ]


def _without(program: Program, graph: Graph, forward: Run, backward: Run, gone: int) -> Program | None:
    """`program` without the last `gone` layers of `forward` and the first of `backward`."""
    shift = gone * forward.period
    last_gone = backward.start + gone * backward.period
    dropped = {*range(forward.stop - shift, forward.stop), *range(backward.start, last_gone)}
    lost = {name for at in dropped for name in graph.nodes[at].results if name is not None}
    instead: dict[str, str] = {}
    for at in range(max(forward.stop - shift, forward.start + shift), forward.stop):
        instead.update(_counterparts(graph.nodes[at], graph.nodes[at - shift], program))
    left: dict[int, Node] = {}
    for at, node in enumerate(graph.nodes):
        if at in dropped:
            continue
        names = instead
        if last_gone <= at < backward.stop:
            before = graph.nodes[at - gone * backward.period]
            pairs = zip(node.reads, before.reads, strict=True)
            names = {**{name: instead.get(other, other) for name, other in pairs if name in lost}, **instead}
        left[at] = renamed(node, names)
    known = {name for node in left.values() for name in node.makes}
    read = {name for node in left.values() for name in node.reads}
    left_out = {name for at in dropped for name in graph.nodes[at].reads} - read
    left_out |= {gradient_name(name) for name in left_out}
    stays = [output for output in graph.outputs if output.value in known or output.value in graph.inputs]
    outputs = []
    for output in stays:
        parameter = parameter_of(output.symbol)
        outputs.append(Output(output.value, instead.get(parameter, parameter) + output.symbol.removeprefix(parameter)))
    symbols = {name: symbol for name, symbol in program.symbols.items() if name not in left_out}
    expected = Counter(output.symbol for output in graph.outputs if output.symbol in symbols)
    if Counter(output.symbol for output in outputs) != expected:
        return None
    if not lost.isdisjoint(read) or not left_out.isdisjoint(program.evaluation.inputs):
        return None
    parts = ((one, [left[at] for at in range(one.start, one.stop) if at in left]) for one in graph.sections)
    training = replace(
        with_sections(graph, parts),
        inputs=tuple(name for name in graph.inputs if name in symbols),
        outputs=tuple(outputs),
        values={name: type_ for name, type_ in graph.values.items() if name in known},
    )
    return replace(program, symbols=symbols, training=training)


def _counterparts(node: Node, other: Node, program: Program) -> Iterator[tuple[str, str]]:
    """The results of `node` and the symbols that it reads, each with that of `other`."""
    for name, instead in zip(node.results, other.results, strict=True):
        if name is not None and instead is not None:
            yield name, instead
    for name, instead in zip(node.reads, other.reads, strict=True):
        if name in program.symbols and name != instead:
            yield name, instead


def memory_choices(options: CompileOptions, replicas: int, on_phase: OnPhase) -> tuple[Choices, Choice]:
    """All choices, and the one that `options` make."""
    choices = training_shapes(options, on_phase, replicas)
    asked = options.dtype, options.keeps_master_weights
    dtype = next(dtype for dtype in DTYPES if (dtype.name, dtype.master) == asked)
    optimizer = options.optimizer or OptimizerOptions(name="adamw")
    states = tuple(state for state in choices.program.optimizers[0].states if state != AVERAGE)
    return choices, Choice(dtype, options.recompute, optimizer.name, states, options.zero)


def training_shapes(options: CompileOptions, on_phase: OnPhase = lambda phase: None, replicas: int = 1) -> Choices:
    """The training step of what `options` name, without evaluation and addresses, whatever their dtype and
    recomputation are: in bfloat16 if the model can be made and captured in it, as only such a graph shows what it
    computes in float32 all the same, else in float32. Raises ModelError, DataError and CaptureError."""
    changed = {"dtype": "fp32", "master_weights": False, "stochastic_rounding": False, "recompute": "none"}
    options = options.model_copy(update=changed)
    dtype = "bfloat16"
    try:
        with default_type(torch.bfloat16):
            program, model = captured_from_options(options, on_phase, dtype=torch.bfloat16, quick=True)
    except (CaptureError, ModelError):
        dtype = "float32"
        try:
            program, model = captured_from_options(options, quick=True)  # its phases were told above
        except CaptureError:  # a capture as by `compile` names lines
            program, model = captured_from_options(options, on_phase)
    program = replace(program, evaluation=Graph("evaluation", (), (), (), {}), single=None)
    on_phase("recompute activations")
    first, *others = pipeline(options, model=model)
    cut = first(program)
    recomputed = {"sections": Recompute("sections")(cut).step, "full": Recompute("full")(program).step}
    graphs = {"none": program.step, **recomputed}
    for change in others:
        cut = cut if isinstance(change, Place | Fits) else change(cut)
    return Choices(cut, graphs, dtype, replicas=replicas, passes=options.training.accumulation_steps)
