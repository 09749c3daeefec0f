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
from fnmatch import fnmatchcase
from itertools import accumulate, count, product
from typing import ClassVar, Literal, TypeAlias

from sambasim.compiler.names import UniqueNames, prefix_of
from sambasim.errors import OptionError
from sambasim.ir.graph import Argument, Graph, Node, Ref, Section, SectionKind, with_sections
from sambasim.ir.mesh import DATA_PARALLEL, PIPELINE, Axis
from sambasim.ir.program import (
    AVERAGE,
    EMA_PREFIX,
    LOSS_SCALE,
    MASTER,
    ROUNDING_SEED,
    STEP,
    Member,
    Optimizer,
    ParameterGroup,
    Program,
    RuntimeArgument,
    dtype_of_average,
    state_name,
)
from sambasim.ir.ranks import holders_of_gradients
from sambasim.ir.types import ALIGNMENT_ELEMENTS, Symbol, SymbolKind, TensorType, align, norm_blocks, parameter_of
from sambasim.ir.verify import Progress
from sambasim.optimizers import OPTIMIZERS
from sambasim.options.training import EmaOptions

Grouping: TypeAlias = Literal["section", "parameter"]
"""What one group holds: all gradients that a backward section completes, or, as in SambaFlow, that of one parameter."""

Move: TypeAlias = tuple[int, int]  # the ranks that complete the gradient of a parameter, and that update it

_Part: TypeAlias = tuple[Section, Sequence[Node]]

REDUCE_BUFFER = "accum_dummy_0_reduce_buf"

_OF_REPLICAS = (
    RuntimeArgument("dp_scale_factor", 1, "replicas that take part: sums of gradients are divided by it"),
    RuntimeArgument("dp_replica", 0, "which replica this is, and so which slice of every group it owns"),
)


@dataclass(frozen=True, slots=True)
class Update:
    """An optimizer, its hyperparameters (`max_grad_norm` among them clips), and the paths of the parameters that it
    updates, or patterns of paths; None stands for all that no other one updates. With `has_all_states`, a run may turn
    on momentum that is 0. `graph`: the update of one of the user's own."""

    kind: str
    hyperparameters: Mapping[str, float | bool]
    parameters: frozenset[str] | None = None
    has_all_states: bool = False
    graph: Graph | None = None

    @property
    def name(self) -> str:
        return self.kind if self.graph is None else self.graph.name

    @property
    def states(self) -> tuple[str, ...]:
        if self.graph is not None:
            others = ("parameter", "gradient", *self.hyperparameters, STEP)
            return tuple(name for name in self.graph.inputs if name not in others)
        entry = OPTIMIZERS[self.kind]
        given = {**self.hyperparameters, "momentum": 1.0} if self.has_all_states else self.hyperparameters
        return entry.kept_states(given)

    def matches(self, paths: Sequence[str]) -> bool:
        """Whether it updates the parameter that has these paths."""
        named = self.parameters or frozenset[str]()
        return not named.isdisjoint(paths) or any(fnmatchcase(*pair) for pair in product(paths, named))


