"""What a run says when it starts, of how it was asked for: what was changed, what has nothing to do, what to know."""

from sambasim.runtime.setup import Setup
from sambasim.runtime.team import Team, changes_buffers
from sambasim.runtime.transports.network import scattered


def notices(setup: Setup, team: Team) -> list[str]:
    """Collective. One line each."""
    told = [f"changed for this run: {change}" for change in setup.resolved.changed]
    if setup.options.reduce_on_rdu and team.sync_name in ("none", "emulated"):
        told.append("--reduce-on-rdu has nothing to do: gradients do not leave this process")
    if setup.options.weights is not None and setup.options.checkpoint.resume is not None:
        told.append("--weights has nothing to do: the weights are those of the checkpoint")
    if setup.options.host_sync is not None and team.sync_name in ("none", "emulated"):
        told.append("--host-sync has nothing to do: gradients do not leave this process")
    if team.engine.notice is not None:
        told.append(team.engine.notice)
    if team.sync_name == "device":
        told += scattered(setup.communicator.node_of)
    if setup.world_size > 1 and changes_buffers(setup):
        told.append("buffers (BatchNorm statistics) are per replica; those of replica 0 are evaluated and saved")
    return told
