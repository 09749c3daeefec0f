"""Attach the optimizer: parameter groups, its state, its hyperparameters as runtime arguments, GRADNORM and OPT
sections.

The parameters whose gradients one backward section completes form one group (one for each dtype): they lie side by
side, one kernel updates them, and with data parallelism one exchange reduces them as soon as that section is done.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import count
from typing import ClassVar

from sambasim.compiler.names import parameter_of, prefix_of
from sambasim.ir.graph import Graph, Node, Section, SectionKind
from sambasim.ir.program import Member, Optimizer, ParameterGroup, Program, RuntimeArgument
from sambasim.ir.types import ALIGNMENT_ELEMENTS, Symbol, SymbolKind, align
from sambasim.ir.verify import Stage, state_name

STATES = {"sgd": ("momentum",), "adam": ("exp_avg", "exp_avg_sq"), "adamw": ("exp_avg", "exp_avg_sq")}
"""The state tensors that each kind of optimizer keeps for each parameter."""


@dataclass(frozen=True, slots=True)
class AttachOptimizer:
    """`kind` and its `hyperparameters`; `max_grad_norm` among them adds a GRADNORM section."""

    title: ClassVar[str] = "attach the optimizer"
    reaches: ClassVar[Stage] = Stage.OPTIMIZED
    kind: str
    hyperparameters: Mapping[str, float | bool]

    def __call__(self, program: Program) -> Program:
        training = program.training
        if training is None:
            return program
        # Plain SGD has no state; its momentum buffer would be a third copy of the model that nobody reads.
        states = () if self.kind == "sgd" and not self.hyperparameters.get("momentum") else STATES[self.kind]
        groups = _groups(training, program)
        optimizer = Optimizer(_free_name(self.kind, states, groups, program), self.kind, states)
        symbols = dict(program.symbols)
        for group in groups:
            for member in group.members:
                for state in states:
                    name = state_name(member.parameter, optimizer.name, state)
                    symbols[name] = Symbol(name, SymbolKind.OPTIMIZER_STATE, symbols[member.parameter].type)
        return replace(
            program,
            symbols=symbols,
            optimizers=(optimizer,),
            groups=groups,
            training=self._extend(training, groups, prefix_of(program.loss or "")),
            runtime_arguments=(*program.runtime_arguments, *self._arguments(optimizer)),
        )

    def _arguments(self, optimizer: Optimizer) -> tuple[RuntimeArgument, ...]:
        return tuple(
            RuntimeArgument(f"{optimizer.name}__{name}", value, f"{name} of {optimizer.kind}")
            for name, value in sorted(self.hyperparameters.items())
        )

    def _extend(self, training: Graph, groups: tuple[ParameterGroup, ...], prefix: str) -> Graph:
        nodes, sections = list(training.nodes), list(training.sections)
        if "max_grad_norm" in self.hyperparameters:
            names = tuple(group.name for group in groups)
            sections.append(_section(sections, SectionKind.GRADNORM, f"{prefix}__gradnorm", nodes, 1))
            nodes.append(Node(f"{prefix}__gradnorm", "sambasim.grad_norm", (names,)))
        for group in groups:
            sections.append(_section(sections, SectionKind.OPT, f"{prefix}__opt_{group.name}", nodes, 1))
            nodes.append(Node(f"{prefix}__{self.kind}_{group.name}", f"sambasim.{self.kind}", (group.name,)))
        return replace(training, nodes=tuple(nodes), sections=tuple(sections))


def _free_name(kind: str, states: tuple[str, ...], groups: tuple[ParameterGroup, ...], program: Program) -> str:
    """`sgd0`, or the next number with which no state has the name of a symbol that the model has."""
    parameters = [member.parameter for group in groups for member in group.members]

    def free(name: str) -> bool:
        return not any(state_name(p, name, state) in program.symbols for p in parameters for state in states)

    return next(name for number in count() if free(name := f"{kind}{number}"))


def _section(sections: list[Section], kind: SectionKind, name: str, nodes: list[Node], count: int) -> Section:
    return Section(len(sections), kind, name, len(nodes), len(nodes) + count)


def _groups(training: Graph, program: Program) -> tuple[ParameterGroup, ...]:
    """One group for each backward section and dtype, in the order in which the backward completes them."""
    section_of = {
        result: section.index
        for section in training.sections
        for node in training.section_nodes(section)
        for result in node.results
    }
    completed: dict[tuple[int, str], list[str]] = {}
    for output in training.outputs:
        symbol = program.symbols[output.symbol]
        if symbol.kind is SymbolKind.GRADIENT:
            # A gradient that is an input itself (the tangent, say) is there before any section has run.
            section = section_of.get(output.value, training.sections[0].index)
            completed.setdefault((section, symbol.type.dtype), []).append(symbol.name)
    return tuple(
        _group(f"group_{number}", gradients, section, dtype, program)
        for number, ((section, dtype), gradients) in enumerate(sorted(completed.items()))
    )


def _group(name: str, gradients: list[str], section: int, dtype: str, program: Program) -> ParameterGroup:
    members, start = [], 0
    for gradient in gradients:
        numel = program.symbols[gradient].type.numel
        members.append(Member(parameter_of(gradient), gradient, start, numel))
        start = align(start + numel, ALIGNMENT_ELEMENTS)
    return ParameterGroup(name, dtype, start, tuple(members), 0, section, {})
