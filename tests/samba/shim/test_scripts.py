"""Scripts by each way in: what they see, and how they end."""

import shutil
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from sambasim.cli.app import PATH_ENTRY
from sambasim.cli.launch_scripts import COMMANDS, env_command, shell_lines
from tests.samba.shim.conftest import Run
from tests.support.mpi import run_job
from tests.support.whole import whole_case

ENDS = """
import sys
import sambaflow.sambacollections
from sambasim.errors import DataError

def deep():
    if sys.argv[1] == "ours":
        raise DataError("no data", remedy="get some")
    if sys.argv[1] == "own":
        print(1 / 0)
    if sys.argv[1] == "optional":
        try:
            import sambaflow.nothing
        except ImportError:
            print("goes on")
    if sys.argv[1] == "absent":
        import sambaflow.nothing
    sys.exit({"exit": 5, "text": "a text", "well": None}.get(sys.argv[1]))

deep()
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
        ("ours", 2, "", "error[data]: no data\n  where: {script}:8\n  try:   get some\n"),
        (
            "absent", 2, "",
            "error[absent]: sambasim has no sambaflow.nothing\n  where: {script}:17\n"
            "  try:   what sambaflow has: __version__, is_demo, logging, mac, samba, sambacollections\n",
        ),
        whole_case("optional", 0, "goes on\n", ""),
        ("exit", 5, "", ""),
        ("text", 1, "", "a text\n"),
        whole_case("well", 0, "", ""),
    ],
)  # fmt: skip
@pytest.mark.parametrize("way", ["app", whole_case("env")])
def test_endings(run: Run, way: str, tmp_path: Path, ending: str, code: int, stdout: str, stderr: str) -> None:
    result = run(way, ENDS, [ending])
    told = stderr.format(script=tmp_path / "script.py")
    assert (result.returncode, result.stdout, result.stderr) == (code, stdout, told)


def test_a_traceback_starts_at_the_script(run: Run, way: str) -> None:
    result = run(way, ENDS, ["own"])
    lines = result.stderr.splitlines()
    assert (result.returncode, lines[0], lines[-1]) == (
        1, "Traceback (most recent call last):", "ZeroDivisionError: division by zero",
    )  # fmt: skip
    assert [line.split(", ")[1:] for line in lines if "File" in line] == [
        ["line 20", "in <module>"],
        ["line 10", "in deep"],
    ]


def test_outputs_that_nothing_has_traced_are_told_with_what_to_call(run: Run, way: str) -> None:
    result = run(way, "import sambaflow, torch\ntorch.nn.Linear(1, 1).output_tensors")
    assert result.returncode == 1
    *_, error, remedy = result.stderr.splitlines()
    assert error == "AttributeError: 'Linear' object has no attribute 'output_tensors'"
    assert remedy == "  try:   call samba.utils.trace_graph(model, inputs, optim, pef=args.pef) first: it sets them"


OF_ANOTHER_MACHINE = """
import sys, torch
from torch.distributed import init_process_group
from sambaflow.samba.utils.argparser import parse_app_args
if sys.argv[1] == "twice":
    parse_app_args(["run", "--pef", "x", "--data-parallel"])
if sys.argv[1] in ("first", "twice"):
    init_process_group("gloo")
torch.nn.Linear(1, 1).to("cuda")
"""


@pytest.mark.parametrize(
    ("case", "told", "line", "remedy"),
    [
        (
            "first",
            "error[launch]: the app calls init_process_group, which needs the environment of torchrun, and torchrun "
            "did not start this",
            '8: init_process_group("gloo")',
            "leave init_process_group out of the app",
        ),
        (
            "twice",
            "error[launch]: the app calls init_process_group, and torch.distributed is initialised already",
            '8: init_process_group("gloo")',
            "leave init_process_group out of the app",
        ),
        (
            "cuda",
            "error[machine]: the app asks for the device cuda, and torch has none here",
            '9: torch.nn.Linear(1, 1).to("cuda")',
            'device = "cpu"',
        ),
    ],
)
def test_what_is_written_for_another_machine_is_told_with_what_to_do(
    run: Run, way: str, tmp_path: Path, case: str, told: str, line: str, remedy: str
) -> None:
    if case == "cuda" and torch.cuda.is_available():
        pytest.skip("this machine has one")
    result = run(way, OF_ANOTHER_MACHINE, [case])
    assert result.returncode == 2
    first, where, to_try = result.stderr.splitlines()
    assert (first, where) == (told, f"  where: {tmp_path}/script.py:{line}")
    assert to_try.startswith(f"  try:   {remedy}")


def test_an_installed_sambaflow_is_given_way_to(run: Run, way: str, tmp_path: Path) -> None:
    package = tmp_path / "installed" / "sambaflow"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("__version__ = 'real'")
    (package / "samba.py").touch()
    result = run(way, "import sambaflow.samba; print(sambaflow.__version__)", path=[package.parent]).check()
    assert result.stdout == "real\n"
    assert result.stderr == (
        f"notice: SambaFlow is installed ({package}/__init__.py), and is used in place of sambasim\n"
    )


def test_a_folder_of_data_of_that_name_is_no_sambaflow(run: Run, tmp_path: Path) -> None:
    (tmp_path / "sambaflow").mkdir()
    result = run("app", "import sambaflow; print(sambaflow.__version__)").check()
    assert ("+sambasim." in result.stdout, result.stderr) == (True, "")


RANKS_OF_A_JOB = """
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
    (tmp_path / "app.py").write_text(RANKS_OF_A_JOB)
    job = (
        f"#!/bin/bash\n#SBATCH --gres=rdu:1\nset -e\nsnfadm -l inventory\n{launch} app.py $1 --pef x --data-parallel\n"
    )
    (tmp_path / "job.sh").write_text(job)
    batch = "sbatch --nodes 1 --tasks-per-node 2 --output=log.%j job.sh run"
    result = run_job(["sh", "-c", f'eval "$(sambasim env)" && {batch}'], cwd=tmp_path).check()
    assert result.stderr == (
        "notice: there is no Slurm: sbatch runs /bin/bash job.sh run and waits for it; ignored: --gres\n"
    )
    (log,) = tmp_path.glob("log.*")
    lines = log.read_text().splitlines()
    assert {"rank 0 of 2", "rank 1 of 2"} <= set(lines)
    told = [line for line in lines if line.startswith("notice:")]
    assert told[0] == "notice: there is no RDU and no snfadm: `sambasim devices` shows the simulated ones"
    assert len(told) == (1 if launch.startswith("mpirun") else 2), lines


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
    assert list(shell_lines(other, tmp_path)) == [
        f"export PATH={tmp_path}:/usr/bin:{COMMANDS}",
        f"export PYTHONPATH='{PATH_ENTRY}:/my folder'",
    ]
    assert CliRunner().invoke(env_command).stdout.endswith(f"export PYTHONPATH={PATH_ENTRY}\n")
    assert (PATH_ENTRY / "sambaflow" / "__init__.py").is_file()
