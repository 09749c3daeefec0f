"""A training job, from a PEF to trained weights: `sambasim run` without `--inference`."""

import time
from array import array
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from hashlib import sha256
from itertools import count
from pathlib import Path
from signal import Signals
from typing import NamedTuple

import numpy as np
from torch import Tensor

from sambasim.data import loaders
from sambasim.data.datasets import NOTHING, Given, Source
from sambasim.errors import DataError, Interrupted, OptionError
from sambasim.ir.types import SymbolKind
from sambasim.records.metrics import EvaluationRecord, StepRecord, SummaryRecord
from sambasim.runtime.best import Watch
from sambasim.runtime.checkpoint.choose import AUTO, IF_ANY, NEWEST, find, settle
from sambasim.runtime.checkpoint.folder import claim
from sambasim.runtime.checkpoint.saver import Saver, restore
from sambasim.runtime.checkpoint.weights import given_weights
from sambasim.runtime.inference import Evaluator, Sums, in_turn
from sambasim.runtime.machine import process
from sambasim.runtime.machine.agreement import DATA, check_equal
from sambasim.runtime.machine.process import keep_freed_memory, repeatable
from sambasim.runtime.metrics import Outcome, has_accuracy
from sambasim.runtime.outcome import averages_after, notices, summarize, trained_state, weights_now, whole_tensors
from sambasim.runtime.run.graphs import Graphs
from sambasim.runtime.run.order import first_order
from sambasim.runtime.run.plan import BEGINNING, Plan, Position, plan
from sambasim.runtime.run.run_observer import RunObserver, Start
from sambasim.runtime.run.setup import Setup, Team, assemble, check_sources, open_sources
from sambasim.runtime.run.training import LossWatch, Totals, Trainer
from sambasim.runtime.values.memory import Tensors, part_of, write_tensors
from sambasim.runtime.watch.observer import StepObserver, StepRecorder, together
from sambasim.runtime.watch.status_file import UNWATCHED, Activity, StepStatus
from sambasim.runtime.watch.supervisor import SAVE, StopSignals, interrupted
from sambasim.runtime.watch.watchdog import WATCHDOG_FIRST_S


class Trained(NamedTuple):
    """What a run has trained: weights and averages as in a state_dict, on every rank, if they are kept.
    `interruption`: if a signal asked to stop."""

    summary: SummaryRecord
    weights: Tensors
    averages: Tensors
    interruption: Interrupted | None


