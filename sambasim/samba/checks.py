"""What silently goes wrong in data parallel apps on the hardware, and is said aloud here.

    DP01  replicas train apart, because session.run was not given data_parallel=True
    DP02  --reduce-on-rdu was typed, and session.run was not given reduce_on_rdu=True      (a notice)
    DP03  replicas start from different weights
    DP04  replicas are fed the same samples

Each finding names the line of the app. What costs a message among ranks is looked at in a few steps only.
"""

import inspect
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from torch import Tensor

import sambasim
from sambasim.errors import DataParallelError, LaunchError
from sambasim.ir.graph import SectionKind
from sambasim.ir.types import SymbolKind
from sambasim.runtime.digests import tensor_sha256
from sambasim.runtime.launcher import check_world_size
from sambasim.runtime.ranks import Communicator
from sambasim.runtime.stepwise import Mode
from sambasim.samba import context
from sambasim.samba.machine import Machine

_LOOKED_AT = (0, 1, 7)
"""Steps of a run in which the replicas compare what they are fed; where they are measured or tested, on the same data,
nothing is wrong with that."""

_LIBRARY = str(Path(sambasim.__file__).parent)


class Checks:
    """Those of one loaded PEF. Collective: every rank makes one, and asks it in the same order."""

    def __init__(self, machine: Machine, communicator: Communicator) -> None:
        self._machine = machine
        self._communicator = communicator
        self._noticed = False
        self._alike = 0
        self._steps = 0
        self._fed: list[str] = []

    def mode(self, kinds: Collection[SectionKind], *, data_parallel: bool, reduce_on_rdu: bool) -> Mode:
        """How an optimizer step of these `kinds` is synced. Raises DataParallelError and LaunchError."""
        world = self._communicator
        if SectionKind.OPT not in kinds:
            return Mode.ALONE
        typed = context.current().arguments
        parallel = self._machine.program.data_parallel is not None
        if world.world_size == 1 and not (data_parallel and parallel):
            return Mode.ALONE
        if not data_parallel and (parallel or getattr(typed, "data_parallel", False)):
            raise DataParallelError(
                f"DP01: {world.world_size} replicas train apart: the PEF is data parallel, but session.run is not told",
                where=app_line(),
                remedy="session.run(…, data_parallel=args.data_parallel, reduce_on_rdu=args.reduce_on_rdu)",
            )
        if not data_parallel:
            raise LaunchError(
                f"{world.world_size} replicas were started, and nothing of this app is data parallel",
                where=app_line(),
                remedy="compile and run it with --data-parallel, or without mpirun",
            )
        minimum = self._machine.program.world_size
        command = context.typed_command()
        check_world_size(world.world_size, minimum, command=command, data_parallel=parallel)
        if world.world_size == 1:
            return Mode.ALONE
        if getattr(typed, "reduce_on_rdu", False) and not reduce_on_rdu and not self._noticed and world.rank == 0:
            self._noticed = True
            self._notice(
                "DP02: --reduce-on-rdu was typed, but session.run is not told: gradients go through the host",
                "session.run(…, reduce_on_rdu=args.reduce_on_rdu)",
            )
        return Mode.DEVICE if reduce_on_rdu else Mode.HOST

    def before(self, kinds: Collection[SectionKind], batch: Mapping[str, Tensor], mode: Mode) -> None:
        """Look at what the replicas are about to begin with. Raises DataParallelError."""
        looks = self._steps in _LOOKED_AT and context.current().command in (None, "run")
        if SectionKind.FWD in kinds and looks:
            self._fed = [tensor_sha256(tensor) for tensor in batch.values()]
        # Only optimizer steps are taken by all replicas together.
        if SectionKind.OPT not in kinds or mode is Mode.ALONE:
            return
        if self._machine.replica.mode is None:
            self._compare_weights()
        if looks:
            self._compare_batches(self._fed)
        self._steps += 1

    def _compare_weights(self) -> None:
        own = {
            name: tensor_sha256(self._machine.replica.read(name))
            for name, symbol in self._machine.program.symbols.items()
            if symbol.kind is SymbolKind.PARAMETER
        } | {"the number of optimizer steps": str(self._machine.replica.steps)}
        everybody = self._communicator.all_gather_object(own)
        for rank, theirs in enumerate(everybody):
            apart = [name for name in own if theirs[name] != everybody[0][name]]
            if apart:
                raise DataParallelError(
                    f"DP03: replica {rank} starts from other weights than replica 0: {apart[0]} differs",
                    where=app_line(),
                    remedy="samba.utils.set_seed(…) before the model is made, on every rank; or load one checkpoint",
                )

    def _compare_batches(self, fed: Sequence[str]) -> None:
        digests = self._communicator.all_gather_object(fed)
        first: dict[tuple[str, ...], int] = {}
        for rank, digest in enumerate(digests):
            if tuple(digest) in first:
                self._same_samples(first[tuple(digest)], rank)
                return
            first[tuple(digest)] = rank

    def _same_samples(self, one: int, other: int) -> None:
        """Once may be chance, where samples repeat; twice is not."""
        self._alike += 1
        if self._alike == 2:
            raise DataParallelError(
                f"DP04: replicas {one} and {other} are fed the same samples, again in step {self._steps + 1}",
                where=app_line(),
                remedy="DataLoader(dataset, sampler=DistributedSampler(dataset, num_replicas=…, rank=…), …)",
            )

    def _notice(self, what: str, remedy: str) -> None:
        print(f"note: {what}\n  where: {app_line()}\n  try:   {remedy}", file=sys.stderr, flush=True)


def app_line() -> str | None:
    """`file:line: code` of the app that called the library."""
    for frame in inspect.stack(context=1):
        if not frame.filename.startswith((_LIBRARY, "<")):
            return f"{frame.filename}:{frame.lineno}: {(frame.code_context or [''])[0].strip()}"
    return None
