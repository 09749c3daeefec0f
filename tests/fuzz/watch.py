"""What a mutant may not do while it is tried: open or import what it names, start anything, take memory or time."""

import os
import re
import resource
import signal
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import sambasim

ADDRESS_SPACE_BYTES = 8 << 30
"""More than this at once ends in a MemoryError, and not in a machine without memory."""

_FORBIDDEN = (
    "subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.remove", "os.rmdir", "os.symlink", "os.chmod",
    "socket.connect", "socket.bind", "socket.sendto", "pickle.find_class",
)  # fmt: skip
_STATUS = Path("/proc/self/status")


class TooSlow(Exception):
    """A way in took longer than it may."""


class Watch:
    """The audit hook of this process: it cannot be taken away again, so it is told when to look."""

    def __init__(self, folder: Path) -> None:
        places = (sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), sysconfig.get_path("platlib"))
        root = Path(sambasim.__file__).parent.parent
        self._places = tuple(
            {str(Path(place).resolve()) for place in (*places, root, folder, "/proc", "/sys", "/dev/null")}
        )
        self._writable = (str(folder.resolve()), str(Path(tempfile.gettempdir()).resolve()), "/dev/null")
        self._sockets = str(Path(tempfile.gettempdir()) / "pymp-")
        self._seen: list[str] = []
        self._looking = False
        sys.addaudithook(self._hear)

    @contextmanager
    def looking(self) -> Iterator[list[str]]:
        """Gives a list that fills with what was done and may not be."""
        self._seen = []
        self._looking = True
        try:
            yield self._seen
        finally:
            self._looking = False

    def _hear(self, event: str, arguments: tuple[object, ...]) -> None:
        if not self._looking:
            return
        if event == "os.remove" and str(arguments[0]).startswith(self._writable):
            return
        if self._is_of_data_workers(event, arguments):
            return
        if event.startswith(_FORBIDDEN):
            self._seen.append(f"{event} {str(arguments)[:200]}")
        elif event == "import" and "canary" in str(arguments[0]):
            self._seen.append(f"import {arguments[0]}")
        elif event == "open" and isinstance(arguments[0], str | bytes):
            self._judge_opening(os.fsdecode(arguments[0]), arguments[1], arguments[2])

    def _is_of_data_workers(self, event: str, arguments: tuple[object, ...]) -> bool:
        """Whether it is how torch gets tensors from processes that read data: pickled, through a socket of theirs."""
        if event == "pickle.find_class":
            return str(arguments[0]).partition(".")[0] == "torch" or arguments[0] == "multiprocessing.resource_sharer"
        return event == "socket.connect" and str(arguments[1]).startswith(self._sockets)

    def _judge_opening(self, name: str, mode: object, flags: object) -> None:
        path = os.path.realpath(name)
        writes = isinstance(flags, int) and bool(flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))
        permitted = self._writable if writes else (*self._places, *self._writable)
        if "canary" in path or not path.startswith(permitted):
            self._seen.append(f"open {path} {mode}")


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """Raises TooSlow in the main thread after `seconds`."""

    def ring(number: int, frame: FrameType | None) -> None:
        raise TooSlow

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def resident_bytes(field: str = "VmRSS") -> int:
    """The memory of this process now, or at most since `forget_peak` (`VmHWM`)."""
    found = re.search(rf"{field}:\s+(\d+) kB", _STATUS.read_text())
    return int(found.group(1)) * 1024 if found else 0


def forget_peak() -> None:
    """`VmHWM` begins anew from what is resident now."""
    Path("/proc/self/clear_refs").write_text("5")


def limit_memory() -> None:
    """From now on, this process gets no more than ADDRESS_SPACE_BYTES."""
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE_BYTES, ADDRESS_SPACE_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
