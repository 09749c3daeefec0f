"""What the person who compiles an app is told: what is going on, and in the end what to know and what to type next."""

import os
import shlex
import sys
from collections.abc import Iterator, Sequence

from sambasim.compiler.compile import Compiled
from sambasim.samba import context
from sambasim.samba.utils.flag import RUN
from sambasim.samba.utils.flags import FLAGS


def tell_phase(phase: str) -> None:
    """A line on stderr."""
    print(f"{phase} …", file=sys.stderr, flush=True)


def print_compiled(compiled: Compiled) -> None:
    """Notes, the file, and the command that runs it, if a command line compiled it."""
    path = os.path.abspath(compiled.path)
    for notice in compiled.notices:
        print(f"note: {notice}")
    print(f"PEF file {path} created\nCompilation succeeded")
    words, command = context.typed_command(), context.current().command
    if command in words:
        start, program = words.index(command), compiled.program
        replicas = max(program.world_size, 2) if program.data_parallel else 1
        print(f"next: {run_command(words[:start], words[start + 1 :], path, replicas)}")
    sys.stdout.flush()


def run_command(start: Sequence[str], typed: Sequence[str], path: str, replicas: int) -> str:
    """The command line that runs the PEF at `path`.

    start: what starts the app: `["python", "app.py"]`
    typed: what stood behind `compile`; what a run has no use for is left out
    """
    inside = os.path.relpath(path)
    words = [*start, RUN, *_of_a_run(typed), "--pef", path if inside.startswith(os.pardir) else inside]
    if replicas > 1:
        words = ["mpirun", "-np", str(replicas), *words, "--reduce-on-rdu"]
    return shlex.join(words)


def _of_a_run(typed: Sequence[str]) -> Iterator[str]:
    """The words of `typed` without those flags of the library, and their values, that a run does not have."""
    left_out = {name: flag for flag in FLAGS if RUN not in flag.commands for name in flag.names}
    skipping = False
    for word in typed:
        if word.startswith("-"):
            name, given, _ = word.partition("=")
            flag = left_out.get(name.replace("_", "-"))
            skipping = flag is not None and flag.convert is not None and not given
            if flag is None:
                yield word
        elif not skipping:
            yield word
