"""Ranks that run in one process: an emulation, or a single rank.

A rank runs until it needs a value that another rank has not computed yet; then the next rank runs.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Generator, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar, final

import torch
from torch import Tensor

from sambasim.errors import InternalError
from sambasim.ir.program import ParameterGroup
from sambasim.ir.types import Slice, TensorType
from sambasim.runtime.transports.communication import AxisGroup, Combine, Communication, GradientSync, Shared, Simple
from sambasim.runtime.values.mean import Wire, tree_mean
from sambasim.runtime.values.memory import DeviceMemory

R = TypeVar("R")


@dataclass(slots=True)
class Hub:
    """Stores the values that ranks exchange. `changes` counts all operations, to detect deadlocks."""

    size: int
    changes: int = 0
    _met: dict[Hashable, dict[int, object]] = field(default_factory=lambda: defaultdict(dict))
    _calls: dict[Hashable, int] = field(default_factory=lambda: defaultdict(int))
    mail: dict[Hashable, deque[Tensor]] = field(default_factory=lambda: defaultdict(deque))

    def meet(self, key: Hashable, position: int, size: int, value: object) -> Mapping[int, object]:
        """Give `value` to the next call of `key`. Returns what its `size` ranks give, by position, as they do."""
        self._calls[key, position] += 1
        call_id = key, self._calls[key, position]
        values = self._met[call_id]
        values[position] = value
        if len(values) == size:
            del self._met[call_id]
        self.changes += 1
        return values

    def forget(self) -> None:
        """Drop what ranks have put that others have not taken, because a rank has failed."""
        for values in (self._met, self._calls, self.mail):
            values.clear()

    def send(self, way: Hashable, tensor: Tensor) -> None:
        self.mail[way].append(tensor)
        self.changes += 1

    def receive(self, way: Hashable) -> Tensor:
        self.changes += 1
        return self.mail[way].popleft()


def run_together(
    steps: Sequence[Generator[None, None, R]], hub: Hub | None = None, generators: dict[int, Tensor] | None = None
) -> list[R]:
    """Run `steps` round-robin, each until it waits for another; returns their results. Raises InternalError on a
    deadlock. After an error, a hub of several is as if nothing had been sent: a caller may go on with another batch.
    `generators`: where each rank's random numbers stand between calls; without it, all begin alike."""
    if hub is None or hub.size == 1:
        return [finished(step) for step in steps]
    results: dict[int, R] = {}
    waiting = dict(enumerate(steps))
    states = dict.fromkeys(waiting, torch.get_rng_state())
    states |= {rank: state for rank, state in (generators or {}).items() if rank > 0}
    try:
        while waiting:
            changes, left = hub.changes, len(waiting)
            for number, step in [*waiting.items()]:
                torch.set_rng_state(states[number])  # as if it ran alone, also after a communication
                try:
                    next(step)
                except StopIteration as end:
                    results[number] = end.value
                    del waiting[number]
                states[number] = torch.get_rng_state()
            if len(waiting) == left and hub.changes == changes:
                numbers = ", ".join(map(str, waiting))
                raise InternalError(f"deadlock: ranks {numbers} wait for one another in a communication of the program")
    except BaseException:
        hub.forget()
        raise
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
class HubGroup(AxisGroup):
    """Ranks that all run in this process."""

    def __init__(self, hub: Hub, ranks: Sequence[int], rank: int) -> None:
        super().__init__(ranks, rank)
        self.hub = hub

    def gather(self, key: Hashable, combine: Combine) -> Communication:
        return self.together(key, _copy_of, combine)

    def send(self, to: int, tag: int) -> Communication:
        way = self.ranks[self.position], self.ranks[to], tag
        return Simple(lambda: None, lambda *own: self.hub.send(way, Communication.tensor(own).clone()))

    def recv(self, source: int, tag: int, type_: TensorType) -> Communication[Tensor]:
        way = self.ranks[source], self.ranks[self.position], tag
        return Simple(lambda: self.hub.receive(way), is_ready=lambda: bool(self.hub.mail[way]))

    def together(
        self, key: Hashable, value_of: Callable[[Sequence[object]], object], result_of: Callable[[Any], R]
    ) -> Communication[R]:
        """A communication that all ranks must begin before any can finish. `value_of`: what this rank gives, from its
        operands; `result_of`: the result, from the values of all."""
        hub, size = self.hub, self.size
        values: Mapping[int, object] = {}

        def begin(*operands: object) -> None:
            nonlocal values
            values = hub.meet((self.ranks, key), self.position, size, value_of(operands))

        def finish() -> R:
            nonlocal values
            taken, values = values, {}
            hub.changes += 1
            return result_of([taken[position] for position in range(size)])

        return Simple(finish, begin, lambda: len(values) == size)


def _copy_of(operands: Sequence[object]) -> Tensor:
    """This rank may overwrite its tensor before others read it. Contiguous, as in a message: strides change bits."""
    return Communication.tensor(operands).clone(memory_format=torch.contiguous_format)


@final
class InProcess(GradientSync):
    """Ranks of this process. Each updates its slices in the memory of the first, from which others copy parameters."""

    def __init__(self, memories: Sequence[DeviceMemory], group: HubGroup, wire: Wire = "fp32") -> None:
        super().__init__(memories[0], group, wire)
        self.title = f"emulated ({group.size} replicas in one process)" if group.size > 1 else "none (one replica)"
        self._memories, self._hub_group = memories, group

    def current(self, group: ParameterGroup) -> Slice:
        return (0, group.numel)

    def reduce_scatter(self, groups: Sequence[ParameterGroup]) -> Communication | None:
        sums = []
        for group in groups:
            part = slice(*self.updated(group))
            gradients = [memory.region(group, "gradient")[part] for memory in self._memories]
            sums.append(tree_mean(gradients, gradients[0], self.replicas, wire=self.wire))
        return self._on_memory("reduce", groups, lambda _: [add_up() for add_up in sums])

    def all_gather(self, groups: Sequence[ParameterGroup]) -> Communication | None:
        return self._on_memory("spread", groups, lambda _: self._copy(groups))

    def _copy(self, groups: Sequence[ParameterGroup]) -> None:
        if self.replica > 0:
            for group in groups:
                updated = self.memory.region(group, "parameter")
                self._memories[self.replica].region(group, "parameter").copy_(updated)

    def make_whole(self) -> None:
        if self.program.zero == 3:
            self._copy(self.program.groups)

    def _on_memory(
        self, name: str, groups: Sequence[ParameterGroup], function: Callable[[object], object]
    ) -> Communication | None:
        """`function`, called once all ranks have begun: it may then read the memory of all."""
        if self.replicas == 1:
            return None
        return self._hub_group.together((name, *(group.name for group in groups)), lambda operands: None, function)

    def end_of_step(self) -> Shared:
        return Shared(*self.offered)
