"""One job, from a PEF to trained weights: what `sambasim run` does once it knows that it can start."""

import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from sambasim.data.sources import Source, open_source
from sambasim.errors import InternalError
from sambasim.hardware.inventory import inventory_of
from sambasim.ir.program import Program
from sambasim.ir.types import SymbolKind
from sambasim.ir.verify import state_name
from sambasim.options.run import HostSyncName, ResolvedRun, RunOptions, resolve_run
from sambasim.pef import PefDocument, map_weights, read
from sambasim.records.metrics import BytesRecord, EvaluationRecord, PredictedRecord, SummaryRecord
from sambasim.runtime import torch_process_group
from sambasim.runtime.agreement import check_sources, check_weights
from sambasim.runtime.arguments import bind_arguments
from sambasim.runtime.capacity import check_device, check_node_memory
from sambasim.runtime.determinism import repeatable
from sambasim.runtime.device import DeviceMemory, private_storage
from sambasim.runtime.device_times import predict_run
from sambasim.runtime.digests import state_sha256, weights_sha256
from sambasim.runtime.engine.allocation import keep_freed_memory
from sambasim.runtime.engine.choice import EXEMPT as INDUCTOR_EXEMPT
from sambasim.runtime.engine.choice import Engine, choose_engine
from sambasim.runtime.evaluation import Evaluator, Sums, record
from sambasim.runtime.listener import Listener, Start
from sambasim.runtime.optimizers import Optimizers
from sambasim.runtime.plan import Plan, plan
from sambasim.runtime.randomness import Stream, derive, seed_everything
from sambasim.runtime.ranks import Communicator
from sambasim.runtime.replica import Replica, input_specs, place_weights
from sambasim.runtime.runnable import check_is_for_run
from sambasim.runtime.seating import placement_record, seat
from sambasim.runtime.sharding import Shard
from sambasim.runtime.sync.device import DeviceSync
from sambasim.runtime.sync.device_memories import Devices, allocate_devices
from sambasim.runtime.sync.emulation import EmulatedSync
from sambasim.runtime.sync.gloo import EXEMPT, GlooSync
from sambasim.runtime.sync.host import HostSync
from sambasim.runtime.sync.interface import GradientSync
from sambasim.runtime.sync.network import scattered
from sambasim.runtime.sync.parameter_server import ParameterServerSync, roles
from sambasim.runtime.sync.single import SingleSync
from sambasim.runtime.sync.small_device import SmallDeviceSync
from sambasim.runtime.threads import default_threads
from sambasim.runtime.trace.run import RunTrace, traced_run
from sambasim.runtime.training import Trainer
from sambasim.runtime.weights import load_weights, save_weights
from sambasim.simulation.sync import SyncPath

SyncName: TypeAlias = Literal["none", "host", "device", "emulated"]


@dataclass(frozen=True, slots=True)
class Team:
    """The replicas that this process plays, and how they sync with one another and with those of other ranks.

    `memory` is that of the first replica; a rank that only serves has parameters there, and no replica.
    """

    replicas: Sequence[Replica]
    memory: DeviceMemory
    sync: GradientSync
    sync_name: SyncName
    engine: Engine


