"""Which stage of a pipeline each operator belongs to.

The forward is cut where as few tensors as possible cross, so that the slowest stage is as fast as possible. A view is
taken where it is read, and what depends on no activation (a mask, say) is computed where it is read; so neither
crosses. A backward operator runs on the stage that has the activations and weights that it reads, and never on a later
stage than a gradient that it reads. An operator that reads only one gradient runs where its result is read.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from sambasim.costs.price import alone_s
from sambasim.costs.work import at_batch_size, work_of
from sambasim.errors import OptionError
from sambasim.hardware.budget import Budget
from sambasim.ir.dataflow import is_view
from sambasim.ir.graph import Graph, Node, SectionKind
from sambasim.ir.operators import OPERATORS
from sambasim.ir.program import Program
from sambasim.ir.schedule import Schedule
from sambasim.ir.types import SymbolKind, parameter_of


@dataclass(frozen=True, slots=True)
class Values:
    """What the values of a graph are to a pipeline. `maker`: by result, its node; `free`: results that depend on no
    activation and no parameter; `trained`: parameters with a gradient; `changed`: buffers that training changes."""

    maker: Mapping[str, Node]
    free: frozenset[str]
    trained: frozenset[str]
    changed: frozenset[str]

    def is_view(self, name: str) -> bool:
        return name in self.maker and is_view(self.maker[name])

    def bases(self, name: str) -> set[str]:
        """What a reader of `name` needs: it, or what it is a view of; nothing for what is computed where it is read."""
        if name in self.free or (name not in self.maker and name not in self.trained):
            return set()
        return self.read_by(self.maker[name]) if self.is_view(name) else {name}

    def read_by(self, node: Node) -> set[str]:
        return set().union(*map(self.bases, node.reads))

    def buffers_read_by(self, node: Node) -> set[str]:
        """The changed buffers that `node` reads, or a view of."""
        views = [self.buffers_read_by(self.maker[name]) for name in node.reads if self.is_view(name)]
        return set(self.changed.intersection(node.reads)).union(*views)


def values_of(graph: Graph, program: Program) -> Values:
    kinds = {name: symbol.kind for name, symbol in program.symbols.items()}
    kept = [output.symbol for output in program.training.outputs] if program.training else []
    trained = frozenset(parameter_of(name) for name in kept if kinds[name] is SymbolKind.GRADIENT)
    changed = frozenset(name for name in kept if kinds[name] is SymbolKind.BUFFER)
    depth = {name: 0 for name in graph.inputs if kinds[name] is not SymbolKind.PARAMETER and name not in changed}
    for node in graph.nodes:
        deepest = max((depth.get(name, _DEEPEST) for name in node.reads), default=0)
        if deepest < _DEEPEST and not OPERATORS[node.operator].draws_random_numbers:
            depth.update((name, deepest + 1) for name in node.makes)
    maker = {name: node for node in graph.nodes for name in node.makes}
    return Values(maker, frozenset(depth.keys() & maker.keys()), trained, changed)


_DEEPEST = 32  # operators in a row that are computed again where their result is read, instead of sent


@dataclass(frozen=True, slots=True)
class Assignment:
    """By node, `stage_of`. By trained parameter, the stages that complete its gradient (`owner`), that update it
    (`updater`) and whose forwards read it, ascending (`readers`). By buffer, the stage that changes it (`buffers`)."""

    stage_of: Mapping[str, int]
    owner: Mapping[str, int]
    updater: Mapping[str, int]
    readers: Mapping[str, tuple[int, ...]]
    buffers: Mapping[str, int]


def assign(program: Program, values: Values, schedule: Schedule, budget: Budget, samples: int | None) -> Assignment:
    """The stages of a step, for passes of `samples`. Raises OptionError if it cannot be cut into so many."""
    graph = program.step
    forward = graph.nodes_of(SectionKind.FWD)
    backward = graph.nodes[len(forward) :]
    work = at_batch_size(work_of(graph, program.symbols), program.batch_size, samples or program.batch_size)
    seconds = [0.0] * len(forward)  # without the start of a section
    for stage in (one for one in work.stages if one.node < len(forward)):
        seconds[stage.node] += alone_s(stage, work, budget)
    ends = _cut(program, forward, values, schedule, seconds)
    stage_of = {node.name: stage for stage, span in enumerate(pairwise([0, *ends])) for node in forward[slice(*span)]}
    held = {name: {stage_of[node.name]} for node in forward for name in node.makes}
    for node in forward:
        if not is_view(node):
            for name in values.read_by(node):
                held.setdefault(name, set()).add(stage_of[node.name])
    owner = {name: min(at) for name, at in held.items() if name in values.trained}
    stage_of |= _backward(graph, backward, values, held, owner, schedule.stages)
    made = {name: stage_of[node.name] for node in backward for name in node.makes}
    for output in graph.outputs:
        name = parameter_of(output.symbol)
        if name in owner and output.value not in made:
            what = f"no operator computes the gradient of {program.symbols[name].torch_names[0]}"
            raise OptionError(what, remedy=_NO_STAGES)
        if name in owner:
            owner[name] = min(owner[name], made[output.value])
    readers = {name: tuple(sorted(held[name])) for name in owner}
    changed = [output for output in graph.outputs if output.symbol in values.changed and output.value in values.maker]
    buffers = {output.symbol: stage_of[values.maker[output.value].name] for output in changed}
    return Assignment(stage_of, owner, owner, readers, buffers)


def assign_forward(graph: Graph, values: Values, training: Assignment) -> Assignment:
    """The stages of an evaluation graph: each operator is where its parameters are, and not before its operands."""
    stage_of: dict[str, int] = {}
    for node in graph.nodes:
        needed = values.read_by(node)
        least = max((stage_of[values.maker[name].name] for name in needed - values.trained), default=0)
        for name in needed & values.trained:
            least = max(least, next((stage for stage in training.readers.get(name, ()) if stage >= least), least))
        changing = (training.buffers[name] for name in values.buffers_read_by(node) & training.buffers.keys())
        stage_of[node.name] = max((least, *changing))
    return replace(training, stage_of=stage_of)


_NO_STAGES = "leave out --pipeline-stages"


def _cut(
    program: Program, forward: Sequence[Node], values: Values, schedule: Schedule, seconds: Sequence[float]
) -> list[int]:
    """Where stages of the forward, whose operators take `seconds`, end. Each has a parameter that none before has."""
    stages, each = schedule.stages, schedule.stages // schedule.ranks
    total_s, owned, seen = [0.0, *accumulate(seconds)], [0], set[str]()
    for node in forward:
        if not is_view(node):  # a view is taken where it is read
            seen |= values.read_by(node) & values.trained
        owned.append(len(seen))
    crossing = crossing_of(forward, values)

    def places(most: int) -> list[int]:
        """Where at most so many tensors cross, between both ends."""
        return [0, *(at for at, count in enumerate(crossing, 1) if 0 < count <= most), len(forward)]

    largest = max(crossing, default=0)
    possible = len({owned[at] for at in places(largest)} - {0})
    if stages > possible:
        remedy = "use --schedule 1f1b, with one stage on each rank" if possible > 1 else _NO_STAGES
        if possible // each > 1:
            of_rank = f" of {each} stages each" if each > 1 else ""
            remedy = f"use fewer --pipeline-stages: at most {possible // each}{of_rank}"
        why = f"its forward has {len(forward)} operators, which read {len(seen)} trained parameters"
        what = f"{program.name} cannot be cut into {stages} stages with parameters of their own: {why}"
        raise OptionError(what, remedy=remedy)
    attempts = (_balanced(places(most), total_s, owned, stages) for most in range(1, largest + 1))
    return next(ends for ends in attempts if ends is not None)


def crossing_of(forward: Sequence[Node], values: Values) -> list[int]:
    """How many tensors cross behind each operator but the last."""
    made = {name: at for at, node in enumerate(forward) for name in node.makes}
    last: dict[str, int] = {}
    for at, node in enumerate(forward):
        if not is_view(node):
            last.update(dict.fromkeys(values.read_by(node) & made.keys(), at))
    change = [0] * len(forward)
    for name, at in last.items():
        change[made[name]] += 1
        change[at] -= 1
    return list(accumulate(change))[:-1]


def _balanced(places: Sequence[int], total_s: Sequence[float], owned: Sequence[int], stages: int) -> list[int] | None:
    """The ends of stages, all in `places`, whose slowest is fastest; None if there are too few places."""
    never = float("inf")
    slowest = [0.0] + [never] * (len(places) - 1)
    begins: list[list[int]] = []
    for _ in range(stages):
        best, begin = [never] * len(places), [0] * len(places)
        for stop in range(1, len(places)):
            for start in reversed(range(stop)):
                own_s = total_s[places[stop]] - total_s[places[start]]
                if own_s > best[stop]:  # a longer one is no faster
                    break
                if owned[places[stop]] > owned[places[start]] and max(slowest[start], own_s) <= best[stop]:
                    best[stop], begin[stop] = max(slowest[start], own_s), start
        slowest = best
        begins.append(begin)
    if slowest[-1] == never:
        return None
    ends, at = [], len(places) - 1
    for begin in reversed(begins):
        ends.append(places[at])
        at = begin[at]
    return ends[::-1]


def only_output(graph: Graph, backward: Sequence[Node]) -> Mapping[str, str]:
    """By backward node that one output depends on, the symbol of that."""
    symbol_of: dict[str, str | None] = {}  # by value; None if several outputs depend on it
    for output in graph.outputs:
        symbol_of[output.value] = output.symbol if output.value not in symbol_of else None
    leads_to = {}
    for node in reversed(backward):
        if reached := {symbol_of[name] for name in node.results if name in symbol_of}:
            symbol = reached.pop() if len(reached) == 1 else None
            symbol_of |= {name: symbol if symbol_of.get(name, symbol) == symbol else None for name in node.reads}
            if symbol is not None:
                leads_to[node.name] = symbol
    return leads_to


def _backward(
    graph: Graph,
    backward: Sequence[Node],
    values: Values,
    held: Mapping[str, set[int]],
    owner: Mapping[str, int],
    stages: int,
) -> Mapping[str, int]:
    """The stages of the backward. `held`: by value of the forward and by parameter, the stages that have it."""
    weight_of = {name: parameter_of(symbol) for name, symbol in only_output(graph, backward).items()}
    names = {name for node in backward for name in node.makes}
    bound: dict[str, int] = {}  # by node: its stage if it reads what was saved, else the highest possible
    fixed: set[str] = set()
    for node in backward:
        needed = values.read_by(node)
        highest = min((bound[values.maker[name].name] for name in needed & names), default=stages - 1)
        saved = [{stage for stage in held[name] if stage <= highest} or {highest} for name in needed - names]
        everywhere = set.intersection(*saved) if saved else set(range(highest + 1))
        own = owner.get(weight_of.get(node.name, ""))
        bound[node.name] = own if own in everywhere else max(everywhere or map(min, saved))
        if saved or len(needed & names) > 1:  # the sum of gradients crosses, not each
            fixed.add(node.name)
    # By value: the highest stage that reads it, or owns what it is the gradient of.
    owned = ((output.value, owner.get(parameter_of(output.symbol))) for output in graph.outputs)
    read = {value: stage for value, stage in owned if stage is not None}
    stage_of: dict[str, int] = {}
    for node in reversed(backward):
        stage = bound[node.name]
        if node.name not in fixed:
            stage = min(max((read[name] for name in node.results if name in read), default=0), stage)
        stage_of[node.name] = stage
        for name in node.reads:
            read[name] = max(read.get(name, 0), stage)
    return stage_of


_LEAST_GAIN = 0.05  # of the memory of the fullest rank: for less, no messages are added


def updaters(assignment: Assignment, sizes: Mapping[str, tuple[float, float]], ranks: int) -> Mapping[str, int]:
    """By trained parameter, the stage that updates it: the one that completes its gradient, or another that reads it,
    if the fullest of `ranks` then holds clearly less. `sizes`: the bytes of a parameter, which are those of its
    gradient, and of its optimizer states on one rank."""
    owner = assignment.owner

    def fullest(updater: Mapping[str, int]) -> float:
        held = [0.0] * ranks
        for name, (parameter_bytes, states_bytes) in sizes.items():
            for rank in {owner[name] % ranks, updater[name] % ranks}:
                held[rank] += 2 * parameter_bytes
            held[updater[name] % ranks] += states_bytes
        return max(held)

    chosen = dict(owner)
    for name in sorted(chosen, key=lambda name: -sizes[name][1]):
        if len(assignment.readers[name]) > 1 and owner[name] in assignment.readers[name]:
            best = (1 - _LEAST_GAIN) * fullest(chosen)
            for stage in assignment.readers[name]:
                if (held := fullest(chosen | {name: stage})) < best:
                    best, chosen = held, chosen | {name: stage}
    return chosen
