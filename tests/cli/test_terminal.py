"""Who looks at what a process writes, also where a launcher gives it a terminal of its own."""

import os
from collections.abc import Iterator
from typing import TextIO

import pytest

from sambasim.cli.terminal import is_terminal

OPEN_MPI = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0"}
MPICH = {"PMI_SIZE": "2", "PMI_RANK": "0"}


@pytest.fixture
def stream() -> Iterator[TextIO]:
    """One that ends on a terminal."""
    master, slave = os.openpty()
    with open(slave, "w") as opened:
        yield opened
    os.close(master)


@pytest.mark.parametrize(
    ("environ", "of_launcher", "expected"),
    [
        ({}, "/tmp/log.txt", True),
        (MPICH, "/tmp/log.txt", True),
        (OPEN_MPI, "/dev/pts/3", True),
        (OPEN_MPI, "/tmp/log.txt", False),
        (OPEN_MPI, "pipe:[123]", False),
        (OPEN_MPI, None, False),
    ],
)
def test_the_stream_of_the_launcher_counts_where_it_gives_terminals(
    stream: TextIO,
    monkeypatch: pytest.MonkeyPatch,
    environ: dict[str, str],
    of_launcher: str | None,
    expected: bool,
) -> None:
    def link(path: str) -> str:
        assert path == f"/proc/{os.getppid()}/fd/{stream.fileno()}"
        if of_launcher is None:
            raise PermissionError(path)
        return of_launcher

    monkeypatch.setattr(os, "environ", environ)
    monkeypatch.setattr(os, "readlink", link)
    assert is_terminal(stream) is expected


def test_a_file_is_no_terminal() -> None:
    with open(os.devnull, "w") as opened:
        assert not is_terminal(opened)