@dataclass(frozen=True, slots=True)
class AttachOptimizers:
    """Attach `updates`, which clip alike; every parameter with a gradient must belong to one. With
    `stochastic_rounding` steps round by draws that depend on a run's seed; with `scales_loss` they are skipped if
    gradients are not finite; with `master_weights` states are float32, and a copy of the parameters is one of them.
    With an `ema`, their average over steps is one, too. `groups`: those of another graph of the model, if it has the
    same. On a mesh with the axis dp, the gradients of a group have a symbol around them, each replica updates a slice,
    and a buffer takes the operands of the reduction. Raises OptionError."""

    title: ClassVar[str] = "attach the optimizer"
    reaches: ClassVar[Progress] = Progress.OPTIMIZED
    updates: tuple[Update, ...]
    stochastic_rounding: bool = False
    grouping: Grouping = "section"
    scales_loss: bool = False
    master_weights: bool = False
    ema: EmaOptions | None = None
    groups: tuple[ParameterGroup, ...] = ()

    def __call__(self, program: Program) -> Program:
        bounds = {update.hyperparameters.get("max_grad_norm") for update in self.updates}
        if len(bounds) > 1:
            listed = ", ".join("none" if bound is None else f"{bound:g}" for bound in sorted(bounds, key=str))
            what = f"the optimizers have different max_grad_norm: {listed}; the norm is that of all gradients together"
            raise OptionError(what, remedy="give all of them the same max_grad_norm, or none of them")
        holders = holders_of_gradients(program).items()  # a rank that updates a parameter reads it without a message
        moves = {parameter_of(name): (source, target) for name, (source, others) in holders for target in others}
        groups = self.groups or _groups(program, self.updates, self.grouping, moves)
        _check_used(program, self.updates, groups)
        if self.master_weights:
            groups = tuple(replace(group, state_dtype="float32") for group in groups)
        optimizers: list[Optimizer] = []
        for index, update in enumerate(self.updates):
            updated = [m.parameter for group in groups if group.optimizer == index for m in group.members]
            states, taken = self._states(update), {optimizer.name for optimizer in optimizers}
            for number in count():  # the next that is free, and with which no state has the name of another symbol
                name = f"{update.name}{number}"
                named = {state_name(parameter, name, state) for parameter, state in product(updated, states)}
                if name not in taken and named.isdisjoint(program.symbols):
                    break
            optimizers.append(Optimizer(name, update.kind, states, update.graph))
        symbols = dict(program.symbols)
        place = {name: number for number, name in enumerate(symbols)}
        for group in groups:
            optimizer, members = optimizers[group.optimizer], sorted(group.members, key=lambda m: place[m.parameter])
            for member, state in product(members, optimizer.states):
                name, parameter = state_name(member.parameter, optimizer.name, state), symbols[member.parameter]
                type_ = TensorType(group.region_type(state).dtype, parameter.type.shape)
                symbols[name] = Symbol(name, SymbolKind.OPTIMIZER_STATE, type_, cuts=parameter.cuts)
        for name in (output.symbol for output in program.step.outputs) if self.ema and self.ema.buffers else ():
            if (buffer := symbols[name]).kind is SymbolKind.BUFFER and "float" in buffer.type.dtype:
                type_ = TensorType(dtype_of_average(buffer.type.dtype), buffer.type.shape)
                average = f"{name}${AVERAGE}"
                symbols[average] = Symbol(average, SymbolKind.BUFFER, type_, cuts=buffer.cuts)
        arguments, operands = self._arguments(optimizers), None
        if any(axis.name == DATA_PARALLEL for axis in program.mesh):
            groups, operands = _with_wrappers(groups, symbols)
            arguments += _OF_REPLICAS
        return replace(
            program,
            symbols=symbols,
            optimizers=tuple(optimizers),
            groups=groups,
            training=self._with_update(groups, program, moves),
            reduce_buffer=operands,
            runtime_arguments=(*program.runtime_arguments, *arguments),
        )

    def state_bytes(self, gradient: str, program: Program) -> int:
        """The bytes of all optimizer states of one parameter. Raises OptionError if no optimizer updates it."""
        states = self._states(self.updates[_optimizer_of(gradient, program, self.updates)])
        type_ = program.symbols[gradient].type
        return len(states) * TensorType("float32" if self.master_weights else type_.dtype, type_.shape).size_bytes

    def _states(self, update: Update) -> tuple[str, ...]:
        return (*([MASTER] if self.master_weights else []), *update.states, *([] if self.ema is None else [AVERAGE]))

    def _arguments(self, optimizers: Sequence[Optimizer]) -> list[RuntimeArgument]:
        arguments = [
            RuntimeArgument(f"{optimizer.name}__{name}", value, f"{name} of {update.name}")
            for optimizer, update in zip(optimizers, self.updates, strict=True)
            for name, value in sorted(update.hyperparameters.items())
        ]
        for name, value in (self.ema.numbers() if self.ema else {}).items():
            arguments.append(RuntimeArgument(f"{EMA_PREFIX}{name}", value, f"{name} of the average of the weights"))
        if self.stochastic_rounding:
            arguments.append(RuntimeArgument(ROUNDING_SEED, 0, "of the draws by which optimizer steps round"))
        if self.scales_loss:
            arguments.append(RuntimeArgument(LOSS_SCALE, 1.0, "by which the loss is multiplied before the backward"))
        return arguments

    def _with_update(self, groups: tuple[ParameterGroup, ...], program: Program, moves: Mapping[str, Move]) -> Graph:
        """The training step with an OPT section for each group, behind a GRADNORM section if gradients are clipped
        or may overflow. Replicas reduce-scatter gradients before it and all-gather parameters behind it. First of all,
        gradients of `moves` are copied to the rank that updates them; last, the parameters are copied back."""
        step, values, prefix = program.step, dict(program.step.values), prefix_of(program.loss or "")
        there, back = _copies(step, groups, moves)

        def of_replicas(kind: SectionKind, verb: str, operator: str, *how: tuple[str, Argument]) -> _Part:
            name, along = f"{prefix}__{verb}", (("axis", DATA_PARALLEL), *how)
            synced = (group.name for group in groups if group.wrapper is not None)
            return _part(kind, name, [Node(f"{name}_{group}", operator, (group,), along) for group in synced])

        parts: list[_Part] = [(section, step.section_nodes(section)) for section in step.sections]
        parts.append(_part(SectionKind.REDUCE, f"{prefix}__copy_gradients", there))
        mean = ("op", "mean"), ("order", "tree")
        parts.append(of_replicas(SectionKind.REDUCE, "reduce", "comm.reduce_scatter", *mean))
        norm: tuple[Ref, ...] = ()
        bounded = any("max_grad_norm" in update.hyperparameters for update in self.updates)
        if bounded or self.scales_loss:
            blocks, total = "$square_sums", "$gradient_norm"
            values[blocks] = TensorType("float64", (sum(m.blocks for group in groups for m in group.members),))
            values[total] = TensorType("float64", ())
            nodes = [Node(blocks, "opt.square_sums", (tuple(group.name for group in groups),), (), (blocks,))]
            for axis in sorted((axis.name for axis in program.mesh), key=DATA_PARALLEL.__eq__):  # dp is the last
                summed, value = f"{nodes[-1].name}_{axis}", nodes[-1].name
                values[summed] = values[value]
                how = (("axis", axis), ("op", "sum"), ("order", "tree"))
                nodes.append(Node(summed, "comm.all_reduce", (Ref(value),), how, (summed,)))
            nodes.append(Node(total, "opt.total_norm", (Ref(nodes[-1].name),), (), (total,)))
            parts.append(_part(SectionKind.GRADNORM, f"{prefix}__gradnorm", nodes))
            norm = (Ref(total),)
        for group in groups:
            kind = self.updates[group.optimizer].kind
            update = Node(f"{prefix}__{kind}_{group.name}", f"opt.{kind}", (group.name, *norm))
            parts.append(_part(SectionKind.OPT, f"{prefix}__opt_{group.name}", [update]))
        parts.append(of_replicas(SectionKind.GATHER, "gather", "comm.all_gather"))
        parts.append(_part(SectionKind.GATHER, f"{prefix}__copy_parameters", back))
        return with_sections(replace(step, values=values), parts)


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


