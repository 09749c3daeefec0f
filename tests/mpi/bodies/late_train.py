"""As `train`, but replica 1 is late with each group that it reduces and updates through a shared window."""

import time

from sambasim.runtime.transports.window import WindowReduce, _Work
from tests.mpi.bodies import train

LATE_S = 0.05
on_time = WindowReduce._complete


def _late(self: WindowReduce, work: _Work) -> None:
    if self._window.replica == 1:
        time.sleep(LATE_S)
    on_time(self, work)


def main() -> None:
    WindowReduce._complete = _late  # type: ignore[method-assign]
    train.main()
