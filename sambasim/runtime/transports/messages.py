"""Messages of transports between processes besides gradients: losses, requests, and whole tensors to rank 0."""

from collections.abc import Collection, Mapping, Sequence
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from sambasim.collectives.slices import Slice
from sambasim.ir.program import Member
from sambasim.runtime.device import bytes_of
from sambasim.runtime.ranks import Communicator
from sambasim.runtime.transports.base import Shared

_COLLECT_TAG = 13
_FLOAT_BYTES = 8


def gather_losses(
    communicator: Communicator, losses: Sequence[float], request: int, workers: Collection[int]
) -> Shared:
    """Collective. The losses of all replicas, in rank order, and the largest request; only `workers` have a replica."""
    counts = [1 + (rank in workers) for rank in range(communicator.world_size)]
    send = np.array([request, *losses], dtype=np.float64)
    receive = np.empty(sum(counts), dtype=np.float64)
    communicator.all_gather(send.view(np.uint8), receive.view(np.uint8), [count * _FLOAT_BYTES for count in counts])
    numbers: list[float] = receive.tolist()
    firsts = list(accumulate(counts, initial=0))[:-1]
    largest = max(int(numbers[first]) for first in firsts)
    return Shared([numbers[first + 1] for first, count in zip(firsts, counts, strict=True) if count > 1], largest)


def collect(
    communicator: Communicator, readable: Mapping[int, Tensor], slices: Sequence[Slice], member: Member
) -> Tensor | None:
    """Collective. On rank 0, the part of a group's flat tensor that belongs to `member`; None on other ranks.

    Each slice comes from its owner. `readable` holds, by rank, the tensors that this process can read, including its
    own."""
    rank = communicator.rank
    parts = [
        (owner, max(start, member.start), min(stop, member.start + member.numel))
        for owner, (start, stop) in enumerate(slices)
    ]
    parts = [(owner, start, stop) for owner, start, stop in parts if start < stop]
    here = communicator.broadcast_object(tuple(readable))
    own = readable[rank]
    if rank != 0:
        sends = [
            communicator.isend(bytes_of(own[start:stop]), 0, _COLLECT_TAG)
            for owner, start, stop in parts
            if owner == rank and owner not in here
        ]
        communicator.wait_all(sends)
        return None
    whole = torch.empty(member.numel, dtype=own.dtype)
    requests = []
    for owner, start, stop in parts:
        part = whole[start - member.start : stop - member.start]
        if owner in readable:
            part.copy_(readable[owner][start:stop])
        else:
            requests.append(communicator.irecv(bytes_of(part), owner, _COLLECT_TAG))
    communicator.wait_all(requests)
    return whole
