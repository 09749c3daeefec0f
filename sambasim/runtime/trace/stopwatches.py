"""The stopwatches of the steps that are traced: on what a step's sync and its replicas say is worth seeing.

    host          the step; data; forward and backward; sync and update
    sections      FWD and BCKWD as they are over, GRADNORM and OPT where they are passes of their own
    copies        batches into device memory, gradients and parameters between device and host
    collectives   REDUCE and GATHER, and in them what waits for messages or for peers

REDUCE, GRADNORM and OPT that sync tells of as they are over begin where the one before ended.
"""

from collections.abc import Callable, Mapping, Sequence
from time import perf_counter_ns
from typing import Any

from torch import Tensor

from sambasim.ir.graph import Graph, Section, SectionKind
from sambasim.records.trace import Track
from sambasim.runtime.replica import Replica, batch_bytes
from sambasim.runtime.sync.interface import BytesMoved, GradientSync
from sambasim.runtime.trace.recorder import Recorder
from sambasim.runtime.trace.watched import Args, StandIns, Tell, Watched

_DIFFERENTIATING = (SectionKind.FWD, SectionKind.BCKWD)
_COUNTED = ("device_to_host", "host_to_device", "peer", "network")


def start(
    stand_ins: StandIns, recorder: Recorder, graph: Graph, replicas: Sequence[Replica], sync: GradientSync, rank: int
) -> None:
    """Put stopwatches on the sync of this process, whose spans are those of `rank`, and on each of its replicas."""
    _Update(recorder, graph, sync, rank).watch(stand_ins)
    for replica in replicas:
        for one in replica.watched():
            _watch(stand_ins, recorder, one, replica.rank)
        _Pass(recorder, graph, replica.rank).watch(stand_ins, replica)


def _watch(stand_ins: StandIns, recorder: Recorder, one: Watched, replica: int) -> None:
    def timed(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: object, **by_name: object) -> object:
            began_ns = perf_counter_ns()
            result = function(*args, **by_name)
            stopped_ns = perf_counter_ns()
            tell: Tell = one.tell
            recorder.add(replica, one.track, one.name, began_ns, stopped_ns, tell(result, *args, **by_name))
            return result

        return call

    stand_ins.put(one.owner, one.method, timed)


class _Pass:
    """The passes of one replica: its sections, and before them its batch on its way to device memory."""

    def __init__(self, recorder: Recorder, graph: Graph, replica: int) -> None:
        self._recorder = recorder
        self._sections = [section for section in graph.sections if section.kind in _DIFFERENTIATING]
        self._replica = replica
        self._step = self._micro_step = -1
        self._fetched_ns = 0
        self._batch_bytes: Args = {}

    def watch(self, stand_ins: StandIns, replica: Replica) -> None:
        stand_ins.put(replica.shard, "next_batch", self._fetch)
        stand_ins.put(replica.executable, "run", self._run)

    def _fetch(self, next_batch: Callable[..., Mapping[str, Tensor]]) -> Callable[..., Mapping[str, Tensor]]:
        def fetch(*args: object) -> Mapping[str, Tensor]:
            batch = next_batch(*args)
            self._batch_bytes = batch_bytes(batch)
            self._fetched_ns = perf_counter_ns()
            return batch

        return fetch

    def _run(self, run: Callable[..., Mapping[str, Tensor]]) -> Callable[..., Mapping[str, Tensor]]:
        def timed(
            tangent: Tensor | None, *, accumulate: bool, section_done: Callable[[int], None]
        ) -> Mapping[str, Tensor]:
            began_ns, over = perf_counter_ns(), 0
            add, replica = self._recorder.add, self._replica
            add(replica, Track.COPIES, "batch to device", self._fetched_ns, began_ns, self._batch_bytes)
            self._micro_step = self._micro_step + 1 if accumulate else 0
            micro_step = self._micro_step

            def done(count: int) -> None:
                nonlocal began_ns, over
                stopped_ns, sections = perf_counter_ns(), self._sections[over:count]
                args = {"section": numbers(sections), "micro_step": micro_step}
                add(replica, Track.SECTIONS, _title(sections), began_ns, stopped_ns, args)
                section_done(count)
                began_ns, over = perf_counter_ns(), count

            return run(tangent, accumulate=accumulate, section_done=done)

        return timed


