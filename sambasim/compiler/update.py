"""What follows the backward of a training step: parameter groups, their optimizers, and data parallelism. By default
the parameters whose gradients one backward section completes form one group for each dtype and optimizer.

The lowest stage of a pipeline that reads a parameter adds up its gradient, because its backward is the last. Its rank
need not hold the optimizer states too: another rank that reads the parameter may update it, once a step.

    rank 0   forward  backward                 gradient ─┐                     ┌─► parameter
    rank 3   forward  backward                           └─► clip, optimizer ──┘
"""

import hashlib
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, count, product
from typing import ClassVar, Literal, TypeAlias

from sambasim.compiler.names import UniqueNames, prefix_of
from sambasim.errors import OptionError
from sambasim.ir.dataflow import pass_and_update
from sambasim.ir.graph import Graph, Node, Ref, Section, SectionKind
from sambasim.ir.mesh import DATA_PARALLEL, PIPELINE, Axis
from sambasim.ir.program import (
    LOSS_SCALE,
    MASTER,
    ROUNDING_SEED,
    Member,
    Optimizer,
    ParameterGroup,
    Program,
    RuntimeArgument,
    state_name,
)
from sambasim.ir.ranks import pipeline_ranks, ranks_of_values
from sambasim.ir.types import (
    ALIGNMENT_ELEMENTS,
    NORM_BLOCK_ELEMENTS,
    Symbol,
    SymbolKind,
    TensorType,
    align,
    parameter_of,
)
from sambasim.ir.verify import Progress
from sambasim.optimizers import OPTIMIZERS

Grouping: TypeAlias = Literal["section", "parameter"]
"""What one group holds: all gradients that a backward section completes, or, as in SambaFlow, that of one parameter."""

Move: TypeAlias = tuple[int, int]  # the ranks that complete the gradient of a parameter, and that update it

REDUCE_BUFFER = "accum_dummy_0_reduce_buf"


@dataclass(frozen=True, slots=True)
class Update:
    """An optimizer, its hyperparameters (`max_grad_norm` among them clips), and the paths of the parameters that it
    updates; None stands for all that have a gradient."""

    kind: str
    hyperparameters: Mapping[str, float | bool]
    parameters: frozenset[str] | None = None

    @property
    def states(self) -> tuple[str, ...]:
        return OPTIMIZERS[self.kind].kept_states(self.hyperparameters)


