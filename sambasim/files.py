"""Files: text and JSON that are read within limits, and files that are written whole or not at all, in places that are
checked before the work that they would be lost with.

    .NAME.HEX/NAME   NAME (its beginning, if long) while it is written: HEX is random but for its beginning, which is
                     that of the host

Only its owner may open that folder, so nobody can put a link in the way of what is written there. Its writer holds a
lock on it until NAME is in its place. A writer that was killed holds none, and the next one of that name removes what
it left.
"""

import errno
import fcntl
import json
import os
import secrets
import shutil
import stat
import tempfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from glob import escape
from io import IOBase
from pathlib import Path
from typing import Any, TypeVar

from sambasim.errors import LONGEST_MESSAGE, MachineError, OptionError, is_out_of_memory
from sambasim.units import format_bytes

T = TypeVar("T")

_WRITABLE_BY_OTHERS = 0o022
_UNSIZED_BYTES = 1 << 20  # read of a file whose size the system does not know, as in /proc


def regular(path: str | Path, flags: int) -> int:
    """An opener for `open`. Raises OSError for what is no regular file: opening a pipe would wait for its other end."""
    opened = os.open(path, flags | os.O_NONBLOCK, 0o666)
    if stat.S_IFMT(os.fstat(opened).st_mode) in (stat.S_IFREG, stat.S_IFDIR):  # `open` has words for a folder
        return opened
    os.close(opened)
    raise OSError(errno.EINVAL, "it is not a regular file", str(path))


def read_text(path: Path, most_bytes: int) -> str:
    """The text of the regular UTF-8 file at `path`. Raises OSError if it is no regular file or has more than
    `most_bytes`, UnicodeDecodeError if it is not UTF-8."""
    with open(path, "rb", opener=regular) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most_bytes:
            raise OSError(errno.EFBIG, f"it has more than {format_bytes(most_bytes)}", str(path))
        data = file.read(size or _UNSIZED_BYTES)  # `most_bytes` would be allocated
    return data.decode("utf-8").replace("\r\n", "\n")


