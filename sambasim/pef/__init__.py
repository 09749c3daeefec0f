"""The PEF format; README.md specifies it. Only `write` and `map_weights` import torch, when they are called."""

from sambasim.pef.document import Checked, PefDocument
from sambasim.pef.files import check, digest_of, locate, map_weights, read, seal, write

__all__ = ["Checked", "PefDocument", "check", "digest_of", "locate", "map_weights", "read", "seal", "write"]
