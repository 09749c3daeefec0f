"""What all ranks must have alike, compared before and after the work. Every function here is collective."""

from collections.abc import Sequence

from sambasim.data.sources import Source
from sambasim.errors import DataError, PeerError
from sambasim.runtime.ranks import Communicator


def check_sources(communicator: Communicator, sources: Sequence[Source]) -> None:
    """Raises DataError if replicas see data sets of different sizes: they would take different numbers of steps, and
    wait for each other for ever."""
    own = [(len(s.train), None if s.evaluation is None else len(s.evaluation)) for s in sources]
    sizes = [size for of_rank in communicator.all_gather_object(own) for size in of_rank]
    apart = [replica for replica, size in enumerate(sizes) if size != sizes[0]]
    if apart:
        raise DataError(
            f"of {sources[0].name}, replica 0 sees {_told(sizes[0])}, but replica {apart[0]} {_told(sizes[apart[0]])}",
            remedy="give every rank the whole data set: sambasim deals the samples out itself",
        )


def check_weights(communicator: Communicator, digest: str | None) -> str:
    """The digest of the parameters, which is the same for all that have one; ranks that read a peer's pass None.

    Raises PeerError if replicas do not hold the same parameters.
    """
    everybody = {rank: other for rank, other in enumerate(communicator.all_gather_object(digest)) if other is not None}
    first = everybody[min(everybody)]
    apart = [rank for rank, other in everybody.items() if other != first]
    if apart:
        raise PeerError(f"the parameters of rank {apart[0]} differ from those of rank 0 after training")
    return first


def _told(size: tuple[int, int | None]) -> str:
    trained, held_out = size
    return f"{trained} samples to train" + (f" and {held_out} held out" if held_out is not None else "")
