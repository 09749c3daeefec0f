"""Replacements for commands that launch scripts call and this machine lacks: srun, sbatch, snfadm, sntilestat.

`sambasim env` appends the folder `samba/shim/commands` to PATH, behind an installed Slurm; its scripts call
`sambasim stand-in NAME`. One notice on stderr says what runs instead.

    srun ARGS COMMAND       mpirun -np TASKS COMMAND, on this machine; COMMAND itself for one task
    sbatch ARGS SCRIPT      SCRIPT, in the foreground; also a script from stdin, and --wrap COMMAND
    snfadm, sntilestat      nothing: the notice names the command of sambasim that shows the simulated devices

--output and --error redirect the output. Options that place tasks on nodes, cores and devices are ignored. Source of
the options: the manual pages of srun and sbatch, Slurm 23.11.
"""

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
from sambasim.errors import LaunchError, OptionError

_SHORT = {
    "a": "array", "A": "account", "b": "begin", "B": "extra-node-info", "c": "cpus-per-task", "C": "constraint",
    "d": "dependency", "D": "chdir", "e": "error", "E": "preserve-env", "F": "nodefile", "G": "gpus", "h": "help",
    "H": "hold", "i": "input", "I": "immediate", "J": "job-name", "k": "no-kill", "K": "kill-on-bad-exit",
    "l": "label", "L": "licenses", "m": "distribution", "M": "clusters", "n": "ntasks", "N": "nodes", "o": "output",
    "O": "overcommit", "p": "partition", "q": "qos", "Q": "quiet", "r": "relative", "s": "oversubscribe",
    "S": "core-spec", "t": "time", "T": "threads", "u": "unbuffered", "v": "verbose", "V": "version", "w": "nodelist",
    "W": "wait", "x": "exclude", "X": "disable-status", "Z": "no-allocate",
}  # fmt: skip
"""Long names of short options."""

_SWITCHES_OF_BOTH = {
    "bcast", "compress", "contiguous", "disable-status", "exact", "exclusive", "get-user-env", "help", "hold",
    "ignore-pbs", "immediate", "kill-on-bad-exit", "label", "multi-prog", "nice", "no-allocate", "no-kill",
    "no-requeue", "overcommit", "overlap", "oversubscribe", "parsable", "preserve-env", "propagate", "pty", "quiet",
    "quit-on-interrupt", "reboot", "requeue", "resv-ports", "send-libs", "spread-job", "stepmgr", "test-only",
    "unbuffered", "usage", "use-min-nodes", "verbose", "version", "whole", "x11",
}  # fmt: skip
_SWITCHES = {"srun": _SWITCHES_OF_BOTH, "sbatch": _SWITCHES_OF_BOTH | {"wait"}}
"""Long options without a value, or with one only after `=`. All others take a value, as `--wait` of srun does."""

_TASK_COUNTS = {"ntasks", "nodes", "ntasks-per-node", "tasks-per-node"}
_USED = {*_TASK_COUNTS, "output", "error", "chdir", "export", "job-name", "wrap"}
_TASKS = "SLURM_NTASKS"


@dataclass(frozen=True, slots=True)
class _Call:
    """The options by long name, "" for a switch, and the command or script with its arguments."""

    options: Mapping[str, str]
    command: Sequence[str]

    def tasks(self, environ: Mapping[str, str]) -> int:
        """The number of processes: from the options, or from the enclosing sbatch, or 1."""
        given = self.options.get("ntasks")
        if given is None:
            per_node = self.options.get("ntasks-per-node", self.options.get("tasks-per-node"))
            nodes = self.options.get("nodes")
            if per_node is None and nodes is None:
                return _number(environ.get(_TASKS, "1"))
            return _number(nodes or "1") * _number(per_node or "1")
        return _number(given)

    def ignored(self, used: frozenset[str] = frozenset()) -> str:
        """The part of a notice that lists ignored options; `used` have an effect for this command."""
        names = [f"--{name}" for name in self.options if name not in _USED | used]
        return f"; ignored: {' '.join(names)}" if names else ""


