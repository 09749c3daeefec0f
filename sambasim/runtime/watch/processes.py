"""Whether a process of this host is there, as the operating system knows it."""

import os
from enum import StrEnum
from pathlib import Path

_STOPPED = b"Tt"
_OVER = b"ZXx"


class Process(StrEnum):
    """What became of a process."""

    THERE = "there"
    STOPPED = "stopped"
    """By a signal, or by a debugger: it goes on when it is told to."""
    GONE = "gone"
    SILENT = "silent"
    """On another host, from which nobody answers."""
    UNKNOWN = "unknown"
    """Out of sight: nothing can be said of it."""


def number_space() -> str:
    """Where the numbers of processes that this one sees are counted. Containers may count on their own."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def began_at(pid: int) -> bytes | None:
    """When process `pid` began, as the system counts: what tells it from a later one of the same number. None for a
    process that cannot be seen."""
    fields = _fields(pid)
    return None if fields is None else fields[19]


def state_of(pid: int, began: bytes | None) -> Process:
    """What became of process `pid`, which `began` then."""
    if began is None:
        return Process.UNKNOWN
    fields = _fields(pid)
    if fields is None or fields[19] != began or fields[0] in _OVER:
        return Process.GONE
    return Process.STOPPED if fields[0] in _STOPPED else Process.THERE


def _fields(pid: int) -> list[bytes] | None:
    """What the system says of a process, from its state on; None for one that is not there."""
    try:
        raw = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    return raw.rpartition(b")")[2].split()
