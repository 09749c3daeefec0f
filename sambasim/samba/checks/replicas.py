"""The checks of one loaded PEF, which the session calls, and the comparison of replicas (DP03, DP07)."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from sambasim.ir.graph import SectionKind
from sambasim.ir.types import SymbolKind
from sambasim.runtime.machine.communicator import Communicator
from sambasim.runtime.run.stepwise import Mode
from sambasim.runtime.values.memory import tensor_sha256
from sambasim.samba import process
from sambasim.samba.checks import arguments, data, job
from sambasim.samba.checks.data import Division, Place
from sambasim.samba.checks.host import Host, is_sampled
from sambasim.samba.device import Machine
from sambasim.samba.process import Finding, app_line

_BATCHES_COMPARED = (1, 2, 8)
"""Steps in which replicas compare their batches."""


@dataclass(frozen=True, slots=True)
class Trained:
    """What a replica trains: digests of its parameters by symbol, its optimizer steps, and the hyperparameters of each
    of its optimizers."""

    weights: Mapping[str, str]
    steps: int
    hyperparameters: Sequence[Mapping[str, float | bool]]


def trained(machine: Machine, *, read: bool = True) -> Trained:
    """What this rank trains. `read=False` leaves out the weights: those of the device are not the trained ones."""
    symbols = machine.program.symbols.items() if read else ()
    names = [name for name, symbol in symbols if symbol.kind is SymbolKind.PARAMETER]
    weights = {name: tensor_sha256(machine.replica.read(name)) for name in names}
    return Trained(weights, machine.replica.steps, list(machine.replica.hyperparameters.values()))


def different_start(replicas: Sequence[Trained], where: str | None) -> Finding | None:
    """DP03, before the first step."""
    for rank, replica in enumerate(replicas):
        name = _different_weight(replicas[0], replica)
        if name is None and replica.steps != replicas[0].steps:
            name = "the number of optimizer steps"
        if name is not None:
            what = f"replica {rank} starts from other weights than replica 0: {name} differs; all continue from those "
            remedy = "samba.utils.set_seed(…) with one seed on all ranks before the model is made, or one checkpoint"
            return Finding("DP03", f"{what}of replica 0", where, remedy)
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
        name = _different_weight(replicas[0], replica)
        if name is not None:
            what = f"{when} replica {rank} has other weights than replica 0: {name} differs"
            remedy = "load weights into the model on every rank before samba.session.to_device(model), or on none"
            return Finding("DP07", what, where, remedy)
    return None


def _different_weight(first: Trained, other: Trained) -> str | None:
    return next((name for name, digest in first.weights.items() if other.weights.get(name, digest) != digest), None)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What a replica shows the others before a step."""

    mode: Mode
    trained: Trained
    fed: tuple[str, ...]
    division: Division | None
    place: Place | None
    files: Mapping[str, str]


