"""`run --record-digests`: digests of what every replica computes in each step, one file per replica.

before the first step   parameters, buffers, optimizer states
every micro-step        inputs; at the end of each section: the values that leave it, gradients, buffers, the loss
after the update        parameters of every replica; optimizer states, whole, with replica 0
"""

import hashlib
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, cast

import torch
from torch import Tensor

from sambasim.errors import MachineError, OptionError, failing_with
from sambasim.files import write_whole
from sambasim.ir.dataflow import pass_and_update
from sambasim.ir.graph import Graph, Section
from sambasim.ir.operators import OPERATORS
from sambasim.ir.program import Program
from sambasim.ir.types import SymbolKind
from sambasim.options.given import leaves
from sambasim.options.grammar import step_range
from sambasim.pef.archive import bytes_of
from sambasim.pef.document import WRITER
from sambasim.records.digests import (
    REPLICA_FILES,
    RUN_FILE,
    RecordedRun,
    StepDigests,
    ValueDigest,
    What,
    is_recording,
    replica_file,
)
from sambasim.runtime.checkpoint.folder import check_shared
from sambasim.runtime.outcome import facts
from sambasim.runtime.run.plan import Plan
from sambasim.runtime.run.run_observer import LineFile, RunObserver
from sambasim.runtime.run.setup import Setup, Team
from sambasim.runtime.watch.observer import StepRecorder

UNWRITTEN: Mapping[str, int] = {
    "aten.mkldnn_rnn_layer.default": 3,  # the kernel's workspace for its backward
    **{name: 0 for name in OPERATORS if "empty" in name},
}
"""By operator: the result with uninitialized bytes. They differ from run to run and affect no other value."""


class Seen(NamedTuple):
    """A tensor to record, and its section. `value` is its name in the graph; None for one in device memory."""

    what: What
    name: str
    section: int | None = None
    value: str | None = None


def seen_of_sections(graph: Graph, program: Program) -> Sequence[Sequence[Seen]]:
    """For each section of the pass of `graph`, the tensors to record at its end, in the order of its nodes."""
    sections, _ = pass_and_update(graph)
    nodes = [(section.index, node) for section in sections for node in graph.section_nodes(section)]
    section_of = {result: section for section, node in nodes for result in node.makes}
    unwritten = {node.results[UNWRITTEN[node.operator]] for node in graph.nodes if node.operator in UNWRITTEN}
    read = {name for section, node in nodes for name in node.reads if section_of.get(name, section) != section}
    leaving = read - unwritten
    named: dict[str, list[Seen]] = {}
    for output in graph.outputs:
        kind = program.symbols[output.symbol].kind
        if output.symbol == program.loss or kind in (SymbolKind.GRADIENT, SymbolKind.BUFFER):
            what = "loss" if output.symbol == program.loss else cast("What", kind.value)
            value = None if what == "gradient" else output.value
            entry = Seen(what, output.symbol, section_of.get(output.value), value)
            named.setdefault(output.value, []).append(entry)
    seen: dict[int, list[Seen]] = {section.index: [] for section in sections}
    for value, section in section_of.items():
        entries = named.get(value, [])
        # Under its own name only if it has no other, or is one summand of a gradient in memory.
        if value in leaving and all(entry.value is None for entry in entries):
            seen[section].append(Seen("value", value, section, value))
        seen[section] += entries
    return list(seen.values())


def seen_in_memory(program: Program, *kinds: SymbolKind) -> Sequence[Seen]:
    return [Seen(cast("What", program.symbols[name].kind.value), name) for name in program.names_of(*kinds)]


def digested(seen: Seen, tensor: Tensor, micro_step: int | None = None) -> ValueDigest:
    """The digest of `tensor`, described by `seen`, as it is now."""
    l2 = float(torch.linalg.vector_norm(tensor.detach().to(torch.float64)))
    norm, not_finite = (l2, 0) if math.isfinite(l2) else (None, int(tensor.numel() - torch.isfinite(tensor).sum()))
    # of dtype, shape and elements, in row-major order
    digest = hashlib.blake2b(f"{tensor.dtype}{tuple(tensor.shape)}".encode(), digest_size=8)
    digest.update(bytes_of(tensor))
    return ValueDigest(seen.what, seen.name, micro_step, seen.section, digest.hexdigest(), norm, not_finite)


