"""Finding the PEF that `--pef` names."""

import os
from pathlib import Path

from sambasim.errors import OptionError

_SUFFIX = ".pef"
_OF_CHECKPOINTS = "checkpoint.json"
_MOST_SUGGESTIONS = 5


def locate(pef: str, output_folder: Path = Path("out"), *, compiling: str | None = None) -> Path:
    """The file that `pef` means: a path, or NAME for OUTPUT_FOLDER/NAME/NAME.pef, where compile writes.

    compiling: what makes the one that is missing, if the caller knows

    Raises OptionError, which tells everything that was looked for, and which PEFs there are.
    """
    candidates = [Path(pef)]
    name = pef.removesuffix(_SUFFIX)
    if name and name == Path(name).name:
        candidates.append(output_folder / name / f"{name}{_SUFFIX}")
    for candidate in candidates:
        if candidate.is_file():
            return candidate
    if os.path.isfile(candidates[0] / _OF_CHECKPOINTS):  # Path's raises where nobody may look
        raise OptionError(
            f"{pef} is a checkpoint, and no PEF",
            remedy=f"--pef NAME --resume {pef} to train on from it; sambasim compare {pef} OTHER tells two apart",
        )
    missing = [f"{path} ({'a folder' if path.is_dir() else 'not there'})" for path in candidates]
    raise OptionError(
        f"there is no PEF {pef!r}",
        where=f"looked for {', then '.join(missing)}, from {Path.cwd()}",
        remedy=_suggestion(output_folder, compiling),
    )


def _suggestion(output_folder: Path, compiling: str | None) -> str:
    names = sorted(path.stem for path in output_folder.glob(f"*/*{_SUFFIX}") if path.stem == path.parent.name)
    if not names:
        return f"compile it first: {compiling or 'sambasim compile'}"
    more = f" and {len(names) - _MOST_SUGGESTIONS} more" if len(names) > _MOST_SUGGESTIONS else ""
    or_compile = f"; or compile it: {compiling}" if compiling is not None else ""
    return f"one of those in {output_folder}: {', '.join(names[:_MOST_SUGGESTIONS])}{more}{or_compile}"
