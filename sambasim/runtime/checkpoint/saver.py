"""Saving checkpoints: every rank writes a shard into a hidden folder, which rank 0 renames once all are on disk.
And what each rank takes of one, also if replicas, the mesh or what is trained have changed since."""

import hashlib
import os
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import NamedTuple, TypeVar

from torch import Tensor

from sambasim.errors import MachineError, OptionError
from sambasim.files import replacing, to_disk
from sambasim.ir.mesh import PIPELINE
from sambasim.ir.program import AVERAGE, MASTER, ParameterGroup
from sambasim.ir.ranks import first_holders
from sambasim.ir.types import Slice, Symbol, SymbolKind
from sambasim.options.given import leaves
from sambasim.records.metrics import CheckpointRecord
from sambasim.runtime.checkpoint import folder
from sambasim.runtime.checkpoint.content import (
    Checkpoint,
    Manifest,
    ShardModel,
    buffer_name,
    describe,
    part_name,
    piece_key,
    states_of,
)
from sambasim.runtime.checkpoint.folder import MANIFEST_FILE
from sambasim.runtime.machine.communicator import Communicator
from sambasim.runtime.run.plan import Position
from sambasim.runtime.run.run_observer import RunObserver
from sambasim.runtime.run.setup import Setup, Team
from sambasim.runtime.run.training import LossWatch, Progress
from sambasim.runtime.values.mean import parts_of
from sambasim.runtime.values.memory import DeviceMemory, save_tensors
from sambasim.runtime.watch.status_file import UNWATCHED, Activity

T = TypeVar("T")


class Piece(NamedTuple):
    """Elements of a flat tensor, or of a part of one, from `start` on, in a view of device memory."""

    symbol: Symbol
    name: str
    start: int
    data: Tensor

    @property
    def key(self) -> str:
        return piece_key(self.name, self.start, self.start + self.data.numel())


def pieces_of(
    memory: DeviceMemory, slice_of: Callable[[ParameterGroup], Slice], at: Mapping[str, int]
) -> Iterator[Piece]:
    """The trained parameters and optimizer states in `memory` that lie in a slice of each group. `at`: the rank's
    coordinates."""
    program = memory.program
    for group in program.groups:
        optimizer = program.optimizers[group.optimizer]
        for region in ("parameter", *optimizer.states):
            for member, start, data in parts_of(group, memory.region(group, region), slice_of(group)):
                symbol = program.symbols[optimizer.symbols_of(member)[region]]
                yield Piece(symbol, part_name(symbol.name, symbol.cuts, at), start, data)


