"""The PEF format; README.md specifies it. Only `write` and `map_weights` import torch, when they are called."""

from sambasim.pef.document import Checked, PefDocument, PefHeader
from sambasim.pef.files import check, locate, map_weights, peek, read, seal, write

__all__ = ["Checked", "PefDocument", "PefHeader", "check", "locate", "map_weights", "peek", "read", "seal", "write"]
