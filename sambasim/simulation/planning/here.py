"""The step and the memory of a strategy on this machine, from what was measured on it (`simulation/machine.py`).

pass         its operators, each as it was measured with as many ranks at a time; between two numbers of samples, on
             the line between them. What a strategy cuts takes a share by its FLOPs or bytes; what it adds, a copy of
             its bytes, or its FLOPs at the rate of the other products
cores        more ranks than cores share them, also while they wait for messages, which MPI does in a busy loop
pipeline     the actions of its schedule
update       by bytes: a rank reads the gradients of all, and its slice of parameters and states, which it writes
memory       parameters once for all ranks with sync between devices; then what a process has before the first pass

All times are predicted; only rates are measured.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from math import inf

from sambasim.costs.fit import Memory
from sambasim.costs.price import SectionPrice
from sambasim.costs.work import work_of
from sambasim.errors import OptionError
from sambasim.hardware.budget import budget_of
from sambasim.hardware.placement import Placement
from sambasim.hardware.spec import ClusterSpec, load_device
from sambasim.ir.dataflow import axis_of, pass_and_update, spans_of_actions
from sambasim.ir.graph import MADE_AGAIN, Node
from sambasim.ir.mesh import TENSOR
from sambasim.ir.operators import OPERATORS, OperatorKind, flops_of
from sambasim.ir.program import Program
from sambasim.ir.ranks import of_ranks
from sambasim.ir.schedule import Action, ActionKind, Schedule, in_flight, make
from sambasim.ir.types import SymbolKind, TensorType
from sambasim.simulation.alone import TimedSection, price_alone
from sambasim.simulation.machine import Machine, PassTimes, Rates, between
from sambasim.simulation.memory import memory_of, pass_memory
from sambasim.simulation.planning.search import Goal, Plan, order
from sambasim.simulation.planning.strategy import Priced, Space, Strategy, Terms, shortage
from sambasim.simulation.scaling import by_rdu
from sambasim.simulation.step import Cost, Passes
from sambasim.simulation.sync import WIRE_BYTES, SyncPath, Traffic
from sambasim.units import counted, format_rate

NOTE = (
    "the rates of this machine were measured: operators, update, messages, memory of a process, copies ({}B/s) and"
    " products ({}FLOP/s) on one core; all steps and their memory are predicted"
)
_WITHOUT_MPI = "; there is no mpirun, so one rank only: python -m pip install mpich"

_COSTLESS = (OperatorKind.VIEW, OperatorKind.GENERATOR, OperatorKind.CHECK, OperatorKind.MEMORY)
_ADDING = (ActionKind.BACKWARD, ActionKind.WEIGHT_GRADIENTS)


def plan_here(
    name: str,
    program_of: Callable[[Strategy], Program],
    machine: Machine,
    cluster: ClusterSpec,
    spaces: Sequence[Space],
    goal: Goal,
    *,
    has_mpi: bool,
    count: int = 10,
) -> Plan:
    """The best `count` strategies of `spaces`, of which the last is the largest, one for each shape of the mesh."""
    here = Here(program_of, machine, cluster, spaces[-1].dtypes[0])
    priced: dict[Strategy, Priced] = {}
    refused: dict[Strategy, str] = {}
    for strategy in dict.fromkeys(strategy for space in spaces for strategy in space.strategies()):
        try:
            priced[strategy] = here.price(strategy)
        except OptionError as error:
            refused[strategy] = error.what
    fitting = (candidate for candidate in priced.values() if candidate.problem is None)
    best: dict[object, Priced] = {}
    for candidate in sorted(fitting, key=lambda candidate: order(candidate, goal)):
        best.setdefault(candidate.strategy.shape, candidate)
    first = list(best.values())[:count]
    chosen = {candidate.strategy for candidate in first}
    others = tuple(candidate for candidate in priced.values() if candidate.strategy not in chosen)
    where = "this machine" if here.nodes == 1 else f"{here.nodes} nodes of {cluster.name}, each as this machine"
    hardware = f"up to {counted(spaces[-1].rdus, 'rank')} on {where}, {counted(machine.cores, 'core')}"
    note = NOTE.format(format_rate(machine.copy_bytes_per_s), format_rate(machine.gemm_flops_per_s))
    note += "" if has_mpi else _WITHOUT_MPI
    note += (
        "" if here.nodes == 1 else f"; bandwidth between nodes: {cluster.network_link.sources['bandwidth_bytes_per_s']}"
    )
    if machine.other_cores > 0.15:  # an estimate of a quiet machine
        note += f"; other programs used {machine.other_cores:.1f} cores meanwhile, so times are too long: measure again"
    return Plan(name, hardware, spaces[-1], goal, tuple(first), others, refused, _MEAN_ERROR, "rank", note)


_MEAN_ERROR = 0.07  # of steps that `python -m tests.benchmarks plan` measures


@dataclass(frozen=True, eq=False)
class _Part:
    """What one rank of a replica runs: its program, with the share of the replica's parameters."""

    program: Program
    share: float

    @cached_property
    def types(self) -> Mapping[str, TensorType]:
        return self.program.step.types(self.program.symbols)

    @cached_property
    def sizes(self) -> Mapping[str, float]:
        """Of the nodes of a pass, by name: FLOPs of a product, else bytes."""
        graph = self.program.step
        sections, _ = pass_and_update(graph)
        return {node.name: self.size(node) for section in sections for node in graph.section_nodes(section)}

    def size(self, node: Node) -> float:
        return float(flops_of(node, self.types) or self.bytes_of(node))

    def bytes_of(self, node: Node) -> int:
        names = [*node.reads, *node.makes]
        return sum(self.types[name].size_bytes for name in names if name in self.types)

    @cached_property
    def memory(self) -> Memory:
        """Of a pass."""
        return pass_memory(self.program.step, self.program.symbols)


