"""The memory of the machine that sambasim runs on."""

from pathlib import Path

from sambasim.units import KIB

_MEMORY = Path("/proc/meminfo")


def available_bytes(meminfo: str | None = None) -> int | None:
    """Bytes of available memory, by the text of /proc/meminfo; None if there is no such file."""
    text = meminfo if meminfo is not None else _MEMORY.read_text() if _MEMORY.exists() else ""
    lines = [line.split() for line in text.splitlines() if line.startswith("MemAvailable:")]
    return int(lines[0][1]) * KIB if lines else None
