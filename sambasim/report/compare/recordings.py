"""Comparing two recordings of digests: the first step, section and tensor that differ."""

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from heapq import merge
from itertools import groupby, product
from operator import itemgetter
from typing import NamedTuple, TypeAlias

from sambasim.records.digests import Recording, StepDigests, ValueDigest
from sambasim.report.compare import (
    deciding_facts,
    differing_facts,
    differing_losses,
    digest_difference,
    has_all,
    place,
    relative_difference,
    verdict_of,
)
from sambasim.report.tables import Row
from sambasim.units import counted, numbered

_MOST_SHOWN = 6
_COMPARED_APART = ("training.seed", "training.batch_size")  # deciding facts themselves, or part of the PEF

_Line: TypeAlias = tuple[int, int, int, StepDigests]  # step, replica and side (0 is A)


class _Pair(NamedTuple):
    """The digests of one tensor in both runs. `begins`: of the state before the first step of one of them."""

    step: int
    replica: int
    a: ValueDigest
    b: ValueDigest
    begins: bool


class _RunsComparison:
    """Steps are added in order; then `result` has what was found. Tensors are matched by name, in the order in which
    the first run computed them; at equal positions the lowest replica comes first."""

    def __init__(self, a: Recording, b: Recording, asked: range | None) -> None:
        self.sides, self.asked = (a, b), asked
        self.replicas = tuple(sorted({*a.replicas} & {*b.replicas}))
        self.titles = dict(enumerate(a.run.sections))
        self.digests = self.equal_before = 0
        self.differences: list[Row] = []
        self.last_equal: _Pair | None = None
        self.by_step: Counter[int] = Counter()
        self.losses: dict[int, tuple[float | None, float | None]] = {}
        self.only_in: Counter[int] = Counter()
        self.starts: dict[int, int] = {}
        self.ends: tuple[dict[int, int], dict[int, int]] = ({}, {})

    def add_step(self, step: int, lines: Iterable[_Line]) -> None:
        pairs: list[tuple[int, _Pair]] = []
        for replica, of_replica in groupby(lines, key=itemgetter(1)):
            sides = {side: digests for _, _, side, digests in of_replica}
            for side, digests in sides.items():
                self.ends[side][replica] = step
                if not digests.begins:
                    self.starts.setdefault(side, step)
            if len(sides) == 1:
                continue
            begins = any(digests.begins for digests in sides.values())
            if not begins:
                self.losses.setdefault(step, (sides[0].loss, sides[1].loss))
            # In the order of computation. The section is not part of the key: another program may have others.
            ours, theirs = (
                {(value.what, value.name, value.micro_step): value for value in sides[side].values} for side in (0, 1)
            )
            if sides[0].begins == sides[1].begins:  # otherwise one is a whole step, and the other only the state after
                common = len(ours.keys() & theirs.keys())
                self.only_in += Counter({side: len(digests.values) - common for side, digests in sides.items()})
            for position, (key, digest) in enumerate(ours.items()):
                if key in theirs:
                    pairs.append((position, _Pair(step, replica, digest, theirs[key], begins)))
        for _, pair in sorted(pairs, key=lambda row: (row[0], row[1].replica)):
            self.digests += 1
            last = self.differences[-1] if self.differences else None
            if pair.a.digest == pair.b.digest:
                if last is None:
                    self.equal_before, self.last_equal = self.equal_before + 1, pair
                continue
            self.by_step[step] += 1
            if last is not None and (last.step, last.what, last.name, last.micro_step) == (step, *pair.a[:3]):
                self.differences[-1] = last.model_copy(update={"replicas": (*last.replicas, pair.replica)})
            elif len(self.differences) < _MOST_SHOWN:
                self.differences.append(self._difference(pair))

    def _difference(self, pair: _Pair) -> Row:
        a, b = pair.a, pair.b
        title = None if a.section is None else self.titles.get(a.section, str(a.section))
        return Row(
            step=pair.step,
            replicas=(pair.replica,),
            **{"micro_step": a.micro_step, "section": a.section, "section_title": title, "what": a.what},
            **{"name": a.name, "norm_a": a.norm, "norm_b": b.norm},
            relative_norm_difference=relative_difference(a.norm, b.norm),
            **{"not_finite_a": a.not_finite, "not_finite_b": b.not_finite, "begins": pair.begins},
        )

    def result(self) -> Row:
        """`first`: the first difference; `not_comparable`: facts that explain other bits, the most important first."""
        a, b = self.sides
        facts = differing_facts(deciding_facts(a.run), deciding_facts(b.run))
        whole = self._is_whole()
        first = self.differences[0] if self.differences else None
        at = None if first is None else f"{'' if first.begins else 'at '}{place(first)}; {digest_difference(first)}"
        steps, of_replicas = counted(len(self.losses), "step"), counted(len(self.replicas), "replica")
        far = "" if whole else " as far as both have recorded"
        equal = f"{far}: {steps}, {of_replicas}, {self.digests:,} digests" if self.digests else None
        last = place(self._difference(self.last_equal)) if first is not None and self.last_equal is not None else None
        options = ({k: v for k, v in side.run.options.items() if k not in _COMPARED_APART} for side in self.sides)
        return Row(
            kind="runs",
            a=str(a.folder),
            b=str(b.folder),
            equal=first is None and whole and self.digests > 0,
            verdict=verdict_of(at, equal, "step of a replica", facts),
            not_comparable=facts,
            other_options=differing_facts(*options),
            steps=len(self.losses),
            replicas=self.replicas,
            digests=self.digests,
            first=first,
            equal_before=self.equal_before,
            last_equal=last,
            next_differences=self.differences[1:],
            differing_by_step=dict(list(self.by_step.items())[:_MOST_SHOWN]),
            losses=differing_losses([(step, *both) for step, both in self.losses.items()]),
            only_in_a=self.only_in[0],
            only_in_b=self.only_in[1],
            notes=list(self._notes()),
        )

    def _is_whole(self) -> bool:
        """Whether all that was asked was compared: all that both runs were to record, or the steps that were named."""
        for side, recording in enumerate(self.sides):
            start, end = self.starts.get(side, math.inf), self._end(recording)
            if recording.replicas != tuple(range(recording.run.ranks)) or not all(
                has_all(start, self.ends[side].get(replica, 0), end, self.asked) for replica in recording.replicas
            ):
                return False
        return self.ends[0] == self.ends[1] and not any(self.only_in.values())

    def _end(self, recording: Recording) -> int:
        """The last step that is to be compared: for a range that goes beyond the run, the last recorded one."""
        run, asked = recording.run, self.asked
        return run.last_step if asked is None or asked[-1] > run.steps else asked[-1]

    def _notes(self) -> Iterator[str]:
        a, b = self.sides
        first = self.asked.start if self.asked is not None else min(self.starts.values(), default=0)
        for side, start in sorted(self.starts.items()):
            if start > first:
                yield f"{'AB'[side]} begins at step {start}"
        for name, recording, ends in zip("AB", self.sides, self.ends, strict=True):
            first, last = min(ends, key=ends.__getitem__, default=0), max(ends.values(), default=0)
            if ends and (self.ends[0] != self.ends[1] or last < self._end(recording)):
                until = recording.run.last_step
                planned = f", and was to record up to step {until}" if last < until else ""
                yield f"{name} ends after step {last}{planned}"
                if ends[first] < last:
                    yield f"replica {first} of {name} ends after step {ends[first]}"
        for name, recording in zip("AB", self.sides, strict=True):
            if missing := [rank for rank in range(recording.run.ranks) if rank not in recording.replicas]:
                yield f"{name} has no file of {numbered('replica', missing)}"
            if alone := [replica for replica in recording.replicas if replica not in self.replicas]:
                yield f"only {name} has {numbered('replica', alone)}"
        for side, count in sorted(self.only_in.items()):
            digests = f"{counted(count, 'digest')} of common steps"
            yield f"{digests} only in {'AB'[side]}, without a counterpart by name"
        if a.run.sees != b.run.sees:
            yield f"A has the {a.run.sees}, B the {b.run.sees}"
        if a.run.pef_digest != b.run.pef_digest:
            yield "the PEFs differ: sambasim compare A.pef B.pef says where"


def compare_runs(a: Recording, b: Recording, asked: range | None = None) -> Row:
    """Compare two recordings, or only the steps that are `asked`. Raises what `Recording.steps` raises."""

    def lines_of(recording: Recording, replica: int, side: int) -> Iterator[_Line]:
        for line in recording.steps(replica):
            if asked is None or line.step in asked or (line.begins and line.step + 1 in asked):
                yield line.step, replica, side, line

    comparison = _RunsComparison(a, b, asked)
    sides = product(comparison.replicas, enumerate((a, b)))
    recorded = [lines_of(recording, replica, side) for replica, (side, recording) in sides]
    for step, lines in groupby(merge(*recorded, key=itemgetter(0, 1, 2)), key=itemgetter(0)):
        comparison.add_step(step, lines)
    return comparison.result()
