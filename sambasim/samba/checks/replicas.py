"""The checks of one loaded PEF, which the session calls: what replicas train (DP03, DP07), and the command line against
the compile and what the app passes to the session (DP01, DP02, AP02)."""

import shlex
from argparse import Namespace
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from sambasim.errors import DataParallelError, LaunchError
from sambasim.ir.graph import SectionKind
from sambasim.ir.program import Program
from sambasim.ir.types import SymbolKind
from sambasim.runtime.machine.communicator import Communicator
from sambasim.runtime.machine.launcher import check_world_size
from sambasim.runtime.run.stepwise import STEP
from sambasim.runtime.transports.connect import Way
from sambasim.runtime.values.memory import tensor_sha256
from sambasim.samba.checks import data, job
from sambasim.samba.checks.data import Division, Place
from sambasim.samba.checks.host import Host, is_sampled
from sambasim.samba.device import Hyperparameters, Machine
from sambasim.samba.flags import FLAGS, MEASURING
from sambasim.samba.process import Finding, app_error, app_line, current, report, report_here, typed_command

_BATCHES_COMPARED = (1, 2, 8)  # steps in which replicas compare their batches


@dataclass(frozen=True, slots=True)
class Trained:
    """What a replica trains: digests of its parameters by symbol, and which optimizers have a state; its optimizer
    steps; the hyperparameters of each optimizer, and dropout rates."""

    weights: Mapping[str, str]
    steps: int
    hyperparameters: Sequence[Mapping[str, float | bool]]


def trained(machine: Machine, rates: Mapping[str, float], *, read: bool = True, starts: bool = False) -> Trained:
    """What this rank trains with these dropout rates. `read=False` leaves out the weights: those of the device are not
    the trained ones. `starts`: no step was taken, so the states of optimizers are compared too."""
    program, replica = machine.program, machine.replica
    names = program.names_of(SymbolKind.PARAMETER) if read else []
    names += replica.states_of(replica.begun) if starts else []
    weights = {name: tensor_sha256(replica.read(name)) for name in names}
    if read:
        weights |= {f"the state of {program.optimizers[index].name}": "" for index in sorted(replica.begun)}
    return Trained(weights, replica.steps, [*replica.hyperparameters.values(), rates])


def different_start(replicas: Sequence[Trained], where: str | None) -> Finding | None:
    """DP03, before the first step."""
    for rank, replica in enumerate(replicas):
        name = _different_weight(replicas[0], replica)
        if name is None and replica.steps != replicas[0].steps:
            name = "the number of optimizer steps"
        if name is not None:
            start = f"replica {rank} starts from other weights than replica 0: {name} differs"
            remedy = "samba.utils.set_seed(…) with one seed on all ranks before the model is made, or one checkpoint"
            return Finding("DP03", f"{start}; all continue from those of replica 0", where, remedy)
    return None


def different_hyperparameters(replicas: Sequence[Trained], when: str, where: str | None) -> Finding | None:
    """DP07 for hyperparameters. `when` is a time, such as "before step 8"."""
    for rank, replica in enumerate(replicas):
        for first, other in zip(replicas[0].hyperparameters, replica.hyperparameters, strict=True):
            for name, value in first.items():
                if other[name] != value:
                    what = f"{when} replica {rank} trains with {name} {other[name]:g}, and replica 0 with {value:g}"
                    return Finding("DP07", what, where, "the same hyperparam_dict on every rank")
    return None


def different_weights(replicas: Sequence[Trained], when: str, where: str | None) -> Finding | None:
    """DP07 for weights. Weights that a replica leaves out are not compared."""
    for rank, replica in enumerate(replicas):
        if name := _different_weight(replicas[0], replica):
            what = f"{when} replica {rank} has other weights than replica 0: {name} differs"
            remedy = "load weights into the model on every rank before samba.session.to_device(model), or on none"
            return Finding("DP07", what, where, remedy)
    return None


def _different_weight(first: Trained, other: Trained) -> str | None:
    if not (first.weights and other.weights):  # a replica leaves them out
        return None
    names = {**first.weights, **other.weights}
    return next((name for name in names if first.weights.get(name) != other.weights.get(name)), None)


@dataclass(frozen=True, slots=True)
class Predicted:
    """What a replica predicts: how its sampler divides the data, the line that feeds it, and digests of the batches in
    `_BATCHES_COMPARED`."""

    division: Division | None
    where: str | None
    batches: Sequence[tuple[str, ...]]