class Checks:
    """The checks of one loaded PEF. Every rank makes this object, and calls its methods in the same order."""

    def __init__(self, machine: Machine, communicator: Communicator) -> None:
        self._machine = machine
        self._communicator = communicator
        self._accumulation = arguments.Accumulation()
        self._step = self._forwards = 0
        self._fed: tuple[str, ...] = ()
        self._equal_batches = data.EqualBatches()
        self._withheld: Finding | None = None  # DP04 for batches that may be of a warm-up
        self.host = Host(machine)
        self._synced = False
        self._replaced = False  # whether the app has replaced the weights since the last step
        self._where: str | None = None
        watched, check = job.current(), job.current_check()
        self._samplers = watched.samplers if watched else None
        if watched is not None:
            watched.compare_last = self._compare_last
            if check is not None:
                batches = int(process.current().flag("grad_accumulation_steps") or 1)
                watched.samplers.shorten = check.short_epoch(machine.program.batch_size, batches)

    def before(
        self, kinds: Collection[SectionKind], batch: Mapping[str, Tensor], given: Mapping[str, float], **sync: bool
    ) -> Mode:
        """Sections of `kinds` are about to run on `batch`, with the hyperparameters `given` so far. Returns how an
        optimizer step is synced, by the arguments `sync` of session.run; collective with one in a mode but ALONE.
        Raises DataParallelError and LaunchError."""
        machine, size, mode = self._machine, self._communicator.world_size, Mode.ALONE
        if SectionKind.OPT in kinds:
            mode = arguments.mode_of(machine.program, size, **sync)
        self._forwards += SectionKind.FWD in kinds
        trains, check, watched = process.current().trains, job.current_check(), job.current()
        if trains:
            self._accumulation.note(kinds)
            self.host.note_run(kinds, given, thoroughly=check is not None)
        if check is not None:
            check.note(machine.program, kinds, batch)
        if SectionKind.FWD in kinds and trains and self._step + 1 in _BATCHES_COMPARED:
            self._fed = data.digests(batch) if size > 1 else ()
        if watched is not None:
            watched.samplers.note_run(kinds, batch)
        if SectionKind.OPT not in kinds:
            return mode
        self._step += 1
        if watched is not None:
            watched.steps = self._step
            watched.samplers.note_step()
        if mode is Mode.ALONE and (self._step > 1 or not machine.program.data_parallel):
            return mode
        self._replaced = False
        compares = check is not None or is_sampled(self._step)
        if watched is not None:
            watched.pages.begin_step(compares=compares)
        if compares:
            self._compare(mode)
        self._synced = mode is not Mode.ALONE
        return mode

    def report_nonfinite_loss(self) -> None:
        """Reports that the loss of the last forward is not finite (AP08)."""
        if not process.has_reported("AP08"):
            what = f"{self._machine.program.loss} is {self._machine.replica.loss} in forward {self._forwards}"
            remedy = "a smaller learning rate, max_grad_norm= for the optimizer, or inputs of a smaller range"
            process.report_here("AP08", what, remedy)

    def before_new_weights(self) -> None:
        """The app is about to replace the weights of the device, perhaps on this rank alone and at its end."""
        self._replaced = True

    def _compare(self, mode: Mode) -> None:
        """Compare all replicas before a step. In the first step compare how they sync, too."""
        where = self._where = app_line()
        watched = job.current()
        division, place = (watched.samplers.division(), watched.samplers.place()) if watched else (None, None)
        files = watched.files.take_new() if watched else {}
        own = Snapshot(mode, trained(self._machine), self._fed, division, place, files)
        points, shown = job.meet(self._communicator, job.Point(self._step), own)
        if not job.together(points):
            for rank, snapshot in enumerate(shown):
                if isinstance(snapshot, tuple):  # from `job.finish` of a replica that has ended
                    process.current().reporter.report_from(rank, snapshot[1])
            process.report(job.different_steps(points, where))
            raise job.CheckIsOver  # a check reports instead of raising, and cannot go on
        if self._step == 1:
            arguments.check_agreement([snapshot.mode for snapshot in shown], where)
        if mode is Mode.ALONE:
            return
        of_replicas = [snapshot.trained for snapshot in shown]
        if self._step == 1 and (start := different_start(of_replicas, where)) is not None:
            process.report(start)
            self._machine.follow_first(self._communicator)
        # Replicas in different epochs may have different rates and orders. Then the cause is reported, once.
        uneven = data.different_epochs([snapshot.place for snapshot in shown], where)
        if not process.has_reported("DP03", "DP07"):
            when = f"before step {self._step}"
            self._report_cause(uneven, different_hyperparameters(of_replicas, when, where))
            if not (uneven and process.has_reported("DP09")):
                process.report(different_weights(of_replicas, when, where))
        if not process.has_reported("DP05"):
            divisions = [snapshot.division for snapshot in shown]
            process.report(data.wrong_division(divisions, compares_epochs=False))
            self._report_cause(uneven, data.wrong_division(divisions))
        fed = [snapshot.fed for snapshot in shown]
        self._fed = ()
        if all(fed) and not process.has_reported("DP04"):
            self._compare_batches(fed, (watched.samplers.line() if watched else None) or where)
        if watched is not None:
            watched.files.compare([snapshot.files for snapshot in shown])

    def _report_cause(self, cause: Finding | None, finding: Finding | None) -> None:
        if finding is None or cause is None:
            process.report(finding)
        elif not process.has_reported(cause.code):
            process.report(cause, notice_only=True)

    def _compare_batches(self, fed: Sequence[tuple[str, ...]], where: str | None) -> None:
        finding = self._equal_batches.note(fed, self._step, where)
        # Equal random batches may be of a warm-up; no warm-up takes 8 steps, or draws from a DistributedSampler.
        if self._step == _BATCHES_COMPARED[-1] or (self._samplers is not None and self._samplers.has_fed):
            process.report(finding)
        else:
            self._withheld = finding

    def _compare_last(self) -> None:
        """Compare after the last step. Collective, also for a rank that has nothing to show."""
        if self._samplers is not None and not self._samplers.has_fed and not process.has_reported("DP04"):
            process.report(self._withheld, notice_only=True)
        own = None
        if self._synced and not process.has_reported("DP03", "DP07", "DP09"):
            own = trained(self._machine, read=not self._replaced)
        of_replicas = self._communicator.all_gather_object(own)
        known = [trains for trains in of_replicas if trains is not None]
        if len(known) == len(of_replicas):
            last = known, "at the end", self._where
            process.report(different_hyperparameters(*last) or different_weights(*last), notice_only=True)
