"""The replacements of srun and sbatch: what they start for lines of public launch scripts. `sambasim app --check` of
scripts that end early: the report, and the exit code."""

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from sambasim.cli import apps
from sambasim.cli.main import sambasim
from sambasim.errors import LaunchError, OptionError
from sambasim.samba import process
from sambasim.samba.utils.argparser import parse_app_args
from tests.cli.typed import invoked, refused

MPIRUN = "/mpi/bin/mpirun"


class Started(Exception):
    """Raised instead of replacing this process by a program."""

    def __init__(self, argv: Sequence[str], environ: Mapping[str, str]) -> None:
        super().__init__(argv)
        self.argv, self.environ = argv, environ


@pytest.fixture(autouse=True)
def new_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without any earlier check, and nothing starts."""

    def start(file: str, argv: Sequence[str], environ: Mapping[str, str]) -> None:
        raise Started(argv, environ)

    monkeypatch.setattr(os, "execvpe", start)
    monkeypatch.setattr(apps, "mpirun_here", lambda: MPIRUN)
    monkeypatch.delenv("SLURM_NTASKS", raising=False)
    process.reset()
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])


def _started(*words: str, stdin: str | None = None) -> tuple[Started, str]:
    """What is started, and the notice."""
    result = CliRunner().invoke(sambasim, ["stand-in", *words], input=stdin)
    assert isinstance(result.exception, Started), result.exception
    return result.exception, result.stderr


@pytest.mark.parametrize(
    ("line", "argv"),
    [
        ("srun --mpi=pmi2 python app.py run --pef x", "python app.py run --pef x"),
        ("srun -N 1 -n 2 --mpi=pmi2 python -u app.py -n 3", f"{MPIRUN} -np 2 python -u app.py -n 3"),
        ("srun -n2 -l -c 8 python app.py", f"{MPIRUN} -np 2 python app.py"),
        ("srun --cpus-per-task=16 --gres=rdu:1 --exclusive pyinstrument app.py", "pyinstrument app.py"),
        ("srun --nodes=2 --ntasks-per-node=4 -- python app.py", f"{MPIRUN} -np 8 python app.py"),
        ("srun -N 2-4 python app.py", f"{MPIRUN} -np 2 python app.py"),
        ("srun -W 60 -r 1 --wait 5 python app.py", "python app.py"),
        ("srun -lu -K1 -I python app.py", "python app.py"),
    ],
)
def test_srun_starts_as_many_ranks_as_slurm_would(line: str, argv: str) -> None:
    started, _ = _started(*line.split())
    assert " ".join(started.argv) == argv


def test_sbatch_runs_the_script_with_its_arguments_and_variables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_NTASKS", "3")  # of srun in a batch script
    started, notice = _started("srun", "--gres=rdu:1", "python", "app.py")
    assert list(started.argv) == [MPIRUN, "-np", "3", "python", "app.py"]
    assert notice == f"notice: there is no Slurm: srun runs {MPIRUN} -np 3 python app.py; ignored: --gres\n"
    script = tmp_path / "job.sh"
    script.write_text("#!/bin/bash -l\n#SBATCH --ntasks 8  # ranks\n#SBATCH -J name\necho\n#SBATCH --ntasks 9\n")
    started, notice = _started("sbatch", "--export=ALL,PEF=x.pef", str(script), "--epochs", "2")
    assert started.argv == ["/bin/bash", "-l", str(script), "--epochs", "2"]
    assert (started.environ["SLURM_NTASKS"], started.environ["PEF"]) == ("8", "x.pef")
    assert notice.endswith(f"sbatch runs /bin/bash -l {script} --epochs 2 and waits for it\n")
    overruled, notice = _started("sbatch", "--wait", "-n", "4", "-W", "--gres", "rdu:1", str(script))
    assert overruled.environ["SLURM_NTASKS"] == "4"
    assert notice.endswith("and waits for it; ignored: --gres\n")


def test_sbatch_takes_a_command_or_a_script_from_stdin_too() -> None:
    wrapped, _ = _started("sbatch", "-n2", "--wrap=srun python app.py")
    assert wrapped.argv == ["/bin/sh", "-c", "srun python app.py"]
    assert (wrapped.environ["SLURM_NTASKS"], wrapped.environ["SLURM_JOB_NAME"]) == ("2", "wrap")
    text = "#!/bin/bash\n#SBATCH --ntasks=3\nsrun python app.py\n"
    read, notice = _started("sbatch", "-J", "train", stdin=text)
    assert read.argv == ["/bin/bash", "-c", text]
    assert (read.environ["SLURM_NTASKS"], read.environ["SLURM_JOB_NAME"]) == ("3", "train")
    assert notice == "notice: there is no Slurm: sbatch runs the script from stdin and waits for it\n"


def test_names_of_output_files_have_the_name_and_number_of_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str | int] = []

    def record(file: str, *_: object) -> int:
        opened.append(file)
        return -1

    monkeypatch.setattr(os, "open", record)
    monkeypatch.setattr(os, "dup2", lambda descriptor, stream: opened.append(stream))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "job.sh").write_text("#SBATCH --job-name net\n#SBATCH --output=%x_%j.out -e %%%t.err\n")
    started, _ = _started("sbatch", "--chdir", "elsewhere", "job.sh", "x")
    assert opened == [f"net_{os.getpid()}.out", 1, 2, "%0.err", 2]
    assert started.argv == ["/bin/sh", str(tmp_path / "job.sh"), "x"], "from where it was called"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        *((line, "there is no Slurm") for line in ("srun --version", "sbatch -h", "sbatch --test-only job.sh")),
        ("snfadm -l inventory", "sambasim devices"),
        ("sntilestat", "sambasim tilestat PEF"),
    ],
)
def test_version_help_and_tools_of_the_device_run_nothing(line: str, said: str) -> None:
    result = invoked("stand-in", *line.split())
    assert result.exit_code == 0
    assert said in result.output


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("srun -n 2", "srun was given no command"),
        ("srun -n many python", "the number of tasks or nodes is 'many'"),
        ("srun --wait", "srun was given --wait without a value"),
        ("sbatch --wait", "sbatch was given no script"),
        ("sbatch --wrap=true job.sh", "sbatch was given both a script and --wrap"),
        ("sbatch nowhere.sh", "sbatch cannot read the script nowhere.sh: No such file"),
        ("srun -n 2 --multi-prog multi.conf", "each task would run another program"),
    ],
)
def test_a_wrong_line_is_an_error(line: str, message: str) -> None:
    assert message in refused("stand-in", *line.split()).what


FOUND = "from sambasim.samba.process import Finding, report\nreport(Finding('DP06', 'so', None, 'do'))\n"
STEP = "from sambasim.samba.checks import job; job.current().part(job.Check).steps += 1\n"
DRAWN = "def draw():\n    while True:\n        yield next(iter(()))\nnext(draw())\n"


def _check(folder: Path, script: str, *flags: str) -> Result:
    (folder / "app.py").write_text(script)
    return invoked("app", *flags, str(folder / "app.py"))


_NO_MODULE = "the app raised ModuleNotFoundError: No module named"


@pytest.mark.parametrize(
    ("script", "exit_code", "findings", "said"),
    [
        (STEP, 0, 0, None),
        (STEP + "raise SystemExit(0)", 0, 0, None),
        (STEP + DRAWN, 0, 0, None),
        (STEP + FOUND, 1, 1, None),
        (FOUND, 1, 1, None),
        ("print('nothing')", 2, 0, ("option", "app.py took no step, so there is nothing to check")),
        (STEP + "raise ValueError('of the app')", 1, 0, ("app", "ValueError: of the app")),
        (STEP + "raise RuntimeError('of the app')", 1, 0, ("app", "RuntimeError: of the app")),
        ("import torchvisionn", 2, 0, ("machine", f"{_NO_MODULE} 'torchvisionn'")),
        (STEP + "raise SystemExit(7)", 7, 0, ("app", "SystemExit: 7")),
    ],
)
def test_the_report_and_the_exit_code_tell_findings_and_how_an_app_fails(
    tmp_path: Path, script: str, exit_code: int, findings: int, said: tuple[str, str] | None
) -> None:
    result = _check(tmp_path, script, "--check", "--json")
    record = json.loads(result.stdout)
    assert (result.exit_code, len(record["findings"])) == (exit_code, findings)
    error = record["error"]
    assert (error and (error["code"], error["what"].removeprefix(f"{tmp_path}/"))) == said


@pytest.mark.parametrize("flags", [("--check-steps", "4"), ("--json",)])
def test_flags_of_a_check_are_refused_without_one(tmp_path: Path, flags: tuple[str, ...]) -> None:
    result = _check(tmp_path, "", *flags)
    assert result.exit_code == 2
    assert f"{flags[0]} needs --check" in result.stderr


def test_a_compile_is_not_checked_and_writes_nothing(tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text("open('written', 'w')")
    result = invoked("app", "--check", str(tmp_path / "app.py"), "compile", "--pef-name", "net")
    assert result.exit_code == OptionError.exit_code
    assert "app.py compile takes no step" in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["app.py"]


def test_the_compile_of_an_app_by_several_ranks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PMI_SIZE", "2")
    monkeypatch.setenv("PMI_RANK", "1")
    with pytest.raises(LaunchError, match="started 2 ranks, but a PEF is compiled by one process"):
        parse_app_args(["compile", "--data-parallel"])
