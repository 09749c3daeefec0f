"""What the person who compiles an app is told: what is going on, and in the end what to know and what to type next."""

import os
import sys
from collections.abc import Iterator

from sambasim.compiler.compile import Compiled
from sambasim.ir.program import Program
from sambasim.ir.types import SymbolKind
from sambasim.report.summaries import section_counts
from sambasim.samba import context


def tell_phase(phase: str) -> None:
    """A line on stderr, unless --log-level asks for less than that."""
    level = str(getattr(context.current().arguments, "log_level", None)).lower()
    if level not in ("warning", "warn", "error", "critical", "fatal"):
        print(f"{phase} …", file=sys.stderr, flush=True)


def print_compiled(compiled: Compiled) -> None:
    """What was made, notes, the file, and the command that runs it, where a command line compiled it."""
    path, program = os.path.abspath(compiled.path), compiled.program
    graph = program.training or program.evaluation
    kinds = ", ".join(f"{count} {kind}" for kind, count in section_counts(graph).items())
    print(f"{program.name}: {len(graph.sections)} sections ({kinds}), {len(graph.nodes)} operators")
    for notice in (*compiled.notices, *_of_the_loss(program)):
        print(f"notice: {notice}")
    print(f"PEF file {path} created\nCompilation succeeded")
    run = context.current().next_run
    command = run.command(_as_typed(path), max(program.world_size, 2) if program.data_parallel else 1) if run else None
    if command is not None:
        print(f"next: {command}")
    sys.stdout.flush()


def _of_the_loss(program: Program) -> Iterator[str]:
    """Where the backward starts, if it is not from a loss that is the model's first output."""
    if program.loss is None or program.training is None:
        return
    loss = program.symbols[program.loss].type
    outputs = [one.symbol for one in program.training.outputs if program.symbols[one.symbol].kind is SymbolKind.OUTPUT]
    if len(loss.shape) > 1:
        what = "the model returns no loss: set sn_grad on the output that a backward starts from"
        yield f"{what}; without it, it is output {outputs.index(program.loss) + 1}, {loss}"
    elif outputs.index(program.loss) > 0:
        yield f"the loss is output {outputs.index(program.loss) + 1} of the model"


def _as_typed(path: str) -> str:
    """`path` from the folder in which the app was started, if it is in there."""
    relative = os.path.relpath(path, context.STARTED_IN)
    return path if relative.startswith(os.pardir) else relative
