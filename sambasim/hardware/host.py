"""The memory of the machine that sambasim runs on."""

from pathlib import Path

from sambasim.units import KIB


def available_bytes(root: Path = Path("/")) -> int | None:
    """Bytes of available memory, also of this process's control group, such as a container; None without /proc."""
    found = [value for value in (_of_system(root), _of_group(root)) if value is not None]
    return min(found, default=None)


def _of_system(root: Path) -> int | None:
    kib = _numbers(root / "proc" / "meminfo").get("MemAvailable:")
    return None if kib is None else kib * KIB


def _of_group(root: Path) -> int | None:
    """What is left to the group by its limit; files that it may drop are free (source: cgroup-v2.rst of Linux)."""
    try:
        groups = (root / "proc" / "self" / "cgroup").read_text(encoding="utf-8").splitlines()
        named = [line.removeprefix("0::/") for line in groups if line.startswith("0::/")]
        folder = root.joinpath("sys", "fs", "cgroup", *named)
        limit, used = ((folder / f"memory.{name}").read_text(encoding="ascii").strip() for name in ("max", "current"))
    except OSError:
        return None
    dropped = _numbers(folder / "memory.stat").get("inactive_file", 0)
    return None if limit == "max" else max(int(limit) - int(used) + dropped, 0)


def _numbers(file: Path) -> dict[str, int]:
    """The first number of each line of `file`, by its first word."""
    lines = [line.split() for line in file.read_text(encoding="ascii").splitlines()] if file.exists() else []
    return {words[0]: int(words[1]) for words in lines if len(words) > 1 and words[1].isdigit()}
