"""DP04 and DP05: replicas that are fed samples of each other, seen from the batches themselves."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations

from torch import Tensor

from sambasim.runtime.digests import tensor_sha256
from sambasim.samba.checks.findings import Finding

_CHANCE = 8
"""Replicas that draw at random from all data, each for itself and with replacement, share about as many samples as each
of them sees twice: one or two until a first repetition. More of them are no chance."""

SHARD = "DataLoader(dataset, sampler=DistributedSampler(dataset, num_replicas=…, rank=…), …) without shuffle="


def digests(batch: Mapping[str, Tensor]) -> tuple[str, ...]:
    """Of each tensor of a batch; of none of a batch to warm up with."""
    return () if _is_to_warm_up(batch) else tuple(tensor_sha256(tensor) for tensor in batch.values())


def sample_digests(batch: Mapping[str, Tensor]) -> tuple[str, ...]:
    """Of each sample of a batch, its parts in all tensors together; of none of a batch to warm up with."""
    if _is_to_warm_up(batch):
        return ()
    rows = zip(*(tensor.detach().unbind() for tensor in batch.values()), strict=True)
    return tuple("".join(tensor_sha256(part.contiguous()) for part in row) for row in rows)


def _is_to_warm_up(batch: Mapping[str, Tensor]) -> bool:
    """Whether a batch is made up, such as of zeros or ones: each of its tensors has one value throughout. Replicas may
    well have the same. Tensors of a single element say nothing of it."""
    tensors = [tensor.detach().flatten() for tensor in batch.values()]
    return any(len(one) > 1 for one in tensors) and all(bool((one == one[:1]).all()) for one in tensors)


def alike(batches: Sequence[tuple[str, ...]]) -> Iterator[tuple[int, int]]:
    """Each two replicas whose batches have the same digests."""
    owners: dict[tuple[str, ...], list[int]] = defaultdict(list)
    for rank, digest in enumerate(batches):
        owners[digest].append(rank)
    for ranks in owners.values():
        yield from combinations(ranks, 2)


class Alike:
    """Which replicas were fed alike, and how often."""

    def __init__(self) -> None:
        self._times: Counter[tuple[int, int]] = Counter()

    def note(self, batches: Sequence[tuple[str, ...]], step: int, where: str | None) -> Finding | None:
        """DP04, once two replicas were fed alike twice."""
        pairs = list(alike(batches))
        self._times.update(pairs)
        again = next((pair for pair in pairs if self._times[pair] > 1), None)
        return None if again is None else same_samples(*again, step, where)


def same_samples(one: int, other: int, step: int, where: str | None) -> Finding:
    """DP04, once it is no chance."""
    return Finding("DP04", f"replicas {one} and {other} are fed the same samples, again in step {step}", where, SHARD)


def shared_samples(replicas: Sequence[Sequence[tuple[str, ...]]], where: str | None) -> Finding | None:
    """DP05, from the digests of the samples that each replica was fed, step by step."""
    owners: dict[str, set[int]] = defaultdict(set)
    steps = _first_epoch(replicas)
    for rank, fed in enumerate(replicas):
        for sample in (sample for batch in fed[:steps] for sample in batch):
            owners[sample].add(rank)
    shared = sum(len(ranks) > 1 for ranks in owners.values())
    if shared <= _CHANCE * (len(replicas) - 1):
        return None
    what = f"{shared} of the {len(owners)} samples of the first {steps} steps are fed to several replicas"
    return Finding("DP05", what, where, SHARD)


def _first_epoch(replicas: Sequence[Sequence[tuple[str, ...]]]) -> int:
    """How many steps surely belong to the first pass over the data. In the second a replica may be fed what another was
    fed in the first, and nothing is wrong with that; but soon one of them is fed again what it was itself."""
    steps = min(len(fed) for fed in replicas)
    for fed in replicas:
        seen: set[str] = set()
        for step, batch in enumerate(fed[:steps]):
            if seen.intersection(batch):
                steps = max(step - 1, 0)
                break
            seen.update(batch)
    return steps