@click.command("stand-in", hidden=True, context_settings={"allow_interspersed_args": False})
@click.argument("name", type=click.Choice(["srun", "sbatch", "snfadm", "sntilestat"]))
@click.argument("words", nargs=-1, type=click.UNPROCESSED)
def stand_in_command(name: str, words: tuple[str, ...]) -> None:
    """Run the replacement for a command of a machine with the hardware."""
    if name == "snfadm":
        _notice("there is no RDU and no snfadm: `sambasim devices` shows the simulated ones")
        return
    if name == "sntilestat":
        _notice("there is no RDU and no sntilestat: `sambasim tilestat PEF` predicts what it would show")
        return
    call = _Call(*_options(name, words))
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
    tasks = call.tasks(os.environ)
    argv = [*call.command] if tasks == 1 else [_mpirun(), "-np", str(tasks), *call.command]
    _notice(f"there is no Slurm: srun runs {shlex.join(argv)}{call.ignored()}")
    job_name = call.options.get("job-name", os.environ.get("SLURM_JOB_NAME", Path(call.command[0]).name))
    _become(argv, call, {**os.environ, "SLURM_JOB_NAME": job_name})


def _sbatch(call: _Call) -> None:
    wrapped = call.options.get("wrap")
    if wrapped is not None:
        if call.command:
            raise OptionError("sbatch was given both a script and --wrap", remedy="leave out one of them")
        job_name, argv = "wrap", ["/bin/sh", "-c", wrapped]
    else:
        text, name = _script(call.command)
        lines = text.splitlines()
        interpreter = shlex.split(lines[0][2:]) if lines and lines[0].startswith("#!") else ["/bin/sh"]
        job_name, argv = Path(name).name, [*interpreter, *(call.command or ["-c", text])]
        call = _Call({**_options("sbatch", list(_directives(lines)))[0], **call.options}, call.command)
    shown = shlex.join(argv) if call.command or wrapped else "the script from stdin"
    _notice(f"there is no Slurm: sbatch runs {shown} and waits for it{call.ignored(frozenset({'wait'}))}")
    environ = {
        **os.environ,
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_JOB_NAME": call.options.get("job-name", job_name),
    }
    if call.options.keys() & _TASK_COUNTS:
        environ[_TASKS] = str(call.tasks(os.environ))
    if call.command and "chdir" in call.options:  # the path of the script is relative to where sbatch was called
        argv[-len(call.command)] = os.path.abspath(call.command[0])
    _become(argv, call, environ)


def _script(command: Sequence[str]) -> tuple[str, str]:
    """The text and name of the script, from a file or from stdin."""
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
    """The words of the `#SBATCH` lines before the first command."""
    for line in lines:
        if line.startswith("#SBATCH"):
            yield from shlex.split(line.removeprefix("#SBATCH"), comments=True)
        elif line.strip() and not line.startswith("#"):
            return


def _options(name: str, words: Sequence[str]) -> tuple[dict[str, str], Sequence[str]]:
    """The options by long name, and the remaining words."""
    options: dict[str, str] = {}
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
            if option in _SWITCHES[name] and value[:1] in _SHORT:  # -lu is -l -u
                rest.insert(0, f"-{value}")
            value = value.removeprefix("=")
        if not has_value and option not in _SWITCHES[name]:
            if not rest:
                raise OptionError(f"{name} was given {word} without a value", remedy=f"{word} VALUE")
            value = rest.pop(0)
        options[option] = value
    return options, rest


def _number(text: str) -> int:
    """`"2"`, or the smaller number of a range, `"2-4"`."""
    match = re.fullmatch(r"([1-9]\d*)(-\d+)?", text)
    if match is None:
        raise OptionError(f"the number of tasks or nodes is {text!r}", remedy="give a whole number above 0")
    return int(match[1])


def _mpirun() -> str:
    beside = Path(sys.executable).parent / "mpirun"
    found = str(beside) if beside.exists() else shutil.which("mpirun")
    if found is None:
        raise LaunchError(
            "srun with several tasks needs mpirun, and there is none beside Python or in PATH",
            remedy="install one: pip install 'sambasim[mpi]'",
        )
    return found


def _become(argv: list[str], call: _Call, environ: MutableMapping[str, str]) -> None:
    """Replace this process by `argv`."""
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

    def replaced(match: re.Match[str]) -> str:
        width, letter = match.groups()
        if letter in "AjJ":
            return job.zfill(int(width or 0))
        if letter in "anst":
            return "0".zfill(int(width or 0))
        return {"x": environ["SLURM_JOB_NAME"], "u": getpass.getuser(), "N": platform.node(), "%": "%"}[letter]

    return re.sub(r"%(\d?)([%AaJjNnstux])", replaced, pattern)


def _notice(text: str) -> None:
    print(f"notice: {text}", file=sys.stderr, flush=True)
