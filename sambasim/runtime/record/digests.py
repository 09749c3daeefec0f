"""`run --record-digests`: digests of what every replica computes in each step, one file per replica.

before the first step   parameters, buffers, optimizer states
every micro-step        inputs; at the end of each section: the values that leave it, gradients, buffers, the loss
after the update        parameters of every replica; optimizer states, whole, with replica 0
"""

import hashlib
import math
import platform
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from sambasim import __version__
from sambasim.errors import MachineError, OptionError
from sambasim.ir.dataflow import pass_and_update
from sambasim.ir.graph import Graph, Section
from sambasim.ir.program import Program
from sambasim.ir.types import SymbolKind
from sambasim.options.given import leaves
from sambasim.options.grammar import StepRange, step_range
from sambasim.pef.weights import bytes_of
from sambasim.records.digests import (
    REPLICA_FILES,
    RUN_FILE,
    RecordedRun,
    SectionName,
    StepDigests,
    ValueDigest,
    What,
    is_recording,
    replica_file,
)
from sambasim.runtime.outcome import exempt
from sambasim.runtime.run.plan import Plan
from sambasim.runtime.run.run_observer import LineFile, RunObserver, write_whole
from sambasim.runtime.run.setup import Setup
from sambasim.runtime.run.team import Team
from sambasim.runtime.watch.observer import StepRecorder

UNWRITTEN: Mapping[str, int] = {
    "aten.mkldnn_rnn_layer.default": 3,  # the kernel's workspace for its backward
    "aten.empty.memory_format": 0,
    "aten.empty_like.default": 0,
    "aten.empty_permuted.default": 0,
    "aten.empty_strided.default": 0,
    "aten.new_empty.default": 0,
    "aten.new_empty_strided.default": 0,
}
"""By operator: the result with uninitialized bytes. They differ from run to run and affect no other value."""

_DIGEST_BYTES = 8
_OUTPUTS: Mapping[SymbolKind, What] = {SymbolKind.GRADIENT: "gradient", SymbolKind.BUFFER: "buffer"}


class Seen(NamedTuple):
    """A tensor to record, and the section that computes it. `value` is its name in the graph, for a value in a
    register; None for a tensor in device memory."""

    what: What
    name: str
    section: int | None = None
    value: str | None = None


def seen_of_sections(graph: Graph, program: Program) -> Sequence[Sequence[Seen]]:
    """For each section of the pass of `graph`, the tensors to record at its end, in the order of its nodes."""
    sections, _ = pass_and_update(graph)
    section_of = {
        result: section.index
        for section in sections
        for node in graph.section_nodes(section)
        for result in node.results
        if result is not None
    }
    unwritten = {node.results[UNWRITTEN[node.operator]] for node in graph.nodes if node.operator in UNWRITTEN}
    leaving = {
        name
        for section in sections
        for node in graph.section_nodes(section)
        for name in node.reads
        if section_of.get(name, section.index) != section.index and name not in unwritten
    }
    named: dict[str, list[Seen]] = {}
    for output in graph.outputs:
        what = "loss" if output.symbol == program.loss else _OUTPUTS.get(program.symbols[output.symbol].kind)
        if what is not None:
            in_memory = what == "gradient"
            entry = Seen(what, output.symbol, section_of.get(output.value), None if in_memory else output.value)
            named.setdefault(output.value, []).append(entry)
    return [
        [
            entry
            for node in graph.section_nodes(section)
            for result in node.results
            if result is not None
            for entry in _seen(result, section.index, result in leaving, named.get(result, ()))
        ]
        for section in sections
    ]


def _seen(value: str, section: int, leaves: bool, named: Sequence[Seen]) -> Sequence[Seen]:
    """What to record of one value: under its own name only if it has no other, or is one summand of a gradient in
    memory."""
    shown = any(entry.value is not None for entry in named)
    return [*([Seen("value", value, section, value)] if leaves and not shown else ()), *named]


