"""Launch scripts for the hardware, unchanged: `sambasim env`, and replacements for commands that this machine lacks:
`sambasim stand-in NAME` runs mpirun for srun and the script for sbatch. Options that place tasks are ignored. Source of
the options: the manual pages of srun and sbatch, Slurm 23.11."""

import getpass
import os
import platform
import re
import shlex
import shutil
import signal
import sys
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import click

from sambasim import __version__
from sambasim.cli.app import PATH_ENTRY
from sambasim.errors import LaunchError, OptionError
from sambasim.runtime.machine.launcher import mpirun_here

COMMANDS = PATH_ENTRY.parent / "commands"

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
    """Print shell commands (sh, bash, zsh) with which launch scripts for the hardware work unchanged.

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
    """The commands for a shell with the environment `environ`. `folder`, of the Python that has sambasim, goes to the
    front of PATH if another `python` or `mpirun` would be found first."""
    path = environ.get("PATH", "")
    entries = [entry for entry in path.split(os.pathsep) if entry not in ("", str(COMMANDS))]
    found = [shutil.which(name, path=path) for name in ("python", "mpirun") if (folder / name).exists()]
    if any(where is None or Path(where).parent != folder for where in found):
        entries = [str(folder), *(entry for entry in entries if entry != str(folder))]
    libraries = environ.get("PYTHONPATH", "").split(os.pathsep)
    libraries = [str(PATH_ENTRY), *(entry for entry in libraries if entry not in ("", str(PATH_ENTRY)))]
    yield f"export PATH={shlex.quote(os.pathsep.join([*entries, str(COMMANDS)]))}"
    yield f"export PYTHONPATH={shlex.quote(os.pathsep.join(libraries))}"


@dataclass(frozen=True, slots=True)
class _Call:
    options: Mapping[str, str]
    command: Sequence[str]

    def tasks(self) -> int:
        if "ntasks" in self.options:
            return _number(self.options["ntasks"])
        if not self.options.keys() & _TASK_COUNTS:
            return _number(os.environ.get("SLURM_NTASKS", "1"))
        per_node = self.options.get("ntasks-per-node", self.options.get("tasks-per-node", "1"))
        return _number(self.options.get("nodes", "1")) * _number(per_node)

    def ignored(self) -> str:
        names = [f"--{name}" for name in self.options if name not in _USED]
        return f"; ignored: {' '.join(names)}" if names else ""


@click.command("stand-in", hidden=True, context_settings={"allow_interspersed_args": False})
@click.argument("name", type=click.Choice(["srun", "sbatch", "snfadm", "sntilestat"]))
@click.argument("words", nargs=-1, type=click.UNPROCESSED)
def stand_in_command(name: str, words: tuple[str, ...]) -> None:
    if name == "snfadm":
        return _notice("there is no RDU and no snfadm: `sambasim devices` shows the simulated ones")
    if name == "sntilestat":
        return _notice("there is no RDU and no sntilestat: `sambasim tilestat PEF` predicts what it would show")
    call = _Call(*_parsed(name, words))
    if call.options.keys() & {"version", "help", "usage"}:
        click.echo(f"{name} of sambasim {__version__}: there is no Slurm, so {name} runs on this machine")
    elif "test-only" in call.options:
        _notice(f"there is no Slurm: {name} --test-only runs nothing")
    elif name == "srun":
        _srun(call)
    else:
        _sbatch(call)


def _srun(call: _Call) -> None:
    if "multi-prog" in call.options:
        raise OptionError(
            "srun --multi-prog is not available: each task would run another program",
            remedy="name the programs in one line: mpirun -np 1 FIRST : -np 1 SECOND",
        )
    if not call.command:
        raise OptionError("srun was given no command", remedy="give a command after the options of srun")
    tasks = call.tasks()
    argv = [*call.command] if tasks == 1 else [_mpirun(), "-np", str(tasks), *call.command]
    _notice(f"there is no Slurm: srun runs {shlex.join(argv)}{call.ignored()}")
    job_name = os.environ.get("SLURM_JOB_NAME", Path(call.command[0]).name)
    _become(argv, call, {**os.environ, "SLURM_JOB_NAME": call.options.get("job-name", job_name)})


def _sbatch(call: _Call) -> None:
    wrapped = call.options.get("wrap")
    if wrapped is not None:
        if call.command:
            raise OptionError("sbatch was given both a script and --wrap", remedy="leave out one of them")
        job_name, argv = "wrap", ["/bin/sh", "-c", wrapped]
    else:
        text, job_name = _script(call.command)
        lines = text.splitlines()
        interpreter = shlex.split(lines[0][2:]) if lines and lines[0].startswith("#!") else ["/bin/sh"]
        argv = [*interpreter, *(call.command or ["-c", text])]
        call = _Call({**_parsed("sbatch", list(_directives(lines)))[0], **call.options}, call.command)
    shown = shlex.join(argv) if call.command or wrapped else "the script from stdin"
    _notice(f"there is no Slurm: sbatch runs {shown} and waits for it{call.ignored()}")
    environ = {**os.environ, "SLURM_JOB_ID": str(os.getpid())}
    environ["SLURM_JOB_NAME"] = call.options.get("job-name", job_name)
    if call.options.keys() & _TASK_COUNTS:
        environ["SLURM_NTASKS"] = str(call.tasks())
    if call.command and "chdir" in call.options:  # the path of the script is relative to where sbatch was called
        argv[-len(call.command)] = os.path.abspath(call.command[0])
    _become(argv, call, environ)


def _script(command: Sequence[str]) -> tuple[str, str]:
    if not command:
        text = "" if sys.stdin.isatty() else sys.stdin.read()
        if not text.strip():
            raise OptionError("sbatch was given no script", remedy="give a script after the options of sbatch")
        return text, "sbatch"
    script = Path(command[0])
    try:
        return script.read_text(errors="replace"), script.name
    except OSError as error:
        raise OptionError(
            f"sbatch cannot read the script {script}: {error.strerror}", remedy="give it the path of a script"
        ) from error


def _directives(lines: Sequence[str]) -> Iterator[str]:
    for line in lines:
        if line.startswith("#SBATCH"):
            yield from shlex.split(line.removeprefix("#SBATCH"), comments=True)
        elif line.strip() and not line.startswith("#"):
            return


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


def _number(text: str) -> int:
    match = re.fullmatch(r"([1-9]\d*)(-\d+)?", text)
    if match is None:
        raise OptionError(f"the number of tasks or nodes is {text!r}", remedy="give a whole number above 0")
    return int(match[1])


def _mpirun() -> str:
    found = mpirun_here()
    if found is None:
        raise LaunchError(
            "srun with several tasks needs mpirun, and there is none beside Python or in PATH",
            remedy="install one: pip install 'sambasim[mpi]'",
        )
    return found


def _become(argv: list[str], call: _Call, environ: MutableMapping[str, str]) -> None:
    for part in call.options.get("export", "").split(","):
        name, assigned, value = part.partition("=")
        if assigned:
            environ[name] = value
    try:
        if "chdir" in call.options:
            os.chdir(call.options["chdir"])
        for option, streams in (("output", (1, 2)), ("error", (2,))):
            if option in call.options:
                file = _file_name(call.options[option], environ)
                descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
                for stream in streams:
                    os.dup2(descriptor, stream)
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # Python ignores it, and the command would inherit that
        os.execvpe(argv[0], argv, environ)
    except OSError as error:
        raise OptionError(
            f"{shlex.join(argv)} cannot be started: {error}", remedy="correct the command, or the options before it"
        ) from error


def _file_name(pattern: str, environ: Mapping[str, str]) -> str:
    """`%x_%4j.out` with the name and number of the job: `job_0042.out`. All tasks write to the file of task 0."""
    job = environ.get("SLURM_JOB_ID", str(os.getpid()))
    letters = dict.fromkeys("AjJ", job) | dict.fromkeys("anst", "0")
    letters |= {"x": environ["SLURM_JOB_NAME"], "u": getpass.getuser(), "N": platform.node(), "%": "%"}

    def replaced(match: re.Match[str]) -> str:
        text = letters[match[2]]
        return text.zfill(int(match[1] or 0)) if match[2] in "AjJanst" else text

    return re.sub(r"%(\d?)([%AaJjNnstux])", replaced, pattern)


def _notice(text: str) -> None:
    print(f"notice: {text}", file=sys.stderr, flush=True)