def wrong_shards(replicas: Sequence[Predicted]) -> Finding | None:
    """DP04 or DP05 for replicas that predict the same samples, or skip some."""
    found = data.wrong_division([replica.division for replica in replicas], compares_epochs=False)
    times = Counter[tuple[int, int]]()
    for step, fed in zip(_BATCHES_COMPARED, zip(*(one.batches for one in replicas), strict=False), strict=False):
        if all(fed):
            found = found or data.equal_batches(fed, times, step, replicas[0].where)
    return found


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What a replica shows the others before a step."""

    mode: Way
    trained: Trained
    fed: tuple[str, ...]
    division: Division | None
    place: Place | None
    files: Mapping[str, str]


class Checks:
    """The checks of one loaded PEF. Every rank makes this object, and calls its methods in the same order."""

    def __init__(self, machine: Machine, communicator: Communicator, given: Hyperparameters) -> None:
        self._machine, self._communicator, self.host, self._given = machine, communicator, Host(machine), given
        self._times_equal = Counter[tuple[int, int]]()
        self._step = self._forwards = 0
        self._fed: tuple[str, ...] = ()
        self._shards: list[tuple[str, ...]] = []  # the batches that a replica has predicted, of those that are compared
        self._withheld: Finding | None = None  # DP04 for batches that may be of a warm-up
        self.replaced = False  # whether the app has sent weights since the last step, perhaps on this rank alone
        self._synced = False
        self._where: str | None = None
        watched, self._check = current().part(job.Job), current().part(job.Check)
        self._samplers = watched.samplers if watched is not None else None
        if watched is not None:
            watched.compare_last = self._compare_last
            if self._check is not None:
                batches = int(current().flag("grad_accumulation_steps") or 1)
                watched.samplers.shorten = partial(self._check.short_epoch, machine.program.batch_size, batches)

    def before(self, kinds: Collection[SectionKind], batch: Mapping[str, Tensor], **sync: bool) -> Way:
        """Before sections of `kinds` run on `batch`: how an optimizer step is synced, by the arguments `sync` of
        session.run. Collective unless IN_PROCESS; to predict a shard is not. Raises DataParallelError, LaunchError."""
        program, size, watched = self._machine.program, self._communicator.world_size, current().part(job.Job)
        has_step, trains = SectionKind.OPT in kinds, current().trains
        predicts = program.training is None
        shards = predicts and sync["data_parallel"]
        if shards:
            check_world_size(size, program.world_size, command=typed_command(), data_parallel=True)
        mode = mode_of(program, size, **sync) if has_step else Way.IN_PROCESS
        self._forwards += SectionKind.FWD in kinds
        current().has_run = True
        if trains:
            self.host.note_run(kinds, self._given.given, thoroughly=self._check is not None)
        fed = STEP if shards else kinds  # what is predicted there is divided as what is trained on
        if self._check is not None:
            self._check.note(program, fed, batch)
        if SectionKind.FWD in kinds and trains and size > 1:
            if shards and self._forwards in _BATCHES_COMPARED:
                self._shards.append(data.digests(batch))
                self._where = app_line()
            elif not predicts and self._step + 1 in _BATCHES_COMPARED:
                self._fed = data.digests(batch)
        if watched is not None:
            watched.samplers.note_run(fed, batch)
        if not has_step:
            if shards and watched is not None:
                watched.samplers.note_step(trains=False)
            return mode
        self._step += 1
        if watched is not None:
            watched.steps = self._step
            watched.samplers.note_step()
        elif size == 1:  # without a check
            return mode
        if mode is Way.IN_PROCESS and (self._step > 1 or not program.data_parallel):
            return mode
        self.replaced = False
        compares = self._check is not None or is_sampled(self._step)
        if watched is not None:  # else the job is over, and the app trains as it exits
            watched.pages.begin_step(compares=compares)
        if compares:
            self._compare(mode, watched)
        self._synced = mode is not Way.IN_PROCESS
        return mode

    def report_nonfinite_loss(self) -> None:
        """Reports that the loss of the last forward is not finite (AP08)."""
        if not current().reporter.has("AP08"):
            what = f"{self._machine.program.loss} is {self._machine.replica.loss} in forward {self._forwards}"
            remedy = "a smaller learning rate, max_grad_norm= for the optimizer, or inputs of a smaller range"
            report_here("AP08", what, remedy)

    def _compare(self, mode: Way, watched: job.Job | None) -> None:
        """Compare all replicas before a step. In the first step compare how they sync, too."""
        self._where = where = app_line()
        if watched is not None:
            watched.where = where
        division, place, line = watched.samplers.feeding() if watched else (None, None, None)
        files = watched.files.take_new() if watched else {}
        now = trained(self._machine, self._given.rates, starts=self._step == 1)
        own = Snapshot(mode, now, self._fed, division, place, files)
        points, shown = job.meet(self._communicator, job.Point(self._step), own)
        if not job.together(points):
            for rank, snapshot in enumerate(shown):
                if isinstance(snapshot, tuple):  # from `job.finish` of a replica that has ended
                    current().reporter.report_from(rank, snapshot[1])
            report(job.different_steps(points, where))
            raise job.CheckIsOver  # a check reports instead of raising, and cannot go on
        if self._step == 1:
            check_agreement([snapshot.mode for snapshot in shown], where)
        if mode is Way.IN_PROCESS:
            return
        of_replicas = [snapshot.trained for snapshot in shown]
        if self._step == 1 and (start := different_start(of_replicas, where)) is not None:
            report(start)
            self._machine.follow_first(self._communicator)
        # Replicas in different epochs may have different rates and orders. Then the cause is reported, once.
        uneven = data.different_epochs([snapshot.place for snapshot in shown], where)
        if not current().reporter.has("DP03", "DP07"):
            when = f"before step {self._step}"
            self._report_cause(uneven, different_hyperparameters(of_replicas, when, where))
            if not (uneven and current().reporter.has("DP09")):
                report(different_weights(of_replicas, when, where))
        if not current().reporter.has("DP05"):
            divisions = [snapshot.division for snapshot in shown]
            report(data.wrong_division(divisions, compares_epochs=False))
            self._report_cause(uneven, data.wrong_division(divisions))
        fed = [snapshot.fed for snapshot in shown]
        self._fed = ()
        if all(fed) and not current().reporter.has("DP04"):
            equal = data.equal_batches(fed, self._times_equal, self._step, line or where)
            # Equal random batches may be of a warm-up; no warm-up takes 8 steps, or draws from a DistributedSampler.
            if self._step == _BATCHES_COMPARED[-1] or (watched is not None and watched.samplers.passes):
                report(equal)
            else:
                self._withheld = equal
        if watched is not None:
            watched.files.compare([snapshot.files for snapshot in shown])

    def _report_cause(self, cause: Finding | None, finding: Finding | None) -> None:
        if finding is None or cause is None:
            report(finding)
        elif not current().reporter.has(cause.code):
            report(cause, notice_only=True)

    def _compare_last(self) -> None:
        """Compare after the last step. Collective, also for a rank that has nothing to show."""
        if self._samplers is not None and not self._samplers.passes and not current().reporter.has("DP04"):
            report(self._withheld, notice_only=True)
        own: Trained | Predicted | None = None
        if self._shards:
            division, _, line = self._samplers.feeding() if self._samplers else (None, None, None)
            own = Predicted(division, line or self._where, self._shards)
        elif self._synced and not current().reporter.has("DP03", "DP07", "DP09"):
            own = trained(self._machine, self._given.rates, read=not self.replaced)
        of_replicas = self._communicator.all_gather_object(own)
        of_training = [replica for replica in of_replicas if isinstance(replica, Trained)]
        of_shards = [replica for replica in of_replicas if isinstance(replica, Predicted)]
        if len(of_training) == len(of_replicas):
            last = of_training, "at the end", self._where
            report(different_hyperparameters(*last) or different_weights(*last), notice_only=True)
        elif len(of_shards) == len(of_replicas) and not current().reporter.has("DP04", "DP05"):
            report(wrong_shards(of_shards), notice_only=True)


_OF_THE_GRAPH = ("batch_size", "inference")
_AGREEING = (*_OF_THE_GRAPH, "grad_accumulation_steps")
"""Flags of the library that must be the same at the compile and in a run, and those of them that change the graph.
`trace_graph` itself refuses another --dtype."""

_SESSION_RUN = "session.run(…, data_parallel=args.data_parallel, reduce_on_rdu=args.reduce_on_rdu)"


def note_not_passed_on(config: Mapping[str, object], *, inference: bool) -> None:
    """DP02 for flags of the command line that are missing in `config`, the config_dict of session.compile."""
    context = current()
    if context.flag("command") != "compile":
        return
    passed = {**config, "inference": inference}
    own = context.flag("parser").of_app  # the app's own flags, which may have the names of ours
    read = [flag for flag in FLAGS if flag.compiled and flag.destination not in own]
    typed = [flag for flag in read if context.flag(flag.destination) not in (None, flag.default)]
    missing = [flag.names[0] for flag in typed if passed.get(flag.destination, flag.default) == flag.default]
    if missing:
        what = f"{', '.join(missing)} is on the command line, but not passed to session.compile"
        report_here("DP02", what, "session.compile(…, config_dict=vars(args))")


def note_changed(metadata: Mapping[str, str], batch_size: int) -> None:
    """Report flags of the library that differ from the compile (AP02). `batch_size` is that of the PEF."""
    for fact in _changed(metadata):
        # An app may compile with batches of another size than -b; a run without -b then has the size of the PEF.
        if fact[0] in _AGREEING and (fact[0], fact[2]) != ("batch_size", str(batch_size)):
            report_here("AP02", *_words([fact]))


def likely_cause(metadata: Mapping[str, str]) -> tuple[str, str]:
    """The arguments that changed since the compile, to append to an error about a different graph, and what to type;
    two times "" without them."""
    changed = [fact for fact in _changed(metadata) if fact[0] in _OF_THE_GRAPH or fact[0] not in _AGREEING]
    what, remedy = _words(changed)
    return (f" (AP02: {what})", remedy) if changed else ("", "")


def _words(changed: Sequence[tuple[str, str, str]]) -> tuple[str, str]:
    parser: Any = current().flag("parser")
    causes = [f"{parser.flag(name)} was {before} at the compile, and is {now} now" for name, before, now in changed]
    sides = []
    for at in (1, 2):
        settings = defaultdict[str, list[str]](list)
        for word, flag in (parser.setting(fact[0], fact[at]) for fact in changed):
            settings[word].append(flag)
        sides.append(" and ".join(f"{word} {' '.join(flags)}" for word, flags in settings.items()))
    return "; ".join(causes), f"run it {sides[0]}, or compile again {sides[1]}"


def _changed(metadata: Mapping[str, str]) -> Iterator[tuple[str, str, str]]:
    """Yields name, value at the compile and value now of each argument that differs: of the app's, and of the library's
    that must agree. Skips arguments that only one side has. metadata: the `pef_metadata` of the compile"""
    typed = current().arguments or Namespace(command=None)
    free = {"command", *(flag.destination for flag in FLAGS)}.difference(_AGREEING)
    free |= {"inference"} if typed.command in MEASURING else set()  # where it selects what is measured
    for name, value in sorted(vars(typed).items()):
        before = metadata.get(name)
        predicts = name == "inference" and value is True  # a training PEF predicts too
        if before is not None and before != str(value) and name not in free and value is not None and not predicts:
            yield name, before, str(value)


def mode_of(program: Program, world_size: int, *, data_parallel: bool, reduce_on_rdu: bool) -> Way:
    """How an optimizer step is synced, by the arguments of session.run. Reports DP01 if replicas that could sync do
    not: each trains alone, as on an RDU. Raises LaunchError for several replicas that cannot sync."""
    context, command, parallel = current(), typed_command(), program.data_parallel
    if world_size == 1 and not (data_parallel and parallel):
        return Way.IN_PROCESS
    if not data_parallel and (parallel or context.flag("data_parallel")):
        check_world_size(world_size, program.world_size, command=command, data_parallel=parallel)
        missing, remedy = "session.run has no data_parallel=", _SESSION_RUN
        if context.flag("data_parallel") is False:
            missing = "--data-parallel is not on the command line"
            remedy = f"mpirun -np {world_size} {shlex.join([*command, '--data-parallel'])}"
        what = f"{world_size} replicas train independently: the PEF is data parallel, but {missing}"
        report_here("DP01", what, remedy)
        if not context.reporter.on_demand:
            return Way.IN_PROCESS
        data_parallel = True  # a check continues as if the app were right
    if not data_parallel:
        what = f"{world_size} replicas were started, but neither the app nor its PEF is data parallel"
        raise app_error(LaunchError, what, "compile and run it with --data-parallel, or without mpirun")
    check_world_size(world_size, program.world_size, command=command, data_parallel=parallel)
    if world_size == 1:
        return Way.IN_PROCESS
    if context.flag("reduce_on_rdu") and not reduce_on_rdu and not context.reporter.has("DP01"):
        what = "--reduce-on-rdu is on the command line, but not passed to session.run: gradients go through the host"
        report_here("DP02", what, "session.run(…, reduce_on_rdu=args.reduce_on_rdu)")
    return Way.DEVICE if reduce_on_rdu else Way.HOST_REPLICATED


def check_agreement(modes: Sequence[Way], where: str | None) -> None:
    """Raises DataParallelError (DP01) if replicas sync in different ways: some would wait for others forever."""
    rank = next((rank for rank, mode in enumerate(modes) if mode is not modes[0]), None)
    if rank is not None:
        syncs = {Way.IN_PROCESS: "trains without the others", Way.HOST_REPLICATED: "syncs through the host"}
        first, other = (syncs.get(mode, "syncs on the device") for mode in (modes[0], modes[rank]))
        what = f"DP01: replica 0 {first}, and replica {rank} {other}"
        raise DataParallelError(what, where=where, remedy=f"{_SESSION_RUN} on every rank")
