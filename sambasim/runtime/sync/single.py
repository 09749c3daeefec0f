"""One replica: nothing to sync."""

from collections.abc import Mapping, Sequence

from torch import Tensor

from sambasim.collectives.slices import Slice
from sambasim.ir.program import Member, ParameterGroup
from sambasim.runtime.sync.phased import PhasedSync


class SingleSync(PhasedSync):
    """The replica owns everything, and its gradients are their own mean."""

    @property
    def title(self) -> str:
        return "none (one replica)"

    def owned(self, group: ParameterGroup) -> Slice:
        return (0, group.numel)

    def reduce(self) -> None:
        """Nothing: the mean over one replica is its gradient."""

    def gather(self) -> None:
        """Nothing: every slice is here."""

    def gather_norms(self, sums: Mapping[str, Sequence[float]]) -> list[float]:
        return [block for group in self.program.groups for block in sums[group.name]]

    def gather_losses(self, losses: Sequence[float], wish: int) -> tuple[Sequence[float], int]:
        return losses, wish

    def whole_state(self, group: ParameterGroup, member: Member, state: str) -> Tensor | None:
        return self.memory.region(group, state)[member.start : member.start + member.numel]
