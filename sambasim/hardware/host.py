"""The memory of the machine that sambasim runs on."""

from collections.abc import Iterator
from pathlib import Path

from sambasim.units import KIB


def available_bytes(root: Path = Path("/")) -> int | None:
    """Bytes of available memory, also of this process's control group, such as a container; None without /proc."""
    kib = _numbers(root / "proc" / "meminfo").get("MemAvailable:")
    return None if kib is None else min([kib * KIB, *_of_groups(root)])


def _of_groups(root: Path) -> Iterator[int]:
    """What is left to the group, and to those that it is in, by their limits; files that they may drop are free
    (source: cgroup-v2.rst of Linux)."""
    file, top = root / "proc" / "self" / "cgroup", root / "sys" / "fs" / "cgroup"
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    own = top.joinpath(*(line.removeprefix("0::/") for line in lines if line.startswith("0::/")))
    for folder in (own, *own.parents):
        limit = folder / "memory.max"
        if limit.exists() and (most := limit.read_text(encoding="ascii").strip()) != "max":
            used = int((folder / "memory.current").read_text(encoding="ascii"))
            dropped = _numbers(folder / "memory.stat").get("inactive_file", 0)
            yield max(int(most) - used + dropped, 0)


def _numbers(file: Path) -> dict[str, int]:
    """The first number of each line of `file`, by its first word."""
    lines = [line.split() for line in file.read_text(encoding="ascii").splitlines()] if file.exists() else []
    return {words[0]: int(words[1]) for words in lines if len(words) > 1 and words[1].isdigit()}
