"""What launch scripts for the hardware call, on a machine without it: srun, sbatch, snfadm, sntilestat.

`sambasim env` puts the scripts in `samba/door/commands` at the end of PATH; they call `sambasim stand-in NAME`. So a
Slurm that is installed is found first. One notice on stderr says what is run instead.

    srun ARGS COMMAND       mpirun -np TASKS COMMAND, on this machine; COMMAND itself for one task
    sbatch ARGS SCRIPT      SCRIPT, in the foreground; with --output, what it prints goes to that file
    snfadm, sntilestat      nothing: the notice names the command of sambasim that shows the simulated devices

Options: the manual pages of srun and sbatch. Those that place tasks on nodes, cores and devices are ignored.
"""

import os
import re
import shlex
import shutil
import signal
import sys
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import click

from sambasim.errors import LaunchError, OptionError

_SHORT = {
    "A": "account", "c": "cpus-per-task", "C": "constraint", "d": "dependency", "D": "chdir", "e": "error",
    "G": "gpus", "i": "input", "J": "job-name", "M": "clusters", "m": "distribution", "n": "ntasks", "N": "nodes",
    "o": "output", "p": "partition", "q": "qos", "t": "time", "T": "threads", "w": "nodelist", "x": "exclude",
}  # fmt: skip
"""Options of one letter that take a value; other letters are switches."""

_SWITCHES = {
    "contiguous", "disable-status", "exclusive", "hold", "kill-on-bad-exit", "label", "no-kill", "no-requeue",
    "overcommit", "overlap", "oversubscribe", "parsable", "preserve-env", "pty", "quiet", "requeue", "unbuffered",
    "verbose",
}  # fmt: skip
"""Long options without a value, or with one only behind `=`."""

_USED = {"ntasks", "nodes", "ntasks-per-node", "tasks-per-node", "output", "chdir", "export"}
_TASKS = "SLURM_NTASKS"


@dataclass(frozen=True, slots=True)
class _Call:
    """The options of an srun or sbatch by long name, "" for a switch, and the command or script with its arguments."""

    options: Mapping[str, str]
    command: Sequence[str]

    def tasks(self, environ: Mapping[str, str]) -> int:
        """How many processes: as the options say, else as the sbatch around this says, else 1."""
        given = self.options.get("ntasks")
        if given is None:
            per_node = self.options.get("ntasks-per-node", self.options.get("tasks-per-node"))
            nodes = self.options.get("nodes")
            if per_node is None and nodes is None:
                return _number(environ.get(_TASKS, "1"))
            return _number(nodes or "1") * _number(per_node or "1")
        return _number(given)

    def ignored(self) -> str:
        """A part of a notice."""
        names = [f"--{name}" for name in self.options if name not in _USED]
        return f"; ignored: {' '.join(names)}" if names else ""


@click.command("stand-in", hidden=True, context_settings={"allow_interspersed_args": False})
@click.argument("name", type=click.Choice(["srun", "sbatch", "snfadm", "sntilestat"]))
@click.argument("words", nargs=-1, type=click.UNPROCESSED)
def stand_in_command(name: str, words: tuple[str, ...]) -> None:
    """Do what a command of a machine with the hardware does, as far as it can be done here."""
    if name == "srun":
        _srun(words)
    elif name == "sbatch":
        _sbatch(words)
    elif name == "snfadm":
        _notice("there is no RDU and no snfadm: `sambasim devices` shows the simulated ones")
    else:
        _notice("there is no RDU and no sntilestat: `sambasim tilestat PEF` predicts what it would show")


def _srun(words: Sequence[str]) -> None:
    call = _parsed("srun", words)
    tasks = call.tasks(os.environ)
    argv = [*call.command] if tasks == 1 else [_mpirun(), "-np", str(tasks), *call.command]
    _notice(f"there is no Slurm: srun runs {shlex.join(argv)}{call.ignored()}")
    _become(argv, call, dict(os.environ))


def _sbatch(words: Sequence[str]) -> None:
    call = _parsed("sbatch", words)
    script = Path(call.command[0])
    try:
        lines = script.read_text(errors="replace").splitlines()
    except OSError as error:
        raise OptionError(
            f"sbatch cannot read the script {script}: {error.strerror}", remedy="give it the path of a script"
        ) from error
    call = _Call({**_options("sbatch", list(_directives(lines)))[0], **call.options}, call.command)
    interpreter = shlex.split(lines[0][2:]) if lines and lines[0].startswith("#!") else ["/bin/sh"]
    argv = [*interpreter, *call.command]
    _notice(f"there is no Slurm: sbatch runs {shlex.join(argv)} and waits for its end{call.ignored()}")
    environ = {**os.environ, "SLURM_JOB_ID": str(os.getpid())}
    if call.options.keys() & {"ntasks", "nodes", "ntasks-per-node", "tasks-per-node"}:
        environ[_TASKS] = str(call.tasks(os.environ))
    _become(argv, call, environ)


def _directives(lines: Sequence[str]) -> Iterator[str]:
    """The words of the `#SBATCH` lines, which stand before the first command."""
    for line in lines:
        if line.startswith("#SBATCH"):
            yield from shlex.split(line.removeprefix("#SBATCH"), comments=True)
        elif line.strip() and not line.startswith("#"):
            return


def _parsed(name: str, words: Sequence[str]) -> _Call:
    options, command = _options(name, words)
    if not command:
        what = "a command" if name == "srun" else "a script"
        raise OptionError(f"{name} was given no {what.split()[1]}", remedy=f"give {what} after the options of {name}")
    return _Call(options, command)


def _options(name: str, words: Sequence[str]) -> tuple[dict[str, str], Sequence[str]]:
    options: dict[str, str] = {}
    rest = list(words)
    while rest and rest[0].startswith("-") and rest[0] != "-":
        word = rest.pop(0)
        if word == "--":
            break
        option, has_value, value = _split(word)
        if not has_value and option not in _SWITCHES:
            if not rest:
                raise OptionError(f"{name} was given {word} without a value", remedy=f"{word} VALUE")
            value = rest.pop(0)
        options[option] = value
    return options, rest


def _split(word: str) -> tuple[str, bool, str]:
    """The long name of an option, whether a value is part of the word, and the value."""
    if word.startswith("--"):
        option, has_value, value = word[2:].partition("=")
        return option, bool(has_value), value
    long = _SHORT.get(word[1])
    if long is None:
        return word[1:], True, ""
    return long, len(word) > 2, word[2:].removeprefix("=")


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
            "srun of several tasks needs an mpirun, and there is none beside Python or in PATH",
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
        if "output" in call.options:
            file = call.options["output"].replace("%j", environ.get("SLURM_JOB_ID", str(os.getpid())))
            descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
            os.dup2(descriptor, 1)
            os.dup2(descriptor, 2)
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # Python ignores it, and what is started would inherit that
        os.execvpe(argv[0], argv, environ)
    except OSError as error:
        raise OptionError(
            f"{shlex.join(argv)} cannot be started: {error}", remedy="correct the command, or the options before it"
        ) from error


def _notice(text: str) -> None:
    print(f"notice: {text}", file=sys.stderr, flush=True)