class Here:
    """`program_of` compiles the model for a strategy. Passes were measured in `dtype`. Nodes of `cluster` are as this
    machine."""

    def __init__(
        self, program_of: Callable[[Strategy], Program], machine: Machine, cluster: ClusterSpec, dtype: str = "fp32"
    ) -> None:
        self._program_of, self._machine, self._cluster = program_of, machine, cluster
        self.nodes = cluster.nodes or 1
        self._alone = Strategy(2, dtype=dtype)
        self._parts: dict[Strategy, tuple[_Part, ...] | OptionError] = {}
        self._times = cache(lambda ranks, samples: between(machine.rates_at(ranks).passes, samples))
        self._costs = cache(self._costs_of)

    def price(self, strategy: Strategy) -> Priced:
        """Raises OptionError if `strategy` cannot be compiled."""
        machine, here = self._machine, strategy.ranks // self.nodes
        parts, rates = self._parts_of(strategy), machine.rates_at(here)
        times = self._times(rates.ranks, strategy.samples)
        costs = [self._costs(part, rates.ranks, strategy.samples) for part in parts]
        crowd, schedule = machine.crowd(here), _schedule(strategy)

        def cost(action: Action) -> Cost:
            """Without the gradients that the later passes of a stage, or micro-steps, add."""
            rank = schedule.rank_of(action.stage)
            found = costs[rank].get((action.kind, action.stage), Cost())
            adds = action.kind in _ADDING and action.micro_batch > 0
            return found + Cost(times.adding_s * parts[rank].share / strategy.chunks) if adds else found

        passes, steps = Passes(schedule, cost), strategy.accumulation_steps
        busy = max(passes.of_ranks, key=lambda rank: rank.predicted_s)
        update_s, sync_s = self._update(strategy, max(part.share for part in parts), rates)
        adding_s = times.adding_s * parts[0].share * (steps - 1)
        terms = Terms(
            compute_s=(busy.device_s * steps + adding_s) * crowd,
            host_s=times.batch_s * strategy.passes * crowd,
            messages_s=busy.messages_s * steps * crowd,
            # A rank that waits for a message keeps its share of a core.
            bubble_s=(passes.predicted_s - busy.predicted_s) * steps * crowd,
            update_s=update_s * crowd,
            sync_s=sync_s * crowd
            + self._between_nodes_s(strategy, parts[0], times, (update_s + sync_s) * crowd, crowd),
        )
        memory = tuple(self._memory(strategy, parts, rates, times))
        capacity_bytes = machine.memory_bytes // here
        problem = shortage(memory, capacity_bytes)
        return Priced(strategy, strategy.ranks, terms, memory, capacity_bytes, {}, True, problem)

    def _parts_of(self, strategy: Strategy) -> tuple[_Part, ...]:
        """By rank along pp. The program of a pass depends on neither replicas nor the number of passes."""
        stages = strategy.stages
        key = replace(strategy, replicas=2, zero=1, samples=1, passes=2 * stages if stages > 1 else 1)
        if strategy.tensor == "batch":
            key = replace(key, tensor="none", chips=1)
        if stages == 1:
            key = replace(key, schedule="1f1b")
        if key not in self._parts:
            try:
                programs = of_ranks(self._program_of(key))
                numels = [sum(group.numel for group in program.groups) for program in programs]
                whole = numels[0] if key == self._alone else sum(group.numel for group in self._whole.program.groups)
                pairs = zip(programs, numels, strict=True)
                self._parts[key] = tuple(_Part(program, numel / whole) for program, numel in pairs)
            except OptionError as error:
                self._parts[key] = error
        found = self._parts[key]
        if isinstance(found, OptionError):
            raise found
        return found

    @property
    def _whole(self) -> _Part:
        """A replica of one rank that makes nothing again: what was measured."""
        return self._parts_of(self._alone)[0]

    def _costs_of(self, part: _Part, ranks: int, samples: int) -> Mapping[tuple[ActionKind, int], Cost]:
        """By action: of a pass of `samples`, while so many `ranks` compute."""
        graph, scale = part.program.step, samples / part.program.batch_size
        rates, times, (sections, _) = self._machine.rates_at(ranks), self._times(ranks, samples), pass_and_update(graph)

        def cost(node: Node) -> Cost:
            if node.operator.startswith("comm."):
                return Cost(messages={axis_of(node) or "": Traffic(self._message_s(part, node, rates, scale))})
            return Cost(self._operator_s(part, node, times, scale))

        found = {}
        for action, (start, stop) in spans_of_actions(sections).items():
            nodes = (node for section in sections[start:stop] for node in graph.section_nodes(section))
            found[action] = sum(map(cost, nodes), Cost())
        return found

    def _operator_s(self, part: _Part, node: Node, times: PassTimes, scale: float) -> float:
        """`scale`: samples, relative to those of the program."""
        name = node.name.removesuffix(MADE_AGAIN)
        known = times.seconds.get(name)
        if known is not None:
            whole = self._whole.sizes.get(name, 0.0)
            return known * part.size(node) / whole if whole else known
        if OPERATORS[node.operator].kind in _COSTLESS:
            return 0.0
        if OPERATORS[node.operator].flops is not None:
            return part.size(node) * scale / self._flops_per_s(times)
        return part.bytes_of(node) * scale / self._machine.copy_bytes_per_s

    def _flops_per_s(self, times: PassTimes) -> float:
        """Of all products of a pass that was measured."""
        whole = self._whole
        products = [node for node in whole.program.step.nodes if OPERATORS[node.operator].flops is not None]
        seconds = sum(times.seconds.get(node.name, 0.0) for node in products)
        flops = sum(map(whole.size, products)) * times.samples / whole.program.batch_size
        return flops / seconds if seconds else self._machine.gemm_flops_per_s

    def _message_s(self, part: _Part, node: Node, rates: Rates, scale: float) -> float:
        """Of a collective along tp, all ranks copy to shared memory at once, and share its speed."""
        if node.operator == "comm.recv":  # comm.send has the time of both
            return 0.0
        size_bytes = part.bytes_of(node) * scale
        if axis_of(node) == TENSOR:
            ranks = next(axis.size for axis in part.program.mesh if axis.name == TENSOR)
            return rates.latency_s + size_bytes * ranks / self._machine.copy_bytes_per_s
        return rates.latency_s + size_bytes / rates.link_bytes_per_s

    def _update(self, strategy: Strategy, share: float, rates: Rates) -> tuple[float, float]:
        """Seconds of the update and of sync on a core of its own, by the bytes that are read and written."""
        states = max(len(optimizer.states) for optimizer in self._whole.program.optimizers)
        copies, measured = strategy.copies, rates.ranks
        update_s = rates.update_s * share * _update_words(copies, states) / _update_words(measured, states)
        own = _update_words(1, states) / copies / _update_words(copies, states)
        update_s, sync_s = update_s * own, update_s * (1 - own)
        if strategy.path is SyncPath.HOST and copies > 1:
            gathers = 2 * strategy.passes if strategy.zero == 3 else 1
            by_host_s = max(rates.host_update_s - rates.update_s, 0.0) * share
            sync_s += by_host_s * (1 + gathers) / 2
        return update_s, sync_s

    def _between_nodes_s(
        self, strategy: Strategy, part: _Part, times: PassTimes, update_s: float, crowd: float
    ) -> float:
        """What sync between nodes adds to a step: what does not overlap with passes and `update_s`, and of what does,
        the time of the processors."""
        program, link, nodes = part.program, self._cluster.network_link, self.nodes
        if nodes == 1:
            return 0.0
        # As RDUs do it, whose elements have WIRE_BYTES, and which take no other time.
        numel, scale = sum(group.numel for group in program.groups), strategy.samples / program.batch_size
        rate = link.bandwidth_bytes_per_s * WIRE_BYTES * numel / program.gradient_bytes
        wire = link.model_copy(update={"bandwidth_bytes_per_s": rate})
        rdu = replace(budget_of(load_device("sn30")), memory_bytes_per_s=inf, launch_s=0.0, start_s=0.0, spread=0.0)
        alone = price_alone(program, work_of(program.step, program.symbols), rdu, strategy.samples, strategy.passes)
        seconds = {group.name: update_s * group.numel / numel for group in program.groups}
        for section in pass_and_update(program.step)[0]:
            nodes_of_it = program.step.section_nodes(section)
            seconds[section.name] = sum(self._operator_s(part, node, times, scale) for node in nodes_of_it) * crowd

        def timed(sections: Sequence[TimedSection]) -> tuple[TimedSection, ...]:
            prices = (SectionPrice(seconds.get(section.name, 0.0), 0.0, 0.0, 0.0, 0.0, 0.0) for section in sections)
            return tuple(replace(section, price=price) for section, price in zip(sections, prices, strict=True))

        step = replace(alone, model=timed(alone.model), update=timed(alone.update), sent_s=times.batch_s * crowd)
        node_of = tuple(rank * nodes // strategy.ranks for rank in range(strategy.ranks))
        synced = by_rdu(step, Placement(self._cluster.model_copy(update={"network_link": wire}), None, 1, node_of))
        hidden = synced.hidden_sync_s / (synced.hidden_sync_s + synced.exposed_sync_s)
        received_bytes = 2 * program.gradient_bytes * (nodes - 1) / strategy.ranks
        return synced.exposed_sync_s + hidden * received_bytes * link.processor_s_per_byte

    def _memory(self, strategy: Strategy, parts: Sequence[_Part], rates: Rates, times: PassTimes) -> Iterator[Memory]:
        by_device, copies = strategy.path is SyncPath.RDU and strategy.copies > 1, strategy.copies
        whole = self._whole
        whole_bytes = whole.memory.total_bytes * times.samples // whole.program.batch_size
        process_bytes = rates.private_bytes + rates.shared_bytes * self.nodes // strategy.ranks
        process_bytes += max(times.heap_bytes - whole_bytes, 0)
        zero, samples = max(strategy.zero, 1) if by_device else strategy.zero, strategy.samples
        for part, flight in zip(parts, in_flight(_schedule(strategy)), strict=True):
            program = part.program
            activations = part.memory.activations * samples // program.batch_size * flight
            temporaries = part.memory.temporaries * samples // program.batch_size
            sliced = replace(program, zero=zero)
            memory = memory_of(sliced, samples=samples, replicas=copies, passes=strategy.passes)
            parameters = memory.parameters * self.nodes // copies if by_device else memory.parameters
            buffers = memory.buffers + process_bytes - program.held_bytes(SymbolKind.REDUCE_BUFFER)
            yield Memory(parameters, memory.gradients, memory.states, activations, temporaries, buffers)


def _schedule(strategy: Strategy) -> Schedule:
    return make(strategy.schedule, strategy.stages, strategy.micro_batches)


def _update_words(copies: int, states: int) -> float:
    """Numbers moved for each parameter: all gradients, then parameter and states of the rank's slice, both ways."""
    return (copies + 2 + 2 * states) / copies


def needed_bytes(program: Program) -> int:
    """Of a pass of a whole replica: its device memory, and what operators allocate."""
    return program.device_bytes + pass_memory(program.leading, program.symbols).total_bytes


def spaced(samples: Iterable[int]) -> list[int]:
    """Those of `samples` to measure, ascending: the most, about a half and a quarter of them, and the fewest."""
    ascending = sorted(samples)
    most = ascending[-1]
    wanted = (1, most // 4, most // 2, most)
    below = (max(number for number in ascending if number <= max(at, ascending[0])) for at in wanted)
    return sorted({ascending[0], *below})
