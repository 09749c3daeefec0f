"""The PEF format: writer, reader and `locate`, which finds a PEF by its name. The specification is README.md.

Importing this package does not import torch. `peek`, `read` and `check` never do; `write` and `map_weights` import it
when they are called.
"""

from sambasim.pef.document import PefDocument, PefHeader
from sambasim.pef.files import check, map_weights, peek, read, write
from sambasim.pef.lookup import locate

__all__ = ["PefDocument", "PefHeader", "check", "locate", "map_weights", "peek", "read", "write"]
