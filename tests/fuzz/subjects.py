"""Every kind of file that is fuzzed, by name."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random

from tests.fuzz.checkpoints import CHECKPOINT
from tests.fuzz.others import ARRAYS, RECORDS, TENSORS, TEXT
from tests.fuzz.pefs import PEF
from tests.fuzz.subject import Subject, Way

_EVERY = (PEF, CHECKPOINT, TENSORS, ARRAYS, TEXT, RECORDS)
SUBJECTS: Mapping[str, Subject] = {subject.name: subject for subject in _EVERY}


def _one_sample(folder: Path) -> Sequence[Path]:
    (folder / "sample.txt").write_bytes(b"0")
    return (folder / "sample.txt",)


def deadly(random: Random, samples: Sequence[bytes]) -> bytes:
    """Deadly now and then."""
    return random.choice([b"live", b"live", b"live", b"die"])


def _read(path: Path) -> None:
    if path.read_bytes() == b"die":
        os.abort()


DYING = Subject("dying", ".txt", _one_sample, (deadly,), (Way("read", _read),))
"""For the test of the fuzzer: a reader that ends its process."""

ALL: Mapping[str, Subject] = {**SUBJECTS, DYING.name: DYING}
