"""The MPI exchanges of host sync: slices of gradients to their owners, slices of parameters to every replica.

An exchange has several rounds, so that buffers are small: while one is sent, the previous one is added or copied.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import TypeAlias, final

import torch
from torch import Tensor

from sambasim.collectives import additions
from sambasim.ir.program import ParameterGroup
from sambasim.ir.types import CUT_ELEMENTS, DTYPE_BYTES, Slice, pieces
from sambasim.records.trace import Track
from sambasim.runtime.machine.communicator import Communicator, Message, Request
from sambasim.runtime.transports.communication import BytesMoved, Communication
from sambasim.runtime.values.mean import Sum, TreeMean
from sambasim.runtime.values.memory import DeviceMemory, byte_array
from sambasim.runtime.watch.observer import SpanArgs, span

ROUND_ELEMENTS = 1_048_576
"""Elements that one replica sends to, or receives from, all owners together in one round."""

_REDUCE_TAG = 14
_GATHER_TAG = 15

_Copy: TypeAlias = tuple[Tensor, Tensor]  # (to, from)


@dataclass(frozen=True, slots=True)
class Places:
    """Where gradients and parameters are, for one rank of a job. `workers`: the ranks with a replica; `slices`: for
    each group, what each rank updates; `device`: the memory of this rank's replica, if any; `kept`: that of the
    updated slices. `outgoing`, `incoming`: host memory for what is sent and received, which all exchanges share;
    `moved`: the bytes of this rank in all of them."""

    communicator: Communicator

    workers: Sequence[int]
    slices: Mapping[str, Sequence[Slice]]
    device: DeviceMemory | None
    kept: DeviceMemory
    outgoing: "Halves" = field(default_factory=lambda: Halves())
    incoming: "Halves" = field(default_factory=lambda: Halves())
    moved: BytesMoved = field(default_factory=BytesMoved)


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
    """Rounds that all ranks execute together. `moves` counts the bytes of this rank in all of them."""

    def __init__(self, rounds: Sequence[_Round], moves: BytesMoved, places: Places, tag: int) -> None:
        self._rounds = rounds
        self._moves = moves
        self._moved = places.moved
        self._communicator = places.communicator
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
        moved = self._moved
        moved.device_to_host += self._moves.device_to_host
        moved.host_to_device += self._moves.host_to_device
        moved.network += self._moves.network

    def _messages(self, requests: Sequence[Request]) -> SpanArgs:
        return {"messages": len(requests)}

    def _bytes(self, copies: Sequence[_Copy]) -> SpanArgs:
        return {"bytes": sum(to.nbytes for to, _ in copies)}

    @span(Track.COLLECTIVES, "wait for messages", _messages)
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
    """An exchange after which the own slices of the gradients in `places.kept` are means over the workers, added in the
    order of the tree."""
    rank = places.communicator.rank
    others = [worker for worker in places.workers if worker != rank]
    steps = additions(len(places.workers))
    means = {group.dtype: TreeMean(steps, len(places.workers), getattr(torch, group.dtype)) for group in groups}
    cuts = _cuts(groups, places.slices)
    outgoing = _Buffers([(group, _lengths(slices)) for group, slices in cuts], places.outgoing)
    incoming = _Buffers([(group, [_lengths(slices)[rank]] * len(others)) for group, slices in cuts], places.incoming)
    moves, rounds = BytesMoved(), []
    for number, (group, slices) in enumerate(cuts):
        now = _Round()
        operands = dict(zip(others, incoming.parts(number), strict=True))
        now.receives.extend(_messages(operands))
        moves.network += sum(part.nbytes for part in operands.values())
        if places.device is not None:
            gradient = places.device.region(group, "gradient")
            staged = dict(enumerate(outgoing.parts(number)))
            now.copies.extend((staged[owner], gradient[a:b]) for owner, (a, b) in enumerate(slices) if a < b)
            moves.device_to_host += sum(part.nbytes for part in staged.values())
            operands[rank] = staged.pop(rank)
            now.sends.extend(_messages(staged))
        mean = kept = places.kept.region(group, "gradient")[slice(*slices[rank])]
        if places.kept is places.device:
            mean = operands[rank]  # the host adds, then the mean is copied to the device
            now.last_copies.append((kept, mean))
            moves.host_to_device += kept.nbytes
        now.means.append(means[group.dtype].of([operands[worker] for worker in places.workers], mean))
        rounds.append(now)
    return Exchange(rounds, moves, places, _REDUCE_TAG)


def all_gather(groups: Sequence[ParameterGroup], places: Places, region: str = "parameter") -> Exchange:
    """An exchange after which every replica's device has the owners' parameters (or another `region`)."""
    rank = places.communicator.rank
    others = [worker for worker in places.workers if worker != rank]
    cuts = _cuts(groups, places.slices)
    buffers = _Buffers([(group, _lengths(slices)) for group, slices in cuts], places.outgoing)
    moves, rounds = BytesMoved(), []
    for number, (group, slices) in enumerate(cuts):
        now = _Round()
        arriving = dict(enumerate(buffers.parts(number)))
        own, staged = places.kept.region(group, region)[slice(*slices[rank])], arriving.pop(rank)
        on_device = {rank} if places.kept is places.device else set()
        if on_device:
            now.copies.append((staged, own))
            moves.device_to_host += own.nbytes
            own = staged
        now.sends.extend(_messages(dict.fromkeys(others, own)))
        if places.device is not None:
            whole = places.device.region(group, region)
            now.receives.extend(_messages(arriving))
            moves.network += sum(part.nbytes for part in arriving.values())
            now.last_copies.extend(
                (whole[slice(*slices[owner])], part)
                for owner, part in ({**arriving, rank: own}).items()
                if part.numel() and owner not in on_device
            )
            moves.host_to_device += sum(part.nbytes for _, part in now.last_copies)
        rounds.append(now)
    return Exchange(rounds, moves, places, _GATHER_TAG)


def _cuts(
    groups: Sequence[ParameterGroup], slices: Mapping[str, Sequence[Slice]]
) -> list[tuple[ParameterGroup, list[Slice]]]:
    """For each round, its group and a piece of each rank's slice; the piece is empty after the slice's end."""
    return [(group, cut) for group in groups for cut in _rounds(slices[group.name])]


def _rounds(slices: Sequence[Slice]) -> Iterator[list[Slice]]:
    owners = sum(start < stop for start, stop in slices)
    limit = max(ROUND_ELEMENTS // max(owners, 1) // CUT_ELEMENTS, 1) * CUT_ELEMENTS
    longest = max(stop - start for start, stop in slices)
    for done, _ in pieces(0, longest, limit):
        yield [(min(start + done, stop), min(start + done + limit, stop)) for start, stop in slices]


def _lengths(slices: Sequence[Slice]) -> list[int]:
    return [stop - start for start, stop in slices]


def _messages(parts: Mapping[int, Tensor]) -> list[Message]:
    return [(byte_array(part), rank) for rank, part in parts.items() if part.numel()]


class Halves:
    """Host memory of two halves, which the rounds of an exchange use alternately. Exchanges run one after another."""

    def __init__(self) -> None:
        self._halves = [torch.empty(0, dtype=torch.uint8)] * 2

    def of(self, size_bytes: int) -> Sequence[Tensor]:
        """The halves, with at least `size_bytes` each."""
        if size_bytes > self._halves[0].nbytes:
            self._halves = [torch.empty(size_bytes, dtype=torch.uint8) for _ in range(2)]
        return self._halves


class _Buffers:
    """The parts of both halves for each round."""

    def __init__(self, rounds: Sequence[tuple[ParameterGroup, Sequence[int]]], halves: Halves) -> None:
        self._rounds = rounds
        self._halves = halves.of(max((sum(lengths) * DTYPE_BYTES[group.dtype] for group, lengths in rounds), default=0))

    def parts(self, number: int) -> list[Tensor]:
        group, lengths = self._rounds[number]
        dtype: torch.dtype = getattr(torch, group.dtype)
        flat = self._halves[number % 2][: sum(lengths) * DTYPE_BYTES[group.dtype]].view(dtype)
        return [flat[a:b] for a, b in pairwise(accumulate(lengths, initial=0))]
