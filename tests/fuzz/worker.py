"""A process that tries mutants, one after another: `python -m tests.fuzz.worker SUBJECT FOLDER SEED START STOP STEP`.

It writes a JSON line before each mutant, and one for each finding; if it dies, the last
line says of which.
"""

import gc
import json
import sys
import time
import traceback
import warnings
from collections.abc import Sequence
from pathlib import Path

from sambasim.errors import InternalError, PeerError, SambasimError
from tests.fuzz.subject import Subject, Way
from tests.fuzz.subjects import ALL
from tests.fuzz.watch import TooSlow, Watch, forget_peak, limit_memory, resident_bytes, within

SAMPLES = "samples"


def main(subject_name: str, folder: Path, seed: int, numbers: range) -> None:
    """Tries the mutants `numbers` of `seed`, in a folder of this process's own."""
    warnings.simplefilter("ignore")
    subject = ALL[subject_name]
    samples = [path.read_bytes() for path in sorted((folder / SAMPLES).iterdir())]
    own = folder / f"worker-{numbers.start}"
    own.mkdir(exist_ok=True)
    _warm_up(subject, samples, own)
    limit_memory()
    watch = Watch(folder)
    for number in numbers:
        mutation, data = subject.mutant(seed, number, samples)
        path = own / f"mutant{subject.suffix}"
        path.write_bytes(data)
        _say(number=number, mutation=mutation)
        sound = True
        for way in subject.ways:
            if way.if_sound and not sound:
                continue
            _say(way=way.name)
            fault, passed = attempt(way, path, watch)
            sound = sound and passed
            if fault is not None:
                _say(finding=fault, number=number, mutation=mutation, way=way.name)
        _say(sound=sound)


def too_slow(way: Way) -> str:
    """The fault of a way in that takes longer than it may."""
    return f"it took more than {way.seconds} s"


def attempt(way: Way, path: Path, watch: Watch) -> tuple[str | None, bool]:
    """What is wrong with how `way` takes the file, or None; and whether it took it as sound.

    A way in that took too long by waiting, maybe for what else the
    machine does, is tried once more: by its own doing it waits twice.
    """
    busy_s = time.process_time()
    fault, passed = _attempt_once(way, path, watch)
    if fault == too_slow(way) and time.process_time() - busy_s < way.seconds:
        fault, passed = _attempt_once(way, path, watch)
    return fault, passed


def _attempt_once(way: Way, path: Path, watch: Watch) -> tuple[str | None, bool]:
    gc.collect(0)
    forget_peak()
    before = resident_bytes()
    fault, passed = None, False
    with watch.looking() as seen:
        try:
            with within(way.seconds):
                way.enter(path)
            passed = True
        except SambasimError as error:
            told = str(error)
            if isinstance(error, InternalError | PeerError):
                fault = f"{type(error).__name__}: {told}"
            elif len(told) > 4000:
                fault = f"a message of {len(told)} characters: {told[:500]}"
        except TooSlow:
            fault = too_slow(way)
        except BaseException:
            fault = traceback.format_exc(limit=-12)[-3000:]
    taken = resident_bytes("VmHWM") - before
    allowed = 2 * path.stat().st_size + way.constant_bytes
    if fault is None and taken > allowed:
        fault = f"it took {taken >> 20} MiB, and {allowed >> 20} are allowed"
    if fault is None and seen:
        fault = "; ".join(seen[:5])
    return fault, passed


def _warm_up(subject: Subject, samples: Sequence[bytes], folder: Path) -> None:
    """What is imported and built at first use is none of a mutant's doing."""
    path = folder / f"sample{subject.suffix}"
    for data in samples:
        path.write_bytes(data)
        for way in subject.ways:
            try:
                way.enter(path)
            except SambasimError:
                continue  # a sample may be of another kind: one for inference does not train
    path.unlink()


def _say(**fields: object) -> None:
    sys.__stdout__.write(json.dumps(fields) + "\n") if sys.__stdout__ else None
    sys.__stdout__.flush() if sys.__stdout__ else None


if __name__ == "__main__":
    name, where, *rest = sys.argv[1:]
    chosen, start, stop, step = map(int, rest)
    main(name, Path(where), chosen, range(start, stop, step))
