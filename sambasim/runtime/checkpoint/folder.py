"""The folder of a run's checkpoints: their names, which there are, and how one comes and goes.

step-0000000050/              a checkpoint, whole: it got this name when everything in it was on the disk
.step-0000000060.partial/     one that is being written, or was when its run died
damaged-step-0000000070/      one that `--resume auto` has put aside
"""

import os
import re
import shutil
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

_NAME = re.compile(r"step-([0-9]{10,})")


_LEFT = re.compile(r"\.step-[0-9]{10,}\.(partial|going|replaced)")


def leftovers_in(folder: Path) -> Sequence[Path]:
    """What runs that died have left of checkpoints: begun and not ended, or not wholly deleted."""
    return [path for path in folder.iterdir() if _LEFT.fullmatch(path.name)]


def rescue(folder: Path) -> None:
    """Give back its name to a checkpoint that was to be replaced by one that never came."""
    for path in folder.glob(".step-*.replaced"):
        named = path.with_name(path.name.removeprefix(".").removesuffix(".replaced"))
        if _NAME.fullmatch(named.name) and not named.exists():
            path.rename(named)


def name_of(step: int) -> str:
    """The name of the checkpoint after `step`."""
    return f"step-{step:010}"


def checkpoints_in(folder: Path) -> Sequence[Path]:
    """The checkpoints in `folder` by their names alone, the newest first. Raises OSError if it cannot be read."""
    if not folder.is_dir():
        return ()
    found = [(int(match[1]), path) for path in folder.iterdir() if (match := _NAME.fullmatch(path.name))]
    return [path for _, path in sorted(found, reverse=True)]


def put_aside_in(folder: Path) -> Sequence[Path]:
    """The damaged ones that `--resume auto` has put aside."""
    return sorted(folder.glob("damaged-step-*")) if folder.is_dir() else ()


def step_of(path: Path) -> int:
    """The step in the name of one of `checkpoints_in`."""
    return int(path.name.removeprefix("step-"))


def older_than(folder: Path, step: int) -> Sequence[Path]:
    """Those of `checkpoints_in` that come before `step`."""
    return [path for path in checkpoints_in(folder) if step_of(path) < step]


def partial_of(path: Path) -> Path:
    """Where the checkpoint that is to be `path` is written."""
    return path.with_name(f".{path.name}.partial")


def begin(path: Path) -> Path:
    """An empty folder to write the checkpoint `path` into; what a run that died has left there goes."""
    partial = partial_of(path)
    if partial.exists():
        shutil.rmtree(partial)
    partial.mkdir()  # and not the folder that it lies in: who wrote there before may miss a disk
    return partial


def publish(path: Path) -> None:
    """The checkpoint that was written gets its name: at once, and on the disk. One of the same name goes then."""
    partial, replaced = partial_of(path), path.with_name(f".{path.name}.replaced")
    sync_folder(partial)
    if path.exists():
        if replaced.exists():
            shutil.rmtree(replaced)
        path.rename(replaced)
    try:
        partial.rename(path)
    except OSError:
        rescue(path.parent)
        raise
    sync_folder(path.parent)
    with suppress(OSError):
        shutil.rmtree(replaced)


def remove(path: Path) -> None:
    """Delete a checkpoint. Its name goes first: what is left of it, if that is cut short, is none."""
    if path.exists():
        going = path.with_name(f".{path.name}.going")
        if going.exists():
            shutil.rmtree(going)
        path.rename(going)
        shutil.rmtree(going)


def put_aside(path: Path) -> Path:
    """Rename a damaged checkpoint, so that it is no checkpoint any more; returns its new path."""
    aside = path.with_name(f"damaged-{path.name}")
    number = 1
    while aside.exists():
        number += 1
        aside = path.with_name(f"damaged-{path.name}-{number}")
    path.rename(aside)
    return aside


def sync_folder(path: Path) -> None:
    """Put the names in a folder on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