@dataclass(frozen=True, slots=True)
class AttachOptimizers:
    """Attach `updates`, which clip alike; every parameter with a gradient must belong to one. With
    `stochastic_rounding` steps round by draws that depend on a run's seed; with `scales_loss` they are skipped if
    gradients are not finite; with `master_weights` states are float32, and a copy of the parameters is one of them.
    Raises OptionError."""

    title: ClassVar[str] = "attach the optimizer"
    reaches: ClassVar[Progress] = Progress.OPTIMIZED
    updates: tuple[Update, ...]
    stochastic_rounding: bool = False
    grouping: Grouping = "section"
    scales_loss: bool = False
    master_weights: bool = False

    def __call__(self, program: Program) -> Program:
        if program.training is None:
            return program
        bounds = {update.hyperparameters.get("max_grad_norm") for update in self.updates}
        if len(bounds) > 1:
            listed = ", ".join("none" if bound is None else f"{bound:g}" for bound in sorted(bounds, key=str))
            raise OptionError(
                f"the optimizers have different max_grad_norm: {listed}; the norm is that of all gradients together",
                remedy="give all of them the same max_grad_norm, or none of them",
            )
        moves = _moved(program)
        groups = _groups(program, self.updates, self.grouping, moves)
        if self.master_weights:
            groups = tuple(replace(group, state_dtype="float32") for group in groups)
        optimizers: list[Optimizer] = []
        for index, update in enumerate(self.updates):
            updated = [m.parameter for group in groups if group.optimizer == index for m in group.members]
            states, taken = self._states(update), {optimizer.name for optimizer in optimizers}
            for number in count():  # the next that is free, and with which no state has the name of another symbol
                name = f"{update.kind}{number}"
                named = {state_name(parameter, name, state) for parameter, state in product(updated, states)}
                if name not in taken and named.isdisjoint(program.symbols):
                    break
            optimizers.append(Optimizer(name, update.kind, states))
        symbols = dict(program.symbols)
        for group in groups:
            optimizer = optimizers[group.optimizer]
            for member, state in product(group.members, optimizer.states):
                name, parameter = state_name(member.parameter, optimizer.name, state), symbols[member.parameter]
                type_ = TensorType(group.region_type(state).dtype, parameter.type.shape)
                symbols[name] = Symbol(name, SymbolKind.OPTIMIZER_STATE, type_, cuts=parameter.cuts)
        return replace(
            program,
            symbols=symbols,
            optimizers=tuple(optimizers),
            groups=groups,
            training=self._with_update(groups, program, moves),
            runtime_arguments=(*program.runtime_arguments, *self._arguments(optimizers)),
        )

    def state_bytes(self, gradient: str, program: Program) -> int:
        """The bytes of all optimizer states of one parameter. Raises OptionError if no optimizer updates it."""
        states = self._states(self.updates[_optimizer_of(gradient, program, self.updates)])
        type_ = program.symbols[gradient].type
        return len(states) * TensorType("float32" if self.master_weights else type_.dtype, type_.shape).size_bytes

    def _states(self, update: Update) -> tuple[str, ...]:
        return (MASTER, *update.states) if self.master_weights else update.states

    def _arguments(self, optimizers: Sequence[Optimizer]) -> list[RuntimeArgument]:
        arguments = [
            RuntimeArgument(f"{optimizer.name}__{name}", value, f"{name} of {optimizer.kind}")
            for optimizer, update in zip(optimizers, self.updates, strict=True)
            for name, value in sorted(update.hyperparameters.items())
        ]
        if self.stochastic_rounding:
            arguments.append(RuntimeArgument(ROUNDING_SEED, 0, "of the draws by which optimizer steps round"))
        if self.scales_loss:
            arguments.append(RuntimeArgument(LOSS_SCALE, 1.0, "by which the loss is multiplied before the backward"))
        return arguments

    def _with_update(self, groups: tuple[ParameterGroup, ...], program: Program, moves: Mapping[str, Move]) -> Graph:
        """The training step with an OPT section for each group, behind a GRADNORM section if gradients are clipped or
        may overflow. Before it, gradients of `moves` are copied to the rank that updates them; after it, the parameters
        are copied back."""
        extended, prefix = _Extended(program.step, program.step.sections), prefix_of(program.loss or "")
        values = extended.values
        there, back = _copies(program.step, groups, moves)
        if there:
            extended.add(SectionKind.REDUCE, f"{prefix}__copy_gradients", there)
        norm: tuple[Ref, ...] = ()
        if self.scales_loss or any("max_grad_norm" in update.hyperparameters for update in self.updates):
            blocks, total = "$square_sums", "$gradient_norm"
            values[blocks] = TensorType("float64", (sum(m.blocks for group in groups for m in group.members),))
            values[total] = TensorType("float64", ())
            nodes = [Node(blocks, "opt.square_sums", (tuple(group.name for group in groups),), (), (blocks,))]
            for axis in program.mesh:
                nodes.append(_sum_along(axis.name, nodes[-1].name, values))
            nodes.append(Node(total, "opt.total_norm", (Ref(nodes[-1].name),), (), (total,)))
            extended.add(SectionKind.GRADNORM, f"{prefix}__gradnorm", nodes)
            norm = (Ref(total),)
        for group in groups:
            kind = self.updates[group.optimizer].kind
            update = Node(f"{prefix}__{kind}_{group.name}", f"opt.{kind}", (group.name, *norm))
            extended.add(SectionKind.OPT, f"{prefix}__opt_{group.name}", (update,))
        if back:
            extended.add(SectionKind.GATHER, f"{prefix}__copy_parameters", back)
        return extended.graph()


def _moved(program: Program) -> Mapping[str, Move]:
    """By parameter that another rank updates than completes its gradient. That rank reads it without a message."""
    training, ranks = program.training, pipeline_ranks(program)
    if training is None or ranks == 1:
        return {}
    made, read = ranks_of_values(training, ranks)
    moves = {}
    for output in training.outputs:
        if program.symbols[output.symbol].kind is SymbolKind.GRADIENT and output.value in made:
            source, name = made[output.value], parameter_of(output.symbol)
            for target in read.get(name, set()) - {source}:
                moves[name] = source, target
    return moves


