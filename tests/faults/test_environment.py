"""The environment of a command: streams that are closed or full, readers that exit, locales. Real processes."""

import shlex
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.faults.fault import TRAIN
from tests.support.mpi import Result, run_job, run_mpi
from tests.support.whole import whole_case

_PYTHON = f"{shlex.quote(sys.executable)} -m sambasim"
_TRAINING = "run --pef net --epochs 50 --no-evaluate --save w.safetensors"
_INSPECT = "inspect net --all"
_JSON = "run --pef net --steps 2 --json"


def _shell(line: str, folder: Path, env: Mapping[str, str] | None = None) -> Result:
    """Run `line` in a shell. SAMBASIM is the command, and the file `code` is for its exit code."""
    return run_job(["bash", "-c", line.replace("SAMBASIM", _PYTHON)], cwd=folder, env=env)


def _exit_code(folder: Path) -> int:
    return int((folder / "code").read_text())


def _check_silent(result: Result) -> None:
    for word in ("Traceback", "BrokenPipe", "Exception ignored", "error["):
        assert word not in result.stderr + result.stdout


@pytest.mark.parametrize(("command", "exit_code"), [whole_case(_TRAINING, 0), (_INSPECT, 141), whole_case(_JSON, 141)])
def test_a_reader_that_exits_ends_a_command_that_prints_but_not_training(
    command: str, exit_code: int, folder: Path
) -> None:
    """It exits before the first output."""
    result = _shell(f"{{ sleep 0.5; SAMBASIM {command}; echo $? >code; }} | true", folder)
    _check_silent(result)
    assert result.stderr == ""
    assert _exit_code(folder) == exit_code
    assert (folder / "w.safetensors").exists() == (command == _TRAINING)


def test_a_reader_of_both_streams_that_exits_early_does_not_end_training(folder: Path) -> None:
    line = f"{{ SAMBASIM {_TRAINING}; echo $? >code; }} 2>&1 | head -n 1"
    result = _shell(line, folder, {"PYTHONUNBUFFERED": "1"})
    assert result.stdout.startswith("net: ")
    assert _exit_code(folder) == 0
    assert (folder / "w.safetensors").exists()


@pytest.mark.parametrize("closed", ["<&- >&- 2>&-", *map(whole_case, (">&-", "2>&-", "<&-"))])
@pytest.mark.parametrize("command", [_TRAINING, whole_case(_INSPECT)])
def test_streams_may_be_closed_from_the_start(command: str, closed: str, folder: Path) -> None:
    """No file that is opened later may get the output."""
    result = _shell(f"SAMBASIM {command} --output-folder out {closed}; echo $? >code", folder)
    _check_silent(result)
    assert _exit_code(folder) == 0
    assert (folder / "w.safetensors").exists() == (command == _TRAINING)
    _shell(f"SAMBASIM run --pef nothing {closed}; echo $? >code", folder)
    assert _exit_code(folder) == 2


FULL = "standard output cannot be written any more: No space left on device"


@pytest.mark.parametrize(
    ("command", "says", "exit_code"),
    [
        (_TRAINING, f"warning: {FULL}; the run goes on\n", 0),
        (_INSPECT, f"error[machine]: {FULL}\n", 2),
        whole_case(_JSON, f"error[machine]: {FULL}\n", 2),
    ],
)
def test_a_command_whose_output_fills_the_disk_says_so_and_training_goes_on(
    command: str, says: str, exit_code: int, folder: Path
) -> None:
    result = _shell(f"SAMBASIM {command} >/dev/full; echo $? >code", folder)
    assert result.stderr.startswith(says)
    assert result.stderr.count("\n") == 1 + (exit_code > 0)
    assert _exit_code(folder) == exit_code
    assert (folder / "w.safetensors").exists() == (command == _TRAINING)


@pytest.mark.parametrize("closed", ["| head -n 1", whole_case(">&-"), whole_case("2>&- <&-")])
def test_ranks_whose_streams_are_closed_train_to_their_end(closed: str, folder: Path) -> None:
    line = f"{_PYTHON} run --pef pair --reduce-on-rdu --save w.safetensors {closed}"
    result = run_mpi(2, ["bash", "-c", f"set -o pipefail; {line}"], cwd=folder)
    assert result.returncode == 0, result.stderr
    _check_silent(result)
    assert (folder / "w.safetensors").exists()


_LOCALES = [
    ("ascii", {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}),
    whole_case("utf-8", {"LC_ALL": "C"}),
    whole_case("utf-8", {"LC_ALL": "", "LC_CTYPE": "", "LANG": "xx_NOWHERE@none", "LANGUAGE": "xx"}),
    whole_case("latin-1", {"PYTHONIOENCODING": "latin-1"}),
]


@pytest.mark.parametrize(("encoding", "env"), _LOCALES)
def test_any_locale_works(encoding: str, env: dict[str, str], folder: Path) -> None:
    """To compile, to train and to inspect; × is printed in any of them, if only as an escape."""
    compile_ = _stdout(f"{TRAIN} --pef-name new", folder, env)
    assert b"Compilation succeeded" in compile_
    times = "\N{MULTIPLICATION SIGN}".encode(encoding, errors="backslashreplace")
    run = _stdout("run --pef net --log-dir logs --metrics m.jsonl --trace t.json", folder, env)
    assert b"batch 4 " + times + b" 1 replica = global batch 4" in run
    run.decode(encoding)
    _stdout(_INSPECT, folder, env).decode(encoding)
    assert (folder / "logs" / "rank0.log").read_text(encoding="utf-8").count("\n") > 4


def _stdout(command: str, folder: Path, env: Mapping[str, str]) -> bytes:
    _shell(f"SAMBASIM {command} >stdout", folder, env).check()
    return (folder / "stdout").read_bytes()
