"""Where code that was built for this machine is kept: in the user's cache folder, apart for each kind of processor."""

import hashlib
import os
from pathlib import Path

import torch


def cache_folder(name: str) -> Path | None:
    """The folder for what `name` builds, made if it is not there; None where that cannot be done.

    What is built is for the processor that builds it, so kinds of processors that share a home do not share it.
    """
    try:
        root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        folder = root / "sambasim" / name / _processor()
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError):  # the latter for a user without a home
        return None
    return folder


def _processor() -> str:
    """A short name for this kind of processor: what it can do decides what is built."""
    able = torch.backends.cpu.get_cpu_capability()
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").split("\n\n")[0].splitlines()
    except OSError:
        lines = []
    told = sorted(line for line in lines if line.startswith(("model name", "flags", "Features", "CPU part")))
    return hashlib.blake2b("\n".join([able, *told]).encode(), digest_size=8).hexdigest()
