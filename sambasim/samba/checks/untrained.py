"""AP07: a run in which the device trains nothing, although the app has it run backwards, or trains on the host."""

from collections.abc import Callable, Collection

from sambasim.ir.graph import SectionKind
from sambasim.samba import context
from sambasim.samba.checks.findings import Finding
from sambasim.samba.checks.place import app_line
from sambasim.samba.checks.telling import telling
from sambasim.samba.machine import Machine

_ACCUMULATED = 256
"""No app adds up the gradients of so many batches before its first optimizer step."""


class Untrained:
    """What the device has done since host and device had the same weights, for one loaded PEF."""

    def __init__(self, machine: Machine, host_trains: Callable[[], bool]) -> None:
        """`host_trains` says whether the app's own optimizers have changed the weights of the host since."""
        self._machine = machine
        self._host_trains = host_trains
        self._backwards = 0
        self._steps_at_exchange = 0
        self._told = False

    @property
    def ahead(self) -> int:
        """How many optimizer steps the device has taken since host and device had the same weights."""
        return self._machine.replica.steps - self._steps_at_exchange

    def note_exchange(self) -> None:
        """Host and device have the same weights now."""
        self._steps_at_exchange = self._machine.replica.steps

    def note_run(self, kinds: Collection[SectionKind]) -> None:
        """Sections of these kinds are about to run."""
        self._backwards += SectionKind.BCKWD in kinds
        if SectionKind.OPT in kinds:
            self._backwards = 0
        elif self._backwards == _ACCUMULATED and not self._machine.replica.steps:
            self._tell_of_backwards()

    def note_fetch(self) -> None:
        """The app is about to have the weights of the device on the host."""
        replica = self._machine.replica
        if self._backwards and not replica.steps:
            self._tell_of_backwards()
        elif self._host_trains() and replica.steps == self._steps_at_exchange:
            self._tell(
                "to_cpu replaces weights that the app has trained on the host, and the device has trained none",
                "session.run(…) in place of forward, backward() and optimizer.step(); or leave to_cpu out",
            )

    def _tell_of_backwards(self) -> None:
        times = "1 backward" if self._backwards == 1 else f"{self._backwards} backwards"
        self._tell(
            f"the device has run {times} and no optimizer step, so that nothing is trained",
            'add "OPT" to section_types, or leave section_types out: an optimizer.step() of the host does not count',
        )

    def _tell(self, what: str, remedy: str) -> None:
        if context.current().trains and not self._told:
            self._told = True
            telling.tell(Finding("AP07", what, app_line(), remedy))
