"""Hierarchical all-reduce: inside each node first, so that each node's sum travels once.

    phase            scope           what happens
    reduce-scatter   within nodes    slice i of the node's ranks is summed at the node's owner of slice i
    reduce-scatter   between nodes   the nodes' owners of slice i sum it: each a part of it
    all-gather       between nodes   and give each other the finished parts
    all-gather       within nodes    every rank of a node gets every slice from its owner in the node

Both levels are the direct schedule. There are as many slices as the largest node has ranks; in a smaller node a rank
owns several. Where all nodes but the last hold equal, aligned blocks of 2^k ranks, and the last no more, the sums nest
as the tree of `tree` does and the bits are the same.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from sambasim.collectives.direct import direct
from sambasim.collectives.schedule import Phase, Round, Rounds, Scope, Transfer, cut_span
from sambasim.collectives.slices import Slice


def hierarchical(nodes: Sequence[Sequence[int]], span: Slice, granule: int) -> Rounds:
    """The rounds of an all-reduce of `span` among all ranks of `nodes`, which may differ in size."""
    width = max(len(ranks) for ranks in nodes)
    slices = cut_span(span, width, granule)
    owners = [[ranks[index * len(ranks) // width] for index in range(width)] for ranks in nodes]
    within = [
        (peer, owner, slice_)
        for ranks, owned in zip(nodes, owners, strict=True)
        for owner, slice_ in zip(owned, slices, strict=True)
        for peer in ranks
        if peer != owner
    ]
    scattered, gathered = zip(
        *(direct(peers, slice_, granule) for peers, slice_ in zip(zip(*owners, strict=True), slices, strict=True)),
        strict=True,
    )
    return (
        Round(
            Phase.REDUCE_SCATTER,
            tuple(Transfer(peer, owner, *slice_, True) for peer, owner, slice_ in within),
            Scope.NODE,
        ),
        _together(scattered),
        _together(gathered),
        Round(
            Phase.ALL_GATHER, tuple(Transfer(owner, peer, *slice_, False) for peer, owner, slice_ in within), Scope.NODE
        ),
    )


def _together(rounds: Iterable[Round]) -> Round:
    """Rounds of the same phase on disjoint slices as one round between nodes."""
    first, *others = rounds
    transfers = (*first.transfers, *(transfer for other in others for transfer in other.transfers))
    return replace(first, transfers=transfers, scope=Scope.NODES)
