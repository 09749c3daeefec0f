"""Steps that are not applied because their loss is NaN or infinite: `--on-nonfinite skip`.

All losses are known before anything is updated, so REDUCE begins only then, and nothing of it is hidden behind the
backward. A step that is skipped ends there: parameters and the optimizer's state were not touched, and buffers, which
the forward has changed already, are put back.
"""

import math
import time
from collections.abc import Collection, Sequence

from torch import Tensor

from sambasim.ir.program import Program
from sambasim.ir.types import SymbolKind
from sambasim.runtime.device import DeviceMemory
from sambasim.runtime.ranks import Communicator
from sambasim.runtime.sync.interface import GradientSync, StepSync
from sambasim.runtime.sync.numbers import gather_losses


class Skipping:
    """What a trainer syncs with in place of `sync`, which finishes only the steps that are applied.

    memories: of the replicas that this process plays
    workers: the ranks that have a replica
    """

    def __init__(
        self,
        sync: GradientSync,
        program: Program,
        memories: Sequence[DeviceMemory],
        communicator: Communicator,
        workers: Collection[int],
    ) -> None:
        self._sync = sync
        self._communicator = communicator
        self._workers = workers
        outputs = program.training.outputs if program.training is not None else ()
        names = [out.symbol for out in outputs if program.symbols[out.symbol].kind is SymbolKind.BUFFER]
        buffers = [memory.tensor(name) for memory in memories for name in names]
        self._buffers: list[tuple[Tensor, Tensor]] = [(buffer, buffer.clone()) for buffer in buffers]

    def begin_step(self) -> None:
        """As `GradientSync.begin_step`. The step of `sync` begins only once it is known to be finished."""
        for buffer, kept in self._buffers:
            kept.copy_(buffer)
        self._sync.wait_for_readers()

    def section_done(self, count: int) -> None:
        """Nothing: whether the step is applied is not known before the backward has ended."""

    def finish_step(self, losses: Sequence[float], wish: int = 0) -> StepSync:
        """Collective. As `GradientSync.finish_step`, if all losses are finite; `applied` says whether they were."""
        began_s = time.perf_counter()
        everybody, wished = self._gather(losses, wish)
        elapsed_s = time.perf_counter() - began_s
        if all(map(math.isfinite, everybody)):
            self._sync.begin_step()
            done = self._sync.finish_step(losses, wish)
            return done._replace(exposed_s=done.exposed_s + elapsed_s)
        for buffer, kept in self._buffers:
            buffer.copy_(kept)
        return StepSync(everybody, wished, norm=None, exposed_s=elapsed_s, applied=False)

    def _gather(self, losses: Sequence[float], wish: int) -> tuple[Sequence[float], int]:
        if self._communicator.world_size == 1:  # which may play several replicas
            return losses, wish
        return gather_losses(self._communicator, losses, wish, self._workers)