@contextmanager
def in_memory(*paths: Path) -> Iterator[None]:
    """Raises MachineError for files or folders within that the memory cannot hold."""
    try:
        yield
    except (MemoryError, OSError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        files = {path: [one for one in (path, *path.rglob("*")) if one.is_file()] for path in paths}
        sizes = {path: format_bytes(sum(one.stat().st_size for one in within)) for path, within in files.items()}
        needed = " and ".join(f"{path} ({size})" for path, size in sizes.items())
        what = ": ".join(filter(None, (f"there is not enough memory for {needed}", str(error))))
        raise MachineError(what, remedy="free some memory, or raise what limits it (ulimit -v)") from error


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A file to write, which then takes the place of `path` at once, and is on the disk. Folders are created. Nothing
    is left of it all after an error. Raises OSError. What is no file, such as /dev/null, or is this process's stdout or
    stderr, stays, and gets what was written."""
    if _stays(path):
        with tempfile.TemporaryDirectory() as aside:
            yield (hidden := Path(aside, path.name))
            with hidden.open("rb") as written, open(path, "wb", opener=unless_foreign_link) as place:
                shutil.copyfileobj(written, place)
        return
    missing = [folder for folder in path.absolute().parents if not folder.exists()]
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        _remove_leftovers(path)
        with _hidden_folder(path) as folder:
            hidden = folder / path.name
            yield hidden
            to_disk(hidden)
            hidden.replace(path)
            to_disk(path.parent)
    finally:
        for folder in missing:  # which are empty after an error
            with suppress(OSError):
                folder.rmdir()


def to_disk(path: Path) -> None:
    """Puts a file, or the names in a folder, on the disk."""
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


@contextmanager
def _hidden_folder(path: Path) -> Iterator[Path]:
    """A new folder for a file that is to become `path`, locked."""
    while True:
        folder = path.with_name(f"{_hidden_name(path)}{secrets.token_hex(8)}")
        folder.mkdir(mode=0o700)
        with suppress(FileNotFoundError):  # if another process has taken it for a leftover
            descriptor = os.open(folder, os.O_RDONLY)
            with suppress(OSError):  # a file system without locks
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            if folder.exists():
                break
            os.close(descriptor)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(descriptor)


def _remove_leftovers(path: Path) -> None:
    """Remove what processes of this account and host left of `path` that no longer live."""
    for folder in path.parent.glob(f"{escape(_hidden_name(path))}{'[0-9a-f]' * 16}"):
        with suppress(OSError):
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises while its writer lives
                if os.fstat(descriptor).st_uid == os.geteuid():
                    shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(descriptor)


def _hidden_name(path: Path) -> str:
    """How it begins. A file system has names of up to 255 bytes."""
    return f".{path.name[:50]}.{_host()}"


def _host() -> str:
    """Eight digits for this host: on a file system of several, its locks may be of each host alone."""
    return f"{zlib.crc32(os.uname().nodename.encode()):08x}"


def _stays(path: Path) -> bool:
    """Whether it is written in place: it is no file, or this process's stdout or stderr."""
    with suppress(OSError):
        status = path.stat()
        return not stat.S_ISREG(status.st_mode) or any(os.path.samestat(status, os.fstat(own)) for own in (1, 2))
    return False


def write_whole(path: Path, text: str) -> None:
    """Write a file whole or not at all. Raises OSError. A link's target, such as /dev/stdout, is written in place."""
    if path.is_symlink():
        with open(path, "w", encoding="utf-8", opener=unless_foreign_link) as file:
            file.write(text)
        return
    with replacing(path) as hidden:
        hidden.write_text(text, encoding="utf-8")


def claimed(file: IOBase) -> bool:
    """Whether no other process has claimed `file`, and this one now has, until it closes it. By a POSIX record lock:
    forked processes do not inherit it, and it works on NFS. Raises OSError for a file system without locks."""
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):  # POSIX lets systems report a held lock as EACCES
        return False
    return True


def unless_foreign_link(path: str, flags: int) -> int:
    """An opener for `open`. Raises OSError for a link that another account made in a folder that others can write:
    whoever follows it writes to a file of their choice. (Linux refuses it in folders such as /tmp.)"""
    status, folder = None, os.stat(os.path.dirname(path) or ".")
    with suppress(FileNotFoundError):
        status = os.lstat(path)
    if status is None or not stat.S_ISLNK(status.st_mode):
        return os.open(path, flags | os.O_NOFOLLOW, 0o666)
    if folder.st_mode & _WRITABLE_BY_OTHERS and status.st_uid not in (os.geteuid(), folder.st_uid):
        raise OSError(errno.ELOOP, "it is a link of another account, in a folder that others can write", path)
    return os.open(path, flags, 0o666)


def check_output_file(path: Path, what: str, remedy: str) -> None:
    """Raises OptionError if the file `path` cannot be written. Missing folders are no error. Nothing is left behind."""
    if path.is_dir():
        why: str | None = f"{path} is a folder"
    elif path.exists() and not os.access(path, os.W_OK):
        why = f"{path} is not writable"
    elif path.is_fifo() and not path.is_symlink():
        why = f"{path} is a named pipe, which waits for a reader"
    elif _stays(path):
        why = None  # such as /dev/stdout
    else:
        why = _folder_problem(path.parent)
    if why:
        raise OptionError(f"{what} cannot be written to {path}", where=why, remedy=remedy)


_SUFFIXES = {"--html": ".html", "--csv": ".csv", "--all": ".csv", "--plot": ".svg", "--trace": ".json"}


