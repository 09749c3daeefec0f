"""Scripts by each way to start them: what they see, how they end, and that one failing rank ends its whole job."""

import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeAlias

import pytest
import torch
from click.testing import CliRunner

from sambasim.cli.apps import COMMANDS, PATH_ENTRY, env_command, shell_lines
from tests.apps.support import STARTS
from tests.support.mpi import ROOT, SITE, Result, run_job, run_mpi
from tests.support.whole import whole_case

Run: TypeAlias = Callable[..., Result]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Writes a script, and runs it in its folder, started in one of these ways."""

    def run_script(
        way: str, text: str, arguments: Sequence[str] = (), *, ranks: int = 0, path: Sequence[Path] = ()
    ) -> Result:
        (tmp_path / "script.py").write_text(text, encoding="utf-8")
        env = {"PYTHONPATH": os.pathsep.join(map(str, [*([PATH_ENTRY] if way == "env" else []), ROOT, SITE, *path]))}
        command = [*STARTS[way], "script.py", *arguments]
        if ranks:
            return run_mpi(ranks, command, timeout=120, env=env, cwd=tmp_path)
        return run_job(command, timeout=120, env=env, cwd=tmp_path)

    return run_script


@pytest.fixture(params=["env", whole_case("app"), whole_case("module")])
def way(request: pytest.FixtureRequest) -> str:
    return str(request.param)


ENDS = """
import sys
import sambaflow.sambacollections
from sambasim.errors import DataError

def deep():
    if sys.argv[1] == "ours":
        raise DataError("no data", remedy="get some")
    if sys.argv[1] == "own":
        print(__import__("torch").nn.Linear(1, 1).output_tensors)
    if sys.argv[1] == "optional":
        try:
            import sambaflow.nothing
        except ImportError:
            print("goes on")
    if sys.argv[1] == "absent":
        import sambaflow.nothing
    if sys.argv[1] in ("first", "twice", "cuda"):
        import torch, torch.distributed as dist
        from sambaflow.samba.utils.argparser import parse_app_args
    if sys.argv[1] == "cuda":
        torch.nn.Linear(1, 1).to("cuda")
    if sys.argv[1] == "twice":
        parse_app_args(["run", "--pef", "x", "--data-parallel"])
    if sys.argv[1] in ("first", "twice"):
        dist.init_process_group("gloo")
    sys.exit({"exit": 5, "text": "a text", "well": None}.get(sys.argv[1]))

deep()
"""
GROUP = """\
error[launch]: the app calls init_process_group by itself
  where: {script}:26: dist.init_process_group("gloo")
  try:   leave init_process_group out of the app: with --data-parallel, parse_app_args calls it
"""
CUDA = """\
error[machine]: the app asks for the device cuda, and torch has none here
  where: {script}:22: torch.nn.Linear(1, 1).to("cuda")
  try:   device = "cpu", and no .cuda(): samba.session.run sends its inputs to the device itself