class TrainingJob:
    """Trains a PEF. Collective: every rank creates one and calls `run`. Remedies repeat `command`, typed without
    mpirun. `signals`: the caller's, who has entered them; they ask it to stop."""

    def __init__(
        self,
        setup: Setup,
        observer: RunObserver,
        activity: Activity = UNWATCHED,
        command: Sequence[str] = ("sambasim", "run", "…"),
        given: Given = NOTHING,
        *,
        keeps_weights: bool = False,
        signals: StopSignals | None = None,
    ) -> None:
        self._setup, self._communicator, self._observer = setup, setup.communicator, observer
        self._activity, self._given, self._keeps_weights = activity, given, keeps_weights
        self._saved: Path | None = None  # the checkpoint of the end
        self._saver: Saver | None = None
        self._stopped: str | None = None
        self._signals = signals or StopSignals()
        self._signals.notify = self._signalled
        self._interrupted: str | None = None  # the name of the signal
        self._losses = LossWatch(
            setup.options.on_nonfinite,
            observer,
            command,
            setup.communicator.world_size,
            lambda: None if self._saver is None else self._saver.newest(),
            goes_on=setup.options.checkpoint.resume in (NEWEST, AUTO, IF_ANY),
        )

    def run(self) -> Trained:
        with ExitStack() as stack:
            keep_freed_memory()
            stack.enter_context(repeatable(self._setup.threads))
            if self._communicator.world_size > 1:
                self._activity.waits("connecting the ranks")
                process.bring_up(self._communicator, self._setup.options.sync_timeout + WATCHDOG_FIRST_S)
                stack.callback(process.take_down)
            return self._train(stack)

    def _train(self, stack: ExitStack) -> Trained:
        program, training = self._setup.program, self._setup.resolved.training
        self._activity.does("opening the data")
        sources = self._open_sources()
        order = first_order(sources[0].train, self._setup.seed, program.batch_size)
        samples, drawn = len(order), "" if isinstance(order, range) else sha256(array("q", order)).hexdigest()[:12]
        check_equal(self._communicator, {DATA: f"an order of {samples} samples {drawn}"}, kind=DataError)
        self._activity.does("finding the checkpoint")
        checkpoint, lines = settle(self._setup.options.checkpoint, self._communicator)
        if checkpoint.dir is not None and (lock := claim(checkpoint.dir, self._communicator)):
            stack.callback(lock.close)
        options = self._setup.options.model_copy(update={"checkpoint": checkpoint})
        self._setup = setup = replace(self._setup, options=options)
        resumption = find(setup, samples)
        position = resumption.checkpoint.manifest.position if resumption else BEGINNING
        steps = plan(samples, setup.replicas, training, position)
        self._activity.does("placing the weights")
        probes = None
        if setup.options.debug_numerics:
            from sambasim.runtime.record.numerics import Probes

            probes = Probes(program, setup.mesh, training.loss_scale)
        weights, lines_of_weights = given_weights(options, program, self._communicator, self._given.weights)
        team = assemble(setup, sources, self._observer, probes, weights)
        del weights
        for shard in filter(None, (replica.shard for replica in team.replicas)):
            stack.callback(shard.close)
        lines += lines_of_weights
        agree = self._largest if setup.document.has_several else None
        trainer = Trainer(team.replicas, steps, training, team.hub, self._request, setup.resolved.arguments, agree)
        if resumption is not None:
            restore(setup, team, resumption.checkpoint)
            team.release_parameters()
            resumption.carry_over(trainer.totals)
            lines += resumption.notices
        if checkpoint.dir is not None:
            told, resumed = (self._observer, self._activity, self._losses), resumption and resumption.checkpoint.path
            self._saver = Saver(checkpoint.dir, setup, team, samples, *told, resumed)
        evaluator = self._evaluator(team, sources[0])
        folder = resumption and resumption.checkpoint.path.parent
        watch = Watch(setup, team, trainer.totals, self._saver, self._observer, folder)
        lines += loaders.notices(*sources[0].loaders, program.batch_size)
        lines += ["samples at the end of the stream that fill no step are not trained"] * (samples == 0)
        start = self._start(steps, team, sources[0], (*notices(setup, team, steps), *lines))
        self._observer.started(start)
        observers: list[StepObserver] = [] if probes is None else [probes.watching(team.replicas)]
        if self._activity is not UNWATCHED:
            observers.append(StepStatus(self._activity, team.memory.program))
        trainer.observe(together(observers))
        evaluation, stopped = self._epochs(trainer, evaluator, watch, sources, steps, team, observers)
        if stopped is not None:
            self._observer.noted(stopped)
            start = replace(start, plan=replace(steps, steps=trainer.totals.steps))
        self._activity.waits("comparing the weights")
        totals, save, save_ema = trainer.totals, setup.options.save, setup.options.save_ema
        keeps_tensors = save is not None or save_ema is not None or self._keeps_weights
        best = watch.load()
        state = best or trained_state(setup, team, totals.updates, keeps_tensors=keeps_tensors)
        summary = summarize(setup, team, start, totals, evaluation, self._saver, state)
        of_step = totals.progress.best.step if best and totals.progress.best else None
        ends = {"interrupted": self._interrupted, "stopped_early": stopped, "weights_of_step": of_step}
        summary = summary.model_copy(update=ends)
        self._activity.takes_long("saving the weights")
        if setup.is_first and save is not None:
            write_tensors(save, state.tensors, "the weights", "--save FILE.safetensors")
        if setup.is_first and save_ema is not None:
            write_tensors(save_ema, state.averages, "the averages", "--save-ema FILE.safetensors")
        held: tuple[Tensors, Tensors] = {}, {}
        if self._keeps_weights:
            held = self._communicator.broadcast_object((state.tensors, state.averages))
        self._activity.does("reporting the summary")
        self._observer.ended(summary)
        if self._saver is not None and save is None and not (self._keeps_weights or self._interrupted):
            self._saver.check_end()
        number = max(self._communicator.all_gather_object(self._signals.received))  # also one after the last step
        files = [file for file in (save, save_ema) if file is not None]
        kept = None if self._saver is None else self._saver.kept()
        interruption = interrupted(number, summary.steps, self._saved, files, kept) if number else None
        return Trained(summary, *held, interruption)

    def _evaluator(self, team: Team, source: Source) -> Evaluator | None:
        """Raises OptionError if there is no evaluation, or not the metric, that the options ask for."""
        setup, asked = self._setup, self._setup.resolved.evaluation
        if source.evaluation is None or not asked.enabled:
            if wanted := asked.watched or next(iter(asked.metrics or ()), None):
                remedy = "--set data.evaluation_fraction=0.1, or --evaluation-data SOURCE"
                raise OptionError(f"no samples are held out to evaluate {wanted}", remedy=remedy)
            return None
        ranks = [replica.transport for replica in team.first]
        own = () if setup.resolved.ema is None else (SymbolKind.PARAMETER,)
        graphs = Graphs(setup.path, setup.document, setup.resolved)
        evaluator = Evaluator(graphs, ranks, self._activity, own, self._given.metrics)
        accuracy = ["accuracy"] if has_accuracy(setup.resolved.loss) else []
        evaluator.metrics.check_has(asked.watched or "loss", ["loss", *accuracy, *setup.program.evaluated])
        return evaluator

    def _largest(self, number: int) -> int:
        """Collective. The largest `number` of all ranks."""
        own, everybody = np.array([number]), np.empty(self._communicator.world_size, np.int64)
        self._communicator.all_gather(own.view(np.uint8), everybody.view(np.uint8))()
        return int(everybody.max())

    def _stop(self, why: str) -> None:
        """On all ranks alike, after an event: the run takes no further step."""
        self._stopped = self._stopped or why

    def _signalled(self, name: str) -> None:
        if self._setup.is_first:
            self._observer.noted(f"{name}: the run ends after this step; another one, a second later, ends it at once")

    def _open_sources(self) -> Sequence[Source]:
        """Collective. The data, opened once for each rank of this process, with the same random numbers for all."""
        sources = open_sources(self._setup, self._given)
        self._activity.waits("waiting for peers to open the data")
        self._setup = replace(self._setup, data_identity=check_sources(self._communicator, sources))
        return sources

    def _step(
        self, trainer: Trainer, epoch: int, recorder: StepRecorder | None, observers: list[StepObserver]
    ) -> StepRecord:
        number = trainer.totals.steps
        if recorder is None or number not in recorder.steps:
            return trainer.step(epoch)
        trainer.settle()
        recorder.begin(number)
        trainer.observe(together([*observers, recorder]))
        step = trainer.step(epoch)
        trainer.observe(together(observers))
        recorder.end(number, epoch, step.loss)
        return step

    def _recorder(self, team: Team, steps: Plan) -> StepRecorder | None:
        run, options = (self._setup, team, steps, self._observer), self._setup.options
        if options.trace is not None:
            from sambasim.runtime.record.trace import RunTrace

            return RunTrace(*run, options.trace)
        if options.record_digests is not None:
            from sambasim.runtime.record.digests import RunDigests

            return RunDigests(*run, options.record_digests)
        return None

    def _epochs(
        self,
        trainer: Trainer,
        evaluator: Evaluator | None,
        watch: Watch,
        sources: Sequence[Source],
        steps: Plan,
        team: Team,
        observers: list[StepObserver],
    ) -> tuple[EvaluationRecord | None, str | None]:
        """Train. Returns the last evaluation, and why the run ends before its last step, if it does."""
        totals, scaling = trainer.totals, self._setup.resolved.training.loss_scale
        progress = totals.progress
        evaluation, position, recorder = None, steps.start, self._recorder(team, steps)
        every, unit = self._setup.resolved.evaluation.cadence
        self._stopped, shard = watch.stops, team.replicas[0].shard

        def save_if_due() -> None:
            if self._saver is not None and not self._losses.is_skipping:
                self._saver.save_if_due(position, progress, due=trainer.requested == SAVE)

        def interrupt_if(requested: int) -> None:
            """If a rank received a signal, the run ends, without what else is due."""
            if requested > SAVE:
                self._signals.report(requested)
                self._interrupted = Signals(requested).name

        def evaluate_if_due(epoch: int, *, is_whole: bool = False) -> None:
            nonlocal evaluation
            number = totals.steps
            is_due = number % every == 0 if unit == "steps" else is_whole and (epoch + 1) % every == 0
            is_end = number == steps.steps or self._stopped is not None
            if evaluator is None or number == progress.evaluated_after or not (is_due or is_end) or self._interrupted:
                return
            trainer.set_arguments(epoch)
            evaluation, requested = self._evaluate(evaluator, sources, totals, epoch, team)
            self._observer.evaluated(evaluation)
            watch.take(evaluation, position)
            self._stopped = self._stopped or watch.stops
            interrupt_if(requested)

        for epoch in count(steps.start.epoch):
            if self._stopped or self._interrupted or steps.ends_before(epoch, totals.steps):
                break
            begun = totals.steps
            self._activity.does("beginning an epoch")
            trainer.begin_epoch(epoch)
            last = min(begun + steps.length(epoch), steps.steps)
            evaluate_if_due(epoch)  # where an interrupted run was to do it
            while totals.steps < last and not (self._stopped or self._interrupted or trainer.ended):
                step = self._step(trainer, epoch, recorder, observers)
                if totals.steps == steps.start.step + 1 and self._setup.is_first and shard and shard.dropped:
                    self._observer.noted(f"columns that the PEF does not take are dropped: {shard.dropped}")
                self._observer.stepped(step)
                self._losses.check(step, trainer.losses)  # before a checkpoint saves its result
                if progress.loss_scale is not None:
                    self._losses.check_scale(progress.loss_scale.value, scaling.minimum, step)
                position = steps.position(totals.steps, epoch, begun)
                interrupt_if(trainer.requested)
                if position.step < last and not trainer.ended:
                    evaluate_if_due(epoch)
                    save_if_due()
            if self._interrupted:
                break
            gave, length = totals.steps - begun, steps.length(epoch)
            if trainer.ended and steps.samples and gave < length and self._setup.is_first:
                self._observer.noted(f"epoch {epoch + 1} ended after {gave} steps, and the stream's length is {length}")
            if is_whole := trainer.ended or position.step == begun + length:
                position = Position(position.step, epoch + 1)  # an evaluation of that is not repeated on resume
            evaluate_if_due(epoch, is_whole=is_whole)
            if is_whole:
                save_if_due()
        # Of skipped steps whose loss was finite, a dynamic scale may be on its way down.
        is_final = progress.loss_scale is None or not scaling.dynamic or self._losses.is_skipping
        if is_final and not self._interrupted:
            self._losses.check_run(totals.steps, progress.skipped_steps)
        if self._saver is not None:
            self._saved = self._saver.save(position, progress, goes_on=False)
        return evaluation, None if self._interrupted or totals.steps == steps.steps else self._stopped

    def _request(self) -> int:
        """This rank's request after a step: to stop, by a signal; to save a checkpoint; or 0."""
        saves = self._saver is not None and self._setup.is_first and self._saver.is_time()
        return self._signals.request() or (SAVE if saves else 0)

    def _evaluate(
        self, evaluator: Evaluator, sources: Sequence[Source], totals: Totals, epoch: int, team: Team
    ) -> tuple[EvaluationRecord, int]:
        """Collective. One evaluation, and the largest request of a rank after it."""
        setup, step, began_s = self._setup, totals.steps, time.perf_counter()
        self._activity.waits("waiting for peers to evaluate")
        averages = averages_after(setup, totals.updates)
        evaluator.use(self._of_first(team, averages))
        self._activity.does("evaluating")
        own: list[list[tuple[Sums, Outcome]]] = []
        with team.whole_parameters():
            for rank, source in zip(team.replicas, sources, strict=True):
                if rank.works and source.evaluation is not None and (team.hub is None or rank.transport.gives_loss):
                    batches = evaluator.infer(source.evaluation, rank.replica, setup.shards, setup.seed)
                    own.append([(sums, outcome) for sums, _, outcome in batches])
        if not team.transport.gives_loss and team.hub is None:
            own = []  # another rank of the replica counts these samples
        self._activity.waits("waiting for peers to evaluate")
        everybody = self._communicator.gather_object((own, self._signals.request())) or ()
        self._activity.does("evaluation done")

        def over_all() -> tuple[EvaluationRecord, int]:
            parts = [*in_turn([of_replica for of_rank, _ in everybody for of_replica in of_rank])]
            if not parts:
                raise DataError("no samples are held out: the evaluation data is empty", remedy="check its source")
            found = evaluator.over(parts)
            requested, evaluation_s = max(request for _, request in everybody), time.perf_counter() - began_s
            return EvaluationRecord(step=step, epoch=epoch + 1, evaluation_s=evaluation_s, **found), requested

        return self._communicator.from_first(over_all)

    def _of_first(self, team: Team, averages: Mapping[str, str] | None) -> Sequence[Mapping[str, Tensor]]:
        """Collective. For each rank that this process evaluates, its parts of the buffers of replica 0; with `averages`
        also of all parameters, each by its average if it has one."""
        setup, tensor_of = self._setup, whole_tensors(self._setup, team)
        kinds = [SymbolKind.BUFFER] if averages is None else [SymbolKind.PARAMETER, SymbolKind.BUFFER]
        own: list[dict[str, Tensor]] = [{} for _ in team.first]
        for name in setup.program.names_of(*kinds):
            whole = self._communicator.broadcast_object(tensor_of((averages or {}).get(name, name)))
            for held, replica in zip(own, team.first, strict=True):
                if name in replica.memory.program.symbols:
                    at = setup.mesh.coordinates(replica.rank)
                    held[name] = part_of(whole, setup.program.symbols[name].cuts, at)
        return own

    def _start(self, steps: Plan, team: Team, source: Source, lines: Sequence[str]) -> Start:
        setup, communicator, program = self._setup, self._communicator, self._setup.program
        label, number, local = setup.mesh.label(communicator.rank), communicator.rank, communicator.local_rank
        kind = "replica" if program.ranks_of_replica == 1 else "rank"
        rank = f"rank {number} of {setup.mesh.world_size}, local rank {local}: {label}"
        return Start(
            name=program.name,
            plan=steps,
            sync=team.transport.title,
            threads=setup.threads,
            data=source.description,
            notices=tuple(lines),
            placement=setup.placement.in_words(kind) if setup.shows_device else "",
            chips=program.chips,
            rank=rank if len(setup.ranks) == 1 and label else "",
            seed=setup.seed,
            weights=partial(weights_now, setup, team),
            stop=self._stop,
        )
