"""What ranks of a script call. They are described, not started; for real ones see `tests/mpi/test_python.py`."""

from contextlib import nullcontext
from typing import Any

import pytest

from sambasim.api.ranks import same_call
from sambasim.errors import LaunchError
from sambasim.runtime.machine.communicator import Communicator

LEFT, RUN, PREDICT = "left the program", "called sambasim.run", "called sambasim.predict"


class Answered(Communicator):
    answers: tuple[Any, ...] = ()

    def all_gather_object(self, value: Any) -> tuple[Any, ...]:
        return (value, *self.answers)


@pytest.mark.parametrize(
    ("calls", "what"),
    [
        ([RUN, LEFT], f"rank 0 {RUN}, and rank 1 {LEFT}"),
        ([LEFT, LEFT, RUN, LEFT], f"ranks 0, 1 and 3 {LEFT}, and rank 2 {RUN}"),
        ([RUN, PREDICT, LEFT], f"rank 0 {RUN}, and rank 1 {PREDICT}, and rank 2 {LEFT}"),
        ([LEFT, '["vm", [{"PEF": "1"}]]', None], f"rank 0 {LEFT}, and ranks 1 and 2 went on"),
        ([RUN, RUN, RUN], None),
        ([LEFT, LEFT], None),
        ([RUN], None),
    ],
)
def test_ranks_that_do_not_call_the_same_are_told(
    monkeypatch: pytest.MonkeyPatch, calls: list[Any], what: str | None
) -> None:
    monkeypatch.setattr("sambasim.api.ranks.Supervisor", lambda world, report: nullcontext())
    monkeypatch.setattr(Answered, "answers", tuple(calls[1:]))
    world = Answered(0, (0,) * len(calls), "vm")
    with nullcontext() if what is None else pytest.raises(LaunchError, match=f"^{what}\n"):
        same_call(world, calls[0])
