"""DP01 and DP02: what the command line, or session.run, is not told of sync."""

import shlex
from argparse import Namespace
from collections.abc import Collection, Sequence

from sambasim.errors import DataParallelError, LaunchError
from sambasim.ir.graph import SectionKind
from sambasim.ir.program import Program
from sambasim.runtime.launcher import check_world_size
from sambasim.runtime.stepwise import Mode
from sambasim.samba.checks.findings import Finding
from sambasim.samba.checks.place import app_line
from sambasim.samba.checks.telling import telling

_DATA_PARALLEL = "session.run(…, data_parallel=args.data_parallel, reduce_on_rdu=args.reduce_on_rdu)"


def mode_of(
    program: Program,
    world_size: int,
    typed: Namespace | None,
    command: Sequence[str],
    *,
    data_parallel: bool,
    reduce_on_rdu: bool,
) -> Mode:
    """How an optimizer step is synced.

    typed: what the command line said, None where the app did not ask for it
    command: what was typed, without mpirun: a remedy repeats it
    data_parallel, reduce_on_rdu: what session.run is told

    Tells if it is not told to sync replicas that can (DP01): they train each alone, as on an RDU. Raises LaunchError
    for replicas that cannot.
    """
    parallel = program.data_parallel is not None
    if world_size == 1 and not (data_parallel and parallel):
        return Mode.ALONE
    if not data_parallel and (parallel or getattr(typed, "data_parallel", False)):
        check_world_size(world_size, program.world_size, command=command, data_parallel=parallel)
        telling.tell(_unsynced(world_size, typed, command))
        if not telling.on_demand:
            return Mode.ALONE
        data_parallel = True  # a check goes on as the app should
    if not data_parallel:
        raise LaunchError(
            f"{world_size} replicas were started, and nothing of this app is data parallel",
            where=app_line(),
            remedy="compile and run it with --data-parallel, or without mpirun",
        )
    check_world_size(world_size, program.world_size, command=command, data_parallel=parallel)
    if world_size == 1:
        return Mode.ALONE
    if getattr(typed, "reduce_on_rdu", False) and not reduce_on_rdu and not telling.has("DP01"):
        what = "--reduce-on-rdu was typed, but session.run is not told: gradients go through the host"
        telling.tell(Finding("DP02", what, app_line(), "session.run(…, reduce_on_rdu=args.reduce_on_rdu)"))
    return Mode.DEVICE if reduce_on_rdu else Mode.HOST


def check_agreement(modes: Sequence[Mode], where: str | None) -> None:
    """Raises DataParallelError (DP01) for replicas that sync in different ways: some would wait for others for ever."""
    rank = next((rank for rank, mode in enumerate(modes) if mode is not modes[0]), None)
    if rank is not None:
        raise DataParallelError(
            f"DP01: replica 0 {_SYNCS[modes[0]]}, and replica {rank} {_SYNCS[modes[rank]]}",
            where=where,
            remedy=f"{_DATA_PARALLEL} on every rank",
        )


_SYNCS = {
    Mode.ALONE: "trains without the others",
    Mode.HOST: "syncs through the host",
    Mode.DEVICE: "syncs on the device",
}


def _unsynced(world_size: int, typed: Namespace | None, command: Sequence[str]) -> Finding:
    """DP01. An app that passes on what was typed lacks the flag; one that was given the flag does not pass it on."""
    what = f"{world_size} replicas train without each other: the PEF is data parallel, but "
    if getattr(typed, "data_parallel", None) is False:
        remedy = f"mpirun -np {world_size} {shlex.join([*command, '--data-parallel'])}"
        return Finding("DP01", f"{what}--data-parallel was not typed", app_line(), remedy)
    return Finding("DP01", f"{what}session.run is not told", app_line(), _DATA_PARALLEL)


class Accumulation:
    """The backwards of one optimizer step, against the number that was typed."""

    def __init__(self, typed: Namespace | None) -> None:
        self._wanted = int(getattr(typed, "grad_accumulation_steps", None) or 1)
        self._backwards = 0

    def note(self, kinds: Collection[SectionKind]) -> None:
        """Sections of `kinds` are about to train. Nothing more is looked at once an optimizer step has been seen."""
        if self._wanted == 1:
            return
        self._backwards += SectionKind.BCKWD in kinds
        if SectionKind.OPT in kinds:
            if self._backwards != self._wanted:
                made = "1 backward makes" if self._backwards == 1 else f"{self._backwards} backwards make"
                what = f"--grad-accumulation-steps {self._wanted} was typed, but {made} an optimizer step"
                remedy = 'section_types=["FWD", "BCKWD"] for each batch, and ["OPT"] once they are through'
                telling.tell(Finding("DP02", what, app_line(), remedy))
            self._wanted = 1
