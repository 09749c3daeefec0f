"""`run --record-digests`: digests of what every replica computes in each step, one file per replica.

    before the first step   parameters, buffers, optimizer states
    every micro-step        inputs; at the end of each section: the values that leave it, gradients, buffers, the loss
    after the update        parameters of every replica; optimizer states, whole, with replica 0

The results of a section are read before other ranks learn that the section has ended, so none has overwritten them.
"""

import math
import platform
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sambasim import __version__
from sambasim.errors import InternalError, MachineError, OptionError
from sambasim.ir.graph import Section
from sambasim.ir.types import SymbolKind
from sambasim.ir.verify import state_name
from sambasim.options.grammar import StepRange, step_range
from sambasim.records.digests import (
    REPLICA_FILES,
    RUN_FILE,
    RecordedRun,
    SectionName,
    StepDigests,
    ValueDigest,
    is_recording,
    replica_file,
)
from sambasim.runtime.digests import Seen, digested, seen_in_memory, seen_of_sections
from sambasim.runtime.listener import Listener
from sambasim.runtime.observer import StepRecorder
from sambasim.runtime.outcome import exempt
from sambasim.runtime.output import LineFile, write_whole
from sambasim.runtime.plan import Plan
from sambasim.runtime.replica import Replica
from sambasim.runtime.setup import Setup
from sambasim.runtime.team import Team

_PARTS = ("data", "loss", "optimizer", "training")
_Leaf = bool | int | float | str | None


def recorded_run(setup: Setup, team: Team, plan: Plan, asked: StepRange) -> RecordedRun:
    """The contents of run.json: the facts that decide the bits of the run, and the recorded steps (`asked`)."""
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
        world_size=setup.world_size,
        emulated=setup.emulated > 1,
        sync=team.transport.title,
        seed=setup.seed,
        options=dict(_options(setup)),
        steps=plan.steps,
        first_step=asked.first,
        last_step=last,
        sections=tuple(SectionName(one.index, one.kind.value, one.name) for one in graph.sections) if graph else (),
        sees=f"values that leave their {unit}",
    )


def _options(setup: Setup) -> Iterator[tuple[str, _Leaf]]:
    for part in _PARTS:
        options = getattr(setup.resolved, part)
        if options is not None:
            yield from _leaves(part, options.model_dump(mode="json"))
    if setup.options.weights is not None:
        yield "weights", str(setup.options.weights)


def _leaves(name: str, value: Any) -> Iterator[tuple[str, _Leaf]]:
    """Yield leaves by dotted name; a list is one text."""
    if isinstance(value, Mapping):
        for key, below in value.items():
            yield from _leaves(f"{name}.{key}", below)
    else:
        yield name, value if isinstance(value, _Leaf) else repr(value)


_REMEDY = "free disk space there, or choose another folder: --record-digests FOLDER"


