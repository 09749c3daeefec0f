"""Bring the slices of one tensor together on rank 0, at the end of a run, to digest or to keep them."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sambasim.collectives.slices import Slice
from sambasim.ir.program import Member
from sambasim.runtime.ranks import Communicator

_TAG = 13


def bytes_of(tensor: Tensor) -> NDArray[np.uint8]:
    """The tensor's memory as bytes, for MPI."""
    array: NDArray[np.uint8] = tensor.view(torch.uint8).numpy()
    return array


def collect(
    communicator: Communicator, readable: Mapping[int, Tensor], slices: Sequence[Slice], member: Member
) -> Tensor | None:
    """Collective. On rank 0 the part of a group's flat tensor that belongs to `member`, each slice from its owner;
    None on other ranks. `readable` has the tensors that this process can read, by rank, its own among them."""
    rank = communicator.topology.rank
    parts = [
        (owner, max(start, member.start), min(stop, member.start + member.numel))
        for owner, (start, stop) in enumerate(slices)
    ]
    parts = [(owner, start, stop) for owner, start, stop in parts if start < stop]
    here = communicator.broadcast_object(tuple(readable))
    own = readable[rank]
    if rank != 0:
        sends = [
            communicator.isend(bytes_of(own[start:stop]), 0, _TAG)
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
            requests.append(communicator.irecv(bytes_of(part), owner, _TAG))
    communicator.wait_all(requests)
    return whole