def _copies(
    training: Graph, groups: Sequence[ParameterGroup], moves: Mapping[str, Move]
) -> tuple[Sequence[Node], Sequence[Node]]:
    """The nodes that bring gradients to the rank that updates their parameters, and those that bring parameters back.
    Each of `moves` has a group of its own."""
    tags = [tag for node in training.nodes for key, tag in node.kwargs if key == "tag" and isinstance(tag, int)]
    tag = count(max(tags, default=-1) + 1)

    def copied(group: ParameterGroup, symbol: str, source: int, target: int) -> Node:
        how = (("axis", PIPELINE), ("source", source), ("target", target), ("tag", next(tag)))
        return Node(f"{symbol}__copy", "comm.copy", (group.name, symbol), how)

    nodes = [
        (copied(group, member.gradient, source, target), copied(group, member.parameter, target, source))
        for group in groups
        for member in group.members[:1]
        if member.parameter in moves
        for source, target in [moves[member.parameter]]
    ]
    return [there for there, _ in nodes], [back for _, back in nodes]


def _sum_along(axis: str, value: str, values: dict[str, TensorType]) -> Node:
    """An all-reduce of `value` along `axis`, whose result is added to `values`."""
    total = f"{value}_{axis}"
    values[total] = values[value]
    return Node(total, "comm.all_reduce", (Ref(value),), (("axis", axis), ("op", "sum"), ("order", "tree")), (total,))


class _Extended:
    """A graph that is extended by sections, from those in `sections` on, and by `values`."""

    def __init__(self, base: Graph, sections: Sequence[Section]) -> None:
        self._base, self.values = base, dict(base.values)
        self._nodes, self._sections = list(base.nodes[: sections[-1].stop]), list(sections)

    def add(self, kind: SectionKind, name: str, members: Sequence[Node]) -> None:
        start = len(self._nodes)
        self._sections.append(Section(len(self._sections), kind, name, start, start + len(members)))
        self._nodes.extend(members)

    def graph(self) -> Graph:
        return replace(self._base, nodes=tuple(self._nodes), sections=tuple(self._sections), values=self.values)


