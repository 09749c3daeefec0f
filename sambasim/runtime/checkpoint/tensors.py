"""The tensors of a checkpoint under the names of the model's, whichever shards they lie in: for who compares two."""

from collections.abc import Iterator

import torch
from torch import Tensor

from sambasim.runtime.checkpoint.reader import Checkpoint
from sambasim.runtime.checkpoint.shards import PARAMETER, buffer_name, part_name, places


def named_tensors(checkpoint: Checkpoint) -> Iterator[tuple[str, Tensor]]:
    """Parameters by their names, states of the optimizer as `name/exp_avg`, buffers as `replica 0/name`. Flat, but for
    buffers and parameters that are not trained; copied where they are cut by shards."""
    manifest = checkpoint.manifest
    shards = [checkpoint.tensors(index) for index in range(len(manifest.shards))]
    for number, group in enumerate(manifest.groups):
        for region in (PARAMETER, *group.states):
            for member in group.members:
                wanted = (member.start, member.start + member.numel)
                parts = [
                    shards[index][part_name(group.name, region, held)][low - held[0] : high - held[0]]
                    for index, held, (low, high) in places(manifest, number, wanted)
                ]
                name = member.parameter if region == PARAMETER else f"{member.parameter}/{region}"
                yield name, parts[0] if len(parts) == 1 else torch.cat(parts) if parts else torch.empty(0)
    for one in manifest.untrained:
        yield one.name, shards[0][one.name]
    for index, shard in enumerate(manifest.shards):
        for replica in shard.replicas:
            for one in manifest.buffers:
                name = buffer_name(replica, one.name)
                yield name, shards[index][name]