class _Update:
    """What follows the backward, or goes on beside it."""

    def __init__(self, recorder: Recorder, graph: Graph, sync: GradientSync, rank: int) -> None:
        self._recorder = recorder
        self._graph = graph
        self._sync = sync
        self._rank = rank
        self._rest: list[Section] = []
        self._began_ns = 0
        self._moved: tuple[int, ...] = ()
        self._opt_of = {
            argument: section.index
            for section in graph.sections
            if section.kind is SectionKind.OPT
            for node in graph.section_nodes(section)
            for argument in _texts(node.args)
        }

    def watch(self, stand_ins: StandIns) -> None:
        for one in self._sync.watched():
            _watch(stand_ins, self._recorder, one._replace(tell=self._numbered(one)), self._rank)
        _watch(stand_ins, self._recorder, Watched(self._sync, "begin_step", Track.HOST, "begin sync"), self._rank)
        stand_ins.put(self._sync, "finish_step", self._finish)
        stand_ins.put(self._sync, "kind_over", self._kind_over)

    def _numbered(self, one: Watched) -> Tell:
        """What `one` tells of its calls, with the numbers of the sections that its name consists of."""
        kinds = one.name.split(", ")
        sections = [section for section in self._graph.sections if section.kind in kinds]
        if not sections:
            return one.tell
        tell: Tell = one.tell

        def told(*call: object, **by_name: object) -> Args:
            args = tell(*call, **by_name)
            opt = self._opt_of.get(str(args.get("group")))
            mine = [section for section in sections if section.kind is not SectionKind.OPT or section.index == opt]
            return {"section": numbers(mine), **args}

        return told

    def _finish(self, finish_step: Callable[..., Any]) -> Callable[..., Any]:
        def finish(losses: Sequence[float], wish: int = 0) -> object:
            self._rest = [section for section in self._graph.sections if section.kind not in _DIFFERENTIATING]
            began_ns, moved = perf_counter_ns(), self._counts()
            self._began_ns, self._moved = began_ns, moved
            result = finish_step(losses, wish)
            stopped_ns = perf_counter_ns()
            self._recorder.add(
                self._rank, Track.HOST, "sync and update", began_ns, stopped_ns, self._bytes_since(moved)
            )
            return result

        return finish

    def _kind_over(self, kind_over: Callable[[SectionKind], None]) -> Callable[[SectionKind], None]:
        def over(kind: SectionKind) -> None:
            stopped_ns = perf_counter_ns()
            section = next((section for section in self._rest if section.kind is kind), None)
            if section is not None:
                self._rest.remove(section)
                track = Track.COLLECTIVES if kind is SectionKind.REDUCE else Track.SECTIONS
                args: Args = {"section": section.index, "name": section.name, **self._bytes_since(self._moved)}
                self._recorder.add(self._rank, track, kind, self._began_ns, stopped_ns, args)
            kind_over(kind)
            self._began_ns, self._moved = perf_counter_ns(), self._counts()

        return over

    def _counts(self) -> tuple[int, ...]:
        moved: BytesMoved = self._sync.bytes_moved
        return tuple(getattr(moved, name) for name in _COUNTED)

    def _bytes_since(self, before: Sequence[int]) -> Mapping[str, int]:
        counts = zip(_COUNTED, self._counts(), before, strict=True)
        return {f"{name}_bytes": now - then for name, now, then in counts if now != then}


def numbers(sections: Sequence[Section]) -> int | str:
    """Of one section its number, of several all of them in words."""
    return sections[0].index if len(sections) == 1 else ", ".join(str(section.index) for section in sections)


def _title(sections: Sequence[Section]) -> str:
    kinds = "+".join(dict.fromkeys(section.kind.value for section in sections))
    first, last = sections[0], sections[-1]
    return f"{kinds} {first.name}" if first is last else f"{kinds} {first.name} … {last.name}"


def _texts(args: Sequence[object]) -> list[str]:
    """The names among the arguments of a node, in lists too."""
    flat = [one for argument in args for one in (argument if isinstance(argument, tuple) else (argument,))]
    return [one for one in flat if isinstance(one, str)]
