"""What has come of a training run: its digests, its counts, and the summary of it all."""

import torch
from torch import Tensor

from sambasim.ir.verify import state_name
from sambasim.records.metrics import BytesRecord, EvaluationRecord, PredictedRecord, SummaryRecord
from sambasim.runtime.agreement import check_weights
from sambasim.runtime.checkpoint.saver import Saver
from sambasim.runtime.device_times import predict_run
from sambasim.runtime.digests import state_sha256, weights_sha256
from sambasim.runtime.engine.choice import EXEMPT as INDUCTOR_EXEMPT
from sambasim.runtime.listener import Start
from sambasim.runtime.plan import Plan
from sambasim.runtime.ranks import Communicator
from sambasim.runtime.seating import placement_record
from sambasim.runtime.setup import Setup
from sambasim.runtime.team import Team
from sambasim.runtime.training import Totals
from sambasim.runtime.transports.factory import Way
from sambasim.runtime.transports.gloo import EXEMPT as GLOO_EXEMPT
from sambasim.simulation.sync import SyncPath


def summarize(
    setup: Setup,
    team: Team,
    start: Start,
    totals: Totals,
    evaluation: EvaluationRecord | None,
    saver: Saver | None,
) -> SummaryRecord:
    """Collective. The summary of a run that is over; `evaluation` is the last one, `saver` has written checkpoints."""
    steps = start.plan
    predicted, not_predicted = _predicted(setup, steps)
    taken = totals.steps - steps.start.step
    return SummaryRecord(
        pef_digest=setup.document.digest,
        world_size=setup.world_size,
        emulated=setup.emulated > 1,
        sync=team.sync_name,
        host_sync=setup.host_sync if team.sync_name == "host" else None,
        parameter_servers=setup.options.parameter_servers or 0,
        engine=team.engine.name,
        threads=setup.threads,
        torch=torch.__version__,
        mpi=setup.communicator.library,
        seed=setup.seed,
        batch_size=steps.batch_size,
        global_batch_size=steps.global_batch_size,
        accumulation_steps=steps.accumulation_steps,
        epochs=steps.epochs,
        steps=totals.steps,
        samples=totals.samples,
        samples_left_out_each_epoch=steps.left_out,
        training_s=totals.training_s,
        model_s=totals.model_s,
        samples_per_s=taken * steps.samples_per_step / totals.training_s if taken else 0.0,
        sync_share=totals.sync_s / totals.training_s if taken else 0.0,
        hidden_sync_s=totals.hidden_sync_s,
        loss_first=totals.loss_first,
        loss_last=totals.loss_last,
        first_nonfinite_step=totals.first_nonfinite_step,
        skipped_steps=totals.skipped_steps,
        evaluation=evaluation,
        bytes=_bytes_of_all(setup.communicator, team),
        weights_sha256=_weights_sha256(setup, team),
        state_sha256=_state_sha256(setup, team, totals.steps - totals.skipped_steps),
        exempt_from_exactness=exempt(setup, team),
        resumed_after_step=None if setup.options.checkpoint.resume is None else steps.start.step,
        checkpoint=None if saver is None or saver.last is None else str(saver.last),
        failed_checkpoints=0 if saver is None else saver.failed,
        notices=list(start.notices),
        placement=placement_record(setup.inventory, setup.placement),
        predicted=predicted,
        not_predicted=not_predicted,
    )


def _predicted(setup: Setup, steps: Plan) -> tuple[PredictedRecord | None, str | None]:
    """What a step is predicted to take, or why nothing is. On rank 0, which alone tells it."""
    if not setup.is_first:
        return None, None
    path = SyncPath.RDU if setup.options.reduce_on_rdu else SyncPath.HOST
    return predict_run(setup.program, setup.inventory, setup.placement, path, steps.accumulation_steps)


def exempt(setup: Setup, team: Team) -> list[str]:
    """What of this run has bits of its own."""
    of_pef = setup.document.metadata.get("exempt_from_exactness")
    of_sync = GLOO_EXEMPT if team.way is Way.GLOO else None
    of_engine = INDUCTOR_EXEMPT if team.engine.inductor else None
    return [reason for reason in (of_pef, of_sync, of_engine) if reason]


def _weights_sha256(setup: Setup, team: Team) -> str:
    """Collective. Of the parameters of every replica that has its own; a server has them only in part."""
    digests = setup.works and team.memory.has_own_parameters
    own = weights_sha256(setup.program, team.memory) if digests else None
    return check_weights(setup.communicator, own)


def _state_sha256(setup: Setup, team: Team, steps: int) -> str:
    """Collective. Of the state of replica 0, with every optimizer state brought together."""
    program = setup.program
    states = {
        state_name(member.parameter, optimizer.name, state): (group, member, state)
        for group in program.groups
        for optimizer in (program.optimizers[group.optimizer],)
        for member in group.members
        for state in optimizer.states
    }
    memory, nothing = team.memory, torch.empty(0)

    def tensor_of(name: str) -> Tensor:
        tensor = team.transport.whole_state(*states[name]) if name in states else memory.tensor(name)
        return tensor if setup.is_first and tensor is not None else nothing

    return setup.communicator.broadcast_object(state_sha256(program, tensor_of, steps))


def _bytes_of_all(communicator: Communicator, team: Team) -> BytesRecord:
    """Collective. What all ranks moved."""
    everybody = communicator.all_gather_object(team.transport.bytes_moved)
    return BytesRecord(
        device_to_host=sum(moved.device_to_host for moved in everybody),
        host_to_device=sum(moved.host_to_device for moved in everybody),
        peer=sum(moved.peer for moved in everybody),
        network=sum(moved.network for moved in everybody),
    )