def _part(kind: SectionKind, name: str, nodes: Sequence[Node]) -> _Part:
    return Section(0, kind, name, 0, 0), nodes  # `with_sections` gives it its place


def _groups(
    program: Program, updates: Sequence[Update], grouping: Grouping, apart: Collection[str]
) -> tuple[ParameterGroup, ...]:
    training, made = program.step, dict[str | None, tuple[int, int]]()
    for number, (section, node) in enumerate(training.nodes_in(training.sections)):
        made |= dict.fromkeys(node.results, (section.index, number))
    completed: dict[tuple[int, str, int, bool, int], list[tuple[int, str]]] = defaultdict(list)
    for position, output in enumerate(training.outputs):
        symbol = program.symbols[output.symbol]
        if symbol.kind is SymbolKind.GRADIENT:
            # A gradient that is an input itself (the tangent, say) is there before any section has run.
            index, number = made.get(output.value, (training.sections[0].index, 0))
            alone = position if grouping == "parameter" or parameter_of(symbol.name) in apart else -1
            optimizer = _optimizer_of(symbol.name, program, updates)
            completed[index, symbol.type.dtype, optimizer, bool(symbol.cuts), alone].append((number, symbol.name))
    # Blocks of the norm are counted by parameters in the order of symbols, which no partition changes.
    of_parameter = {parameter_of(gradient): gradient for of in completed.values() for _, gradient in of}
    in_order = [of_parameter[name] for name in program.symbols if name in of_parameter]
    blocks = (norm_blocks(program.symbols[name].type.numel) for name in in_order)
    first_block = dict(zip(in_order, accumulate(blocks, initial=0), strict=False))
    groups = []
    for number, ((_, dtype, optimizer, _, _), gradients) in enumerate(sorted(completed.items())):
        members, start = [], 0
        for _, gradient in sorted(gradients):  # as they are completed: see `ir/pieces.py`
            numel = program.symbols[gradient].type.numel
            members.append(Member(parameter_of(gradient), gradient, start, numel, first_block[gradient]))
            start = align(start + numel, ALIGNMENT_ELEMENTS)
        groups.append(ParameterGroup(f"group_{number}", dtype, start, tuple(members), optimizer, {}))
    return tuple(groups)


