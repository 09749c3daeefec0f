"""DP08: several ranks write the same file, so that what stays is one of them, or a mixture.

Files are seen when Python opens them, by an audit hook, and where torch and safetensors write them in C++ or Rust.
What is appended to is left out: each rank's lines stay there.
"""

import os
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path

from sambasim.samba.checks.findings import Finding
from sambasim.samba.checks.place import own_line_of_app
from sambasim.samba.checks.telling import telling

_WRITERS = (("torch.serialization", "_open_zipfile_writer", 0), ("safetensors.torch", "serialize_file", 1))
"""Functions that write a file without Python's open: their module, their name, and the place of the path among their
arguments. Apps reach them by torch.save and save_file, which may have been imported by name before this is."""

_OF_TOOLS = {"__pycache__", ".cache"}
_OF_THE_SYSTEM = ("/dev/", "/proc/", "/sys/")
_OF_A_NODE = ("/tmp/", "/var/tmp/", "/dev/shm/")

Writer = Callable[..., object]


@dataclass(slots=True)
class Files:
    """The files that the app opens for writing in this process, from `start` to `stop`, and what other ranks told of
    theirs."""

    node_of: Sequence[int]
    _new: dict[str, str] = field(default_factory=dict)
    _writers: dict[tuple[int | None, str], dict[int, str]] = field(default_factory=dict)
    _told: set[str] = field(default_factory=set)
    _active: bool = False
    _hooked: bool = False
    _process: int = field(default_factory=os.getpid)
    _originals: dict[tuple[str, str], Writer] = field(default_factory=dict)

    def start(self) -> None:
        """Watch every file that is opened from now on."""
        self._active = True
        if not self._hooked:
            sys.addaudithook(self._on_audit)  # for the life of the process: there is no way to remove it
            self._hooked = True
        for module_name, name, position in _WRITERS:
            module = import_module(module_name)
            original: Writer = getattr(module, name)
            self._originals[module_name, name] = original
            setattr(module, name, self._watched(original, position))

    def stop(self) -> None:
        """Leave torch as it was, and look at no file any more."""
        self._active = False
        while self._originals:
            (module_name, name), original = self._originals.popitem()
            setattr(import_module(module_name), name, original)

    def take_new(self) -> Mapping[str, str]:
        """The files that this rank has opened since the last call, and where: what the other ranks are to know."""
        new, self._new = self._new, {}
        return new

    def compare(self, replicas: Sequence[Mapping[str, str]]) -> None:
        """Tell each file that several ranks have written. `replicas` has what `take_new` gave on each rank."""
        for rank, opened in enumerate(replicas):
            for path, where in opened.items():
                local = path.startswith((*_OF_A_NODE, f"{tempfile.gettempdir()}/"))
                writers = self._writers.setdefault((self.node_of[rank] if local else None, path), {})
                writers.setdefault(rank, where)
        for (_, path), writers in self._writers.items():
            where = writers[min(writers)]
            if len(writers) > 1 and where not in self._told:  # a line that writes many files is told once
                self._told.add(where)
                _tell(path, writers)

    def note(self, path: object) -> None:
        """`path` is opened for writing, now and by this thread. What sambasim opens itself does not count."""
        if not self._active or not isinstance(path, str | bytes | os.PathLike) or os.getpid() != self._process:
            return
        file = os.path.abspath(os.fsdecode(path))
        if file in self._new or _is_no_result(file):
            return
        where = own_line_of_app()
        if where is not None:
            self._new[file] = where

    def _on_audit(self, event: str, arguments: tuple[object, ...]) -> None:
        if event == "open" and self._active:
            path, mode, flags = arguments
            if "w" in mode if isinstance(mode, str) else isinstance(flags, int) and flags & os.O_TRUNC:
                self.note(path)

    def _watched(self, original: Writer, position: int) -> Writer:
        def watched(*arguments: object, **keywords: object) -> object:
            if len(arguments) > position:
                self.note(arguments[position])
            return original(*arguments, **keywords)

        return watched


def _is_no_result(file: str) -> bool:
    """Devices and locks, and what Python and libraries keep for the next time."""
    if file.startswith(_OF_THE_SYSTEM) or file.endswith(".lock"):
        return True
    return not _OF_TOOLS.isdisjoint(Path(file).parts)


def _tell(path: str, writers: Mapping[int, str]) -> None:
    ranks = ", ".join(map(str, sorted(writers)))
    where = writers[min(writers)]
    remedy = "if torch.distributed.get_rank() == 0: …, or a name with the rank in it"
    telling.tell(Finding("DP08", f"ranks {ranks} write the same file, {path}", where, remedy))
