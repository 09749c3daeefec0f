"""What a run reports, as records: notices at its start; the summary at its end, with the predicted time of a step on
devices, and the bytes that sync moved, added over ranks."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, astuple
from itertools import chain, takewhile
from typing import Any

import torch
from torch import Tensor

from sambasim.errors import CallbackError, PeerError
from sambasim.ir.mesh import DATA_PARALLEL, copy_mesh
from sambasim.ir.program import Program
from sambasim.ir.ranks import kept
from sambasim.ir.types import SymbolKind
from sambasim.pef.digests import changed
from sambasim.records.metrics import BytesMoved, EvaluationRecord, PlacementRecord, PredictedRecord, SummaryRecord
from sambasim.runtime.checkpoint.saver import Saver
from sambasim.runtime.machine.process import peak_memory_bytes
from sambasim.runtime.run.plan import Plan
from sambasim.runtime.run.replica import changed_buffers
from sambasim.runtime.run.run_observer import Start
from sambasim.runtime.run.setup import INDUCTOR_EXEMPT, Setup, Team
from sambasim.runtime.run.training import Totals
from sambasim.runtime.transports.connect import Way
from sambasim.runtime.transports.host import GLOO_EXEMPT
from sambasim.runtime.transports.network import scattered
from sambasim.runtime.values.memory import State, byte_array, joined, state_dict, state_of
from sambasim.units import format_bytes


def notices(setup: Setup, team: Team, steps: Plan) -> list[str]:
    options, program = setup.options, setup.program
    lines = [f"changed for this run: {change}" for change in setup.resolved.changed]
    if any(change.startswith("training.seed ") for change in setup.resolved.changed):
        lines.append("--seed draws no new first weights: compile again with another for others")
    lines += changed(setup.document) if setup.is_first else ()
    lines += setup.notes
    schedule, backwards = setup.resolved.training.schedule, range(steps.steps - 1, steps.start.step - 1, -1)
    of_zero = [*takewhile(lambda step: not schedule.factor(step, steps.steps), backwards)]
    if len(of_zero) > 1:  # of a schedule that ends with the run the last step may be
        what = f"the learning rate is 0 from step {of_zero[-1] + 1} of {steps.steps} on"
        to_type = f"; --set training.schedule.total_steps={steps.steps}" if schedule.total_steps else ""
        lines.append(f"{what}: training.schedule counts optimizer steps, not epochs{to_type}")
    nothing = "gradients do not leave this process"
    if setup.shards == 1:
        nothing = "there is one replica, so there are no gradients to sync"
    is_alone = team.sync_name in ("none", "emulated")
    if options.reduce_on_rdu and is_alone:
        lines.append(f"--reduce-on-rdu has no effect: {nothing}")
    if "host_sync" in options.model_fields_set and is_alone:
        lines.append(f"--host-sync has no effect: {nothing}")
    if options.wire != setup.wire:
        dtypes = sorted({group.dtype for group in program.groups})
        why = nothing if setup.shards == 1 else f"gradients are {' and '.join(dtypes)}"
        lines.append(f"--wire has no effect: {why}")
    elif setup.wire != "fp32" and team.sync_name == "device" and len({*setup.communicator.node_of}) == 1:
        lines.append(f"--wire {setup.wire} saves no bytes on one node: devices read all bits of gradients, and round")
    lines += _mesh_notices(setup)
    lines += _zero_notices(setup, team)
    lines += ["evaluations, and so the best, are of the averages of the weights: --save-ema, or Run.ema"] * (
        setup.resolved.ema is not None
    )
    has_instructions = any(has for name, has in torch.cpu.get_capabilities().items() if "bf16" in name)
    if not has_instructions and any(group.dtype == "bfloat16" for group in program.groups):
        lines.append("this CPU has no instructions for bfloat16: the PEF may run slower than one compiled for fp32")
    if team.engine.notice is not None:
        lines.append(team.engine.notice)
    if team.sync_name == "device":
        lines += scattered(setup.communicator.node_of)
    names = [(*symbol.torch_names, symbol.name)[0] for symbol in changed_buffers(program)]
    if setup.shards > 1 and names:
        each, first = ("chip", "the first chip") if program.chips > 1 else ("replica", "replica 0")
        others = f" and {len(names) - 1} more are" if len(names) > 1 else " is"
        lines.append(f"{names[0]}{others} kept per {each}; those of {first} are evaluated and saved")
    return lines


_MOST_RANKS = 8


def _mesh_notices(setup: Setup) -> list[str]:
    """Where the first ranks are on the mesh and on devices, if a copy of the model has several: a line for each."""
    mesh, nodes = setup.mesh, setup.communicator.node_of
    if copy_mesh(setup.program.mesh).world_size == 1:
        return []
    lines = [f"mesh {mesh}, {mesh.world_size} ranks"]
    for rank, location in enumerate(setup.placement.locations()[:_MOST_RANKS]):
        local = f" (local {nodes[:rank].count(nodes[rank])})" if len(setup.ranks) == 1 else ""
        where = f" on {location}" if setup.shows_device else ""
        lines.append(f"rank {rank}{local}: {mesh.place(rank)}{where}")
    more = mesh.world_size - _MOST_RANKS
    return [*lines, f"{more} more ranks"] if more > 0 else lines


def _zero_notices(setup: Setup, team: Team) -> list[str]:
    program, sync = team.memory.program, team.transport.sync
    if program.zero < 2 or setup.shards == 1 or team.way not in (Way.HOST, Way.DEVICE):
        return []
    if team.way is Way.HOST:
        each = [
            f"{format_bytes(part.kept_bytes)} of {format_bytes(part.size_bytes)} {part.kind}"
            for part in kept(program, {group.name: sync.updated(group) for group in program.groups})
        ]
        return [f"ZeRO {program.zero}: rank 0 keeps {', '.join(each)}"]
    what = "everything is whole" if sync.replicated else "whole gradients, parameters once on each node"
    return [f"ZeRO {program.zero} saves nothing more with --reduce-on-rdu: {what}"]


def summarize(
    setup: Setup,
    team: Team,
    start: Start,
    totals: Totals,
    evaluation: EvaluationRecord | None,
    saver: Saver | None,
    state: State,
) -> SummaryRecord:
    steps, options = start.plan, setup.options
    taken = totals.steps - steps.start.step
    moved_here = [replica.transport.sync.bytes_moved for replica in team.replicas]
    moved = [astuple(own) for of_process in setup.communicator.all_gather_object(moved_here) for own in of_process]
    locations = setup.placement.locations()
    prediction = _prediction(setup, steps) if setup.is_first else None
    progress = totals.progress
    measured = asdict(totals) | asdict(progress)
    measured["loss_scale"] = None if progress.loss_scale is None else progress.loss_scale.value
    return SummaryRecord(
        **{name: value for name, value in measured.items() if name in SummaryRecord.model_fields},
        **facts(setup, team),
        chips=setup.program.chips,
        mesh=dict(setup.mesh.sizes),
        sync=team.sync_name,
        host_sync=setup.options.host_sync if team.sync_name == "host" else None,
        wire=None if setup.wire == "fp32" else setup.wire,
        parameter_servers=options.parameter_servers or 0,
        mpi=setup.communicator.library,
        batch_size=steps.batch_size,
        global_batch_size=steps.global_batch_size,
        accumulation_steps=steps.accumulation_steps,
        epochs=steps.epochs,
        samples_left_out_each_epoch=steps.left_out,
        samples_per_s=taken * steps.samples_per_step / totals.training_s if taken else 0.0,
        sync_share=totals.sync_s / totals.training_s if taken else 0.0,
        evaluation=evaluation,
        peak_memory_bytes=setup.communicator.all_gather_object(peak_memory_bytes()),
        bytes=BytesMoved(*map(sum, zip(*moved, strict=True))),
        weights_sha256=state.weights_sha256,
        state_sha256=state.state_sha256,
        resumed_after_step=None if options.checkpoint.resume is None else steps.start.step,
        checkpoint=None if saver is None or saver.last is None else str(saver.last),
        failed_checkpoints=0 if saver is None else saver.failed,
        notices=list(start.notices),
        placement=PlacementRecord(
            device=setup.inventory.device.name,
            cluster=setup.placement.cluster.name,
            tiles=setup.placement.tiles,
            node_of=tuple(location.node for location in locations),
            rdu_of=tuple(location.rdu for location in locations),
            first_tile_of=tuple(at.first_tile for at in locations if at.first_tile is not None) or None,
        ),
        predicted=prediction if isinstance(prediction, PredictedRecord) else None,
        not_predicted=prediction if isinstance(prediction, str) else None,
    )


def _prediction(setup: Setup, steps: Plan) -> PredictedRecord | str:
    if setup.document.has_several:
        return "the PEF has a graph for each length of samples: sambasim simulate predicts them"
    from sambasim.runtime.prediction import predicted, predicted_record  # the simulator, once training has ended
    from sambasim.simulation.sync import SyncPath

    path = SyncPath.RDU if setup.options.reduce_on_rdu else SyncPath.HOST
    step = predicted(setup.program, setup.inventory, setup.placement, path, steps.accumulation_steps)
    return step if isinstance(step, str) else predicted_record(step, setup.inventory)


def facts(setup: Setup, team: Team) -> dict[str, Any]:
    """The values of RunFacts."""
    return {
        "pef_digest": setup.document.digest,
        "world_size": setup.replicas,
        "emulated": setup.is_emulation,
        "engine": team.engine.name,
        "threads": setup.threads,
        "torch": torch.__version__,
        "data": setup.data_identity,
        "seed": setup.seed,
        "exempt_from_exactness": _exempt(setup, team),
    }


def _exempt(setup: Setup, team: Team) -> list[str]:
    of_pef = setup.document.metadata.get("exempt_from_exactness")
    cpus = f"ranks on CPUs of {len(setup.cpus)} kinds, whose kernels differ: {', '.join(setup.cpus)}"
    of_engine = team.engine.inductor and INDUCTOR_EXEMPT
    reasons = (of_pef, len(setup.cpus) > 1 and cpus, team.way is Way.GLOO and GLOO_EXEMPT, of_engine)
    return [reason for reason in reasons if reason]


def trained_state(setup: Setup, team: Team, steps: int, *, keeps_tensors: bool) -> State:
    """Collective. The state of replica 0 after `steps` optimizer steps; rank 0 has its tensors, if they are wanted.
    Raises PeerError if replicas have different parameters."""
    program = setup.program
    tensor_of, averages = whole_tensors(setup, team), averages_after(setup, steps)
    state = state_of(program, tensor_of, steps, keeps_tensors=keeps_tensors, averages=averages)
    weights_sha256, state_sha256 = setup.communicator.broadcast_object((state.weights_sha256, state.state_sha256))
    if setup.shards > 1:
        _check_equal(setup, team, weights_sha256 if setup.is_first and _is_whole(program) else None)
    return State(weights_sha256, state_sha256, state.tensors, state.averages)


def weights_now(setup: Setup, team: Team, everywhere: bool) -> Mapping[str, Tensor]:
    """Copies of the parameters and buffers of replica 0, by their names in a state_dict, on rank 0; or `everywhere`:
    then collective. Raises CallbackError if rank 0 alone has only a part of them."""
    if not everywhere and (team.keeps_slices or (team.hub is None and not _is_whole(setup.program))):
        what = "event.weights() was called on rank 0 only, and a rank has only a part of the parameters"
        raise CallbackError(what, remedy="--callback-ranks all, and call it on all of them")
    own = state_dict(setup.program, whole_tensors(setup, team))
    return setup.communicator.broadcast_object(own) if everywhere else own


def _is_whole(program: Program) -> bool:
    """Whether one rank has all of a replica's parameters."""
    return program.schedule is None and not any(symbol.cuts for symbol in program.symbols.values())


