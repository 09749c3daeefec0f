"""Ranks that run in one process: an emulation, or a single rank.

A rank runs until a communication needs a value that another rank has not computed yet; then the next rank runs. Values
for other ranks are stored in the hub. So the program that runs in several processes can run in one debugger.
"""

from collections import defaultdict, deque
from collections.abc import Generator, Hashable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar, final

import torch
from torch import Tensor

from sambasim.collectives.slices import Slice
from sambasim.errors import InternalError
from sambasim.ir.program import Member, ParameterGroup, Program
from sambasim.ir.types import TensorType
from sambasim.runtime.device import DeviceMemory
from sambasim.runtime.mean import tree_mean
from sambasim.runtime.transports.base import Communication, EndOfStep, Shared, Transport, slices_of
from sambasim.runtime.transports.values import Combine, Line, tensor_operand

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
        """Store this rank's `value` for the collective `key`; returns the id of this call of it."""
        self._calls[key, position] += 1
        call_id = key, self._calls[key, position]
        self._put[call_id][position] = value
        self.changes += 1
        return call_id

    def is_full(self, call_id: Hashable) -> bool:
        """Whether the values of all ranks are stored."""
        return len(self._put[call_id]) == self.size

    def take(self, call_id: Hashable) -> list[object]:
        """The values of all ranks, in order. Every rank calls this once."""
        found = [self._put[call_id][one] for one in range(self.size)]
        self._taken[call_id] += 1
        self.changes += 1
        if self._taken[call_id] == self.size:
            del self._put[call_id], self._taken[call_id]
        return found

    def box(self, source: int, to: int, tag: int) -> "deque[Tensor]":
        """The queue of messages from one rank to another."""
        return self._mail[(source, to, tag)]


def run_together(steps: Sequence[Generator[None, None, R]], hub: Hub | None = None) -> list[R]:
    """Run `steps` round-robin, each until it waits for another, and return their results.

    Raises InternalError on a deadlock.
    """
    if hub is None or hub.size == 1:
        return [finished(step) for step in steps]
    results: dict[int, R] = {}
    waiting = dict(enumerate(steps))
    generators: dict[int, Tensor] = {}
    while waiting:
        changes = hub.changes
        done = []
        for number, step in waiting.items():
            if number in generators:  # a rank may draw random numbers after a communication
                torch.set_rng_state(generators[number])
            try:
                next(step)
                generators[number] = torch.get_rng_state()
            except StopIteration as end:
                results[number] = end.value
                done.append(number)
        for number in done:
            del waiting[number]
        if waiting and not done and hub.changes == changes:
            numbers = ", ".join(map(str, waiting))
            raise InternalError(f"deadlock: ranks {numbers} wait for one another in a communication of the program")
    return [results[number] for number in range(len(steps))]


def finished(steps: Generator[None, None, R]) -> R:
    """Run `steps` of a rank that is alone in its process, and return their result.

    Raises InternalError if the program waits for another rank of the process.
    """
    try:
        next(steps)
    except StopIteration as end:
        result: R = end.value
        return result
    raise InternalError("the program waits for a rank that does not run in this process")


@final
class HubLine(Line):
    """A line of ranks in this process."""

    def __init__(self, hub: Hub, position: int) -> None:
        self.hub = hub
        self.size = hub.size
        self.position = position

    def gather(self, key: Hashable, combine: Combine) -> Communication:
        return _GatherHere(self, key, combine)

    def send(self, to: int, tag: int) -> Communication:
        return _SendHere(self.hub.box(self.position, to, tag), self.hub)

    def recv(self, source: int, tag: int, type_: TensorType) -> Communication:
        return _ReceiveHere(self.hub.box(source, self.position, tag), self.hub)


class _Collective(Communication):
    """A communication that all ranks must begin before any can finish."""

    def __init__(self, hub: Hub, key: Hashable, position: int) -> None:
        self._hub = hub
        self._key = key
        self._position = position
        self._call: Hashable = None

    def put(self, value: object) -> None:
        self._call = self._hub.put(self._key, self._position, value)

    def is_ready(self) -> bool:
        return self._hub.is_full(self._call)

    def take(self) -> list[object]:
        return self._hub.take(self._call)