def begin_folder(folder: Path, run: RecordedRun) -> None:
    """Create `folder`, delete the previous recording in it, and write run.json. Raises MachineError if that fails."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / RUN_FILE).unlink(missing_ok=True)
        for old in folder.glob(REPLICA_FILES):
            old.unlink()
        write_whole(folder / RUN_FILE, run.model_dump_json(indent=1) + "\n")
    except OSError as error:
        raise _error(folder, error) from error


class ReplicaFile:
    """The file of one replica, emptied first: one line per recorded step."""

    def __init__(self, folder: Path, replica: int) -> None:
        self._path = folder / replica_file(replica)
        try:
            self._lines = LineFile(self._path)
        except OSError as error:
            raise _error(self._path, error) from error

    def add(self, step: StepDigests) -> None:
        """Append a line. Raises MachineError if it cannot be written."""
        try:
            self._lines.write(step.model_dump_json() + "\n")
        except OSError as error:
            raise _error(self._path, error) from error

    def close(self) -> None:
        """Nothing more will be written."""
        self._lines.close()


def _error(path: Path, error: OSError) -> MachineError:
    return MachineError(f"digests cannot be written to {path}: {error.strerror}", remedy=_REMEDY)


_AT_FIRST = (SymbolKind.PARAMETER, SymbolKind.BUFFER)


def recorded(setup: Setup, team: Team, plan: Plan, listener: Listener) -> "RunDigests | None":
    """Collective. The recorder that the options ask for; None without `--record-digests`.

    Raises OptionError if the run has none of the requested steps, and MachineError if digests cannot be written.
    """
    return None if setup.options.record_digests is None else RunDigests(setup, team, plan, listener)


class RunDigests(StepRecorder):
    """Records the requested steps. Collective."""

    def __init__(self, setup: Setup, team: Team, plan: Plan, listener: Listener) -> None:
        folder, program = setup.options.record_digests, setup.program
        if folder is None or program.training is None:
            raise InternalError("digests of a run that requests none, or has no training graph")
        asked = step_range(setup.options.record_steps)
        begun = plan.start.step
        if asked.first > plan.steps or (asked.last is not None and asked.last <= begun):
            has = f"continues after step {begun} of {plan.steps}" if begun else f"has {plan.steps} steps"
            what = f"--record-steps {setup.options.record_steps}: the run {has}"
            raise OptionError(what, remedy=f"give --record-steps {begun + 1}-{plan.steps}, or leave it out")
        if begun and any(setup.communicator.all_gather_object(is_recording(folder))):  # before rank 0 makes it one
            raise OptionError(
                f"{folder} holds the digests of an earlier part of the run, which would be lost",
                remedy="choose another folder: --record-digests FOLDER; compare accepts runs that begin later",
            )
        run = recorded_run(setup, team, plan, asked)
        if setup.is_first:
            begin_folder(folder, run)
        setup.communicator.barrier()
        self.steps = range(run.first_step - 1, run.last_step)
        self._setup = setup
        self._team = team
        self._listener = listener
        self._first: int | None = None
        sections = seen_of_sections(program.training, program)
        inputs = seen_in_memory(program, SymbolKind.INPUT)
        self._passes = {one.rank: _Pass(one, inputs, sections) for one in team.replicas if one.works}
        self._files = [ReplicaFile(folder, rank) for rank in self._passes]

    def begin(self, step: int) -> None:
        if self._first is None:
            self._first = step + 1
            self._add(step, [[] for _ in self._passes], _AT_FIRST, begins=True)
        for one in self._passes.values():
            one.values = []

    def pass_begins(self, replica: int, micro_step: int) -> None:
        self._passes[replica].begin(micro_step)

    def sections_end(self, replica: int, sections: Sequence[Section], began_ns: int) -> None:
        if replica in self._passes:
            self._passes[replica].end_sections(sections)

    def end(self, step: int, epoch: int, loss: float) -> None:
        self._add(step + 1, [one.values for one in self._passes.values()], (SymbolKind.PARAMETER,), loss=loss)
        if step == self.steps[-1]:
            for file in self._files:
                file.close()
            self._listener.noted(self._summary())

    def _add(
        self,
        step: int,
        values: Sequence[Sequence[ValueDigest]],
        kinds: Sequence[SymbolKind],
        *,
        begins: bool = False,
        loss: float | None = None,
    ) -> None:
        """Collective. Write a line for each replica: its `values`, then the symbols of `kinds` in its memory."""
        states = self._states()
        kept = seen_in_memory(self._setup.program, *kinds)
        finite = loss if loss is not None and math.isfinite(loss) else None
        for file, own, one in zip(self._files, values, self._passes.values(), strict=True):
            replica = one.replica
            memory = [digested(seen, replica.memory.tensor(seen.name)) for seen in kept]
            more = states if replica.rank == 0 else []
            file.add(StepDigests(step=step, begins=begins, loss=finite, values=(*own, *memory, *more)))

    def _states(self) -> list[ValueDigest]:
        """Collective. The whole optimizer states on rank 0; each rank may have a slice."""
        program, found = self._setup.program, []
        for group in program.groups:
            optimizer = program.optimizers[group.optimizer]
            for member in group.members:
                for state in optimizer.states:
                    whole = self._team.transport.whole_state(group, member, state)
                    if whole is not None and self._setup.is_first:
                        name = state_name(member.parameter, optimizer.name, state)
                        found.append(digested(Seen("state", name), whole))
        return found

    def _summary(self) -> str:
        first, last, folder = self._first, self.steps[-1] + 1, self._setup.options.record_digests
        which = f"step {first}" if first == last else f"steps {first} to {last}"
        return f"recorded the digests of {which}: sambasim compare {folder} OTHER"


class _Pass:
    """The passes of one replica, and the digests of the current step."""

    def __init__(self, replica: Replica, inputs: Sequence[Seen], sections: Sequence[Sequence[Seen]]) -> None:
        self.replica = replica
        self.values: list[ValueDigest] = []
        self._inputs = inputs
        self._sections = sections
        self._micro_step = -1

    def begin(self, micro_step: int) -> None:
        """A pass begins; its batch is in device memory."""
        self._micro_step = micro_step
        self._record(self._inputs)

    def end_sections(self, sections: Sequence[Section]) -> None:
        """Record what `sections` have computed."""
        for section in sections:
            if section.index < len(self._sections):
                self._record(self._sections[section.index])

    @torch.no_grad()
    def _record(self, seen: Sequence[Seen]) -> None:
        for one in seen:
            tensor = self._tensor(one)
            if tensor is not None:
                self.values.append(digested(one, tensor, self._micro_step))

    def _tensor(self, seen: Seen) -> Tensor | None:
        """None for a value within sections that were compiled together."""
        if seen.value is not None:
            return self.replica.executor.present(seen.value)
        return self.replica.memory.tensor(seen.name)