def averages_after(setup: Setup, steps: int) -> Mapping[str, str] | None:
    """By parameter, the state that is its average after `steps` optimizer steps: none before the first one is taken;
    None if the program keeps none."""
    ema = setup.resolved.ema
    return None if ema is None else setup.program.averages if steps >= ema.start else {}


def _check_equal(setup: Setup, team: Team, own_sha256: str | None) -> None:
    """Collective. `own_sha256`: that of this rank's parameters, if it is known."""
    own, kinds = {}, (SymbolKind.PARAMETER,)
    for replica in team.first if setup.works and not team.keeps_slices else ():
        if (memory := replica.memory).has_own_parameters:
            own[replica.rank] = own_sha256 or state_of(memory.program, memory.tensor, 0, kinds).weights_sha256
    digests = dict(chain.from_iterable(of_process.items() for of_process in setup.communicator.all_gather_object(own)))
    for rank, digest in digests.items():
        first = setup.mesh.group(rank, DATA_PARALLEL)[0]
        if digest != digests.get(first, digest):
            who, other = (setup.mesh.who(other_rank, "rank") for other_rank in (rank, first))
            raise PeerError(f"the parameters of {who} differ from those of {other} after training")


def whole_tensors(setup: Setup, team: Team) -> Callable[[str], Tensor]:
    """A collective function: on rank 0, the whole tensor of a symbol in replica 0; an empty one on other ranks."""
    team.settle()
    nothing, pipelined = torch.empty(0), setup.program.schedule is not None
    sliced = {*setup.program.optimizer_states}
    if team.keeps_slices:
        sliced |= {member.parameter for group in setup.program.groups for member in group.members}

    def tensor_of(name: str) -> Tensor:
        cuts = setup.program.symbols[name].cuts
        parts: list[Tensor | None] = []
        for replica in team.first:
            if name in sliced and name in replica.memory.program.symbols:
                parts.append(replica.transport.sync.whole(name))
            elif name in replica.memory.program.symbols:
                parts.append(replica.memory.tensor(name))
        if (cuts or pipelined) and team.hub is None:
            own = parts[0] if parts and team.transport.replica == 0 else None
            # As bytes of its own: a pickled view would bring the whole device memory along.
            sent = setup.communicator.gather_object(None if own is None else byte_array(own).copy())
            dtype: torch.dtype = getattr(torch, setup.program.symbols[name].type.dtype)
            parts = [None if part is None else torch.from_numpy(part).view(dtype) for part in sent or ()]
        held = [part.view(setup.program.symbols[name].type.shape) for part in parts if part is not None]
        if not setup.is_first or not held:
            return nothing
        return joined(held[: cuts[0].parts] if cuts else held, cuts)

    return tensor_of
