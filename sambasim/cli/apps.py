"""Programs for the hardware, unchanged: `sambasim app` runs a script whose `import sambaflow` finds sambasim, `sambasim
env` serves launch scripts, and `sambasim stand-in NAME` replaces commands that this machine lacks: it runs mpirun for
srun and the script for sbatch. Options: manual pages of Slurm 23.11."""

import getpass
import json
import os
import platform
import re
import shlex
import shutil
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext, redirect_stdout
from dataclasses import asdict
from importlib.machinery import SourceFileLoader
from itertools import takewhile
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import click

import sambasim
from sambasim.cli.shared import COUNT, as_json
from sambasim.errors import LaunchError, OptionError, SambasimError, failing_with, say, say_json
from sambasim.files import unless_foreign_link
from sambasim.runtime.machine.launcher import mpirun_here
from sambasim.terminal.output import survive_closed_stdout
from sambasim.units import counted

if TYPE_CHECKING:
    from sambasim.samba.checks.job import Check
    from sambasim.samba.process import Finding

PATH_ENTRY = Path(sambasim.__file__).parent / "samba" / "shim" / "path_entry"
COMMANDS = PATH_ENTRY.parent / "commands"

_STEPS = 16


@click.command("app", context_settings={"allow_interspersed_args": False})
@click.option("--check", is_flag=True, help="Run a few steps with every check, and report mistakes.")
@click.option("--check-steps", type=COUNT, metavar="N", help=f"Steps of a check; {_STEPS} by default.")
@as_json("Print the report of a check as one JSON line.")
@click.argument("script", metavar="SCRIPT.py", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("arguments", metavar="ARGS...", nargs=-1, type=click.UNPROCESSED)
def app_command(script: Path, arguments: tuple[str, ...], check: bool, check_steps: int | None, as_json: bool) -> None:
    """Run a SambaFlow app unchanged: sambasim stands in for the package sambaflow.

    All arguments after SCRIPT.py go to the script, also -h. `python -m sambasim SCRIPT.py ...` is the same.

    With --check the script stops after N steps, in epochs of half as many. The exit code is 0 without findings, 1 with
    findings, and another if the check could not continue.

    \b
    Examples:
      sambasim app logreg.py compile --data-parallel -ws 2 --pef-name logreg
      mpirun -np 2 sambasim app logreg.py run --data-parallel --reduce-on-rdu --pef out/logreg/logreg.pef
      mpirun -np 2 sambasim app --check logreg.py run --data-parallel --pef out/logreg/logreg.pef
      sambasim app logreg.py run -h
    """
    if as_json and not check:
        raise click.UsageError("--json needs --check: it prints the report of a check as JSON")
    if check_steps is not None and not check:
        raise click.UsageError("--check-steps needs --check")
    survive_closed_stdout()
    file, code = script.absolute(), 0  # before the script changes folders
    try:
        if check:
            code = _check_script(script, arguments, check_steps or _STEPS, as_json)
        else:
            _run_script(script, arguments)
    except BaseException as error:
        from sambasim.samba.ending import leave

        code = leave(error, file)
        if isinstance(error, SystemExit) and not isinstance(error.code, int | None):
            raise SystemExit(error.code) from None  # a text, which Python prints
        raise SystemExit(code) from None
    raise SystemExit(code)


def _run_script(script: Path, arguments: Sequence[str]) -> None:
    """Run a script as Python would, with the `sambaflow` shim. It stays `__main__`, for handlers at exit."""
    file = script.absolute()
    sys.argv = [str(script), *arguments]
    if not sys.flags.safe_path:
        sys.path[0] = str(file.resolve().parent)
    if str(PATH_ENTRY) not in sys.path:
        sys.path.insert(1, str(PATH_ENTRY))
    # runpy.run_path would set `sys.argv[0]` to `__file__`, and drop the module at the end.
    loader, module = SourceFileLoader("__main__", str(file)), ModuleType("__main__")
    module.__file__, module.__loader__ = str(file), loader
    module.__dict__["__cached__"] = None
    sys.modules["__main__"] = module
    exec(loader.source_to_code(loader.get_data(str(file)), str(file)), module.__dict__)


def _check_script(script: Path, arguments: Sequence[str], steps: int, as_json: bool) -> int:
    """Run a script for so many optimizer steps, and print the report on rank 0. Returns 1 for findings, else 0."""
    from sambasim.runtime.machine.launcher import launched_rank
    from sambasim.samba.checks.job import CheckIsOver, begin_check
    from sambasim.samba.process import current

    if arguments and arguments[0] == "compile":
        what = f"{script} compile takes no step, so there is nothing to check"
        raise OptionError(what, remedy=f"compile it without --check, and then sambasim app --check {script} run …")
    check, stdout, is_first = begin_check(steps), sys.stdout, launched_rank() == 0
    try:
        with redirect_stdout(sys.stderr) if as_json else nullcontext():
            try:
                _run_script(script, arguments)
            except (CheckIsOver, StopIteration):
                pass  # an app that calls next() for batches does not expect short epochs
            except RuntimeError as error:
                if not isinstance(error.__cause__, StopIteration):  # Python's error if a generator calls next()
                    raise
            except SystemExit as leaving:
                if leaving.code not in (0, None):
                    raise
        findings = check.end()
        if not (check.steps or findings):
            remedy = "check a command that trains or predicts, such as run; without OPT there is no step of training"
            raise OptionError(f"{script} took no step, so there is nothing to check", remedy=remedy)
    except BaseException as error:
        if as_json and is_first:
            say_json(_json(script, check, current().reporter.findings, error), stdout)
        raise
    if is_first:
        (say_json if as_json else say)((_json if as_json else _in_words)(script, check, findings), stdout)
    return int(bool(findings))


def _in_words(script: Path, check: "Check", findings: "Sequence[Finding]") -> str:
    from sambasim.samba.process import current

    numbers = {"replica": current().world_size, "step": check.steps, "finding": len(findings)}
    replicas, steps, found = (counted(count, noun) if count else f"no {noun}" for noun, count in numbers.items())
    cut = " with shortened epochs, so the scores differ from those of a run" if check.epochs_cut else ""
    heading = f"check of {script}, {replicas}, {steps}{cut}: {found}"
    return "\n".join([heading, *(finding.shown_as(finding.code) for finding in findings)])


def _json(script: Path, check: "Check", findings: "Sequence[Finding]", error: BaseException | None = None) -> str:
    """One line, with the code of each finding and of the error that ended the app: "app" for its own exceptions."""
    from sambasim.samba.ending import translated
    from sambasim.samba.process import current

    fields = None
    match error and translated(error):
        case SambasimError() as ours:
            fields = {"code": ours.code, "what": ours.what, "where": ours.where, "remedy": ours.remedy}
        case BaseException() as other:
            fields = {"code": "app", "what": f"{type(other).__name__}: {other}", "where": None, "remedy": None}
    numbers = {"replicas": current().world_size, "steps": check.steps, "epochs_cut": check.epochs_cut}
    record = {"script": str(script), **numbers, "findings": [asdict(finding) for finding in findings], "error": fields}
    return json.dumps(record, ensure_ascii=False, separators=(",", ":"))


_SHORT = {
    "a": "array", "A": "account", "b": "begin", "B": "extra-node-info", "c": "cpus-per-task", "C": "constraint",
    "d": "dependency", "D": "chdir", "e": "error", "E": "preserve-env", "F": "nodefile", "G": "gpus", "h": "help",
    "H": "hold", "i": "input", "I": "immediate", "J": "job-name", "k": "no-kill", "K": "kill-on-bad-exit",
    "l": "label", "L": "licenses", "m": "distribution", "M": "clusters", "n": "ntasks", "N": "nodes", "o": "output",
    "O": "overcommit", "p": "partition", "q": "qos", "Q": "quiet", "r": "relative", "s": "oversubscribe",
    "S": "core-spec", "t": "time", "T": "threads", "u": "unbuffered", "v": "verbose", "V": "version", "w": "nodelist",
    "W": "wait", "x": "exclude", "X": "disable-status", "Z": "no-allocate",
}  # fmt: skip

_SWITCHES = {
    "bcast", "compress", "contiguous", "disable-status", "exact", "exclusive", "get-user-env", "help", "hold",
    "ignore-pbs", "immediate", "kill-on-bad-exit", "label", "multi-prog", "nice", "no-allocate", "no-kill",
    "no-requeue", "overcommit", "overlap", "oversubscribe", "parsable", "preserve-env", "propagate", "pty", "quiet",
    "quit-on-interrupt", "reboot", "requeue", "resv-ports", "send-libs", "spread-job", "stepmgr", "test-only",
    "unbuffered", "usage", "use-min-nodes", "verbose", "version", "whole", "x11",
}  # fmt: skip
"""Long options without a value, or with one only after `=`. All others take a value, `--wait` only that of srun."""

_TASK_COUNTS = {"ntasks", "nodes", "ntasks-per-node", "tasks-per-node"}
_USED = {*_TASK_COUNTS, "output", "error", "chdir", "export", "job-name", "wrap"}


@click.command("env")
def env_command() -> None:
    """Print shell commands with which launch scripts for the hardware work unchanged.

    They set PATH and PYTHONPATH: `import sambaflow` then imports sambasim, and srun, sbatch, snfadm and sntilestat run
    replacements of sambasim unless they are installed.

    \b
    Examples:
      eval "$(sambasim env)"
      mpirun -np 2 python app.py run --data-parallel --reduce-on-rdu --pef app.pef
    """
    for line in shell_lines(os.environ, Path(sys.executable).parent):
        print(line)
    if sys.stdout.isatty():
        print('nothing is set yet; to set it, type:  eval "$(sambasim env)"', file=sys.stderr)


def shell_lines(environ: Mapping[str, str], folder: Path) -> Iterator[str]:
    """The commands for a shell. `folder`, of this Python, goes first in PATH if others would be found before."""

    def entries(variable: str, own: Path) -> list[str]:
        return [entry for entry in environ.get(variable, "").split(os.pathsep) if entry not in ("", str(own))]

    path = entries("PATH", COMMANDS)
    names = [name for name in ("python", "mpirun") if (folder / name).exists()]
    if any(Path(shutil.which(name, path=environ.get("PATH", "")) or "").parent != folder for name in names):
        path = [str(folder), *(entry for entry in path if entry != str(folder))]
    yield f"export PATH={shlex.quote(os.pathsep.join([*path, str(COMMANDS)]))}"
    libraries = [str(PATH_ENTRY), *entries("PYTHONPATH", PATH_ENTRY)]
    yield f"export PYTHONPATH={shlex.quote(os.pathsep.join(libraries))}"


@click.command("stand-in", hidden=True, context_settings={"allow_interspersed_args": False})
@click.argument("name", type=click.Choice(["srun", "sbatch", "snfadm", "sntilestat"]))
@click.argument("words", nargs=-1, type=click.UNPROCESSED)
def stand_in_command(name: str, words: tuple[str, ...]) -> None:
    instead = {"snfadm": "devices` shows the simulated ones", "sntilestat": "tilestat PEF` predicts what it would show"}
    if name in instead:
        return _notice(f"there is no RDU and no {name}: `sambasim {instead[name]}")
    options, command = _parsed(name, words)
    if options.keys() & {"version", "help", "usage"}:
        click.echo(f"{name} of sambasim {sambasim.__version__}: there is no Slurm, so {name} runs on this machine")
    elif "test-only" in options:
        _notice(f"there is no Slurm: {name} --test-only runs nothing")
    elif name == "srun":
        _srun(options, command)
    else:
        _sbatch(options, command)


def _srun(options: Mapping[str, str], command: Sequence[str]) -> None:
    if "multi-prog" in options:
        what = "srun --multi-prog is not available: each task would run another program"
        raise OptionError(what, remedy="name the programs in one line: mpirun -np 1 FIRST : -np 1 SECOND")
    if not command:
        raise OptionError("srun was given no command", remedy="give a command after the options of srun")
    tasks, mpirun = _tasks(options), mpirun_here()
    if tasks > 1 and mpirun is None:
        what = "srun with several tasks needs mpirun, and there is none beside Python or in PATH"
        raise LaunchError(what, remedy="install one: pip install 'sambasim[mpi]'")
    argv = [*command] if tasks == 1 else [str(mpirun), "-np", str(tasks), *command]
    _notice(f"there is no Slurm: srun runs {shlex.join(argv)}{_ignored(options)}")
    _become(argv, options, {"SLURM_JOB_NAME": os.environ.get("SLURM_JOB_NAME", Path(command[0]).name)})


def _sbatch(options: Mapping[str, str], command: Sequence[str]) -> None:
    wrapped = options.get("wrap")
    if wrapped is not None and command:
        raise OptionError("sbatch was given both a script and --wrap", remedy="leave out one of them")
    if wrapped is not None:
        job_name, argv = "wrap", ["/bin/sh", "-c", wrapped]
    else:
        text, job_name = _script(command)
        interpreter = shlex.split(text.splitlines()[0][2:]) if text.startswith("#!") else ["/bin/sh"]
        argv = [*interpreter, *(command or ["-c", text])]
        comments = takewhile(lambda line: not line.strip() or line.startswith("#"), text.splitlines())
        lines = [line.removeprefix("#SBATCH") for line in comments if line.startswith("#SBATCH")]
        words = [word for line in lines for word in shlex.split(line, comments=True)]
        options = {**_parsed("sbatch", words)[0], **options}
    shown = shlex.join(argv) if command or wrapped else "the script from stdin"
    _notice(f"there is no Slurm: sbatch runs {shown} and waits for it{_ignored(options)}")
    variables = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_JOB_NAME": job_name}
    if options.keys() & _TASK_COUNTS:
        variables["SLURM_NTASKS"] = str(_tasks(options))
    if command and "chdir" in options:  # the path of the script is relative to where sbatch was called
        argv[-len(command)] = os.path.abspath(command[0])
    _become(argv, options, variables)


def _script(command: Sequence[str]) -> tuple[str, str]:
    """The text of the script, and its name."""
    if not command:
        text = "" if sys.stdin.isatty() else sys.stdin.read()
        if not text.strip():
            raise OptionError("sbatch was given no script", remedy="give a script after the options of sbatch")
        return text, "sbatch"
    script = Path(command[0])
    with failing_with(OptionError, f"sbatch cannot read the script {script}", "give it the path of a script"):
        text = script.read_text(errors="replace")
    return text, script.name


def _parsed(name: str, words: Sequence[str]) -> tuple[dict[str, str], Sequence[str]]:
    """The options by long name, and the remaining words. `--wait` of sbatch, which waits anyway, is left out."""
    options: dict[str, str] = {}
    switches = _SWITCHES | ({"wait"} if name == "sbatch" else set())
    rest = list(words)
    while rest and rest[0].startswith("-") and rest[0] != "-":
        word = rest.pop(0)
        if word == "--":
            break
        if word.startswith("--"):
            option, has_value, value = word[2:].partition("=")
        else:
            option, value = _SHORT.get(word[1], word[1]), word[2:]
            has_value = value
            if option in switches and value[:1] in _SHORT:  # -lu is -l -u
                rest.insert(0, f"-{value}")
            value = value.removeprefix("=")
        if not has_value and option not in switches:
            if not rest:
                raise OptionError(f"{name} was given {word} without a value", remedy=f"{word} VALUE")
            value = rest.pop(0)
        if (name, option) != ("sbatch", "wait"):
            options[option] = value
    return options, rest


def _tasks(options: Mapping[str, str]) -> int:
    if "ntasks" in options:
        return _number(options["ntasks"])
    if not options.keys() & _TASK_COUNTS:
        return _number(os.environ.get("SLURM_NTASKS", "1"))
    per_node = options.get("ntasks-per-node", options.get("tasks-per-node", "1"))
    return _number(options.get("nodes", "1")) * _number(per_node)


def _number(text: str) -> int:
    match = re.fullmatch(r"([1-9]\d*)(-\d+)?", text)
    if match is None:
        raise OptionError(f"the number of tasks or nodes is {text!r}", remedy="give a whole number above 0")
    return int(match[1])


def _ignored(options: Mapping[str, str]) -> str:
    names = [f"--{name}" for name in options if name not in _USED]
    return f"; ignored: {' '.join(names)}" if names else ""


def _become(argv: list[str], options: Mapping[str, str], variables: Mapping[str, str]) -> None:
    """Replace this process by `argv`, with `variables` and what the options say."""
    environ = {**os.environ, **variables}
    if "job-name" in options:
        environ["SLURM_JOB_NAME"] = options["job-name"]
    for part in options.get("export", "").split(","):
        name, assigned, value = part.partition("=")
        if assigned:
            environ[name] = value
    try:
        if "chdir" in options:
            os.chdir(options["chdir"])
        for option, streams in (("output", (1, 2)), ("error", (2,))):
            if option in options:
                file = _file_name(options[option], environ)
                descriptor = unless_foreign_link(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
                for stream in streams:
                    os.dup2(descriptor, stream)
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # Python ignores it, and the command would inherit that
        os.execvpe(argv[0], argv, environ)
    except OSError as error:
        what = f"{shlex.join(argv)} cannot be started: {error}"
        raise OptionError(what, remedy="correct the command, or the options before it") from error


def _file_name(pattern: str, environ: Mapping[str, str]) -> str:
    """`%x_%4j.out` with the name and number of the job: `job_0042.out`. All tasks write to the file of task 0."""
    letters = dict.fromkeys("AjJ", environ.get("SLURM_JOB_ID", str(os.getpid()))) | dict.fromkeys("anst", "0")
    names = {"x": environ["SLURM_JOB_NAME"], "u": getpass.getuser(), "N": platform.node(), "%": "%"}

    def replaced(match: re.Match[str]) -> str:
        number = letters.get(match[2])
        return names[match[2]] if number is None else number.zfill(int(match[1] or 0))

    return re.sub(r"%(\d?)([%AaJjNnstux])", replaced, pattern)


def _notice(text: str) -> None:
    say(f"notice: {text}", sys.stderr)
