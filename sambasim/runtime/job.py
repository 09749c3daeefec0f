"""One job, from a PEF to trained weights: what `sambasim run` does once it knows that it can start."""

import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from torch import Tensor

from sambasim.data.sources import Source, open_source
from sambasim.ir.types import SymbolKind
from sambasim.options.run import RunOptions
from sambasim.records.metrics import EvaluationRecord, SummaryRecord
from sambasim.runtime import torch_process_group
from sambasim.runtime.admission import blaming
from sambasim.runtime.agreement import check_sources
from sambasim.runtime.determinism import repeatable
from sambasim.runtime.engine.allocation import keep_freed_memory
from sambasim.runtime.evaluation import Evaluator, Sums, record
from sambasim.runtime.listener import Listener, Start
from sambasim.runtime.outcome import summarize
from sambasim.runtime.plan import Plan, plan
from sambasim.runtime.randomness import Stream, derive, seed_everything
from sambasim.runtime.ranks import Communicator
from sambasim.runtime.replica import input_specs
from sambasim.runtime.setup import Setup, set_up
from sambasim.runtime.sync.network import scattered
from sambasim.runtime.team import Team, assemble, changes_buffers
from sambasim.runtime.trace.run import RunTrace, traced_run
from sambasim.runtime.training import Trainer
from sambasim.runtime.weights import save_weights


class TrainingJob:
    """Trains `path`'s PEF as `options` say. Collective: every rank of `communicator` makes one and calls `run`."""

    def __init__(self, path: Path, options: RunOptions, communicator: Communicator, listener: Listener) -> None:
        self._began_s = time.perf_counter()
        self._setup: Setup = set_up(path, options, communicator)
        self._communicator = communicator
        self._listener = listener

    def run(self) -> SummaryRecord:
        """Train, evaluate, save; returns the summary."""
        with ExitStack() as stack:
            keep_freed_memory()
            stack.enter_context(blaming(self._setup.known))
            stack.enter_context(repeatable(self._setup.threads))
            if self._communicator.world_size > 1:
                torch_process_group.bring_up(self._communicator)
                stack.callback(torch_process_group.take_down)
            return self._train()

    def _train(self) -> SummaryRecord:
        setup = self._setup
        program, training = setup.program, setup.resolved.training
        sources = self._open_sources()
        steps = plan(len(sources[0].train), setup.world_size, training)
        team = assemble(setup, sources, self._listener)
        trainer = Trainer(program, team.replicas, team.sync, steps, training, team.sync.optimizers)
        evaluator = None
        if sources[0].evaluation is not None and training.evaluate:
            evaluator = Evaluator(program, team.memory, setup.resolved.loss, setup.resolved.data)
        self._listener.started(self._start(steps, team, sources[0]))
        trace = self._trace(team, steps)
        evaluation = self._epochs(trainer, evaluator, sources, steps, team, trace)
        summary = summarize(setup, team, steps, trainer.totals, evaluation)
        if setup.options.save is not None and setup.is_first:
            save_weights(setup.options.save, program, team.memory)
        self._listener.ended(summary)
        return summary

    def _open_sources(self) -> Sequence[Source]:
        """The data, opened once for each replica of this process: each rank of a job has data sets of its own, with
        whatever state they keep. A data function that draws random numbers draws the same for all."""
        setup, sources = self._setup, []
        for _ in range(setup.emulated):
            seed_everything(derive(setup.seed, 0, 0, 0, Stream.SOURCE))
            sources.append(open_source(setup.resolved.data, tuple(input_specs(setup.program))))
        check_sources(self._communicator, sources)
        return sources

    def _trace(self, team: Team, steps: Plan) -> RunTrace | None:
        setup = self._setup
        emulated = setup.emulated > 1
        traced = traced_run(setup.options, setup.document, steps, team.sync.title, setup.placement, emulated=emulated)
        if traced is None:
            return None
        return RunTrace(traced, setup.program, team.replicas, team.sync, self._communicator, self._listener)

    def _epochs(
        self,
        trainer: Trainer,
        evaluator: Evaluator | None,
        sources: Sequence[Source],
        steps: Plan,
        team: Team,
        trace: RunTrace | None,
    ) -> EvaluationRecord | None:
        evaluation = None
        for epoch in range(steps.epochs):
            trainer.begin_epoch(epoch)
            while trainer.totals.steps < min((epoch + 1) * steps.steps_per_epoch, steps.steps):
                self._listener.stepped(trainer.step(epoch) if trace is None else trace.step(trainer, epoch))
            if evaluator is not None:
                evaluation = self._evaluate(evaluator, sources, trainer.totals.steps, epoch, team)
                self._listener.evaluated(evaluation)
        return evaluation

    def _evaluate(
        self, evaluator: Evaluator, sources: Sequence[Source], step: int, epoch: int, team: Team
    ) -> EvaluationRecord:
        setup, began_s = self._setup, time.perf_counter()
        evaluator.use_buffers(self._buffers_of_first(team))
        own = [
            evaluator.sums(source.evaluation, number, setup.world_size, setup.seed, step)
            for number, source in zip(setup.own_replicas, sources, strict=False)
            if source.evaluation is not None
        ]
        everybody = self._communicator.all_gather_object(own)
        total = sum((sums for of_rank in everybody for sums in of_rank), Sums())
        return record(total, step, epoch, setup.program.loss is not None, began_s)

    def _buffers_of_first(self, team: Team) -> dict[str, Tensor]:
        """Collective: the buffers of replica 0."""
        symbols = self._setup.program.symbols.values()
        names = [symbol.name for symbol in symbols if symbol.kind is SymbolKind.BUFFER]
        own = {name: team.memory.tensor(name).clone() for name in names}
        return self._communicator.broadcast_object(own) if names else own

    def _start(self, steps: Plan, team: Team, source: Source) -> Start:
        return Start(
            name=self._setup.program.name,
            plan=steps,
            sync=team.sync.title,
            threads=self._setup.threads,
            data=source.description,
            notices=tuple(self._notices(team)),
            seconds_to_start_s=time.perf_counter() - self._began_s,
            placement=str(self._setup.placement),
        )

    def _notices(self, team: Team) -> list[str]:
        setup = self._setup
        notices = [f"changed for this run: {change}" for change in setup.resolved.changed]
        if setup.options.reduce_on_rdu and team.sync_name in ("none", "emulated"):
            notices.append("--reduce-on-rdu has nothing to do: gradients do not leave this process")
        if setup.options.host_sync is not None and team.sync_name in ("none", "emulated"):
            notices.append("--host-sync has nothing to do: gradients do not leave this process")
        if team.engine.notice is not None:
            notices.append(team.engine.notice)
        if team.sync_name == "device":
            notices += scattered(self._communicator.node_of)
        if setup.world_size > 1 and changes_buffers(setup):
            notices.append("buffers (BatchNorm statistics) are per replica; those of replica 0 are evaluated and saved")
        return notices