@final
class _GatherHere(_Collective):
    def __init__(self, line: HubLine, key: Hashable, combine: Combine) -> None:
        super().__init__(line.hub, key, line.position)
        self._combine = combine

    def begin(self, *operands: object) -> None:
        self.put(tensor_operand(operands).clone())  # this rank may overwrite it before the others read

    def finish(self) -> object:
        return self._combine([tensor_operand([tensor]) for tensor in self.take()])


@final
class _SendHere(Communication):
    def __init__(self, box: "deque[Tensor]", hub: Hub) -> None:
        self._box = box
        self._hub = hub

    def begin(self, *operands: object) -> None:
        self._box.append(tensor_operand(operands).clone())
        self._hub.changes += 1

    def finish(self) -> object:
        return None


@final
class _ReceiveHere(Communication):
    def __init__(self, box: "deque[Tensor]", hub: Hub) -> None:
        self._box = box
        self._hub = hub

    def begin(self, *operands: object) -> None:
        """Nothing is sent."""

    def is_ready(self) -> bool:
        return bool(self._box)

    def finish(self) -> object:
        self._hub.changes += 1
        return self._box.popleft()


@final
class InProcess(Transport):
    """Connects replica number `replica` to the other replicas of this process. `memories` are those of all, in order.

    Every replica updates its slices in the memory of the first one; the others copy the parameters from there.
    """

    def __init__(self, program: Program, memories: Sequence[DeviceMemory], hub: Hub, replica: int) -> None:
        super().__init__(program, memories[0], HubLine(hub, replica), len(memories), replica)
        self.memories = memories
        self.hub = hub
        self.slices = slices_of(program, len(memories))

    @property
    def title(self) -> str:
        if self.replicas == 1:
            return "none (one replica)"
        return f"emulated ({self.replicas} replicas in one process)"

    def owned(self, group: ParameterGroup) -> Slice:
        return self.slices[group.name][self.replica]

    def kept(self, group: ParameterGroup) -> Slice:
        return (0, group.numel)

    def saved(self, group: ParameterGroup) -> Slice:
        return (0, group.numel)

    def reduce_scatter(self, groups: Sequence[ParameterGroup]) -> Communication | None:
        return None if self.replicas == 1 else _ReduceHere(self, groups)

    def all_gather(self, groups: Sequence[ParameterGroup]) -> Communication | None:
        return None if self.replicas == 1 else _SpreadHere(self, groups)

    def end_step(self) -> EndOfStep:
        return _Alone(self) if self.replicas == 1 else _Meeting(self)

    def whole_state(self, group: ParameterGroup, member: Member, state: str) -> Tensor | None:
        return self.memory.region(group, state)[member.start : member.start + member.numel]


class _OnMemory(_Collective):
    """A collective on device memory: once all ranks have begun, each may read the memory of all."""

    def __init__(self, transport: InProcess, groups: Sequence[ParameterGroup]) -> None:
        key = (type(self).__name__, *(group.name for group in groups))
        super().__init__(transport.hub, key, transport.replica)
        self.transport = transport
        self.groups = groups

    def begin(self, *operands: object) -> None:
        self.put(None)


@final
class _ReduceHere(_OnMemory):
    def finish(self) -> object:
        own = self.transport
        for group in self.groups:
            part = slice(*own.owned(group))
            gradients = [memory.region(group, "gradient")[part] for memory in own.memories]
            tree_mean(gradients, gradients[0], own.replicas)
        self.take()
        return None


@final
class _SpreadHere(_OnMemory):
    def finish(self) -> object:
        own = self.transport
        for group in self.groups:
            if own.replica > 0:
                own.memories[own.replica].region(group, "parameter").copy_(own.memory.region(group, "parameter"))
        self.take()
        return None


@final
class _Meeting(_Collective, EndOfStep):
    def __init__(self, transport: InProcess) -> None:
        super().__init__(transport.hub, "end of step", transport.replica)
        self._transport = transport

    def begin(self, *operands: object) -> None:
        self.put(self._transport.offered)

    def finish(self) -> Shared:
        exchanged = [one for one in self.take() if isinstance(one, Shared)]
        return Shared([loss for one in exchanged for loss in one.losses], max(one.request for one in exchanged))


@final
class _Alone(EndOfStep):
    """The end of a step of one replica."""

    def __init__(self, transport: InProcess) -> None:
        self._transport = transport

    def begin(self, *operands: object) -> None:
        """Nothing to send."""

    def finish(self) -> Shared:
        return self._transport.offered
