"""The modules of `sambaflow` outside `sambaflow.samba`, in one file: `_SOURCES` in `shim/__init__.py` says which names
belong to which.

sambaflow                       __version__, is_demo
sambaflow.mac.metadata          ConvTilingMetadata, TilingMetadata: hints for the hardware's compiler, without effect
                                here. An app gives a dictionary of them, by `key`, to session.compile(metadata=...).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from sambasim import __version__ as _own_version

__version__ = f"1.19.0+sambasim.{_own_version}"
"""The imitated release of SambaFlow, and the version of sambasim."""


class _No:
    def __bool__(self) -> bool:
        return False

    __call__ = __bool__


is_demo = _No()
"""False, as a value and as a call."""


@dataclass(frozen=True, slots=True)
class ConvTilingMetadata:
    """Convolutions are tiled. `original_size` is the shape of the image before it, without the batch dimension."""

    key: ClassVar[str] = "conv_tiling"

    original_size: Sequence[int]


@dataclass(frozen=True, slots=True)
class TilingMetadata:
    """A model is tiled. `original_size` as in ConvTilingMetadata; `num_tiles` is None if the compiler decides."""

    key: ClassVar[str] = "tiling"

    original_size: Sequence[int]
    num_tiles: int | Sequence[int] | None = None