class Saver:
    """Saves checkpoints as the options ask. Every rank has one and makes the same calls. `resumed`: the checkpoint that
    the run began with."""

    def __init__(
        self,
        directory: Path,
        setup: Setup,
        team: Team,
        samples: int,
        observer: RunObserver,
        activity: Activity,
        losses: LossWatch,
        resumed: Path | None,
    ) -> None:
        self._folder, self._cadence = directory, setup.options.checkpoint.cadence
        self._setup, self._team, self._observer, self._activity, self._losses = setup, team, observer, activity, losses
        self._beginning = describe(setup, samples)
        self._failure: MachineError | None = None
        self._last_s = time.monotonic()
        self._saved = None if resumed is None else resumed.resolve()
        self.failed = 0
        self.last: Path | None = None

    def is_time(self) -> bool:
        """Whether a checkpoint is due by time. Rank 0 decides for all, because clocks differ."""
        return self._cadence.unit == "s" and time.monotonic() - self._last_s >= self._cadence.every

    def save_if_due(self, position: Position, progress: Progress, *, due: bool) -> None:
        """Call after a step within an epoch, and after an epoch and its evaluation. `due`: by time."""
        count = {"steps": position.step, "epochs": position.epoch}.get(self._cadence.unit)
        at_end = self._cadence.unit == "steps" or not position.used
        if due or (count is not None and at_end and count % self._cadence.every == 0):
            self.save(position, progress)

    def check_end(self) -> None:
        """For a run that saves its weights nowhere else. Raises MachineError if its end could not be saved."""
        if self._failure is not None:
            raise MachineError(
                f"the run is over, and its end is not saved: {self._failure.what}; {self.kept()}",
                where=self._failure.where,
                remedy="free some space there and use --resume; --save FILE saves the weights elsewhere",
            )

    def newest(self) -> str | None:
        with suppress(OptionError, StopIteration):
            return next(path.name for path in folder.checkpoints_in(self._folder))
        return None

    def kept(self) -> str:
        """For a message: which checkpoint there is if the run ends now."""
        newest = self.newest()
        return f"the last checkpoint is {newest}" if newest else "there is no checkpoint yet"

    def save(self, position: Position, progress: Progress, *, goes_on: bool = True) -> Path | None:
        """Save a checkpoint now; returns its path, or None if that fails and --on-checkpoint-failure is `warn`.
        That of this step, if there is one, is not saved again. Raises MachineError, or NumericsError for non-finite
        parameters, as --on-nonfinite says."""
        began_s = time.perf_counter()
        setup, options = self._setup, self._setup.options.checkpoint
        path = self._folder / folder.name_of(position.step)
        best = None if progress.best is None or setup.resolved.evaluation.keep_best is None else progress.best.step
        if self._saved == path.resolve():
            return path
        self._team.settle()
        self._losses.check_parameters(self._nonfinite_parameter(), position)
        own = [
            (rank.replica, dict(rank.shard.state)) for rank in self._team.replicas if rank.shard and rank.shard.state
        ]
        everybody = dict(pair for pairs in setup.communicator.all_gather_object(own) for pair in pairs)
        progress = replace(progress, streams=[state for _, state in sorted(everybody.items())])
        manifest = self._beginning.model_copy(update={"position": position, "progress": progress})
        try:
            written = write(path, manifest, self._own_pieces(), setup.communicator, self._activity)
        except MachineError as error:
            self.failed, self._failure = self.failed + 1, error
            if options.on_failure == "stop":
                raise
            after = "training goes on, and " if goes_on else ""
            self._observer.noted(f"warning: {error.what} ({error.where}); {after}{self.kept()}")
            return None
        finally:
            self._last_s = time.monotonic()
        self._saved, self._failure, self.last = path.resolve(), None, path
        if setup.is_first:
            with suppress(OSError, OptionError):  # what cannot be deleted stays, without harm
                others = [kept for kept in folder.checkpoints_in(self._folder) if folder.step_of(kept) != best]
                older = [kept for kept in others if folder.step_of(kept) < position.step]
                for checkpoint in older[options.keep - 1 :]:
                    folder.remove(checkpoint)
        self._observer.saved(
            CheckpointRecord(
                step=position.step,
                epoch=position.epoch + bool(position.used),
                path=str(path),
                size_bytes=sum(shard.size_bytes for shard in written.shards.values()),
                checkpoint_s=time.perf_counter() - began_s,
            )
        )
        return path

    def _own_pieces(self) -> Mapping[str, Tensor]:
        """What this rank saves, by key. Of what several ranks of a replica have, the first saves; replica 0 saves
        parameters that are not trained."""
        program, replicas = self._setup.program, self._team.replicas if self._setup.works else ()
        holders = first_holders(program)
        pieces = {piece.key: piece.data for piece in self._trained()}
        trained = {member.parameter for group in program.groups for member in group.members}
        whole = []
        for name, tensor in self._beginning.tensors.items():
            for replica in replicas:
                at = self._setup.mesh.coordinates(replica.rank)
                if at.get(PIPELINE, 0) != holders[name] or not (tensor.cuts or replica.transport.is_first_copy):
                    continue
                part = part_name(name, tensor.cuts, at)
                if tensor.kind is SymbolKind.BUFFER:
                    place = divmod(replica.replica, program.chips)
                    whole.append((buffer_name(*place, part), replica.memory.tensor(name)))
                elif tensor.kind is SymbolKind.PARAMETER and name not in trained and replica.replica == 0:
                    whole.append((part, replica.memory.tensor(name)))
        return pieces | {piece_key(name, 0, tensor.numel()): tensor.view(-1) for name, tensor in whole}

    def _trained(self) -> Iterator[Piece]:
        """The parameters and optimizer states that this process saves."""
        for replica in self._team.first:
            sync, at = replica.transport.sync, self._setup.mesh.coordinates(replica.rank)
            for piece in pieces_of(sync.memory, sync.saved, at):
                if replica.transport.is_first_copy or piece.symbol.cuts:
                    yield piece

    def _nonfinite_parameter(self) -> str | None:
        """Collective. A trained parameter with an element that is NaN or infinite, if there is one."""
        parameters = (piece for piece in self._trained() if piece.symbol.kind is SymbolKind.PARAMETER)
        bad = (piece.name for piece in parameters if not all(bound.isfinite() for bound in piece.data.aminmax()))
        name = next(bad, None)
        self._activity.waits("waiting for peers to begin a checkpoint")
        return next(filter(None, self._setup.communicator.all_gather_object(name)), None)