def seen_in_memory(program: Program, *kinds: SymbolKind) -> Sequence[Seen]:
    whats: Mapping[SymbolKind, What] = {
        SymbolKind.INPUT: "input",
        SymbolKind.PARAMETER: "parameter",
        SymbolKind.BUFFER: "buffer",
    }
    return [Seen(whats[symbol.kind], symbol.name) for symbol in program.symbols.values() if symbol.kind in kinds]


def digested(seen: Seen, tensor: Tensor, micro_step: int | None = None) -> ValueDigest:
    """The digest of `tensor`, described by `seen`, as it is now."""
    norm = float(torch.linalg.vector_norm(tensor.detach().to(torch.float64)))
    finite = math.isfinite(norm)
    not_finite = 0 if finite else int(tensor.numel() - torch.isfinite(tensor).sum())
    # of dtype, shape and elements, in row-major order
    digest = hashlib.blake2b(f"{tensor.dtype}{tuple(tensor.shape)}".encode(), digest_size=_DIGEST_BYTES)
    digest.update(bytes_of(tensor))
    return ValueDigest(
        seen.what, seen.name, micro_step, seen.section, digest.hexdigest(), norm if finite else None, not_finite
    )


def _run_of(setup: Setup, team: Team, plan: Plan, asked: StepRange) -> RecordedRun:
    graph = setup.program.training
    last = plan.steps if asked.last is None else min(asked.last, plan.steps)
    unit = "unit of compiled sections" if team.engine.inductor else "section"
    return RecordedRun(
        by=f"sambasim {__version__}",
        pef=setup.program.name,
        pef_digest=setup.document.digest,
        threads=setup.threads,
        engine=team.engine.name,
        torch=torch.__version__,
        cpu=f"{platform.machine()} {setup.instructions}",
        exempt_from_exactness=tuple(exempt(setup, team)),
        world_size=setup.replicas,
        emulated=setup.is_emulation,
        sync=team.transport.title,
        seed=setup.seed,
        options=_options(setup),
        steps=plan.steps,
        first_step=asked.first,
        last_step=last,
        sections=tuple(SectionName(section.index, section.kind.value, section.name) for section in graph.sections)
        if graph
        else (),
        sees=f"values that leave their {unit}",
    )


def _options(setup: Setup) -> dict[str, bool | int | float | str | None]:
    tables = {name: table for name, table in setup.option_tables.items() if table is not None}
    named = {name: value for name, value in leaves(tables) if value != {}}
    if setup.options.weights is not None:
        named["weights"] = str(setup.options.weights)
    return {
        name: value if value is None or isinstance(value, int | float | str) else repr(value)
        for name, value in named.items()
    }


