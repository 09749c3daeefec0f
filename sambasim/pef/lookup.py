"""The file that a name means, and the record of the PEFs that this account compiled: an empty file
`${XDG_STATE_HOME:-~/.local/state}/sambasim/compiled-pefs/DIGEST` for each. Code and data that a PEF names are not
covered."""

import os
import re
from contextlib import suppress
from pathlib import Path

from sambasim.errors import OptionError

_MOST_SUGGESTIONS = 5
_WRITABLE_BY_OTHERS = 0o022


def locate(pef: str, output_folder: Path = Path("out"), *, compiling: str | None = None) -> Path:
    """The file that `--pef PEF` means: a path, or NAME for OUTPUT_FOLDER/NAME/NAME.pef. `compiling` is the command that
    makes it, if the caller knows. Raises OptionError, which lists the places searched, and the PEFs that exist."""
    candidates = [Path(pef)]
    name = pef.removesuffix(".pef")
    if name and name == Path(name).name:
        candidates.append(output_folder / name / f"{name}.pef")
    for candidate in candidates:
        if candidate.is_file():
            return candidate
    if os.path.isfile(candidates[0] / "checkpoint.json"):  # Path.is_file raises in a closed folder
        raise OptionError(
            f"{pef} is a checkpoint, and no PEF",
            remedy=f"--pef NAME --resume {pef} to train on from it; sambasim compare {pef} OTHER tells two apart",
        )
    missing = [f"{path} ({'a folder' if path.is_dir() else 'not there'})" for path in candidates]
    raise OptionError(
        f"there is no PEF {pef!r}",
        where=f"searched {', then '.join(missing)}, from {Path.cwd()}",
        remedy=_suggestion(output_folder, compiling),
    )


def _suggestion(output_folder: Path, compiling: str | None) -> str:
    names = sorted(path.stem for path in output_folder.glob("*/*.pef") if path.stem == path.parent.name)
    if not names:
        return f"compile it first: {compiling or 'sambasim compile'}"
    more = f" and {len(names) - _MOST_SUGGESTIONS} more" if len(names) > _MOST_SUGGESTIONS else ""
    or_compile = f"; or compile it: {compiling}" if compiling is not None else ""
    return f"one of those in {output_folder}: {', '.join(names[:_MOST_SUGGESTIONS])}{more}{or_compile}"


def record_compiled(digest: str) -> str | None:
    """Record that this account compiled the PEF with this digest. Returns None, or why that failed."""
    try:
        folder = _folder()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        (folder / digest).touch(mode=0o600)
    except (OSError, RuntimeError) as error:  # RuntimeError: the user has no home
        return (error.strerror if isinstance(error, OSError) else None) or str(error)
    return None


def is_compiled_here(digest: str) -> bool:
    with suppress(OSError, RuntimeError):
        folder = _folder()
        for path in (folder, folder / digest):
            status = path.lstat()
            # What another account could have written proves nothing.
            if status.st_uid != os.getuid() or status.st_mode & _WRITABLE_BY_OTHERS:
                return False
        return re.fullmatch("[0-9a-f]{64}", digest) is not None
    return False


def _folder() -> Path:
    state = os.environ.get("XDG_STATE_HOME")
    return Path(state or Path.home() / ".local" / "state") / "sambasim" / "compiled-pefs"
