"""`session.compile`: capture a model, compile it, write the PEF, and print what was compiled."""

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from torch import nn

from sambasim.compiler.compile import Compiled, Stopwatch, assemble, capture_model
from sambasim.ir.program import Program
from sambasim.ir.types import SymbolKind
from sambasim.report.summaries import section_counts
from sambasim.samba import context
from sambasim.samba.inputs import Inputs, repeatable
from sambasim.samba.request import (
    LOSS_INDICES,
    Optimizer,
    as_sequence,
    build_fields,
    fingerprint_of,
    request,
    unwrapped,
)


def compile_model(
    model: nn.Module,
    inputs: Inputs,
    optimizers: Optimizer | Sequence[Optimizer] | None,
    name: str | None,
    config: Mapping[str, object],
    metadata: Mapping[str, object],
    *,
    inference: bool,
    loss_indices: Sequence[int] | int | None,
) -> str:
    """Compiles `model` with the options of `config`. Returns the absolute path of the PEF. See `Session.compile`."""
    typed = context.current().arguments
    model = unwrapped(model)
    asked = request(
        model,
        repeatable(inputs),
        as_sequence(optimizers),
        build_fields(config, name or type(model).__name__.lower()),
        inference=inference,
        loss_indices=loss_indices,
    )
    kept = {str(getattr(key, "key", key)): str(value) for key, value in metadata.items()}
    parsed = getattr(typed, "parsed_batch_size", None)
    if parsed is not None:  # the default of -b on a run
        kept.setdefault("parsed_batch_size", str(parsed))
    watch = Stopwatch(_print_phase)
    built = capture_model(
        model,
        asked.inputs,
        asked.options,
        by_keyword=asked.by_keyword,
        any_loss=True,
        loss_indices=asked.loss_indices,
        watch=watch,
    )
    # The fingerprint calls the model, which may leave something behind, as in a cache; so it comes after the capture.
    kept |= fingerprint_of(asked) | fingerprint_of(replace(asked, updates=()))
    if asked.loss_indices:
        kept[LOSS_INDICES] = ",".join(map(str, asked.loss_indices))
    compiled = assemble(built, model, asked.options, watch, asked.updates or None, kept)
    _print_compiled(compiled)
    return str(compiled.path.absolute())


def _print_phase(phase: str) -> None:
    """A line on stderr, unless --log-level is above info."""
    level = str(getattr(context.current().arguments, "log_level", None)).lower()
    if level not in ("warning", "warn", "error", "critical", "fatal"):
        print(f"{phase} …", file=sys.stderr, flush=True)


def _print_compiled(compiled: Compiled) -> None:
    """The sections, notices, the file, and the command that runs it if a command line compiled it."""
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
    """A notice if the backward does not start from a loss that is the first output."""
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
    """`path` relative to the folder in which the app was started, if it is inside."""
    relative = os.path.relpath(path, context.STARTED_IN)
    return path if relative.startswith(os.pardir) else relative
