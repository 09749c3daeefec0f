"""Estimates of a strategy from the program of a replica without stages: fast enough for thousands of them.

pass of a stage    its layers, from one predicted step (`layers`), and the message to the next stage
schedule           all stages once, and the slowest stage for each further pass; a schedule with a smaller bubble
                   waits so much less
update             of its parameters, divided by the ranks that share it
memory             of the rank that has all layers, by the stage's share of the parameters and its passes in flight
sync               of its parameters as one group; between RDUs it overlaps with the last backward, and between nodes
                   with the next forward
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, reduce
from itertools import pairwise
from math import sqrt
from operator import add

from sambasim.costs.fit import Memory
from sambasim.hardware.placement import Placement, place
from sambasim.hardware.spec import ClusterSpec, DeviceSpec
from sambasim.simulation.memory import divided_by
from sambasim.simulation.planning.one_rank import ByDtype, Layer, OneRank, Ranks, joined
from sambasim.simulation.planning.strategy import BY_HOST, Priced, Strategy, Terms, rdus_of, shortage
from sambasim.simulation.scaling import spread_of
from sambasim.simulation.sync import GATHERS_IN_PASSES, WIRE_BYTES, GroupSync, SyncPath, Traffic, group_sync, message


@dataclass(frozen=True)
class Stage:
    """A stage of the pipeline, or all those of a rank, in a pass: its layers as one; it receives `messages`, and makes
    bytes again for its backward."""

    layer: Layer
    messages: Traffic
    again_bytes: int

    @cached_property
    def pass_s(self) -> float:
        return self.layer.forward_s + self.layer.backward_s + self.messages.predicted_s

    def __add__(self, other: "Stage") -> "Stage":
        again_bytes = max(self.again_bytes, other.again_bytes)
        return Stage(joined([self.layer, other.layer]), self.messages + other.messages, again_bytes)


class Estimator:
    def __init__(self, programs: ByDtype, device: DeviceSpec, cluster: ClusterSpec) -> None:
        self._device, self._cluster = device, cluster
        self.ranks = Ranks(programs, device, cluster)
        self._stages: dict[tuple[object, ...], Sequence[Stage] | str] = {}
        self._placement, self._group_sync = cache(self._placed), cache(self._synced)
        self._rdus = cache(lambda ranks, tiles: rdus_of(place(ranks, device, tiles, cluster)))

    def estimate(self, strategy: Strategy) -> Priced | str:
        """The price of `strategy`, or why it is impossible."""
        rank = self.ranks.of(strategy)
        if isinstance(rank, str):
            return rank
        of_ranks = self._staged(strategy, rank)
        if isinstance(of_ranks, str):
            return of_ranks
        memory = self._memory(strategy, rank, of_ranks)
        capacity_bytes = self.ranks.budget(strategy.tiles).capacity_bytes
        terms, received = self._time(strategy, rank, of_ranks)
        rdus, problem = self._rdus(strategy.ranks, strategy.tiles), shortage(memory, capacity_bytes)
        return Priced(strategy, rdus, terms, memory, capacity_bytes, received.received_bytes, False, problem)

    def _staged(self, strategy: Strategy, rank: OneRank) -> Sequence[Stage] | str:
        stages = strategy.stages * strategy.chunks
        splits, again = strategy.schedule == "zb-h1", strategy.recompute == "full"
        key = id(rank), stages, strategy.stages, strategy.chips, splits, again
        if key not in self._stages:
            ranges = rank.chain.cut(stages)
            if ranges is None:
                self._stages[key] = f"the model can be cut into {rank.chain.most_stages} stages at most"
                return self._stages[key]
            crossing = [rank.chain.layers[stop - 1].crossing_bytes for _, stop in ranges[:-1]]
            between = [self._between_stages(strategy, at, size) for at, size in enumerate(crossing)]
            received = [a + b for a, b in pairwise([Traffic(), *between, Traffic()])]
            budget = self.ranks.budget(strategy.tiles)
            section_s = budget.launch_s + budget.load_s + budget.start_s
            staged = [
                _stage(rank.chain.layers[slice(*span)], messages, section_s, splits=splits, again=again)
                for span, messages in zip(ranges, received, strict=True)
            ]
            self._stages[key] = [reduce(add, staged[at :: strategy.stages]) for at in range(strategy.stages)]
        return self._stages[key]

    def _between_stages(self, strategy: Strategy, stage: int, size_bytes: int) -> Traffic:
        """A message of the first replica from `stage` to the next one, or back."""
        ranks = [(at % strategy.stages) * strategy.chips for at in (stage, stage + 1)]
        nodes = {rank // self._cluster.rdus_per_node for rank in ranks}
        return message(size_bytes, place(1, self._device, None, self._cluster), within=len(nodes) == 1)

    def _memory(self, strategy: Strategy, rank: OneRank, of_ranks: Sequence[Stage]) -> tuple[Memory, ...]:
        ranks, copies, zero, whole = strategy.stages, strategy.copies, strategy.zero, rank.memory
        gathered = rank.gathered[zero - BY_HOST] * (1 - 1 / copies) / ranks if zero >= BY_HOST else 0.0
        buffers = whole.buffers - (rank.operand_bytes if copies == 1 else 0)
        by, found = divided_by(zero, copies, strategy.passes), list[Memory]()
        for at, own in enumerate(of_ranks):
            share, kept_bytes = rank.share_of(own.layer), own.layer.kept_bytes * _in_flight(strategy, at)
            parameters = round(whole.parameters * share / by["parameter"])
            gradients = round(whole.gradients * share / by["gradient"])
            states = round(whole.states * share / by["states"])
            activations = kept_bytes + own.again_bytes + rank.between_bytes // ranks
            found.append(Memory(parameters, gradients, states, activations, buffers=round(buffers * share + gathered)))
        return tuple(found)

    def _time(self, strategy: Strategy, rank: OneRank, of_ranks: Sequence[Stage]) -> tuple[Terms, Traffic]:
        """The terms of the slowest rank, and what it receives."""
        ranks, passes = strategy.stages, strategy.passes
        busy_s = sum([stage.pass_s for stage in of_ranks])
        slowest = max(of_ranks, key=lambda stage: stage.pass_s)
        pass_s = slowest.pass_s + (rank.sent_s if ranks == 1 else 0.0)
        bubble_s = (busy_s - slowest.pass_s) / strategy.chunks
        if strategy.schedule == "zb-h1":  # which runs gradients of weights, once and again, where others wait
            bubble_s *= max(1 - 2 * slowest.layer.weights_s / slowest.pass_s, 0.0)
        share = rank.share_of(slowest.layer)
        messages = (rank.messages * share + slowest.messages) * passes
        least = 3 if strategy.schedule == "zb-h1" else 2  # forward, backward, gradients of weights
        starts_s = self.ranks.budget(strategy.tiles).start_s * max(rank.sections / ranks, least * strategy.chunks)
        host_s = (starts_s + rank.sent_s) * passes
        sync_s, moved = 0.0, Traffic()
        if strategy.copies > 1:
            sync_s, moved = self._sync(strategy, rank, rank.numel * share, slowest.layer, host_s)
        compute_s = max(pass_s * passes - host_s - messages.predicted_s, 0.0)
        update_s = rank.update_s * share / strategy.copies
        return Terms(compute_s, host_s, messages.predicted_s, bubble_s, update_s, sync_s), messages + moved

    def _sync(
        self, strategy: Strategy, rank: OneRank, numel: float, last: Layer, host_s: float
    ) -> tuple[float, Traffic]:
        """Seconds after the backward, and traffic. Between RDUs, all but one group overlap with the backward of `last`,
        and if replicas have nodes of their own, the gathers with the next host time and its forward."""
        where, by_host = (strategy.copies, strategy.ranks, strategy.tiles), strategy.path is SyncPath.HOST
        sync, budget = self._group_sync(strategy.path, *where, round(WIRE_BYTES * numel)), self.ranks.budget(where[-1])
        groups = max(rank.groups // strategy.stages, 1)
        launches_s = groups * budget.launch_s * (2 if by_host else 1)
        waits_s = rank.spread_s * spread_of(strategy.copies) / spread_of(2) / strategy.stages
        if not by_host:
            reduce_s, gather_s = sync.reduce.predicted_s + launches_s, sync.gather.predicted_s + launches_s
            if self._placement(*where).apart:
                gather_s = max(max(gather_s - last.forward_s, gather_s / groups) - host_s, 0.0)
            exposed_s = max(reduce_s - last.backward_s, reduce_s / groups) + gather_s + waits_s
            return exposed_s, sync.reduce + sync.gather
        gathers = 2 * strategy.passes if strategy.zero >= GATHERS_IN_PASSES else 1
        moved = sync.reduce + sync.gather * gathers
        return moved.predicted_s + (1 + gathers) * launches_s + waits_s, moved

    def _synced(self, path: SyncPath, copies: int, ranks: int, tiles: int | None, size_bytes: int) -> GroupSync:
        return group_sync(
            path, size_bytes, self._placement(copies, ranks, tiles), self.ranks.budget(tiles), sliced=True
        )

    def _placed(self, copies: int, ranks: int, tiles: int | None) -> Placement:
        """Of the ranks along dp, a node has as many as it has places for whole copies."""
        whole = place(ranks, self._device, tiles, self._cluster)
        here = max(whole.per_full_node // (ranks // copies), 1)
        return replace(whole, node_of=tuple(at // here for at in range(copies)))


def _stage(layers: Sequence[Layer], messages: Traffic, section_s: float, *, splits: bool, again: bool) -> Stage:
    """`section_s`: the shortest section. With `splits`, gradients of weights have sections of their own. With `again`,
    it recomputes about √n segments of n places where one tensor crosses: see `compiler/passes.py`."""
    whole, again_bytes = joined(layers), 0
    forward_s, backward_s, weights_s, kept_bytes = whole.forward_s, whole.backward_s, whole.weights_s, whole.kept_bytes
    crossing = [layer.crossing_bytes for layer in layers[:-1] if layer.crossing == 1]
    if again:
        segments = max(round(sqrt(len(crossing))), 1)
        between_bytes = sum(crossing) * (segments - 1) // max(len(crossing), 1)
        if between_bytes < kept_bytes:
            kept_bytes, again_bytes = between_bytes, kept_bytes // segments
            backward_s += forward_s
    forward_s = max(forward_s, section_s)
    if splits:
        rest_s, weights_s = max(backward_s - weights_s, section_s), max(weights_s, section_s)
        backward_s = rest_s + weights_s
    backward_s = max(backward_s, section_s)
    layer = replace(whole, forward_s=forward_s, backward_s=backward_s, weights_s=weights_s, kept_bytes=kept_bytes)
    return Stage(layer, messages, again_bytes)


def _in_flight(strategy: Strategy, rank: int) -> int:
    """Passes of which a rank keeps activations at once: see `ir/schedule.py`. Of chunks, the average."""
    ranks, passes = strategy.stages, strategy.passes
    if strategy.schedule == "gpipe":
        return passes
    if strategy.schedule == "zb-h1":
        return min(ranks, passes)
    if strategy.chunks > 1:
        most = (strategy.chunks + 1) * ranks - 2 * rank - 1
        return min(-(-most // strategy.chunks), passes)
    return min(ranks - rank, passes)
