"""Every row of the API table is exercised by a test of this folder, and no test claims a row that there is not."""

from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

from sambasim.samba.fidelity.api import API
from sambasim.samba.fidelity.row import Status


def exercised() -> Iterator[str]:
    """The rows that the tests beside this one are marked with."""
    for file in Path(__file__).parent.glob("test_*.py"):
        for value in vars(import_module(f"tests.samba.api.{file.stem}")).values():
            yield from getattr(value, "exercises", ())


def test_every_row_is_exercised_and_every_mark_is_a_row() -> None:
    wanted = {row.name for row in API if row.status is not Status.ABSENT}
    assert wanted - set(exercised()) == set()
    assert set(exercised()) - wanted == set()