def _run_of(setup: Setup, team: Team, plan: Plan, asked: range) -> RecordedRun:
    graph = setup.program.training
    weights = setup.options.weights
    options = leaves({**setup.resolved.tables, "weights": weights and str(weights)})
    return RecordedRun(
        **facts(setup, team),
        by=WRITER,
        pef=setup.program.name,
        cpu=", ".join(setup.cpus),
        ranks=setup.mesh.world_size,
        sync=team.transport.title,
        options={
            name: value if isinstance(value, int | float | str) else repr(value)
            for name, value in options.items()
            if value not in (None, {})
        },
        steps=plan.steps,
        first_step=asked.start,
        last_step=min(asked[-1], plan.steps),
        sections=tuple(map(str, graph.sections if graph else ())),
        sees=f"values that leave their {'unit of compiled sections' if team.engine.inductor else 'section'}",
    )


_FLAG = "--record-digests FOLDER"


class RunDigests(StepRecorder):
    """Records the requested steps in `folder`. Collective. Raises OptionError if the run has none of these steps, and
    MachineError if digests cannot be written."""

    def __init__(self, setup: Setup, team: Team, plan: Plan, observer: RunObserver, folder: Path) -> None:
        program = setup.program
        asked = step_range(setup.options.record_steps)
        done = plan.start.step
        if asked.start > plan.steps or asked[-1] <= done:
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
            with failing_with(MachineError, f"the digests cannot be written to {folder}", f"another place: {_FLAG}"):
                folder.mkdir(parents=True, exist_ok=True)
                (folder / RUN_FILE).unlink(missing_ok=True)
                for old in folder.glob(REPLICA_FILES):
                    old.unlink()
                write_whole(folder / RUN_FILE, run.model_dump_json(indent=1) + "\n")
        setup.communicator.barrier()
        check_shared(folder, "--record-digests", setup.communicator)
        self.steps = range(max(run.first_step - 1, done), run.last_step)
        self._setup, self._team, self._observer, self._folder = setup, team, observer, folder
        self._inputs = seen_in_memory(program, SymbolKind.INPUT)
        self._sections = seen_of_sections(program.step, program)
        self._replicas = {replica.rank: replica for replica in team.replicas if replica.works}
        self._values: dict[int, list[ValueDigest]] = {rank: [] for rank in self._replicas}
        self._micro_step = dict.fromkeys(self._replicas, 0)
        named = "the digests", _FLAG, observer.noted
        self._files = {rank: LineFile(folder / replica_file(rank), *named) for rank in self._replicas}

    def begin(self, step: int) -> None:
        if step == self.steps[0]:
            self._add(step, SymbolKind.PARAMETER, SymbolKind.BUFFER, begins=True)

    def pass_begins(self, replica: int, micro_step: int) -> None:
        self._micro_step[replica] = micro_step
        self._record(replica, self._inputs)

    def sections_end(self, replica: int, sections: Sequence[Section], began_ns: int) -> None:
        for section in sections if replica in self._replicas else ():
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
        self._add(step + 1, SymbolKind.PARAMETER, loss=loss if math.isfinite(loss) else None)
        if step == self.steps[-1]:
            for file in self._files.values():
                file.close()
            first = self.steps[0] + 1
            which = f"step {first}" if first == step + 1 else f"steps {first} to {step + 1}"
            self._observer.noted(f"recorded the digests of {which}: sambasim compare {self._folder} OTHER")

    def _add(self, step: int, *kinds: SymbolKind, begins: bool = False, loss: float | None = None) -> None:
        """Collective. Write a line for each replica: its values, then the symbols of `kinds` in its memory, and on rank
        0 the whole optimizer states."""
        states = []
        for name in self._setup.program.optimizer_states:
            whole = self._team.transport.sync.whole(name)  # each rank may have a slice
            if whole is not None and self._setup.is_first:
                states.append(digested(Seen("state", name), whole))
        kept = seen_in_memory(self._setup.program, *kinds)
        for rank, replica in self._replicas.items():
            memory = [digested(seen, replica.memory.tensor(seen.name)) for seen in kept]
            values, self._values[rank] = (*self._values[rank], *memory, *(states if rank == 0 else ())), []
            line = StepDigests(step=step, begins=begins, loss=loss, values=values)
            self._files[rank].write(line.model_dump_json() + "\n")