def write(
    path: Path,
    manifest: Manifest,
    pieces: Mapping[str, Tensor],
    communicator: Communicator,
    activity: Activity = UNWATCHED,
) -> Manifest:
    """Collective. Write the checkpoint `path`, of which this rank has `pieces`; returns the complete manifest. Raises
    MachineError on all ranks if one fails; then nothing of it is left."""
    rank, count = communicator.rank, communicator.world_size
    with ExitStack() as stack:

        def begin() -> Path:
            path.parent.stat()  # raises if the folder itself is gone: its disk may have been unmounted
            hidden = stack.enter_context(replacing(path))
            hidden.mkdir()
            return hidden.relative_to(path.parent)  # which may have another path on another host

        def write_shard() -> tuple[str, ShardModel]:
            file = hidden / f"shard-{rank:05}-of-{count:05}.safetensors"
            save_tensors(file, pieces)
            with file.open("rb") as stream, ThreadPoolExecutor(1) as other:
                flushed = other.submit(os.fsync, stream.fileno())  # hashing takes as long
                sha256 = hashlib.file_digest(stream, "sha256").hexdigest()
                flushed.result()
                return file.name, ShardModel(size_bytes=stream.tell(), sha256=sha256)

        def finish() -> None:
            (hidden / MANIFEST_FILE).write_text(manifest.model_dump_json())
            to_disk(hidden / MANIFEST_FILE)
            stack.close()

        activity.waits("waiting for peers to begin a checkpoint")
        hidden = path.parent / _together(path, communicator, activity, lambda: begin() if rank == 0 else path)[0]
        activity.takes_long("writing a checkpoint")
        manifest = manifest.sealed(dict(_together(path, communicator, activity, write_shard)))
        _together(path, communicator, activity, lambda: finish() if rank == 0 else None)
    activity.does("going on after a checkpoint")
    return manifest


def _together(path: Path, communicator: Communicator, activity: Activity, work: Callable[[], T]) -> tuple[T, ...]:
    """Collective. The results of `work` on all ranks. If one fails, all raise MachineError."""
    with communicator.alike():
        try:
            result = work()
        except OSError as error:
            raise MachineError(
                f"checkpoint {path.name} cannot be written: {error.strerror or error}",
                where=f"rank {communicator.rank} on {communicator.host_name}, {path.parent}",
                remedy="free some space there, or name another place that all hosts share: --checkpoint-dir FOLDER",
            ) from error
        finally:
            activity.waits("waiting for peers' parts of a checkpoint")
    return communicator.all_gather_object(result)


def restore(setup: Setup, team: Team, checkpoint: Checkpoint) -> None:
    """Collective. Make `checkpoint` the state of `team`: parameters in each memory, optimizer states of the slices that
    a rank updates; zeros without momentum begin anew. More replicas get buffers of replica 0, chips of the first."""
    program, saved, run = setup.program, checkpoint.manifest, checkpoint.manifest.run

    def read(symbol: Symbol, memory: DeviceMemory, rank: int, prefix: str = "") -> None:
        if symbol.name in memory.program.symbols:
            flat = memory.tensor(symbol.name).view(-1)
            checkpoint.read_part(symbol, setup.mesh.coordinates(rank), 0, flat, prefix)

    own = {id(rank.memory): rank for rank in team.replicas if rank.memory.has_own_parameters}
    memories = [(rank.memory, rank.rank) for rank in own.values()]
    memories += [(of.memory, rank.rank) for rank in team.first if (of := rank.transport.sync).memory is not rank.memory]
    for symbol in program.symbols.values():
        if symbol.kind is SymbolKind.PARAMETER:
            for memory, number in memories:
                read(symbol, memory, number)
        elif symbol.kind is SymbolKind.BUFFER:
            for rank in team.replicas:
                replica, chip = divmod(rank.replica, program.chips)
                prefix = buffer_name(replica if replica < run.replicas else 0, chip if chip < run.chips else 0, "")
                read(symbol, rank.memory, rank.rank, prefix)
    states, there = program.optimizer_states, states_of(saved)
    has_momentum = saved.position.step > 0 and bool(leaves(saved.options).get("optimizer.momentum"))
    begun = set(range(len(program.optimizers)) if has_momentum else ())
    for rank in team.first:
        sync, at = rank.transport.sync, setup.mesh.coordinates(rank.rank)
        for piece in pieces_of(sync.memory, sync.current, at):
            if piece.symbol.kind is SymbolKind.OPTIMIZER_STATE:
                group, member, state = states[piece.symbol.name]
                kind = program.optimizers[group.optimizer].name.rstrip("0123456789")
                name = there.get(member.parameter, {}).get((kind, state, piece.symbol.whole))
                if name is not None:
                    checkpoint.read_part(piece.symbol, at, piece.start, piece.data, name=name)
                elif state in (MASTER, AVERAGE):
                    checkpoint.read_part(program.symbols[member.parameter], at, piece.start, piece.data)
                begun |= {group.optimizer} if state not in (MASTER, AVERAGE) and bool(piece.data.any()) else set()
    # Also: other ranks have restored what this one reads.
    for rank, each in product(team.replicas, set().union(*setup.communicator.all_gather_object(begun))):
        rank.optimizers.begun[each] = 0