"""


def test_a_script_sees_what_python_shows_it(run: Run, way: str, tmp_path: Path) -> None:
    text = (
        "import sys, sambaflow.samba as samba\nfrom sambaflow.samba import nn\nimport beside\n"
        "print(sys.argv, __name__, __file__, sys.path[0], samba.__name__, nn.__name__)\n"
        "print(sys.modules['__main__'].samba is samba)"
    )
    (tmp_path / "beside.py").touch()
    result = run(way, text, ["-b", "--pef_name", "x"]).check()
    seen = f"['script.py', '-b', '--pef_name', 'x'] __main__ {tmp_path}/script.py {tmp_path}"
    assert result.stdout == f"{seen} sambaflow.samba sambaflow.samba.nn\nTrue\n"


@pytest.mark.parametrize(
    ("ending", "code", "stdout", "stderr"),
    [
        (
            "ours", 2, "",
            'error[data]: no data\n  where: {script}:8: raise DataError("no data", remedy="get some")\n'
            "  try:   get some\n",
        ),
        (
            "absent", 2, "",
            "error[absent]: sambasim has no sambaflow.nothing\n  where: {script}:17: import sambaflow.nothing\n"
            "  try:   what sambaflow has: __version__, is_demo, logging, mac, samba, sambacollections\n",
        ),
        ("first", 2, "", GROUP),
        whole_case("twice", 2, "", GROUP),
        ("cuda", 2, "", CUDA),
        whole_case("optional", 0, "goes on\n", ""),
        whole_case("exit", 5, "", ""),
        whole_case("text", 1, "", "a text\n"),
        whole_case("well", 0, "", ""),
    ],
)  # fmt: skip
@pytest.mark.parametrize("way", ["app", whole_case("env"), whole_case("module")])
def test_endings(run: Run, way: str, tmp_path: Path, ending: str, code: int, stdout: str, stderr: str) -> None:
    if ending == "cuda" and torch.cuda.is_available():
        pytest.skip("this machine has one")
    result = run(way, ENDS, [ending])
    printed = stderr.format(script=tmp_path / "script.py")
    assert (result.returncode, result.stdout, result.stderr) == (code, stdout, printed)


def test_a_traceback_starts_at_the_script_and_ends_in_the_remedy(run: Run, way: str) -> None:
    result = run(way, ENDS, ["own"])
    lines = result.stderr.splitlines()
    assert (result.returncode, lines[0]) == (1, "Traceback (most recent call last):")
    assert lines[-2:] == [
        "AttributeError: 'Linear' object has no attribute 'output_tensors'",
        "  try:   call samba.utils.trace_graph(model, inputs, optim, pef=args.pef) first: it sets them",
    ]
    frames = [line.partition(", ")[2] for line in lines if "script.py" in line]
    assert frames == ["line 29, in <module>", "line 10, in deep"]


def test_an_installed_sambaflow_takes_precedence(run: Run, way: str, tmp_path: Path) -> None:
    package = tmp_path / "installed" / "sambaflow"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("__version__ = 'real'")
    (package / "samba.py").touch()
    result = run(way, "import sambaflow.samba; print(sambaflow.__version__)", path=[package.parent]).check()
    notice = f"notice: SambaFlow is installed ({package}/__init__.py), and is used in place of sambasim\n"
    assert (result.stdout, result.stderr) == ("real\n", notice)


PRINTS_ITS_RANK = """
import sys
import torch.distributed as dist
from sambaflow.samba.utils.argparser import parse_app_args
parse_app_args(sys.argv[1:])
print(f"rank {dist.get_rank()} of {dist.get_world_size()}\\n", end="", flush=True)
"""


@pytest.mark.parametrize(
    "launch",
    [
        "srun --mpi=pmi2 python",  # as many as sbatch says
        whole_case("srun -N 1 -n 2 --mpi=pmi2 --nodelist sn30-h1 --cpus-per-task=4 python"),
        whole_case("mpirun -np 2 -hosts localhost python"),
    ],
)
def test_a_batch_script_starts_its_ranks_where_there_is_no_slurm(tmp_path: Path, launch: str) -> None:
    if shutil.which("sbatch"):
        pytest.skip("this machine has Slurm")
    (tmp_path / "app.py").write_text(PRINTS_ITS_RANK)
    lines = ["#!/bin/bash", "#SBATCH --gres=rdu:1", "set -e", "snfadm -l inventory"]
    (tmp_path / "job.sh").write_text("\n".join([*lines, f"{launch} app.py $1 --pef x --data-parallel\n"]))
    batch = "sbatch --nodes 1 --tasks-per-node 2 --output=log.%j job.sh run"
    result = run_job(["sh", "-c", f'eval "$(sambasim env)" && {batch}'], cwd=tmp_path).check()
    assert result.stderr == (
        "notice: there is no Slurm: sbatch runs /bin/bash job.sh run and waits for it; ignored: --gres\n"
    )
    (log,) = tmp_path.glob("log.*")
    lines = log.read_text().splitlines()
    assert {"rank 0 of 2", "rank 1 of 2"} <= set(lines)
    printed = [line for line in lines if line.startswith("notice:")]
    assert printed[0] == "notice: there is no RDU and no snfadm: `sambasim devices` shows the simulated ones"
    assert len(printed) == (1 if launch.startswith("mpirun") else 2), lines


def test_an_installed_srun_is_found_first(tmp_path: Path) -> None:
    (tmp_path / "srun").write_text("#!/bin/sh\necho the real one\n")
    (tmp_path / "srun").chmod(0o755)
    result = run_job(["sh", "-c", f'PATH="$PATH:{tmp_path}"; eval "$(sambasim env)" && srun -n 2 true']).check()
    assert (result.stdout, result.stderr) == ("the real one\n", "")


def test_lines_for_a_shell(tmp_path: Path) -> None:
    for name in ("python", "mpirun"):
        (tmp_path / name).touch(mode=0o755)
    found = {"PATH": f"{tmp_path}:/usr/bin:{COMMANDS}"}
    lines = [f"export PATH={tmp_path}:/usr/bin:{COMMANDS}", f"export PYTHONPATH={PATH_ENTRY}"]
    assert list(shell_lines(found, tmp_path)) == lines
    other = {"PATH": "/usr/bin", "PYTHONPATH": f"/my folder:{PATH_ENTRY}"}
    assert list(shell_lines(other, tmp_path)) == [lines[0], f"export PYTHONPATH='{PATH_ENTRY}:/my folder'"]
    assert CliRunner().invoke(env_command).stdout.endswith(f"export PYTHONPATH={PATH_ENTRY}\n")
    assert (PATH_ENTRY / "sambaflow" / "__init__.py").is_file()


JOB = """
import os, sys, time
import sambaflow.samba
from sambasim.runtime.machine.launcher import launched_rank
from sambasim.errors import DataError
from sambasim.samba.ending import communicator


rank, how = launched_rank(), sys.argv[1]
if how == "early" and rank == 1:
    raise ValueError("before it has joined")
communicator()
if how == "alike":
    raise DataError("no data")
if rank == 1:
    if how == "ours":
        raise DataError("no data")
    if how == "own":
        1 / 0
    if how == "exit":
        sys.exit(3)
    if how == "well":
        sys.exit(0)
if how == "well":
    time.sleep(2)
    print("the other goes on")
else:
    communicator().barrier()
    time.sleep(60)
"""


@pytest.mark.parametrize("way", [whole_case("app"), "env"])
@pytest.mark.parametrize(
    ("how", "code", "first", "last"),
    [
        ("ours", 2, "error[data] (rank 1 on ", 'script.py:17: raise DataError("no data")'),
        whole_case("alike", 2, "error[data] (every rank): no data", "script.py:14"),
        whole_case("own", 1, "the script failed (rank 1 on ", "ZeroDivisionError: division by zero"),
        ("exit", 3, "a rank left while others worked (rank 1 on ", "exit code 3"),
        ("early", 1, "Traceback", "ValueError: before it has joined"),
        ("well", 0, "", ""),  # a rank that has finished just exits
    ],
)
def test_the_job_ends(run: Run, way: str, how: str, code: int, first: str, last: str) -> None:
    result = run(way, JOB, [how], ranks=2)
    assert result.returncode == code
    assert result.stdout == ("the other goes on\n" if how == "well" else "")
    assert bool(result.stderr) == (how != "well")
    assert result.stderr.startswith(first)
    assert result.stderr.rstrip().endswith(last)
