"""One process plays all replicas: the oracle that the real sync paths are held against.

It is deliberately plain: no slices, no owners. The mean is taken over whole groups, replica 0 updates all of them, and
the others get copies. That this gives the same bits as owners with slices is what the tests show.
"""

from collections.abc import Mapping, Sequence

from sambasim.collectives.slices import Slice
from sambasim.ir.program import ParameterGroup, Program
from sambasim.runtime.arguments import Arguments
from sambasim.runtime.device import DeviceMemory
from sambasim.runtime.sync.interface import GradientSync
from sambasim.runtime.sync.mean import tree_mean


class EmulatedSync(GradientSync):
    """`memories` are those of all replicas, in rank order."""

    def __init__(self, program: Program, arguments: Arguments, memories: Sequence[DeviceMemory]) -> None:
        super().__init__(program, arguments)
        self._memories = memories

    @property
    def title(self) -> str:
        return f"emulated ({len(self._memories)} replicas in one process)"

    def owned(self, group: ParameterGroup) -> Slice:
        return (0, group.numel)

    def reduce(self) -> None:
        for group in self.program.groups:
            gradients = [memory.region(group, "gradient") for memory in self._memories]
            tree_mean(gradients, gradients[0], self.divisor)

    def gather(self, regions: Sequence[str] = ("parameter",)) -> None:
        for group in self.program.groups:
            for region in regions:
                for memory in self._memories[1:]:
                    memory.region(group, region).copy_(self._memories[0].region(group, region))

    def gather_norms(self, sums: Mapping[str, Sequence[float]]) -> list[float]:
        return [block for group in self.program.groups for block in sums[group.name]]
