"""The folder of an app."""

import os
from pathlib import Path


def get_file_dir(file: str | os.PathLike[str]) -> str:
    """The folder that a file is in, as an absolute path: `get_file_dir(__file__)` is that of the app."""
    return str(Path(file).resolve().parent)
