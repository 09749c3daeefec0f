"""Ranks that run in one process: an emulation, or a single rank.

A rank runs until it needs a value that another rank has not computed yet; then the next rank runs.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Generator, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar, final

import torch
from torch import Tensor

from sambasim.errors import InternalError
from sambasim.ir.mesh import DATA_PARALLEL, Mesh, mesh_of
from sambasim.ir.program import ParameterGroup, Program
from sambasim.ir.types import Slice, TensorType
from sambasim.runtime.transports.base import Communication, EndOfStep, Shared, Transport, slices_of
from sambasim.runtime.transports.values import Combine, Line, tensor_operand
from sambasim.runtime.values.device import DeviceMemory
from sambasim.runtime.values.mean import tree_mean

R = TypeVar("R")


@dataclass(slots=True)
class Hub:
    """Stores the values that ranks exchange. `changes` counts all operations, to detect deadlocks."""

    size: int
    changes: int = 0
    _put: dict[Hashable, dict[int, object]] = field(default_factory=lambda: defaultdict(dict))
    _taken: dict[Hashable, int] = field(default_factory=lambda: defaultdict(int))
    _calls: dict[Hashable, int] = field(default_factory=lambda: defaultdict(int))
    _mail: dict[tuple[int, int, int], deque[Tensor]] = field(default_factory=lambda: defaultdict(deque))

    def put(self, key: Hashable, position: int, value: object) -> Hashable:
        self._calls[key, position] += 1
        call_id = key, self._calls[key, position]
        self._put[call_id][position] = value
        self.changes += 1
        return call_id

    def is_full(self, call_id: Hashable, size: int) -> bool:
        return len(self._put[call_id]) == size

    def take(self, call_id: Hashable, size: int) -> list[object]:
        found = [self._put[call_id][one] for one in range(size)]
        self._taken[call_id] += 1
        self.changes += 1
        if self._taken[call_id] == size:
            del self._put[call_id], self._taken[call_id]
        return found

    def forget(self) -> None:
        """Drop what ranks have put that others have not taken, because a rank has failed."""
        for one in (self._put, self._taken, self._calls, self._mail):
            one.clear()

    def box(self, source: int, to: int, tag: int) -> "deque[Tensor]":
        return self._mail[(source, to, tag)]


def run_together(
    steps: Sequence[Generator[None, None, R]], hub: Hub | None = None, generators: dict[int, Tensor] | None = None
) -> list[R]:
    """Run `steps` round-robin, each until it waits for another; returns their results. Raises InternalError on a
    deadlock. `generators`: where each rank's generator of random numbers stands between calls; without it, all begin
    with the state of this process."""
    if hub is None or hub.size == 1:
        return [finished(step) for step in steps]
    results: dict[int, R] = {}
    waiting = dict(enumerate(steps))
    kept = {} if generators is None else generators
    states = dict.fromkeys(waiting, torch.get_rng_state()) | {rank: kept[rank] for rank in kept if rank > 0}
    while waiting:
        changes = hub.changes
        done = []
        for number, step in waiting.items():
            torch.set_rng_state(states[number])  # as if it ran alone, also after a communication
            try:
                next(step)
            except StopIteration as end:
                results[number] = end.value
                done.append(number)
            states[number] = torch.get_rng_state()
        for number in done:
            del waiting[number]
        if waiting and not done and hub.changes == changes:
            numbers = ", ".join(map(str, waiting))
            raise InternalError(f"deadlock: ranks {numbers} wait for one another in a communication of the program")
    if generators is not None:
        generators.update(states)
        torch.set_rng_state(states[0])
    return [results[number] for number in range(len(steps))]


def finished(steps: Generator[None, None, R]) -> R:
    """Run `steps` of a rank that is alone in its process; returns their result."""
    try:
        next(steps)
    except StopIteration as end:
        result: R = end.value
        return result
    raise InternalError("the program waits for a rank that does not run in this process")


@final
class HubLine(Line):
    """Ranks that all run in this process."""

    def __init__(self, hub: Hub, ranks: Sequence[int], rank: int) -> None:
        super().__init__(ranks, rank)
        self.hub = hub

    def gather(self, key: Hashable, combine: Combine) -> Communication:
        return Together(self, key, _copy_of, combine)

    def send(self, to: int, tag: int) -> Communication:
        return _SendHere(self.hub, self.hub.box(self.ranks[self.position], self.ranks[to], tag))

    def recv(self, source: int, tag: int, type_: TensorType) -> Communication:
        return _ReceiveHere(self.hub, self.hub.box(self.ranks[source], self.ranks[self.position], tag))


def _copy_of(operands: Sequence[object]) -> Tensor:
    """This rank may overwrite its tensor before the others read it. Contiguous, as what arrives in a message is:
    kernels give other bits for other strides."""
    return tensor_operand(operands).clone(memory_format=torch.contiguous_format)


@final
class Together(Communication[R]):
    """A communication that all ranks must begin before any can finish. `value_of`: what this rank gives, from its
    operands; `result_of`: the result, from the values of all."""

    def __init__(
        self,
        line: HubLine,
        key: Hashable,
        value_of: Callable[[Sequence[object]], object],
        result_of: Callable[[Any], R],
    ) -> None:
        self._line = line
        self._key = key
        self._value_of = value_of
        self._result_of = result_of
        self._call: Hashable = None

    def begin(self, *operands: object) -> None:
        line = self._line
        self._call = line.hub.put((line.ranks, self._key), line.position, self._value_of(operands))

    def is_ready(self) -> bool:
        return self._line.hub.is_full(self._call, self._line.size)

    def finish(self) -> R:
        return self._result_of(self._line.hub.take(self._call, self._line.size))


@final
class _SendHere(Communication):
    def __init__(self, hub: Hub, box: "deque[Tensor]") -> None:
        self._hub = hub
        self._box = box

    def begin(self, *operands: object) -> None:
        self._box.append(tensor_operand(operands).clone())
        self._hub.changes += 1

    def finish(self) -> object:
        return None


@final
class _ReceiveHere(Communication):
    def __init__(self, hub: Hub, box: "deque[Tensor]") -> None:
        self._hub = hub
        self._box = box

    def is_ready(self) -> bool:
        return bool(self._box)

    def finish(self) -> object:
        self._hub.changes += 1
        return self._box.popleft()


@final
class InProcess(Transport):
    """Connects rank `rank` of `mesh` to the others, which all run in this process, with `memories`. Along dp, each rank
    updates its slices in the memory of its group's first rank; the others copy the parameters from there."""

    def __init__(
        self, program: Program, memories: Sequence[DeviceMemory], hub: Hub, rank: int, mesh: Mesh | None = None
    ) -> None:
        self._mesh = mesh or mesh_of(program.mesh, len(memories))
        ranks = self._mesh.group(rank, DATA_PARALLEL)
        size, replica = len(ranks), ranks.index(rank)
        super().__init__(program, memories[ranks[0]], replica, slices_of(program, size), size)
        self.rank = rank
        self.memories = [memories[one] for one in ranks]
        self._hub = hub
        self._group = self.line_of(ranks)
        self._all = self.line_of(range(len(memories)))
        title = f"emulated ({size} replica{'s' * (size > 1)} in one process)"
        if len(memories) > size or program.chips > 1:
            title = f"emulated ({self._mesh} in one process)"
        self.title = "none (one replica)" if len(memories) == 1 else title

    @property
    def hub(self) -> Hub:
        return self._hub

    @property
    def mesh(self) -> Mesh:
        return self._mesh

    def line_of(self, ranks: Sequence[int]) -> HubLine:
        return HubLine(self._hub, ranks, self.rank)

    def kept(self, group: ParameterGroup) -> Slice:
        return (0, group.numel)

    def saved(self, group: ParameterGroup) -> Slice:
        return (0, group.numel)

    def reduce_scatter(self, groups: Sequence[ParameterGroup]) -> Communication | None:
        def reduce(_: object) -> None:
            for group in groups:
                part = slice(*self.owned(group))
                gradients = [memory.region(group, "gradient")[part] for memory in self.memories]
                tree_mean(gradients, gradients[0], self.replicas)

        return self._on_memory("reduce", groups, reduce)

    def all_gather(self, groups: Sequence[ParameterGroup]) -> Communication | None:
        return self._on_memory("spread", groups, lambda _: self._copy(groups))

    def _copy(self, groups: Sequence[ParameterGroup]) -> None:
        if self.replica > 0:
            for group in groups:
                updated = self.memory.region(group, "parameter")
                self.memories[self.replica].region(group, "parameter").copy_(updated)

    def make_whole(self) -> None:
        if self.program.zero == 3:
            self._copy(self.program.groups)

    def _on_memory(
        self, name: str, groups: Sequence[ParameterGroup], function: Callable[[object], None]
    ) -> Communication | None:
        """`function`, called once all ranks have begun: it may then read the memory of all."""
        if self.replicas == 1:
            return None
        return Together(self._group, (name, *(group.name for group in groups)), lambda operands: None, function)

    def end_step(self) -> EndOfStep:
        if self._all.size == 1:
            return _Alone(self)
        gives = self.gives_loss

        def own(operands: object) -> Shared:
            return self.offered if gives else self.offered._replace(losses=())

        return Together(self._all, "end of step", own, all_of)


def all_of(offered: Sequence[Shared]) -> Shared:
    return Shared([loss for one in offered for loss in one.losses], max(one.request for one in offered))


@final
class _Alone(EndOfStep):
    """The end of a step of one replica."""

    def __init__(self, transport: InProcess) -> None:
        self._transport = transport

    def finish(self) -> Shared:
        return self._transport.offered
