"""The MPI exchanges of host sync: slices of gradients to their owners, slices of parameters to every replica.

An exchange has several rounds, so that buffers are small: while one is sent, the previous one is added or copied.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias, final

import torch
from torch import Tensor

from sambasim.ir.program import ParameterGroup
from sambasim.ir.types import ALIGNMENT_ELEMENTS, Slice, pieces
from sambasim.records.metrics import BytesMoved
from sambasim.records.trace import Track
from sambasim.runtime.machine.communicator import Communicator, Message, Request
from sambasim.runtime.transports.communication import Communication, Slices
from sambasim.runtime.values.mean import Sum, Wire, sent_as, tree_mean
from sambasim.runtime.values.memory import DeviceMemory, byte_array
from sambasim.runtime.watch.observer import SpanArgs, span

ROUND_ELEMENTS = 1_048_576
"""Elements that one replica sends to, or receives from, all owners together in one round."""

_REDUCE_TAG = 14
_GATHER_TAG = 15

_Copy: TypeAlias = tuple[Tensor, Tensor]  # (to, from)
_Part: TypeAlias = tuple[int, torch.dtype]  # elements of a buffer


def _halves() -> list[Tensor]:
    return [torch.empty(0, dtype=torch.uint8)] * 2


@dataclass(frozen=True, slots=True)
class Places:
    """Where gradients and parameters are, for one rank of a job. `workers`: the ranks with a replica; `device`: the
    memory of this rank's replica, if any; `kept`: that of the updated slices; `wire`: see `tree_mean`. `outgoing`,
    `incoming`: host memory in two halves, which rounds use alternately and all exchanges share."""

    communicator: Communicator
    workers: Sequence[int]
    slices: Slices
    device: DeviceMemory | None
    kept: DeviceMemory
    wire: Wire
    outgoing: list[Tensor] = field(default_factory=_halves)
    incoming: list[Tensor] = field(default_factory=_halves)
    moved: BytesMoved = field(default_factory=BytesMoved)

    @property
    def others(self) -> list[int]:
        return [worker for worker in self.workers if worker != self.communicator.rank]


@dataclass(frozen=True, slots=True)
class _Round:
    """One round of one rank, in order: copies to the host, messages, means, copies to the device."""

    copies: list[_Copy] = field(default_factory=list)
    sends: list[Message] = field(default_factory=list)
    receives: list[Message] = field(default_factory=list)
    means: list[Sum] = field(default_factory=list)
    last_copies: list[_Copy] = field(default_factory=list)


@final
class Exchange(Communication):
    """Rounds that all ranks execute together."""

    def __init__(self, rounds: Sequence[_Round], places: Places, tag: int) -> None:
        self._rounds, self._moved, self._communicator = rounds, places.moved, places.communicator
        self._to_host_bytes = sum(to.nbytes for round_ in rounds for to, _ in round_.copies)
        self._to_device_bytes = sum(to.nbytes for round_ in rounds for to, _ in round_.last_copies)
        self._received_bytes = sum(buffer.nbytes for round_ in rounds for buffer, _ in round_.receives)
        self._sends = [self._communicator.persistent(round_.sends, (), tag) for round_ in rounds]
        self._receives = [self._communicator.persistent((), round_.receives, tag) for round_ in rounds]

    def finish(self) -> None:
        rounds = self._rounds
        for number in range(len(rounds) + 1):
            if number < len(rounds):
                if number >= 2:
                    self._wait(self._sends[number - 2].requests)  # this round reuses the buffers of that one
                self._receives[number].start()
                self._to_host(rounds[number].copies)
                self._sends[number].start()
            if number >= 1:
                before = rounds[number - 1]
                self._wait(self._receives[number - 1].requests)
                for take_mean in before.means:
                    take_mean()
                self._to_device(before.last_copies)
        for messages in self._sends[-2:]:
            self._wait(messages.requests)
        self._moved.device_to_host += self._to_host_bytes
        self._moved.host_to_device += self._to_device_bytes
        self._moved.network += self._received_bytes

    def _bytes(self, copies: Sequence[_Copy]) -> SpanArgs:
        return {"bytes": sum(to.nbytes for to, _ in copies)}

    @span(Track.COLLECTIVES, "wait for messages", lambda self, requests: {"messages": len(requests)})
    def _wait(self, requests: Sequence[Request]) -> None:
        self._communicator.wait_all(requests)

    @span(Track.COPIES, "device to host", _bytes)
    def _to_host(self, copies: Sequence[_Copy]) -> None:
        for to, source in copies:
            to.copy_(source)

    @span(Track.COPIES, "host to device", _bytes)
    def _to_device(self, copies: Sequence[_Copy]) -> None:
        for to, source in copies:
            to.copy_(source)


def reduce_scatter(groups: Sequence[ParameterGroup], places: Places) -> Exchange:
    """An exchange after which the own slices of the gradients in `places.kept` are means over the workers."""
    rank, others, workers = places.communicator.rank, places.others, places.workers
    cuts = _cuts(groups, places)
    sent, received = list[list[_Part]](), list[list[_Part]]()
    for group, slices in cuts:
        parts = _parts(slices, sent_as(group, places.wire))
        received.append([parts[rank]] * len(others))
        parts[rank] = _parts(slices, getattr(torch, group.dtype))[rank]  # which is not sent
        sent.append(parts)
    outgoing, incoming = _buffers(sent, places.outgoing), _buffers(received, places.incoming)
    rounds = []
    for (group, slices), leaving, arriving in zip(cuts, outgoing, incoming, strict=True):
        now, operands = _Round(), dict(zip(others, arriving, strict=True))
        now.receives.extend(_messages(operands))
        if places.device is not None:
            gradient, staged = places.device.region(group, "gradient"), dict(enumerate(leaving))
            now.copies.extend((staged[owner], gradient[a:b]) for owner, (a, b) in enumerate(slices) if a < b)
            operands[rank] = staged.pop(rank)
            now.sends.extend(_messages(staged))
        mean = kept = places.kept.region(group, "gradient")[slice(*slices[rank])]
        if places.kept is places.device:
            mean = operands[rank]  # the host adds, then the mean is copied to the device
            now.last_copies.append((kept, mean))
        now.means.append(tree_mean([operands[worker] for worker in workers], mean, len(workers), wire=places.wire))
        rounds.append(now)
    return Exchange(rounds, places, _REDUCE_TAG)


def all_gather(groups: Sequence[ParameterGroup], places: Places, region: str = "parameter") -> Exchange:
    """An exchange after which every replica's device has the owners' parameters (or another `region`)."""
    rank, is_on_device = places.communicator.rank, places.kept is places.device
    cuts = _cuts(groups, places)
    buffers = _buffers([_parts(slices, getattr(torch, group.dtype)) for group, slices in cuts], places.outgoing)
    rounds = []
    for (group, slices), parts in zip(cuts, buffers, strict=True):
        now, arriving = _Round(), dict(enumerate(parts))
        own, staged = places.kept.region(group, region)[slice(*slices[rank])], arriving.pop(rank)
        if is_on_device:
            now.copies.append((staged, own))
            own = staged
        now.sends.extend(_messages(dict.fromkeys(places.others, own)))
        if places.device is not None:
            whole = places.device.region(group, region)
            now.receives.extend(_messages(arriving))
            placed = arriving if is_on_device else {**arriving, rank: own}
            now.last_copies.extend((whole[slice(*slices[at])], part) for at, part in placed.items() if part.numel())
        rounds.append(now)
    return Exchange(rounds, places, _GATHER_TAG)


def _cuts(groups: Sequence[ParameterGroup], places: Places) -> list[tuple[ParameterGroup, list[Slice]]]:
    """For each round, its group and a piece of each rank's slice; the piece is empty after the slice's end."""
    cuts = []
    for group in groups:
        slices = places.slices[group.name]
        owners = sum(start < stop for start, stop in slices)
        limit = max(ROUND_ELEMENTS // max(owners, 1) // ALIGNMENT_ELEMENTS, 1) * ALIGNMENT_ELEMENTS
        for done, _ in pieces(0, max(stop - start for start, stop in slices), limit):
            cut = [(min(start + done, stop), min(start + done + limit, stop)) for start, stop in slices]
            cuts.append((group, cut))
    return cuts


def _parts(slices: Sequence[Slice], dtype: torch.dtype) -> list[_Part]:
    return [(stop - start, dtype) for start, stop in slices]


def _messages(parts: Mapping[int, Tensor]) -> list[Message]:
    return [(byte_array(part), rank) for rank, part in parts.items() if part.numel()]


def _buffers(rounds: Sequence[Sequence[_Part]], halves: list[Tensor]) -> list[list[Tensor]]:
    """For each round, a tensor for each part, in alternating `halves`, which grow if need be."""
    sizes = [[numel * dtype.itemsize for numel, dtype in parts] for parts in rounds]
    largest = max(map(sum, sizes), default=0)
    if largest > halves[0].nbytes:
        halves[:] = [torch.empty(largest, dtype=torch.uint8) for _ in range(2)]
    buffers = []
    for number, (parts, of_parts) in enumerate(zip(rounds, sizes, strict=True)):
        cut = torch.split(halves[number % 2][: sum(of_parts)], of_parts)
        buffers.append([part.view(dtype) for part, (_, dtype) in zip(cut, parts, strict=True)])
    return buffers
