"""`python -m tests.fuzz.numbers FORMAT…`: puts numbers that nobody expects into every number field of every format, and
runs every command that reads it. Fields are found in the files, and by the schemas those that are null there."""

import argparse
import json
import multiprocessing
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from functools import cache
from itertools import product
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from sambasim.units import KIB, MIB
from tests.faults.command import sambasim
from tests.fuzz.number_formats import FORMATS, MOST_BYTES, MOST_S, VALUES, Place, fields, number_names, put, value_at


class Outcome(NamedTuple):
    """Of one command: its exit code, what is wrong or "", and what it took."""

    code: int
    fault: str
    cpu_s: float
    bytes: int


Run: TypeAlias = Callable[[str, Path], Outcome]


def run_here(line: str, folder: Path) -> Outcome:
    """What `sambasim LINE` does, in this process."""
    began_s = time.process_time()
    try:
        outcome = sambasim(line, folder)
    except BaseException:
        return Outcome(-1, traceback.format_exc(limit=-4)[-1500:], 0, 0)
    code, text = outcome.returncode, outcome.stderr
    answers = (0, 1, 2, 3) if line.startswith(("compare", "plan")) else (0, 2, 3)  # 1: they differ; nothing fits
    is_refused_or_done = code in answers and "Traceback" not in text
    fault = "" if is_refused_or_done else f"exit code {code}: {text[-800:]}"
    return Outcome(code, fault, time.process_time() - began_s, 0)


def run(line: str, folder: Path) -> Outcome:
    """What `sambasim LINE` does, in a copy of this process, which ends it after MOST_S or above MOST_BYTES."""
    ours, theirs = multiprocessing.Pipe(duplex=False)
    pid = os.fork()
    if not pid:
        _be_measured(line, folder, theirs)
    theirs.close()
    try:
        return Outcome(*ours.recv()) if ours.poll(12 * MOST_S) else Outcome(-1, "it hangs", MOST_S, 0)
    except EOFError:
        return Outcome(-1, f"it took more than {2 * MOST_S} s of the processor, or was killed", 2 * MOST_S, 0)
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _be_measured(line: str, folder: Path, answers: Connection) -> None:
    code, fault = -1, ""
    began_s, resident = time.process_time(), 0
    try:
        status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        resident, data = (int(status[key].split()[0]) * KIB for key in ("VmRSS", "VmData"))
        resource.setrlimit(resource.RLIMIT_DATA, (data + 2 * MOST_BYTES, resource.RLIM_INFINITY))
        resource.setrlimit(resource.RLIMIT_CPU, (2 * MOST_S, 2 * MOST_S))
        code, fault, *_ = run_here(line, folder)
    finally:
        seconds = time.process_time() - began_s
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * KIB - resident
        if seconds > MOST_S:
            fault = f"it took {seconds:.0f} s {fault}"
        if peak > MOST_BYTES:
            fault = f"it took {peak / MIB:.0f} MiB {fault}"
        answers.send((code, fault, seconds, peak))
        os._exit(0)


@cache
def prepared(name: str) -> tuple[Path, list[tuple[Path, Any, str, Place]]]:
    """A folder, and the fields of `name`: each with its file and the content of that."""
    folder = Path(tempfile.mkdtemp(prefix=f"sambasim-numbers-{name}-"))
    os.environ["XDG_STATE_HOME"] = str(folder / "state")
    made, names = FORMATS[name], number_names(FORMATS[name].schemas)
    found: dict[str, tuple[Path, Any, str, Place]] = {}
    for path in made.make(folder):
        content = made.load(path)
        for field, place in fields(content, names).items():
            before = found.get(field)
            if before is None or value_at(before[1], before[3]) is None:
                found[field] = (path, content, field, place)
    return folder, list(found.values())


def check_sound(name: str) -> None:
    """Files without a change are taken by a command at least, or nothing is learnt from what a number changes. It runs
    here, and so imports what its copies need."""
    folder, found = prepared(name)
    for path in {path for path, *_ in found}:
        sound = [run_here(_line(command, path), folder) for command in FORMATS[name].commands]
        assert any(one.code == 0 for one in sound), sound
        assert all(one.code in (0, 2) and not one.fault for one in sound), sound


def _line(command: str, path: Path) -> str:
    return command.replace("FILE", str(path)).replace("DIR", str(path.parent))


def cases(name: str) -> list[tuple[int, object]]:
    """A field by its number, and a value for it."""
    return list(product(range(len(prepared(name)[1])), VALUES))


def try_case(name: str, number: int, value: object, run: Run = run) -> Iterator[tuple[str, Outcome]]:
    """What each command does with the file."""
    folder, found = prepared(name)
    path, content, _, place = found[number]
    sound, made = path.read_bytes(), FORMATS[name]
    changed = json.loads(json.dumps(content))
    put(changed, place, value)
    try:
        made.store(path, changed)
        for command in made.commands:
            yield command, run(_line(command, path), folder)
    finally:
        path.write_bytes(sound)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.numbers", description=__doc__)
    parser.add_argument("formats", nargs="*", metavar="FORMAT", help=f"of {', '.join(FORMATS)}; default: all")
    parser.add_argument("--match", default="", help="only fields with this text")
    parser.add_argument("--list", action="store_true", help="only print the fields")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    findings = 0
    for name in given.formats or FORMATS:
        folder, found = prepared(name)
        if given.list:
            print(*(f"{name}: {field}" for _, _, field, _ in found), sep="\n")
            continue
        check_sound(name)
        runs, worst_s, worst_bytes, codes = 0, (0.0, ""), (0, ""), dict[int, int]()
        for number, value in cases(name):
            field = found[number][2]
            if given.match not in field:
                continue
            for command, outcome in try_case(name, number, value):
                what = f"{field} = {value!r}: {command}"
                runs += 1
                codes[outcome.code] = codes.get(outcome.code, 0) + 1
                worst_s, worst_bytes = max(worst_s, (outcome.cpu_s, what)), max(worst_bytes, (outcome.bytes, what))
                if outcome.fault:
                    findings += 1
                    print(f"{name}: {what}\n    {outcome.fault}", flush=True)
        print(
            f"{name}: {len(found)} fields, {runs} runs, exit codes {codes}; at most {worst_s[0]:.1f} s ({worst_s[1]}), "
            f"{worst_bytes[0] / MIB:.0f} MiB ({worst_bytes[1]})",
            flush=True,
        )
        shutil.rmtree(folder)
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
