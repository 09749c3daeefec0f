"""How the steps of a run get on the board: what each rank does in a step is written as it comes to it.

For a run that is watched, functions that write stand in for a few methods of the objects that run a step, in these
objects and not in their classes. All text is put together once, and a step costs some copies of some bytes; a run that
nobody watches runs the code that it always ran.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from sambasim.ir.graph import Graph, SectionKind
from sambasim.ir.program import Program
from sambasim.runtime.replica import Replica
from sambasim.runtime.sync.interface import GradientSync, StepSync, Synced
from sambasim.runtime.trace.watched import StandIns
from sambasim.runtime.watch.activity import Activity
from sambasim.runtime.watch.board import State, Writer, prepare

_DIFFERENTIATING = (SectionKind.FWD, SectionKind.BCKWD)

_WAITING = prepare(State.WAITING, "waiting for peers")
_DEALING = prepare(State.RUNNING, "beginning an epoch")
_READING = prepare(State.RUNNING, "reading data")
_BATCH = prepare(State.RUNNING, "placing the batch")
_DONE = prepare(State.RUNNING, "telling of the step")


def follow(
    activity: Activity,
    program: Program,
    replicas: Sequence[Replica],
    syncs: tuple[GradientSync, Synced],
    done: Callable[[], int],
) -> None:
    """Write from now on, where somebody watches, what happens in the steps of this process's replicas and their sync.

    syncs: what the replicas sync with, and what the trainer calls, which may be the same
    done: how many steps have been done, whenever it is asked
    """
    writer, graph = activity.writer, program.training
    if writer is None or graph is None:
        return
    stand_ins, (sync, outer) = StandIns(), syncs
    for replica in replicas:
        micro_steps = _MicroSteps(writer, replica.shard.accumulation_steps)
        stand_ins.put(replica.shard, "begin_epoch", partial(_dealing, writer, micro_steps))
        stand_ins.put(replica.shard, "next_batch", partial(_reading, writer, micro_steps))
        stand_ins.put(replica.executable, "run", partial(_running, writer, titles(graph)))
    for one in {id(one): one for one in (sync, outer)}.values():
        stand_ins.put(one, "begin_step", partial(_beginning, writer, done))
        stand_ins.put(one, "finish_step", partial(_finishing, writer))
    for part in sync.watched():
        title = prepare(State.WAITING, f"sync with peers: {part.name}")
        stand_ins.put(part.owner, part.method, partial(_syncing, writer, title))


def titles(graph: Graph) -> Sequence[bytes]:
    """What to write once so many sections of a pass have been run, from none to all of them."""
    sections = [section for section in graph.sections if section.kind in _DIFFERENTIATING]
    whole = len(graph.sections)
    texts = [f"section {number} of {whole} ({section.name})" for number, section in enumerate(sections, 1)]
    return [prepare(State.RUNNING, text) for text in [*texts, "backward done"]]


def _beginning(writer: Writer, done: Callable[[], int], begin_step: Callable[[], None]) -> Callable[[], None]:
    does, step = writer.does, writer.step

    def begin() -> None:
        step(done() + 1)
        does(_WAITING)
        begin_step()

    return begin


class _MicroSteps:
    """Counts the batches of a replica, and writes which of its step each is."""

    def __init__(self, writer: Writer, of_step: int) -> None:
        self._writer = writer
        self._of_step = of_step
        self._begun = 0

    def restart(self) -> None:
        """An epoch begins, and a step with it."""
        self._begun = 0

    def begin(self) -> None:
        """The next batch."""
        micro_step, self._begun = self._begun, (self._begun + 1) % self._of_step
        if micro_step:  # the first is told apart from a step that has but one by those behind it
            self._writer.micro_step(micro_step + 1)


def _dealing(writer: Writer, micro_steps: _MicroSteps, begin_epoch: Callable[..., None]) -> Callable[..., None]:
    def deal(epoch: int, step: int, used: int) -> None:
        writer.does(_DEALING)
        micro_steps.restart()
        begin_epoch(epoch, step, used)

    return deal


def _reading(
    writer: Writer, micro_steps: _MicroSteps, next_batch: Callable[[], Mapping[str, Tensor]]
) -> Callable[[], Mapping[str, Tensor]]:
    does = writer.does

    def read() -> Mapping[str, Tensor]:
        micro_steps.begin()
        does(_READING)
        batch = next_batch()
        does(_BATCH)
        return batch

    return read


def _running(
    writer: Writer, after: Sequence[bytes], run: Callable[..., dict[str, Tensor]]
) -> Callable[..., dict[str, Tensor]]:
    does = writer.does

    def ran(tangent: Tensor | None, *, accumulate: bool, section_done: Callable[[int], None]) -> dict[str, Tensor]:
        def done(count: int) -> None:
            section_done(count)
            does(after[count])

        does(after[0])
        return run(tangent, accumulate=accumulate, section_done=done)

    return ran


def _syncing(writer: Writer, title: bytes, method: Callable[..., Any]) -> Callable[..., Any]:
    """A part of the sync. Of many groups it may take long, but goes on from one to the next."""
    does = writer.does

    def synced(*args: object, **by_name: object) -> object:
        does(title)
        result = method(*args, **by_name)
        does(_WAITING)
        return result

    return synced


def _finishing(writer: Writer, finish_step: Callable[..., StepSync]) -> Callable[..., StepSync]:
    does = writer.does

    def finish(losses: Sequence[float], wish: int = 0) -> StepSync:
        does(_WAITING)
        result = finish_step(losses, wish)
        writer.micro_step(0)
        does(_DONE)
        return result

    return finish