def _optimizer_of(gradient: str, program: Program, updates: Sequence[Update]) -> int:
    paths = program.symbols[parameter_of(gradient)].torch_names
    rest = None
    for index, update in enumerate(updates):
        if update.parameters is None:
            rest = index
        elif update.matches(paths):
            return index
    if rest is not None:
        return rest
    what = f"the parameter {paths[0] if paths else parameter_of(gradient)} has a gradient, but no optimizer updates it"
    raise OptionError(what, remedy="give it to an optimizer, or set requires_grad_(False)")


def _check_used(program: Program, updates: Sequence[Update], groups: Sequence[ParameterGroup]) -> None:
    """Raises OptionError for names that no parameter has."""
    used = {group.optimizer for group in groups}
    for index, update in enumerate(updates):
        if update.parameters is not None and index not in used:
            members = (program.symbols[member.parameter] for group in groups for member in group.members)
            names = [path for symbol in members for path in symbol.torch_names]
            what = f"no parameter belongs to the group that matches {' or '.join(sorted(update.parameters))}"
            remedy = f"patterns match whole names, such as {names[0]} and {names[-1]}; the first group that does counts"
            raise OptionError(what, remedy=remedy)


def _with_wrappers(
    groups: Sequence[ParameterGroup], symbols: dict[str, Symbol]
) -> tuple[tuple[ParameterGroup, ...], str]:
    """`groups` with symbols around their gradients, and the name of the reduce operand buffer; all are added to
    `symbols`."""
    wrapped = []
    for group in groups:
        members = "\n".join(f"{member.gradient} {member.start}" for member in group.members)
        name = f"$OPT_dp_accum_group_{hashlib.sha1(members.encode(), usedforsecurity=False).hexdigest()}"
        symbols[name] = Symbol(name, SymbolKind.ACCUMULATION_GROUP, TensorType(group.dtype, (group.numel,)))
        wrapped.append(replace(group, wrapper=name))
    largest, names = max(groups, key=lambda group: group.region_type("parameter").size_bytes), UniqueNames()
    for name in symbols:
        names.take(name)
    operands = names.take(REDUCE_BUFFER)
    type_ = TensorType(largest.dtype, (largest.numel + ALIGNMENT_ELEMENTS,))
    symbols[operands] = Symbol(operands, SymbolKind.REDUCE_BUFFER, type_)
    return tuple(wrapped), operands


@dataclass(frozen=True, slots=True)
class AddDataParallel:
    """Add the axis dp, along which an update that is attached later is synced. `world_size`: the fewest replicas, each
    of `chips` ranks; with `several`, a run chooses how many. `zero`: see `ir/ranks.py`."""

    title: ClassVar[str] = "add data parallelism"
    reaches: ClassVar[Progress] = Progress.CAPTURED
    world_size: int
    chips: int = 1
    zero: int = 1
    several: bool = True

    def __call__(self, program: Program) -> Program:
        axis = Axis(DATA_PARALLEL, self.world_size * self.chips, self.several, self.chips)
        zero = 0 if program.training is None else self.zero  # replicas that predict exchange nothing
        return replace(program, mesh=(axis, *program.mesh), zero=zero)
