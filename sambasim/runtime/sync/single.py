"""One replica: nothing to sync."""

from collections.abc import Mapping, Sequence

from sambasim.collectives.slices import Slice
from sambasim.ir.program import ParameterGroup
from sambasim.runtime.sync.interface import GradientSync


class SingleSync(GradientSync):
    """The replica owns everything, and its gradients are their own mean."""

    @property
    def title(self) -> str:
        return "none (one replica)"

    def owned(self, group: ParameterGroup) -> Slice:
        return (0, group.numel)

    def reduce(self) -> None:
        """Nothing: the mean over one replica is its gradient."""

    def gather(self, regions: Sequence[str] = ("parameter",)) -> None:
        """Nothing: every slice is here."""

    def gather_norms(self, sums: Mapping[str, Sequence[float]]) -> list[float]:
        return [block for group in self.program.groups for block in sums[group.name]]