@contextmanager
def _writes(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        what = f"digests cannot be written to {path}: {error.strerror}"
        remedy = "free disk space there, or choose another folder: --record-digests FOLDER"
        raise MachineError(what, remedy=remedy) from error


_AT_FIRST = (SymbolKind.PARAMETER, SymbolKind.BUFFER)


class RunDigests(StepRecorder):
    """Records the requested steps in `folder`. Collective. Raises OptionError if the run has none of these steps, and
    MachineError if digests cannot be written."""

    def __init__(self, setup: Setup, team: Team, plan: Plan, observer: RunObserver, folder: Path) -> None:
        program = setup.program
        asked = step_range(setup.options.record_steps)
        done = plan.start.step
        if asked.first > plan.steps or (asked.last is not None and asked.last <= done):
            has = f"continues after step {done} of {plan.steps}" if done else f"has {plan.steps} steps"
            what = f"--record-steps {setup.options.record_steps}: the run {has}"
            raise OptionError(what, remedy=f"give --record-steps {done + 1}-{plan.steps}, or leave it out")
        if done and any(setup.communicator.all_gather_object(is_recording(folder))):  # before rank 0 makes it one
            raise OptionError(
                f"{folder} holds the digests of an earlier part of the run, which would be lost",
                remedy="choose another folder: --record-digests FOLDER; compare accepts runs that begin later",
            )
        run = _run_of(setup, team, plan, asked)
        if setup.is_first:
            with _writes(folder):
                folder.mkdir(parents=True, exist_ok=True)
                (folder / RUN_FILE).unlink(missing_ok=True)
                for old in folder.glob(REPLICA_FILES):
                    old.unlink()
                write_whole(folder / RUN_FILE, run.model_dump_json(indent=1) + "\n")
        setup.communicator.barrier()
        self.steps = range(run.first_step - 1, run.last_step)
        self._folder = folder
        self._setup = setup
        self._team = team
        self._observer = observer
        self._first: int | None = None
        self._inputs = seen_in_memory(program, SymbolKind.INPUT)
        self._sections = seen_of_sections(program.step, program)
        self._replicas = {replica.rank: replica for replica in team.replicas if replica.works}
        self._values: dict[int, list[ValueDigest]] = {rank: [] for rank in self._replicas}
        self._micro_step = dict.fromkeys(self._replicas, 0)
        with _writes(folder):
            self._files = {rank: LineFile(folder / replica_file(rank)) for rank in self._replicas}

    def begin(self, step: int) -> None:
        if self._first is None:
            self._first = step + 1
            self._add(step, _AT_FIRST, begins=True)

    def pass_begins(self, replica: int, micro_step: int) -> None:
        self._micro_step[replica] = micro_step
        self._record(replica, self._inputs)

    def sections_end(self, replica: int, sections: Sequence[Section], began_ns: int) -> None:
        if replica in self._replicas:
            for section in sections:
                if section.index < len(self._sections):
                    self._record(replica, self._sections[section.index])

    @torch.no_grad()
    def _record(self, replica: int, seen: Sequence[Seen]) -> None:
        executor, memory = self._replicas[replica].executor, self._replicas[replica].memory
        for entry in seen:
            tensor = memory.tensor(entry.name) if entry.value is None else executor.present(entry.value)
            if tensor is not None:  # as it is for a value within sections that were compiled together
                self._values[replica].append(digested(entry, tensor, self._micro_step[replica]))

    def end(self, step: int, epoch: int, loss: float) -> None:
        self._add(step + 1, (SymbolKind.PARAMETER,), loss=loss)
        if step == self.steps[-1]:
            for file in self._files.values():
                file.close()
            self._observer.noted(self._summary())

    def _add(self, step: int, kinds: Sequence[SymbolKind], *, begins: bool = False, loss: float | None = None) -> None:
        """Collective. Write a line for each replica: its values, then the symbols of `kinds` in its memory."""
        states = self._states()
        kept = seen_in_memory(self._setup.program, *kinds)
        finite = loss if loss is not None and math.isfinite(loss) else None
        for rank, replica in self._replicas.items():
            memory = [digested(seen, replica.memory.tensor(seen.name)) for seen in kept]
            of_state = states if rank == 0 else []
            values, self._values[rank] = (*self._values[rank], *memory, *of_state), []
            with _writes(self._folder / replica_file(rank)):
                line = StepDigests(step=step, begins=begins, loss=finite, values=values)
                self._files[rank].write(line.model_dump_json() + "\n")

    def _states(self) -> list[ValueDigest]:
        """Collective. The whole optimizer states on rank 0; each rank may have a slice."""
        digests = []
        for name, place in self._setup.program.optimizer_states.items():
            whole = self._team.transport.sync.whole_state(*place)
            if whole is not None and self._setup.is_first:
                digests.append(digested(Seen("state", name), whole))
        return digests

    def _summary(self) -> str:
        first, last, folder = self._first, self.steps[-1] + 1, self._folder
        which = f"step {first}" if first == last else f"steps {first} to {last}"
        return f"recorded the digests of {which}: sambasim compare {folder} OTHER"
