"""THE ARTIFACT: the PEF format, its writer and its reader. The specification is README.md beside this file.

Importing this package does not import torch; `peek`, `read` and `check` never do; `write` and `map_weights` do it when
they are called.
"""

from sambasim.pef.document import PefDocument, PefHeader
from sambasim.pef.locate import locate
from sambasim.pef.reader import check, map_weights, peek, read
from sambasim.pef.writer import write

__all__ = ["PefDocument", "PefHeader", "check", "locate", "map_weights", "peek", "read", "write"]