class TrainingJob:
    """Trains `path`'s PEF as `options` say. Collective: every rank of `communicator` makes one and calls `run`."""

    def __init__(self, path: Path, options: RunOptions, communicator: Communicator, listener: Listener) -> None:
        self._began_s = time.perf_counter()
        self._path = path
        self._options = options
        self._communicator = communicator
        self._listener = listener
        self._document: PefDocument = read(path)
        check_device(self._document)
        self._program: Program = self._document.program
        self._resolved: ResolvedRun = resolve_run(options, self._document.training_defaults, self._document.data_source)
        if self._resolved.optimizer is None:
            raise InternalError("a training job without an optimizer")
        check_is_for_run(self._program)
        self._emulated = options.emulate_replicas or 1
        self._roles = roles(communicator.topology.world_size, options.parameter_servers or 0)
        self._inventory = inventory_of(self._document.compile_options, cluster=options.cluster)
        nodes = [communicator.topology.node_of[rank] for rank in self._roles.workers]
        self._placement = seat(self._inventory, nodes, self._emulated)
        self._arguments = bind_arguments(
            self._program,
            self._resolved.optimizer,
            self._world_size,
            communicator.topology.rank,
            self._resolved.training.seed,
        )
        self._threads = options.threads or default_threads(communicator, self._emulated)

    @property
    def _world_size(self) -> int:
        """Replicas in all, whoever plays them."""
        return len(self._roles.workers) * self._emulated

    @property
    def _works(self) -> bool:
        """Whether this process has replicas. One that only serves opens the data too, but takes no sample of it."""
        return self._communicator.topology.rank in self._roles.workers

    @property
    def _host_sync(self) -> HostSyncName:
        return self._options.host_sync or "mpi"

    def run(self) -> SummaryRecord:
        """Train, evaluate, save; returns the summary."""
        with ExitStack() as stack:
            keep_freed_memory()
            stack.enter_context(repeatable(self._threads))
            if self._communicator.topology.world_size > 1:
                torch_process_group.bring_up(self._communicator)
                stack.callback(torch_process_group.take_down)
            return self._train()

    def _train(self) -> SummaryRecord:
        program, resolved = self._program, self._resolved
        sources = self._open_sources()
        steps = plan(len(sources[0].train), self._world_size, resolved.training)
        team = self._team(sources)
        trainer = Trainer(program, team.replicas, team.sync, steps, resolved.training, team.sync.optimizers)
        evaluator = None
        if sources[0].evaluation is not None and resolved.training.evaluate:
            evaluator = Evaluator(program, team.memory, resolved.loss, resolved.data)
        self._listener.started(self._start(steps, team, sources[0]))
        trace = self._trace(team, steps)
        evaluation = self._epochs(trainer, evaluator, sources, steps, team, trace)
        return self._finish(trainer, team, steps, evaluation)

    def _open_sources(self) -> Sequence[Source]:
        """The data, opened once for each replica of this process: each rank of a job has data sets of its own, with
        whatever state they keep. A data function that draws random numbers draws the same for all."""
        sources = []
        for _ in range(self._emulated):
            seed_everything(derive(self._resolved.training.seed, 0, 0, 0, Stream.SOURCE))
            sources.append(open_source(self._resolved.data, tuple(input_specs(self._program))))
        check_sources(self._communicator, sources)
        return sources

    def _trace(self, team: Team, steps: Plan) -> RunTrace | None:
        title, emulated = team.sync.title, self._emulated > 1
        traced = traced_run(self._options, self._document, steps, title, self._placement, emulated=emulated)
        if traced is None:
            return None
        return RunTrace(traced, self._program, team.replicas, team.sync, self._communicator, self._listener)

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

    def _team(self, sources: Sequence[Source]) -> Team:
        program, communicator = self._program, self._communicator
        devices = None
        if self._emulated == 1 and communicator.topology.world_size > 1 and self._options.reduce_on_rdu:
            devices = allocate_devices(program, communicator)
            memories = [devices.by_rank[communicator.topology.rank]]
        else:
            check_node_memory(communicator, program.device_bytes * self._emulated)
            memories = [DeviceMemory(program, private_storage(program.device_bytes)) for _ in range(self._emulated)]
        self._place_weights(memories)
        sync, name = self._sync(memories, devices)
        engine = choose_engine(self._options.engine, communicator, self._listener.preparing)
        return Team(self._replicas(memories, sources, engine), memories[0], sync, name, engine)

    def _replicas(
        self, memories: Sequence[DeviceMemory], sources: Sequence[Source], engine: Engine
    ) -> Sequence[Replica]:
        """Collective. What one rank of a node has compiled, the others find on the disk."""
        topology = self._communicator.topology
        if engine.inductor and topology.local_rank > 0:
            self._communicator.node_barrier()
        seed = self._resolved.training.seed
        replicas = [
            Replica(
                topology.rank + index,
                self._program,
                memory,
                self._shard(source, topology.rank + index),
                seed,
                engine.inductor,
            )
            for index, (memory, source) in enumerate(zip(memories, sources, strict=True))
            if self._works
        ]
        if engine.inductor:
            if topology.local_rank == 0:
                self._communicator.node_barrier()
            self._communicator.barrier()  # so that the first step waits for nobody's compiler
        return replicas

    def _sync(self, memories: Sequence[DeviceMemory], devices: Devices | None) -> tuple[GradientSync, SyncName]:
        program, arguments, communicator = self._program, self._arguments, self._communicator
        optimizers = Optimizers(program, memories[0], arguments)
        if self._emulated > 1:
            return EmulatedSync(program, arguments, optimizers, memories), "emulated"
        if communicator.topology.world_size == 1:
            return SingleSync(program, arguments, optimizers, memories[0]), "none"
        if devices is not None:
            one = DeviceSync if devices.shares_parameters else SmallDeviceSync
            return one(program, arguments, optimizers, devices, communicator), "device"
        if self._host_sync == "gloo":
            return GlooSync(program, arguments, optimizers, memories[0], communicator), "host"
        if self._host_sync == "parameter-server":
            return ParameterServerSync(program, arguments, memories[0], self._roles, communicator), "host"
        return HostSync(program, arguments, optimizers, memories[0], communicator), "host"

    def _shard(self, source: Source, rank: int) -> Shard:
        return Shard(
            source.train,
            rank=rank,
            world_size=self._world_size,
            batch_size=self._program.batch_size,
            options=self._resolved.data,
            inputs=input_specs(self._program),
            seed=self._resolved.training.seed,
        )

    def _place_weights(self, memories: Sequence[DeviceMemory]) -> None:
        weights = dict(map_weights(self._path))
        if self._options.weights is not None:
            weights |= load_weights(self._options.weights, self._program)
        for memory in memories:
            place_weights(self._program, memory, weights)
        self._communicator.node_barrier()  # a peer may have placed what is read here

    def _evaluate(
        self, evaluator: Evaluator, sources: Sequence[Source], step: int, epoch: int, team: Team
    ) -> EvaluationRecord:
        began_s = time.perf_counter()
        evaluator.use_buffers(self._buffers_of_first(team))
        seed = self._resolved.training.seed
        first = self._communicator.topology.rank
        own = [
            evaluator.sums(source.evaluation, first + index, self._world_size, seed, step)
            for index, source in enumerate(sources)
            if source.evaluation is not None and self._works
        ]
        everybody = self._communicator.all_gather_object(own)
        total = sum((sums for of_rank in everybody for sums in of_rank), Sums())
        return record(total, step, epoch, self._program.loss is not None, began_s)

    def _buffers_of_first(self, team: Team) -> dict[str, Tensor]:
        """Collective: the buffers of replica 0."""
        memory = team.memory
        names = [symbol.name for symbol in self._program.symbols.values() if symbol.kind is SymbolKind.BUFFER]
        own = {name: memory.tensor(name).clone() for name in names}
        return self._communicator.broadcast_object(own) if names else own

    def _start(self, steps: Plan, team: Team, source: Source) -> Start:
        return Start(
            name=self._program.name,
            plan=steps,
            sync=team.sync.title,
            threads=self._threads,
            data=source.description,
            notices=tuple(self._notices(team)),
            seconds_to_start_s=time.perf_counter() - self._began_s,
            placement=str(self._placement),
        )

    def _notices(self, team: Team) -> list[str]:
        notices = [f"changed for this run: {change}" for change in self._resolved.changed]
        if self._options.reduce_on_rdu and team.sync_name in ("none", "emulated"):
            notices.append("--reduce-on-rdu has nothing to do: gradients do not leave this process")
        if self._options.host_sync is not None and team.sync_name in ("none", "emulated"):
            notices.append("--host-sync has nothing to do: gradients do not leave this process")
        if team.engine.notice is not None:
            notices.append(team.engine.notice)
        if team.sync_name == "device":
            notices += scattered(self._communicator.topology.node_of)
        if self._world_size > 1 and self._changes_buffers():
            notices.append("buffers (BatchNorm statistics) are per replica; those of replica 0 are evaluated and saved")
        return notices

    def _changes_buffers(self) -> bool:
        outputs = self._program.training.outputs if self._program.training else ()
        return any(self._program.symbols[output.symbol].kind is SymbolKind.BUFFER for output in outputs)

    def _finish(self, trainer: Trainer, team: Team, steps: Plan, evaluation: EvaluationRecord | None) -> SummaryRecord:
        memory = team.memory
        weights = self._weights_sha256(team)
        if self._options.save is not None and self._communicator.topology.rank == 0:
            save_weights(self._options.save, self._program, memory)
        totals = trainer.totals
        predicted, not_predicted = self._predicted(steps)
        summary = SummaryRecord(
            pef_digest=self._document.digest,
            world_size=self._world_size,
            emulated=self._emulated > 1,
            sync=team.sync_name,
            host_sync=self._host_sync if team.sync_name == "host" else None,
            parameter_servers=self._options.parameter_servers or 0,
            engine=team.engine.name,
            threads=self._threads,
            torch=torch.__version__,
            mpi=self._communicator.library,
            seed=self._resolved.training.seed,
            batch_size=steps.batch_size,
            global_batch_size=steps.global_batch_size,
            accumulation_steps=steps.accumulation_steps,
            epochs=steps.epochs,
            steps=totals.steps,
            samples=totals.steps * steps.samples_per_step,
            samples_left_out_each_epoch=steps.left_out,
            training_s=totals.training_s,
            model_s=totals.model_s,
            samples_per_s=totals.steps * steps.samples_per_step / totals.training_s,
            sync_share=totals.sync_s / totals.training_s,
            hidden_sync_s=totals.hidden_sync_s,
            loss_first=totals.loss_first,
            loss_last=totals.loss_last,
            first_nonfinite_step=totals.first_nonfinite_step,
            evaluation=evaluation,
            bytes=self._bytes_of_all(team.sync),
            weights_sha256=weights,
            state_sha256=self._state_sha256(team, totals.steps),
            exempt_from_exactness=self._exempt(team),
            placement=placement_record(self._inventory, self._placement),
            predicted=predicted,
            not_predicted=not_predicted,
        )
        self._listener.ended(summary)
        return summary

    def _predicted(self, steps: Plan) -> tuple[PredictedRecord | None, str | None]:
        """What a step is predicted to take, or why nothing is. On rank 0, which alone tells it."""
        if self._communicator.topology.rank > 0:
            return None, None
        path = SyncPath.RDU if self._options.reduce_on_rdu else SyncPath.HOST
        return predict_run(self._program, self._inventory, self._placement, path, steps.accumulation_steps)

    def _exempt(self, team: Team) -> list[str]:
        """What of this run has bits of its own."""
        of_pef = self._document.metadata.get("exempt_from_exactness")
        of_sync = EXEMPT if isinstance(team.sync, GlooSync) else None
        of_engine = INDUCTOR_EXEMPT if team.engine.inductor else None
        return [reason for reason in (of_pef, of_sync, of_engine) if reason]

    def _weights_sha256(self, team: Team) -> str:
        """Collective. Of the parameters of every replica that has its own; a server has them only in part."""
        digests = self._works and team.memory.has_own_parameters
        own = weights_sha256(self._program, team.memory) if digests else None
        return check_weights(self._communicator, own)

    def _state_sha256(self, team: Team, steps: int) -> str:
        """Collective. Of the state of replica 0, with every optimizer state brought together."""
        states = {
            state_name(member.parameter, optimizer.name, state): (group, member, state)
            for group in self._program.groups
            for optimizer in (self._program.optimizers[group.optimizer],)
            for member in group.members
            for state in optimizer.states
        }
        memory, nothing = team.memory, torch.empty(0)
        first = self._communicator.topology.rank == 0

        def tensor_of(name: str) -> Tensor:
            tensor = team.sync.whole_state(*states[name]) if name in states else memory.tensor(name)
            return tensor if first and tensor is not None else nothing

        return self._communicator.broadcast_object(state_sha256(self._program, tensor_of, steps))

    def _bytes_of_all(self, sync: GradientSync) -> BytesRecord:
        everybody = self._communicator.all_gather_object(sync.bytes_moved)
        return BytesRecord(
            device_to_host=sum(moved.device_to_host for moved in everybody),
            host_to_device=sum(moved.host_to_device for moved in everybody),
            peer=sum(moved.peer for moved in everybody),
            network=sum(moved.network for moved in everybody),
        )
