"""The table of bad input, one module for each way in; `ALL` is the whole of it, by way and name."""

from collections.abc import Mapping

from tests.faults.fault import Fault
from tests.faults.kinds.capture import CAPTURE
from tests.faults.kinds.checkpoints import CHECKPOINTS
from tests.faults.kinds.data import DATA
from tests.faults.kinds.files import FILES
from tests.faults.kinds.flags import FLAGS
from tests.faults.kinds.model import MODEL

WAYS_IN: Mapping[str, tuple[Fault, ...]] = {
    "flags": FLAGS, "model": MODEL, "capture": CAPTURE, "data": DATA, "files": FILES, "checkpoints": CHECKPOINTS,
}  # fmt: skip

ALL: Mapping[str, Fault] = {f"{way}: {fault.name}": fault for way, faults in WAYS_IN.items() for fault in faults}
