"""`sambaflow.mac.metadata`: what an app tells the compiler about its model, beside the model.

An app collects such records in a dictionary under their `key` and hands it to `samba.session.compile(metadata=...)`.
They tell the hardware's compiler how to lay work out. No number depends on that: here they are written down only.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

__all__ = ["ConvTilingMetadata", "TilingMetadata"]


@dataclass(frozen=True, slots=True)
class ConvTilingMetadata:
    """That convolutions are cut into tiles, because an image is too large for the chip's memory.

    original_size: the shape of the image before it is cut, without the batch dimension
    """

    key: ClassVar[str] = "conv_tiling"

    original_size: Sequence[int]


@dataclass(frozen=True, slots=True)
class TilingMetadata:
    """That a model is cut into tiles.

    original_size: the shape of the image before it is cut, without the batch dimension
    num_tiles: how many tiles, or None where the compiler decides
    """

    key: ClassVar[str] = "tiling"

    original_size: Sequence[int]
    num_tiles: int | Sequence[int] | None = None
