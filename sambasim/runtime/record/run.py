"""`run --record-digests`: what every replica computes in each step, as digests, a file for each replica.

    before the first step   parameters, buffers, optimizer states
    every micro-step        inputs; as each section is over, the values that leave it, gradients, buffers, the loss
    after the update        parameters as every replica has them, and optimizer states, whole, with replica 0

What a section has made is read before peers learn that the section has ended, so none of them has written to it.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from sambasim.errors import InternalError, OptionError
from sambasim.ir.graph import Section
from sambasim.ir.types import SymbolKind
from sambasim.ir.verify import state_name
from sambasim.options.grammar import step_range
from sambasim.records.digests import StepDigests, ValueDigest, is_recording
from sambasim.runtime.listener import Listener
from sambasim.runtime.observer import StepRecorder
from sambasim.runtime.plan import Plan
from sambasim.runtime.record.digest import digested
from sambasim.runtime.record.facts import recorded_run
from sambasim.runtime.record.files import ReplicaFile, begin_folder
from sambasim.runtime.record.seen import Seen, seen_in_memory, seen_of_sections
from sambasim.runtime.replica import Replica
from sambasim.runtime.setup import Setup
from sambasim.runtime.team import Team

_AT_FIRST = (SymbolKind.PARAMETER, SymbolKind.BUFFER)


def recorded(setup: Setup, team: Team, plan: Plan, listener: Listener) -> "RunDigests | None":
    """Collective. What records the digests that are asked for; None for nothing.

    Raises OptionError if the run has none of the steps, and MachineError if digests cannot be written.
    """
    return None if setup.options.record_digests is None else RunDigests(setup, team, plan, listener)


class RunDigests(StepRecorder):
    """Records the steps that were asked for. Collective."""

    def __init__(self, setup: Setup, team: Team, plan: Plan, listener: Listener) -> None:
        folder, program = setup.options.record_digests, setup.program
        if folder is None or program.training is None:
            raise InternalError("digests of a run that asks for none, or trains nothing")
        asked = step_range(setup.options.record_steps)
        begun = plan.start.step
        if asked.first > plan.steps or (asked.last is not None and asked.last <= begun):
            has = f"goes on after step {begun} of {plan.steps}" if begun else f"has {plan.steps} steps"
            what = f"--record-steps {setup.options.record_steps}: the run {has}"
            raise OptionError(what, remedy=f"--record-steps {begun + 1}-{plan.steps}, or leave it out")
        if begun and any(setup.communicator.all_gather_object(is_recording(folder))):  # before rank 0 makes it one
            raise OptionError(
                f"{folder} holds the digests of an earlier part of the run, which would be lost",
                remedy="another folder: --record-digests FOLDER; compare takes runs that begin later",
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
            self._listener.noted(self._told())

    def _add(
        self,
        step: int,
        values: Sequence[Sequence[ValueDigest]],
        kinds: Sequence[SymbolKind],
        *,
        begins: bool = False,
        loss: float | None = None,
    ) -> None:
        """A line for each replica: its `values`, and after them what is in its memory, of `kinds`. Collective."""
        states = self._states()
        kept = seen_in_memory(self._setup.program, *kinds)
        told = loss if loss is not None and math.isfinite(loss) else None
        for file, own, one in zip(self._files, values, self._passes.values(), strict=True):
            replica = one.replica
            memory = [digested(seen, replica.memory.tensor(seen.name)) for seen in kept]
            more = states if replica.rank == 0 else []
            file.add(StepDigests(step=step, begins=begins, loss=told, values=(*own, *memory, *more)))

    def _states(self) -> list[ValueDigest]:
        """Collective. The states of the optimizers, of which each rank may have a slice, on rank 0."""
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

    def _told(self) -> str:
        first, last, folder = self._first, self.steps[-1] + 1, self._setup.options.record_digests
        which = f"step {first}" if first == last else f"steps {first} to {last}"
        return f"recorded the digests of {which}: sambasim compare {folder} OTHER"


class _Pass:
    """The passes of one replica through its sections, and what was seen of them in the step that is under way."""

    def __init__(self, replica: Replica, inputs: Sequence[Seen], sections: Sequence[Sequence[Seen]]) -> None:
        self.replica = replica
        self.values: list[ValueDigest] = []
        self._inputs = inputs
        self._sections = sections
        self._micro_step = -1

    def begin(self, micro_step: int) -> None:
        """A pass begins; its batch is in place."""
        self._micro_step = micro_step
        self._see(self._inputs)

    def end_sections(self, sections: Sequence[Section]) -> None:
        """What these sections have made is there."""
        for section in sections:
            if section.index < len(self._sections):
                self._see(self._sections[section.index])

    @torch.no_grad()
    def _see(self, seen: Sequence[Seen]) -> None:
        for one in seen:
            tensor = self._tensor(one)
            if tensor is not None:
                self.values.append(digested(one, tensor, self._micro_step))

    def _tensor(self, seen: Seen) -> Tensor | None:
        """None for what is not seen: a value within sections that were compiled together."""
        if seen.value is not None:
            return self.replica.executor.present(seen.value)
        return self.replica.memory.tensor(seen.name)
