"""Attach the optimizers: parameter groups, their state, their hyperparameters as runtime arguments, GRADNORM and OPT
sections.

By default, the parameters whose gradients one backward section completes form one group (one for each dtype and
optimizer): they are contiguous in memory, one kernel updates them, and with data parallelism one exchange reduces them
as soon as that section is done. `grouping="parameter"` makes a group of each parameter, as SambaFlow's compiler does.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import ClassVar, Literal, TypeAlias

from sambasim.compiler.names import parameter_of, prefix_of
from sambasim.errors import OptionError
from sambasim.ir.graph import Graph, Node, Ref, Section, SectionKind
from sambasim.ir.program import ROUNDING_SEED, Member, Optimizer, ParameterGroup, Program, RuntimeArgument
from sambasim.ir.types import ALIGNMENT_ELEMENTS, Symbol, SymbolKind, TensorType, align
from sambasim.ir.verify import Stage, state_name
from sambasim.optimizers import OPTIMIZERS

Grouping: TypeAlias = Literal["section", "parameter"]
"""What one gradient group holds: all gradients that a backward section completes, or the gradient of one parameter."""


@dataclass(frozen=True, slots=True)
class Update:
    """An optimizer: its `kind`, its `hyperparameters`, and the `parameters` that it updates, by their paths in the
    model; None stands for all that have a gradient. `max_grad_norm` among the hyperparameters bounds the norm of
    all."""

    kind: str
    hyperparameters: Mapping[str, float | bool]
    parameters: frozenset[str] | None = None

    @property
    def states(self) -> tuple[str, ...]:
        """The names of the state tensors of each parameter."""
        return OPTIMIZERS[self.kind].kept_states(self.hyperparameters)


@dataclass(frozen=True, slots=True)
class AttachOptimizers:
    """`updates`, one after another; every parameter with a gradient must belong to one of them.

    With `stochastic_rounding`, their steps round parameters and state by draws that a run's seed decides.
    Raises OptionError if some of them clip and others do not, or by another norm.
    `grouping` does not change an update, but two things are computed by group: the order of additions in the norm of
    all gradients (`max_grad_norm`), and the draws of stochastic rounding.
    """

    title: ClassVar[str] = "attach the optimizer"
    reaches: ClassVar[Stage] = Stage.OPTIMIZED
    updates: tuple[Update, ...]
    stochastic_rounding: bool = False
    grouping: Grouping = "section"

    def __call__(self, program: Program) -> Program:
        training = program.training
        if training is None:
            return program
        _check_clipping(self.updates)
        groups = _groups(training, program, self.updates, self.grouping)
        optimizers: list[Optimizer] = []
        for index, update in enumerate(self.updates):
            updated = [m.parameter for group in groups if group.optimizer == index for m in group.members]
            taken = {optimizer.name for optimizer in optimizers}
            optimizers.append(Optimizer(_free_name(update, updated, program, taken), update.kind, update.states))
        symbols = dict(program.symbols)
        for group in groups:
            optimizer = optimizers[group.optimizer]
            for member in group.members:
                for state in optimizer.states:
                    name = state_name(member.parameter, optimizer.name, state)
                    symbols[name] = Symbol(name, SymbolKind.OPTIMIZER_STATE, symbols[member.parameter].type)
        return replace(
            program,
            symbols=symbols,
            optimizers=tuple(optimizers),
            groups=groups,
            training=self._extend(training, groups, prefix_of(program.loss or "")),
            runtime_arguments=(*program.runtime_arguments, *self._arguments(optimizers)),
        )

    def _arguments(self, optimizers: Sequence[Optimizer]) -> list[RuntimeArgument]:
        arguments = [
            RuntimeArgument(f"{optimizer.name}__{name}", value, f"{name} of {optimizer.kind}")
            for optimizer, update in zip(optimizers, self.updates, strict=True)
            for name, value in sorted(update.hyperparameters.items())
        ]
        if self.stochastic_rounding:
            arguments.append(RuntimeArgument(ROUNDING_SEED, 0, "of the draws by which optimizer steps round"))
        return arguments

    def _extend(self, training: Graph, groups: tuple[ParameterGroup, ...], prefix: str) -> Graph:
        nodes, sections = list(training.nodes), list(training.sections)
        values = dict(training.values)

        def add(kind: SectionKind, name: str, *members: Node) -> None:
            sections.append(Section(len(sections), kind, name, len(nodes), len(nodes) + len(members)))
            nodes.extend(members)

        norm: tuple[Ref, ...] = ()
        if any("max_grad_norm" in update.hyperparameters for update in self.updates):
            blocks, total = "$square_sums", "$gradient_norm"
            values[blocks] = TensorType("float64", (sum(group.norm_blocks for group in groups),))
            values[total] = TensorType("float64", ())
            names = tuple(group.name for group in groups)
            add(
                SectionKind.GRADNORM,
                f"{prefix}__gradnorm",
                Node(blocks, "opt.square_sums", (names,), (), (blocks,)),
                Node(total, "opt.total_norm", (Ref(blocks),), (), (total,)),
            )
            norm = (Ref(total),)
        for group in groups:
            kind = self.updates[group.optimizer].kind
            update = Node(f"{prefix}__{kind}_{group.name}", f"opt.{kind}", (group.name, *norm))
            add(SectionKind.OPT, f"{prefix}__opt_{group.name}", update)
        return replace(training, nodes=tuple(nodes), sections=tuple(sections), values=values)


def _check_clipping(updates: Sequence[Update]) -> None:
    bounds = {update.hyperparameters.get("max_grad_norm") for update in updates}
    if len(bounds) > 1:
        told = ", ".join("none" if bound is None else f"{bound:g}" for bound in sorted(bounds, key=str))
        raise OptionError(
            f"the optimizers have different max_grad_norm: {told}; the norm is that of all gradients together",
            remedy="give all of them the same max_grad_norm, or none of them",
        )


def _free_name(update: Update, parameters: Sequence[str], program: Program, taken: Collection[str]) -> str:
    """`sgd0`, or the next number that no other optimizer has, and with which no state has the name of a symbol that the
    model has."""

    def free(name: str) -> bool:
        states = (state_name(parameter, name, state) for parameter in parameters for state in update.states)
        return name not in taken and not any(state in program.symbols for state in states)

    return next(name for number in count() if free(name := f"{update.kind}{number}"))


def _groups(
    training: Graph, program: Program, updates: Sequence[Update], grouping: Grouping
) -> tuple[ParameterGroup, ...]:
    """One group for each backward section, dtype and optimizer, or one for each parameter, in the order in which the
    backward completes them."""
    section_of = {
        result: section.index
        for section in training.sections
        for node in training.section_nodes(section)
        for result in node.results
    }
    completed: dict[tuple[int, str, int, int], list[str]] = {}
    for position, output in enumerate(training.outputs):
        symbol = program.symbols[output.symbol]
        if symbol.kind is SymbolKind.GRADIENT:
            # A gradient that is an input itself (the tangent, say) is there before any section has run.
            section = section_of.get(output.value, training.sections[0].index)
            alone = position if grouping == "parameter" else 0
            key = (section, symbol.type.dtype, _optimizer_of(symbol.name, program, updates), alone)
            completed.setdefault(key, []).append(symbol.name)
    return tuple(
        _group(f"group_{number}", gradients, dtype, optimizer, program)
        for number, ((_, dtype, optimizer, _), gradients) in enumerate(sorted(completed.items()))
    )


def _optimizer_of(gradient: str, program: Program, updates: Sequence[Update]) -> int:
    paths = program.symbols[parameter_of(gradient)].torch_names
    for index, update in enumerate(updates):
        if update.parameters is None or not update.parameters.isdisjoint(paths):
            return index
    raise OptionError(
        f"the parameter {paths[0] if paths else parameter_of(gradient)} has a gradient, but no optimizer updates it",
        remedy="give it to an optimizer, or set requires_grad_(False)",
    )


def _group(name: str, gradients: list[str], dtype: str, optimizer: int, program: Program) -> ParameterGroup:
    members, start = [], 0
    for gradient in gradients:
        numel = program.symbols[gradient].type.numel
        members.append(Member(parameter_of(gradient), gradient, start, numel))
        start = align(start + numel, ALIGNMENT_ELEMENTS)
    return ParameterGroup(name, dtype, start, tuple(members), optimizer, {})
