"""The checks of a loaded PEF: what the session asks before it runs sections."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from sambasim.ir.graph import SectionKind
from sambasim.runtime.ranks import Communicator
from sambasim.runtime.stepwise import Mode
from sambasim.samba import context
from sambasim.samba.checks import meeting, on_demand, samplers, samples, sync, watching, weights
from sambasim.samba.checks.findings import Finding
from sambasim.samba.checks.place import app_line
from sambasim.samba.checks.samplers import Division, Place
from sambasim.samba.checks.steps import is_looked_at
from sambasim.samba.checks.telling import telling
from sambasim.samba.checks.unclipped import Unclipped
from sambasim.samba.checks.unfetched import Unfetched
from sambasim.samba.checks.unsent import Unsent
from sambasim.samba.checks.untrained import Untrained
from sambasim.samba.checks.weights import Trained
from sambasim.samba.machine import Machine

_BATCHES_COMPARED = (1, 2, 8)
"""Steps in which the replicas compare what they are fed. Once it may be chance that it is the same, where samples
repeat; twice it is not."""


@dataclass(frozen=True, slots=True)
class Look:
    """What a replica shows the others before a step."""

    mode: Mode
    trained: Trained
    fed: tuple[str, ...]
    division: Division | None
    place: Place | None
    waiting: bool
    files: Mapping[str, str]


class Checks:
    """Those of one loaded PEF. Every rank makes one, and asks it in the same order."""

    def __init__(self, machine: Machine, communicator: Communicator) -> None:
        self._machine = machine
        self._communicator = communicator
        self._accumulation = sync.Accumulation(context.current().arguments)
        self._typed = context.typed_command()
        self._step = self._forwards = 0
        self._fed: tuple[str, ...] = ()
        self._alike = samples.Alike()
        self._withheld: Finding | None = None
        """DP04 of batches that may have been there to warm up with."""
        self._unsent = unsent = Unsent(machine)
        self._untrained = Untrained(machine, lambda: unsent.host_trains)
        self._unclipped = Unclipped(machine)
        self._unfetched = Unfetched(machine, unsent.host_is_as_exchanged)
        self._shared = False
        self._last: Trained | None = None
        self._replaced = False
        self._where: str | None = None
        watched, check = watching.current(), on_demand.current()
        self._samplers = watched.samplers if watched else None
        if watched is not None:
            watched.compare_last, watched.settle = self._compare_last, self._unfetched.settle
            if check is not None:
                watched.samplers.shortened = check.short_epoch(machine.program.batch_size)

    def mode(self, kinds: Collection[SectionKind], *, data_parallel: bool, reduce_on_rdu: bool) -> Mode:
        """How an optimizer step of these `kinds` is synced. Raises DataParallelError and LaunchError."""
        if SectionKind.OPT not in kinds:
            return Mode.ALONE
        return sync.mode_of(
            self._machine.program,
            self._communicator.world_size,
            context.current().arguments,
            self._typed,
            data_parallel=data_parallel,
            reduce_on_rdu=reduce_on_rdu,
        )

    def before(
        self, kinds: Collection[SectionKind], batch: Mapping[str, Tensor], mode: Mode, given: Mapping[str, float]
    ) -> None:
        """Look at what the replicas are about to begin with. Collective with an optimizer step in a mode but ALONE.

        given: the hyperparameters that `session.run` was told last, those of every call together

        Raises DataParallelError.
        """
        self._unfetched.settle()
        self._forwards += SectionKind.FWD in kinds
        trains = context.current().trains
        if trains:
            self._accumulation.note(kinds)
        check = on_demand.current()
        if trains:
            self._unsent.note_run(kinds, given, thoroughly=check is not None)
            self._untrained.note_run(kinds)
        if check is not None:
            check.note(self._machine.program, kinds, batch, trains=trains)
        if SectionKind.FWD in kinds and trains and self._step + 1 in _BATCHES_COMPARED:
            self._fed = samples.digests(batch) if self._communicator.world_size > 1 else ()
        watched = watching.current()
        if watched is not None:
            watched.samplers.note_run(kinds, batch)
        if SectionKind.OPT not in kinds:
            return
        self._step += 1
        if watched is not None:
            watched.steps = self._step
            watched.samplers.note_step()
        if mode is Mode.ALONE and (self._step > 1 or self._machine.program.data_parallel is None):
            return
        self._last, self._replaced = None, False
        looks = self._looks()
        if watched is not None:
            watched.board.enter(meets=looks)
        if looks:
            self._compare(mode)
        self._shared = mode is not Mode.ALONE

    def tell_of_loss(self) -> None:
        """The loss of the last forward is not finite (AP08)."""
        if not telling.has("AP08"):
            what = f"{self._machine.program.loss} is {self._machine.replica.loss} in forward {self._forwards}"
            remedy = "a smaller learning rate, max_grad_norm= for the optimizer, or inputs of a smaller range"
            telling.tell(Finding("AP08", what, app_line(), remedy))

    def before_new_weights(self) -> None:
        """The app is about to give the device other weights, perhaps on this rank alone, and then to train no more.

        What it has trained is kept for the last comparison in the steps that are looked at anyway: it takes time.
        """
        self._unfetched.settle()
        if not self._shared:
            return
        if not self._replaced and self._looks():
            self._last = weights.trained(self._machine)
        self._replaced = True

    def before_replacement(self) -> None:
        """Another PEF is about to be loaded for the same model, with the weights of the host."""
        ahead = self._untrained.ahead
        if ahead > 0 and context.current().trains:
            steps = "1 step" if ahead == 1 else f"{ahead} steps"
            what = f"trace_graph loads the weights of the host, and the device has trained on for {steps} since"
            telling.tell(Finding("AP06", what, app_line(), "samba.session.to_cpu(model) before trace_graph"))

    def after_exchange(self) -> None:
        """Weights were sent from host to device, or back."""
        self._unsent.note_exchange()
        self._unfetched.note_exchange()
        self._untrained.note_exchange()

    def before_fetch(self) -> None:
        """The weights of the device are about to replace those of the host."""
        self._unfetched.settle()
        self._untrained.note_fetch()

    def _looks(self) -> bool:
        return on_demand.current() is not None or is_looked_at(self._step)

    def _compare(self, mode: Mode) -> None:
        """What every replica is about to take its next step with. In the first step also how they sync: replicas of
        which each trains alone are not compared any more."""
        where = self._where = app_line()
        watched = watching.current()
        own = Look(
            mode,
            weights.trained(self._machine),
            self._fed,
            watched.samplers.division() if watched else None,
            watched.samplers.place() if watched else None,
            watched is not None and watched.samplers.is_waiting(),
            watched.files.take_new() if watched else {},
        )
        points, looks = meeting.meet(self._communicator, meeting.Point(self._step), own)
        if not meeting.together(points):
            for rank, shown in enumerate(looks):
                if isinstance(shown, tuple):  # from a replica that has come to its end: see `watching.finish`
                    telling.tell_of(rank, shown[1])
            telling.tell(meeting.different_steps(points, where))
            raise on_demand.CheckIsOver  # in a check on demand: the replicas cannot go on
        if self._step == 1:
            sync.check_agreement([look.mode for look in looks], where)
        if mode is Mode.ALONE:
            return
        trained = [look.trained for look in looks]
        if self._step == 1:
            start = weights.different_start(trained, where)
            telling.tell(start)
            if start is not None:
                self._machine.follow_first(self._communicator)
        # Replicas in different epochs may well have other rates, and another order: then that is what is told.
        uneven = samplers.different_epochs([look.place for look in looks], where)
        if not (telling.has("DP03") or telling.has("DP07")):
            when = f"before step {self._step}"
            self._tell_or(uneven, weights.different_hyperparameters(trained, when, where), only_noticed=True)
            if uneven is None or not telling.has("DP09"):  # other rates make other weights
                telling.tell(weights.different_weights(trained, when, where))
        if not telling.has("DP05"):
            divisions = [look.division for look in looks]
            telling.tell(samplers.wrong_division(samplers.of_one_epoch(divisions)))
            self._tell_or(uneven, samplers.wrong_division(divisions), only_noticed=True)
        line = watched.samplers.line() if watched else None
        self._compare_batches(looks, line or where)
        if watched is not None:
            watched.files.compare([look.files for look in looks])

    def _tell_or(self, reason: Finding | None, finding: Finding | None, *, only_noticed: bool = False) -> None:
        """`finding`, or, if there is one, the `reason` for it, once."""
        if finding is None or reason is None:
            telling.tell(finding)
        elif not telling.has(reason.code):
            telling.tell(reason, only_noticed=only_noticed)

    def _compare_batches(self, looks: Sequence[Look], where: str | None) -> None:
        self._fed = ()
        fed = [look.fed for look in looks]
        if not all(fed) or telling.has("DP04"):
            return
        finding = self._alike.note(fed, self._step, where)
        # Batches of random numbers to warm up with may be the same on all replicas, but nobody warms up for so long.
        if self._step == _BATCHES_COMPARED[-1] or not all(look.waiting for look in looks):
            telling.tell(finding)
        else:
            self._withheld = finding

    def _compare_last(self) -> None:
        """What the last step has left. Collective, whatever this rank has to show: others may have been told less."""
        if self._samplers is not None and not self._samplers.has_fed and not telling.has("DP04"):
            telling.tell(self._withheld, only_noticed=True)
        own = None
        if self._shared and not any(map(telling.has, ("DP03", "DP07", "DP09"))):
            own = self._last or weights.trained(self._machine, read=not self._replaced)
        trained = self._communicator.all_gather_object(own)
        known = [one for one in trained if one is not None]
        if len(known) == len(trained):
            telling.tell(weights.different_course(known, "at the end", self._where), only_noticed=True)