def check_output_files(files: Mapping[str, tuple[str, Path | None]], *inputs: Path | None) -> None:
    """Check the files that flags name, each with what it is. None may be one of the others, or of `inputs`."""
    named = {flag: (what, path) for flag, (what, path) in files.items() if path is not None}
    for flag, (what, path) in named.items():
        remedy = f"another place: {flag} FILE{_SUFFIXES.get(flag, path.suffix)}"
        check_output_file(path, what, remedy)
        others = (other for name, (_, other) in named.items() if name != flag)
        for which, paths in (("its own input", filter(None, inputs)), ("another file of this command", others)):
            if path.resolve() in [other.resolve() for other in paths] and not _stays(path):
                raise OptionError(f"{flag} {path} would overwrite {which}", remedy=remedy)


def check_output_folder(path: Path, what: str, remedy: str) -> None:
    """As `check_output_file`, for a folder of files."""
    if why := _folder_problem(path):
        raise OptionError(f"{what} cannot be written to {path}", where=why, remedy=remedy)


def _folder_problem(path: Path) -> str | None:
    """Why no file can be made in the folder `path`, or in the folder in which it would be created."""
    path = Path(os.path.abspath(path))
    folder = next(place for place in (path, *path.parents) if os.path.lexists(place))
    if not folder.is_dir():
        return f"{folder} is not a folder"
    try:
        # os.access says yes on a read-only disk and in /proc, so a file is made.
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        return f"no file can be made in {folder}: {error.strerror}"
    return None


class Misfit(Exception):
    """JSON does not have the keys and types that it should: where, and what is wrong."""


class OtherFormat(Misfit):
    """Its key `format` is another."""


class OtherVersion(Misfit):
    """Its key `version` is another; `writer` is the program that wrote it."""

    def __init__(self, version: object, writer: object) -> None:
        quoted, self.writer = (ascii(text)[1:-1][:40] for text in (str(version), str(writer)))
        super().__init__(f"format {quoted}, written by {self.writer}")


def parse_file(
    data: bytes, parse: Callable[[bytes], T], format_name: str, version: str, *, is_known: bool = False
) -> T:
    """As `parse_json`, of JSON whose keys `format` and `version` must be these, as `parse` checks too. Raises
    OtherFormat, OtherVersion or Misfit."""
    try:
        return parse_json(data, parse, is_known=is_known)
    except Misfit:
        from pydantic_core import from_json

        head: Any = None
        with suppress(ValueError):
            head = from_json(data)
        if isinstance(head, dict) and head.get("format") != format_name:
            raise OtherFormat(f'its key "format" is not "{format_name}"') from None
        if isinstance(head, dict) and head.get("version") != version:
            raise OtherVersion(head.get("version"), head.get("writer")) from None
        raise


def parse_json(data: bytes, parse: Callable[[bytes], T], *, is_known: bool = False) -> T:
    """What `parse`, of pydantic, makes of JSON in which no table has a key twice, as is known of what a writer of ours
    has written. Raises Misfit."""
    from pydantic import ValidationError

    try:
        parsed = parse(data)
        if not is_known:  # pydantic would take the last of two
            json.loads(data.decode(), object_pairs_hook=once, parse_int=str)
    except ValidationError as error:
        raise Misfit(fault_text(error.errors(include_url=False)[0])) from error
    except TwiceError as error:
        raise Misfit(str(error)) from None
    return parsed


class TwiceError(ValueError):
    """A table of JSON has a key twice."""


def once(pairs: list[tuple[str, T]]) -> dict[str, T]:
    """The `object_pairs_hook` of all JSON. Raises TwiceError."""
    table = dict(pairs)
    if len(table) < len(pairs):
        [(twice, _)] = Counter(name for name, _ in pairs).most_common(1)
        raise TwiceError(f"{twice} is given twice in one table")
    return table


def fault_text(fault: Any) -> str:
    """A fault that pydantic found: `nodes = -1: Input should be greater than 0`."""
    name, given = ".".join(map(str, fault["loc"])) or "the whole", fault["input"]
    is_number = isinstance(given, float) or (type(given) is int and given.bit_length() < LONGEST_MESSAGE)
    return f"{name}{f' = {given}' if is_number else ''}: {fault['msg'].removeprefix('Value error, ')}"
