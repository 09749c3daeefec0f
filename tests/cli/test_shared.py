"""What commands share: whether output goes to a terminal, and imports that are exempt from garbage collection."""

import os
import subprocess
import sys
import termios
from pathlib import Path

import pytest

from sambasim.errors import UserError
from sambasim.terminal.output import is_terminal
from tests.cli.typed import refused
from tests.faults.command import sambasim
from tests.support.mpi import mpirun, run_job

OPEN_MPI = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0"}
MPICH = {"PMI_SIZE": "2", "PMI_RANK": "0"}


@pytest.mark.parametrize(("environ", "expected"), [({}, True), (MPICH, True), (OPEN_MPI, False)])
def test_a_pseudo_terminal_of_open_mpi_is_none(
    monkeypatch: pytest.MonkeyPatch, environ: dict[str, str], expected: bool
) -> None:
    """Open MPI gives one to every rank; that of mpirun counts, and no mpirun started this process."""
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    master, slave = os.openpty()
    with open(slave, "w") as stream:
        assert is_terminal(stream) is expected
    os.close(master)


_WIDTH = """
import os, sys
from sambasim.terminal.output import is_terminal, terminal_width
os.write(1, f"{is_terminal(sys.stdout)} {terminal_width(sys.stdout)}\\n".encode())
"""


@pytest.mark.parametrize(("columns", "expected"), [(None, "True 93"), ("70", "True 70"), ("pipe", "False 200")])
def test_ranks_know_the_terminal_of_mpirun(columns: str | None, expected: str) -> None:
    master, slave = os.openpty() if columns != "pipe" else os.pipe()
    env = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    if columns != "pipe":
        termios.tcsetwinsize(slave, (24, 93))
        env |= {} if columns is None else {"COLUMNS": columns}
    command = [mpirun(), "-np", "2", sys.executable, "-c", _WIDTH]
    subprocess.run(command, stdout=slave, stdin=subprocess.DEVNULL, env=env, timeout=60, check=True)
    assert os.read(master, 1000).decode().splitlines()[:2] == [expected, expected]
    os.close(slave)
    os.close(master)


def test_a_pipe_that_takes_output_in_parts_gets_all_of_it() -> None:
    """Python drops the rest, if the stream is unbuffered."""
    code = "from sambasim.terminal.output import set_up_streams; set_up_streams(); print('x' * 300_000)"
    reads, writes = os.pipe()
    os.set_blocking(writes, False)  # a full pipe takes a part
    command, env = [sys.executable, "-c", code], {**os.environ, "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(command, stdout=writes, env=env) as process, open(reads, "rb") as pipe:
        os.close(writes)
        assert pipe.read() == b"x" * 300_000 + b"\n"
    assert process.returncode == 0


_SWALLOWS = """
import os, signal
try:
    os.kill(os.getpid(), signal.SIGINT)
except BaseException:
    raise AttributeError("partially initialized")
"""


def test_ctrl_c_while_torch_is_imported_ends_the_command(tmp_path: Path) -> None:
    """Torch turns the exception into others, some of which end the process."""
    (tmp_path / "torch.py").write_text(_SWALLOWS)
    (tmp_path / "a.py").write_text("import torch")
    begin = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"  # background jobs ignore it
    code = f"{begin}; import sys; sys.argv[1:] = ['app', 'a.py']; from sambasim.cli.main import main; main()"
    ended = run_job([sys.executable, "-c", code], cwd=tmp_path, is_fresh=True)
    assert (ended.returncode, ended.stderr) == (130, "interrupted\n")


@pytest.mark.parametrize("typed", ["verify", "inspect", "simulate digits --sync", "devices --arch", "app", ""])
def test_what_is_too_long_is_an_error_that_quotes_its_ends(typed: str, tmp_path: Path) -> None:
    """Also as the name of a file, of which the system has an error of its own."""
    ended = sambasim([*typed.split(), "a" * 5000 + "z"], tmp_path)
    assert ended.returncode == 2
    assert "az" in ended.stderr
    assert len(ended.stderr) < 1200


def test_a_name_that_is_not_utf_8_is_told() -> None:
    for words in (["verify", "a\udcff.pef"], ["run", "--save=\udcff.safetensors"], ["\udcff"]):
        assert "\\udcff" in refused(*words, kind=UserError).what


_OWN = """
import os

log = open("log.txt", "w")
log.write("the end")


class Own:
    def __init__(self):
        self.itself = self

    def __del__(self, write=os.write):
        write(1, b"finalized\\n")


own = Own()


def use():
    return log, own
"""
"""Its globals are in a cycle with their dictionary, as in any script that has a function."""


@pytest.mark.parametrize(
    "start",
    [
        "from sambasim.cli.shared import kept_imports\nwith kept_imports(): import torch\nimport own",
        "import sys; sys.argv[1:] = ['app', 'app.py']; from sambasim.cli.main import main; main()",
    ],
    ids=["a user's module in a command", "an app"],
)
def test_open_files_of_a_user_are_written_when_python_ends(start: str, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(_OWN)
    (tmp_path / "app.py").write_text(f"from sambaflow import samba\n{_OWN}")
    ended = run_job([sys.executable, "-c", start], cwd=tmp_path, is_fresh=True).check()
    assert ended.stdout == "finalized\n"
    assert (tmp_path / "log.txt").read_text() == "the end"
