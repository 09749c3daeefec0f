"""Which tensors each shard of a checkpoint holds, and where in its file: worked out from the manifest alone.

    blocks_0/parameter[0:65536]     elements 0 to 65536 of a group's flat tensor
    blocks_0/exp_avg[0:65536]       the same of a state of the optimizer
    replica 1/bn__running_mean      a buffer of replica 1
    embedding__weight               a parameter that is not trained, in the first shard

A shard is a safetensors file, and there is one right way to lay these out in it: that of a PEF's weights.
"""

from collections.abc import Iterator, Sequence

from sambasim.ir.types import Symbol, SymbolKind, TensorType
from sambasim.pef.layout import Layout, tensors_layout
from sambasim.runtime.checkpoint.manifest import GroupModel, Manifest, Span, TensorModel

PARAMETER = "parameter"


def file_name(index: int, count: int) -> str:
    """The file of shard `index` of `count`."""
    return f"shard-{index:05}-of-{count:05}.safetensors"


def part_name(group: str, region: str, span: Span) -> str:
    """The tensor that holds `span` of one of a group's flat tensors."""
    return f"{group}/{region}[{span[0]}:{span[1]}]"


def buffer_name(replica: int, buffer: str) -> str:
    """The tensor that holds a buffer of one replica."""
    return f"replica {replica}/{buffer}"


def shard_layout(
    groups: Sequence[GroupModel],
    spans: Sequence[Span],
    buffers: Sequence[TensorModel],
    replicas: Sequence[int],
    untrained: Sequence[TensorModel],
) -> Layout:
    """The layout of a shard with `spans` of `groups`, the `buffers` of `replicas`, and these `untrained` parameters."""
    tensors = dict(_parts(groups, spans))
    tensors |= {buffer_name(replica, one.name): _type(one) for replica in replicas for one in buffers}
    tensors |= {one.name: _type(one) for one in untrained}
    return tensors_layout(_symbol(name, type_) for name, type_ in tensors.items())


def layout_of(manifest: Manifest, index: int) -> Layout:
    """The layout of shard `index`."""
    shard = manifest.shards[index]
    untrained = manifest.untrained if index == 0 else ()
    return shard_layout(manifest.groups, shard.spans, manifest.buffers, shard.replicas, untrained)


def places(manifest: Manifest, group: int, wanted: Span) -> Iterator[tuple[int, Span, Span]]:
    """Where the elements `wanted` of a group are: by shard, the span that it holds, and what is wanted of that."""
    for index, shard in enumerate(manifest.shards):
        start, stop = shard.spans[group]
        low, high = max(start, wanted[0]), min(stop, wanted[1])
        if low < high:
            yield index, (start, stop), (low, high)


def _parts(groups: Sequence[GroupModel], spans: Sequence[Span]) -> Iterator[tuple[str, TensorType]]:
    for group, span in zip(groups, spans, strict=True):
        if span[0] < span[1]:
            for region in (PARAMETER, *group.states):
                yield part_name(group.name, region, span), TensorType(group.dtype, (span[1] - span[0],))


def _type(tensor: TensorModel) -> TensorType:
    return TensorType(tensor.dtype, tensor.shape)


def _symbol(name: str, type_: TensorType) -> Symbol:
    return Symbol(name, SymbolKind.PARAMETER, type_, None, (), None)