def _groups(
    program: Program, updates: Sequence[Update], grouping: Grouping, apart: Collection[str]
) -> tuple[ParameterGroup, ...]:
    training, section_of = program.step, dict[str | None, int]()
    for section in training.sections:
        for node in training.section_nodes(section):
            section_of |= dict.fromkeys(node.results, section.index)
    completed: dict[tuple[int, str, int, bool, int], list[str]] = defaultdict(list)
    for position, output in enumerate(training.outputs):
        symbol = program.symbols[output.symbol]
        if symbol.kind is SymbolKind.GRADIENT:
            # A gradient that is an input itself (the tangent, say) is there before any section has run.
            index = section_of.get(output.value, training.sections[0].index)
            alone = position if grouping == "parameter" or parameter_of(symbol.name) in apart else -1
            optimizer = _optimizer_of(symbol.name, program, updates)
            completed[index, symbol.type.dtype, optimizer, bool(symbol.cuts), alone].append(symbol.name)
    # Blocks of the norm are counted by parameters in the order of symbols, which no partition changes.
    of_parameter = {parameter_of(gradient): gradient for gradients in completed.values() for gradient in gradients}
    in_order = [of_parameter[name] for name in program.symbols if name in of_parameter]
    blocks = (-(-program.symbols[name].type.numel // NORM_BLOCK_ELEMENTS) for name in in_order)
    first_block = dict(zip(in_order, accumulate(blocks, initial=0), strict=False))
    groups = []
    for number, ((_, dtype, optimizer, _, _), gradients) in enumerate(sorted(completed.items())):
        members, start = [], 0
        for gradient in gradients:
            numel = program.symbols[gradient].type.numel
            members.append(Member(parameter_of(gradient), gradient, start, numel, first_block[gradient]))
            start = align(start + numel, ALIGNMENT_ELEMENTS)
        groups.append(ParameterGroup(f"group_{number}", dtype, start, tuple(members), optimizer, {}))
    return tuple(groups)


def _optimizer_of(gradient: str, program: Program, updates: Sequence[Update]) -> int:
    paths = program.symbols[parameter_of(gradient)].torch_names
    for index, update in enumerate(updates):
        if update.parameters is None or not update.parameters.isdisjoint(paths):
            return index
    raise OptionError(
        f"the parameter {paths[0] if paths else parameter_of(gradient)} has a gradient, but no optimizer updates it",
        remedy="give it to an optimizer, or set requires_grad_(False)",
    )


@dataclass(frozen=True, slots=True)
class AddDataParallel:
    """Add the axis `dp`, gradient groups, the reduce operand buffer, and the REDUCE (reduce-scatter) and GATHER (all-
    gather) sections; OPT updates one slice. Where gradients are clipped, GRADNORM gets an all-reduce. `world_size`: the
    fewest replicas, each of `chips` ranks; with `several`, a run chooses how many. `zero`: see `ir/ranks.py`."""

    title: ClassVar[str] = "add gather and reduce sections"
    reaches: ClassVar[Progress] = Progress.OPTIMIZED
    world_size: int
    chips: int = 1
    zero: int = 1
    several: bool = True

    def __call__(self, program: Program) -> Program:
        if program.training is None:
            return program
        groups, symbols, names = [], dict(program.symbols), UniqueNames()
        for group in program.groups:
            members = "\n".join(f"{member.gradient} {member.start}" for member in group.members)
            name = f"$OPT_dp_accum_group_{hashlib.sha1(members.encode(), usedforsecurity=False).hexdigest()}"
            symbols[name] = Symbol(name, SymbolKind.ACCUMULATION_GROUP, TensorType(group.dtype, (group.numel,)))
            groups.append(replace(group, wrapper=name))
        largest = max(program.groups, key=lambda group: group.region_type("parameter").size_bytes)
        for name in symbols:
            names.take(name)
        buffer = names.take(REDUCE_BUFFER)
        type_ = TensorType(largest.dtype, (largest.numel + ALIGNMENT_ELEMENTS,))
        symbols[buffer] = Symbol(buffer, SymbolKind.REDUCE_BUFFER, type_)
        replicas = "replicas that take part: sums of gradients are divided by it"
        replica = "which replica this is, and so which slice of every group it owns"
        arguments = RuntimeArgument("dp_scale_factor", 1, replicas), RuntimeArgument("dp_replica", 0, replica)
        return replace(
            program,
            symbols=symbols,
            groups=tuple(groups),
            training=_with_communication(program),
            reduce_buffer=buffer,
            zero=self.zero,
            mesh=(Axis(DATA_PARALLEL, self.world_size * self.chips, self.several, self.chips), *program.mesh),
            runtime_arguments=(*program.runtime_arguments, *arguments),
        )


def _with_communication(program: Program) -> Graph:
    """The step with data parallelism: a reduce-scatter of every group before the optimizers, an all-gather after them,
    and where gradients are clipped, the sum of the norm along dp. The sections that copy the gradient of a tied
    parameter to the rank that updates it, and the result back, stay first and last."""
    training, prefix = program.step, prefix_of(program.loss or "")
    groups = [group.name for group in program.groups]
    in_pass, update = pass_and_update(training)
    extended = _Extended(training, in_pass)

    def keep(kind: SectionKind) -> None:
        for section in update:
            if section.kind is kind:
                extended.add(kind, section.name, training.section_nodes(section))

    keep(SectionKind.REDUCE)  # copies of gradients come first
    name, axis = f"{prefix}__reduce", ("axis", DATA_PARALLEL)
    mean = (axis, ("op", "mean"), ("order", "tree"))
    reductions = [Node(f"{name}_{group}", "comm.reduce_scatter", (group,), mean) for group in groups]
    extended.add(SectionKind.REDUCE, name, reductions)
    for section in update:
        if section.kind in (SectionKind.REDUCE, SectionKind.GATHER):
            continue
        members = list(training.section_nodes(section))
        for at, node in enumerate(members):
            if node.operator == "opt.total_norm":
                (norm,) = node.reads
                total = _sum_along(DATA_PARALLEL, norm, extended.values)
                members[at:] = [total, replace(node, args=(Ref(total.name),)), *members[at + 1 :]]
                break
        extended.add(section.kind, section.name, members)
    name = f"{prefix}__gather"
    gathers = [Node(f"{name}_{group}", "comm.all_gather", (group,), (axis,)) for group in groups]
    extended.add(SectionKind.GATHER, name, gathers)
    keep(SectionKind.GATHER)  # copies of parameters last
    return extended.graph()
