"""DP01, DP02, AP02: the command line compared with the compile, and with what the app passes to the session."""

import shlex
from argparse import Namespace
from collections.abc import Collection, Iterator, Mapping, Sequence

from sambasim.errors import DataParallelError, LaunchError
from sambasim.ir.graph import SectionKind
from sambasim.ir.program import Program
from sambasim.runtime.machine.launcher import check_world_size
from sambasim.runtime.run.stepwise import Mode
from sambasim.samba.flags import FLAGS, MEASURING
from sambasim.samba.process import app_error, current, report_here, typed_command
from sambasim.units import counted

_OF_THE_GRAPH = ("batch_size", "inference")
_AGREEING = (*_OF_THE_GRAPH, "grad_accumulation_steps")
"""Flags of the library that must be the same at the compile and in a run, and those of them that change the graph.
`trace_graph` itself refuses another --dtype."""

_SESSION_RUN = "session.run(…, data_parallel=args.data_parallel, reduce_on_rdu=args.reduce_on_rdu)"


def note_not_passed_on(config: Mapping[str, object], *, inference: bool) -> None:
    """Report flags of the command line that are missing in `config`, the config_dict of session.compile (DP02)."""
    context = current()
    if context.flag("command") != "compile":
        return
    passed = {**config, "inference": inference}
    of_app = context.flag("of_app") or ()  # the app's own flags, which may have the names of ours
    read = [flag for flag in FLAGS if flag.compiled and flag.destination not in of_app]
    typed = [flag for flag in read if context.flag(flag.destination) not in (None, flag.default)]
    missing = [flag.names[0] for flag in typed if passed.get(flag.destination, flag.default) == flag.default]
    if missing:
        what = f"{', '.join(missing)} is on the command line, but not passed to session.compile"
        report_here("DP02", what, "session.compile(…, config_dict=vars(args))")


def note_changed(metadata: Mapping[str, str], batch_size: int) -> None:
    """Report flags of the library that differ from the compile (AP02). `batch_size` is that of the PEF."""
    for name, before, now in _changed(metadata):
        # An app may compile with batches of another size than -b; a run without -b then has the size of the PEF.
        if name in _AGREEING and (name, now) != ("batch_size", str(batch_size)):
            what = f"{_flag(name)} was {before} when the PEF was compiled, and is {now} now"
            report_here("AP02", what, f"use the {_flag(name)} of the compile, or compile again")


def likely_cause(metadata: Mapping[str, str]) -> str:
    """The arguments that changed since the compile, to append to an error about a different graph; or ""."""
    causes = [
        f"{_flag(name)} was {before} at the compile, and is {now} now"
        for name, before, now in _changed(metadata)
        if name in _OF_THE_GRAPH or name not in _AGREEING
    ]
    return f" (AP02: {'; '.join(causes)})" if causes else ""


def _changed(metadata: Mapping[str, str]) -> Iterator[tuple[str, str, str]]:
    """Yields name, value at the compile and value now of each argument that differs: of the app's, and of the library's
    that must agree. Skips arguments that only one side has. metadata: the `pef_metadata` of the compile"""
    typed = current().arguments or Namespace(command=None)
    free = {"command", *(flag.destination for flag in FLAGS)}.difference(_AGREEING)
    if typed.command in MEASURING:  # there, --inference selects what is measured
        free |= {"inference"}
    for name, value in sorted(vars(typed).items()):
        before = metadata.get(name)
        predicts = name == "inference" and value is True  # a training PEF predicts too
        if before is not None and before != str(value) and name not in free and value is not None and not predicts:
            yield name, before, str(value)


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def mode_of(program: Program, world_size: int, *, data_parallel: bool, reduce_on_rdu: bool) -> Mode:
    """How an optimizer step is synced, by the arguments of session.run. Reports DP01 if replicas that could sync do
    not: each trains alone, as on an RDU. Raises LaunchError for several replicas that cannot sync."""
    context, command = current(), typed_command()
    parallel = program.data_parallel
    if world_size == 1 and not (data_parallel and parallel):
        return Mode.ALONE
    if not data_parallel and (parallel or context.flag("data_parallel")):
        check_world_size(world_size, program.world_size, command=command, data_parallel=parallel)
        missing, remedy = "session.run has no data_parallel=", _SESSION_RUN
        if context.flag("data_parallel") is False:
            missing = "--data-parallel is not on the command line"
            remedy = f"mpirun -np {world_size} {shlex.join([*command, '--data-parallel'])}"
        what = f"{world_size} replicas train independently: the PEF is data parallel, but {missing}"
        report_here("DP01", what, remedy)
        if not context.reporter.on_demand:
            return Mode.ALONE
        data_parallel = True  # a check continues as if the app were right
    if not data_parallel:
        what = f"{world_size} replicas were started, but neither the app nor its PEF is data parallel"
        raise app_error(LaunchError, what, "compile and run it with --data-parallel, or without mpirun")
    check_world_size(world_size, program.world_size, command=command, data_parallel=parallel)
    if world_size == 1:
        return Mode.ALONE
    if context.flag("reduce_on_rdu") and not reduce_on_rdu and not context.reporter.has("DP01"):
        what = "--reduce-on-rdu is on the command line, but not passed to session.run: gradients go through the host"
        report_here("DP02", what, "session.run(…, reduce_on_rdu=args.reduce_on_rdu)")
    return Mode.DEVICE if reduce_on_rdu else Mode.HOST


def check_agreement(modes: Sequence[Mode], where: str | None) -> None:
    """Raises DataParallelError (DP01) if replicas sync in different ways: some would wait for others forever."""
    rank = next((rank for rank, mode in enumerate(modes) if mode is not modes[0]), None)
    if rank is not None:
        syncs = {Mode.ALONE: "trains without the others", Mode.HOST: "syncs through the host"}
        first, other = (syncs.get(mode, "syncs on the device") for mode in (modes[0], modes[rank]))
        what = f"DP01: replica 0 {first}, and replica {rank} {other}"
        raise DataParallelError(what, where=where, remedy=f"{_SESSION_RUN} on every rank")


class Accumulation:
    """Compares the backwards of the first optimizer step with --grad-accumulation-steps (DP02)."""

    def __init__(self) -> None:
        self._wanted = int(current().flag("grad_accumulation_steps") or 1)
        self._backwards = 0

    def note(self, kinds: Collection[SectionKind]) -> None:
        """Sections of `kinds` are about to run."""
        if self._wanted == 1:
            return
        self._backwards += SectionKind.BCKWD in kinds
        if SectionKind.OPT in kinds:
            if self._backwards != self._wanted:
                made = counted(self._backwards, "backward")
                what = f"--grad-accumulation-steps is {self._wanted}, but the optimizer step follows {made}"
                report_here("DP02", what, 'section_types=["FWD", "BCKWD"] for each batch, then ["OPT"] once')
            self._wanted = 1
