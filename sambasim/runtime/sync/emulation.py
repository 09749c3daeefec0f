"""One process plays all replicas: the oracle that the real sync paths are held against.

It is deliberately plain: no slices, no owners. The mean is taken over whole groups, replica 0 updates all of them, and
the others get copies. That this gives the same bits as owners with slices is what the tests show.
"""

from collections.abc import Sequence

from sambasim.ir.program import Program
from sambasim.runtime.arguments import Arguments
from sambasim.runtime.device import DeviceMemory
from sambasim.runtime.optimizers import Optimizers
from sambasim.runtime.sync.mean import tree_mean
from sambasim.runtime.sync.single import SingleSync


class EmulatedSync(SingleSync):
    """`memories` are those of all replicas, in rank order."""

    def __init__(
        self, program: Program, arguments: Arguments, optimizers: Optimizers, memories: Sequence[DeviceMemory]
    ) -> None:
        super().__init__(program, arguments, optimizers, memories[0])
        self._memories = memories

    @property
    def title(self) -> str:
        return f"emulated ({len(self._memories)} replicas in one process)"

    def reduce(self) -> None:
        for group in self.program.groups:
            gradients = [memory.region(group, "gradient") for memory in self._memories]
            tree_mean(gradients, gradients[0], self.divisor)

    def gather(self) -> None:
        for group in self.program.groups:
            for memory in self._memories[1:]:
                memory.region(group, "parameter").copy_(self.memory.region(group, "parameter"))
