"""Resuming a run: checking that the checkpoint fits it, and restoring the state of training."""

from dataclasses import dataclass

from sambasim.ir.types import SymbolKind
from sambasim.runtime.checkpoint.changes import changes, check_epoch, check_exact, check_pef
from sambasim.runtime.checkpoint.choose import check_empty, check_newest, choose
from sambasim.runtime.checkpoint.content import Checkpoint, buffer_name, pieces_of
from sambasim.runtime.checkpoint.manifest import Manifest, describe
from sambasim.runtime.loss_scale import LossScale
from sambasim.runtime.plan import Position
from sambasim.runtime.setup import Setup
from sambasim.runtime.team import Team
from sambasim.runtime.training import Totals


@dataclass(frozen=True, slots=True)
class Resumption:
    """The checkpoint that a run resumes from, its position, and notices for the user. `keeps_loss_scale`: its options
    for it are those of the run."""

    checkpoint: Checkpoint
    position: Position
    notices: tuple[str, ...]
    keeps_loss_scale: bool

    def carry_over(self, totals: Totals) -> None:
        progress = self.checkpoint.manifest.progress
        totals.samples = progress.samples
        totals.first_nonfinite_step = progress.first_nonfinite_step
        totals.skipped_steps = progress.skipped_steps
        if progress.loss_scale is not None and self.keeps_loss_scale:
            totals.loss_scale = LossScale(**progress.loss_scale.model_dump())
        if progress.loss_first is not None:
            totals.loss_first = progress.loss_first


def find(setup: Setup, samples: int) -> Resumption | None:
    """Collective. The checkpoint that the options ask to resume from; None for a run that starts from the beginning.
    Raises CheckpointError or OptionError."""
    options, communicator = setup.options.checkpoint, setup.communicator
    if options.resume is None:
        if options.dir is not None:
            check_empty(options.dir)
            communicator.barrier()  # no rank writes before all have checked
        return None
    checkpoint, notices = choose(options.resume, options.dir, communicator)
    saved, where = checkpoint.manifest, str(checkpoint.path)
    at = saved.position
    if options.dir is not None:
        check_newest(at.step, options.dir)
        communicator.barrier()
    now = describe(setup, samples)
    found = [*check_pef(saved, now, setup.path, where), *changes(saved, now)]
    check_epoch(saved, now, found, where)
    if options.exact:
        check_exact(found, where)
    notices = [*notices, f"resumes after step {at.step}, from {where}"]
    notices += [f"changed since the checkpoint: {change}" for change in found]
    if any(change.alters_bits for change in found):
        notices.append("from here on, the bits may differ from those of an uninterrupted run")
    return Resumption(checkpoint, Position(at.step, at.epoch, at.used), tuple(notices), _same_scaling(saved, now))


def _same_scaling(saved: Manifest, now: Manifest) -> bool:
    was, wanted = saved.options["training"], now.options["training"]
    return isinstance(was, dict) and isinstance(wanted, dict) and was.get("loss_scale") == wanted.get("loss_scale")


def restore(setup: Setup, team: Team, checkpoint: Checkpoint) -> None:
    """Collective. Make `checkpoint` the state of `team`. A replica that it does not have gets the buffers of replica 0,
    and a chip those of the first. A rank restores the parameters in its memory, and the optimizer states of the slices
    that it updates."""
    program, run = setup.program, checkpoint.manifest.run
    kept = {id(one.memory): one for one in team.replicas if one.memory.has_own_parameters}
    own = [(one.memory, one.rank) for one in kept.values()]
    own += [(one.transport.memory, one.rank) for one in team.first if one.transport.memory is not one.memory]
    for symbol in program.symbols.values():
        if symbol.kind is SymbolKind.PARAMETER:
            for memory, rank in own:
                if symbol.name not in memory.program.symbols:
                    continue
                at, flat = setup.mesh.coordinates(rank), memory.tensor(symbol.name).view(-1)
                checkpoint.read_part(symbol.name, symbol.cuts, at, 0, flat)
        elif symbol.kind is SymbolKind.BUFFER:
            for one in team.replicas:
                if symbol.name not in one.memory.program.symbols:
                    continue
                replica, chip = divmod(one.replica, program.chips)
                prefix = buffer_name(replica if replica < run.replicas else 0, chip if chip < run.chips else 0, "")
                at, flat = setup.mesh.coordinates(one.rank), one.memory.tensor(symbol.name).view(-1)
                checkpoint.read_part(symbol.name, symbol.cuts, at, 0, flat, prefix=prefix)
    for one in team.first:
        transport, at = one.transport, setup.mesh.coordinates(one.rank)
        for piece in pieces_of(one.memory.program, transport.memory, transport.kept, at):
            if piece.kind is SymbolKind.OPTIMIZER_STATE:
                cuts = program.symbols[piece.symbol].cuts
                checkpoint.read_part(piece.symbol, cuts, at, piece.start, piece.data)
    setup.communicator.node_barrier()  # another rank may have restored memory that this one reads
