"""The environment of a command: streams that are closed or full, readers that exit, locales. Real processes."""

import shlex
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.faults.command import sambasim as command
from tests.faults.fault import SAMPLES, TRAIN, net
from tests.support.mpi import Result, run_job, run_mpi
from tests.support.whole import whole_case

_PYTHON = f"{shlex.quote(sys.executable)} -m sambasim"
_TRAINING = "run --pef net --epochs 50 --no-evaluate --save w.safetensors"
_INSPECT = "inspect net --all"
_JSON = "run --pef net --steps 2 --json"


def _shell(line: str, folder: Path, env: Mapping[str, str] | None = None, exit_code: int = 0) -> Result:
    """Run `line` in a shell, in which COMMAND stands for `sambasim`, and END keeps its exit code, which must be this.
    There are weights if it trains."""
    line = line.replace("COMMAND", _PYTHON).replace("END", "echo $? >code")
    result = run_job(["bash", "-c", line], cwd=folder, env=env)
    assert int((folder / "code").read_text()) == exit_code
    assert (folder / "w.safetensors").exists() == (_TRAINING in line)
    return result


def _check_silent(result: Result) -> None:
    for word in ("Traceback", "BrokenPipe", "Exception ignored", "error["):
        assert word not in result.stderr + result.stdout


@pytest.mark.parametrize(("command", "exit_code"), [whole_case(_TRAINING, 0), (_INSPECT, 141), whole_case(_JSON, 141)])
def test_a_reader_that_exits_ends_a_command_that_prints_but_not_training(
    command: str, exit_code: int, folder: Path
) -> None:
    """It exits before the first output."""
    result = _shell(f"{{ sleep 0.5; COMMAND {command}; END; }} | true", folder, exit_code=exit_code)
    _check_silent(result)
    assert result.stderr == ""


def test_a_reader_of_both_streams_that_exits_early_does_not_end_training(folder: Path) -> None:
    result = _shell(f"{{ COMMAND {_TRAINING}; END; }} 2>&1 | head -n 1", folder, {"PYTHONUNBUFFERED": "1"})
    assert result.stdout.startswith("net: ")


@pytest.mark.parametrize("closed", ["<&- >&- 2>&-", *map(whole_case, (">&-", "2>&-", "<&-"))])
@pytest.mark.parametrize("command", [_TRAINING, whole_case(_INSPECT)])
def test_streams_may_be_closed_from_the_start(command: str, closed: str, folder: Path) -> None:
    """No file that is opened later may get the output."""
    _shell(f"COMMAND run --pef nothing {closed}; END", folder, exit_code=2)
    _check_silent(_shell(f"COMMAND {command} --output-folder out {closed}; END", folder))


@pytest.mark.parametrize("flags", ["--steps 2", "--inference"])
def test_a_module_of_data_changes_no_number_of_threads(flags: str, folder: Path) -> None:
    code = "torch.set_num_threads(3)\nclass Noting(TensorDataset):\n    def __getitem__(self, i):\n"
    code += "        print(torch.get_num_threads(), end=' ', file=open('threads', 'a'))\n"
    code += "        return super().__getitem__(i)\n\n\n"
    (folder / "net.py").write_text(net(samples=SAMPLES.replace("TensorDataset", "Noting"), before=code))
    command(f"run --pef net --data net.py:samples --threads 1 --json {flags}", folder).check()
    assert {*(folder / "threads").read_text().split()} == {"1"}


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
    result = _shell(f"COMMAND {command} >/dev/full; END", folder, exit_code=exit_code)
    assert result.stderr.startswith(says)
    assert result.stderr.count("\n") == 1 + (exit_code > 0)


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
    assert b"Compilation succeeded" in _stdout(f"{TRAIN} --pef-name new", folder, env)
    times = "\N{MULTIPLICATION SIGN}".encode(encoding, errors="backslashreplace")
    run = _stdout("run --pef net --log-dir logs --metrics m.jsonl --trace t.json", folder, env)
    assert b"batch 4 " + times + b" 1 replica = global batch 4" in run
    run.decode(encoding)
    _stdout(_INSPECT, folder, env).decode(encoding)
    assert (folder / "logs" / "rank0.log").read_text(encoding="utf-8").count("\n") > 4


def _stdout(command: str, folder: Path, env: Mapping[str, str]) -> bytes:
    _shell(f"COMMAND {command} >stdout; END", folder, env)
    return (folder / "stdout").read_bytes()
