"""`python -m tests.fuzz SUBJECT…`: reads many mutants. The exit code is 1 if one is neither read nor refused."""

import argparse
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from random import Random

from sambasim.errors import InternalError, PeerError, SambasimError
from tests.fuzz.subjects import SUBJECTS, Subject

_SECONDS = 30
"""For one mutant, on a busy machine."""
_MOST_BYTES = 1 << 30
"""That a mutant may take on top of what Python, torch and the valid files have taken."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("subjects", nargs="*", metavar="SUBJECT", help=f"of {', '.join(SUBJECTS)}; default: all")
    parser.add_argument("--count", type=int, default=1000, help="mutants of each subject")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=60, help="for each subject, at most")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    folder = Path(tempfile.mkdtemp(prefix="sambasim-fuzz-"))
    os.environ["XDG_STATE_HOME"] = str(folder / "state")
    findings = 0
    for name in given.subjects or SUBJECTS:
        findings += campaign(name, folder / name, given.seed, given.count, 60 * given.minutes)
    if not findings:
        shutil.rmtree(folder)
    return 1 if findings else 0


def campaign(name: str, folder: Path, seed: int, count: int, seconds: float) -> int:
    """Reads `count` mutants of a subject; returns the number of findings. Each is printed, and its file kept."""
    subject, start_s = SUBJECTS[name], time.monotonic()
    made = folder / "made"
    made.mkdir(parents=True)
    samples = subject.make_samples(made)
    os.environ["XDG_STATE_HOME"] = str(folder / "other-account")
    for sample in samples:
        read(subject, sample)  # importing takes memory that is not a mutant's
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + _MOST_BYTES, resource.RLIM_INFINITY))
    findings = tried = valid = 0
    for number in range(count):
        if time.monotonic() > start_s + seconds:
            break
        path = mutant(subject, samples, folder / f"mutant{subject.suffix}", Random(f"{name} {seed} {number}"))
        fault = read(subject, path)
        tried, valid = tried + 1, valid + (fault is None)
        if fault not in (None, "refused"):
            findings += 1
            kept = folder / f"finding-{seed}-{number}{subject.suffix}"
            path.rename(kept)
            print(f"{name} {number}: {kept}\n{fault}", flush=True)
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    print(f"{name}: {tried} mutants, {valid} of them read as valid; {findings} findings", flush=True)
    return findings


def mutant(subject: Subject, samples: Sequence[Path], path: Path, random: Random) -> Path:
    """Makes a mutant at `path`: a file, or a folder of files of which one is changed."""
    sample = random.choice(samples)
    if sample.is_dir():
        shutil.rmtree(path, ignore_errors=True)
        shutil.copytree(sample, path)
        target = random.choice(sorted(one for one in path.iterdir() if one.is_file()))
    else:
        path.write_bytes(sample.read_bytes())
        target = path
    for mutation in random.sample(subject.mutations, len(subject.mutations)):
        with suppress(ValueError):  # it is of another format: a shard has no JSON, a manifest no header
            target.write_bytes(mutation(random, target.read_bytes()))
            break
    return path


def read(subject: Subject, path: Path) -> str | None:
    """None if all readers take the mutant, "refused" if one of them refuses it, or else what is wrong."""

    def too_slow(*_: object) -> None:
        raise TimeoutError(f"it took more than {_SECONDS} s")

    signal.signal(signal.SIGALRM, too_slow)
    for reader in subject.readers:
        signal.setitimer(signal.ITIMER_REAL, _SECONDS)
        try:
            reader(path)
        except (InternalError, PeerError) as error:
            return f"{type(error).__name__}: {error}"
        except SambasimError as error:
            return "refused" if len(str(error)) < 4000 else f"a message of {len(str(error))} characters"
        except BaseException:
            return traceback.format_exc(limit=-12)[-3000:]
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    return None


if __name__ == "__main__":
    sys.exit(main())
