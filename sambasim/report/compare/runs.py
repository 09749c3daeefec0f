"""Where two recorded runs part: the first step, section and tensor whose digests differ.

Tensors are matched by name, so runs of programs that differ can be compared as far as they have names in common. Within
a step they come in the order in which the first run computed them; of those at one place, that of the first replica.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import merge
from typing import NamedTuple

from sambasim.records.digests import RecordedRun, Recording, StepDigests, ValueDigest
from sambasim.report.compare.facts import asked_otherwise, not_comparable, told
from sambasim.report.compare.losses import losses_apart, relative_difference
from sambasim.report.compare.result import DigestApart, RunsCompared

_MOST_SHOWN = 6
_SAME_NORM = 1e-15


class _Pair(NamedTuple):
    """The lines of one replica at one step; None where a run has none."""

    step: int
    replica: int
    a: StepDigests | None
    b: StepDigests | None


@dataclass(slots=True)
class _Found:
    """What has been found so far."""

    titles: dict[int, str]
    digests: int = 0
    steps: set[int] = field(default_factory=set)
    apart: list[DigestApart] = field(default_factory=list)
    alike_before: int = 0
    last_alike: tuple[int, int, ValueDigest, bool] | None = None
    by_step: dict[int, int] = field(default_factory=dict)
    losses: dict[int, tuple[float | None, float | None]] = field(default_factory=dict)
    only_in_a: int = 0
    only_in_b: int = 0
    starts: list[int | None] = field(default_factory=lambda: [None, None])
    ends: list[int] = field(default_factory=lambda: [-1, -1])


def compare_runs(a: Recording, b: Recording, wanted: Callable[[int], bool] = lambda step: True) -> RunsCompared:
    """Compares the steps that are `wanted`. Raises what reading them raises."""
    found = _Found({one.number: f"{one.number} {one.kind} {one.name}" for one in a.run.sections})
    replicas = tuple(sorted({*a.replicas} & {*b.replicas}))
    step: list[_Pair] = []
    for pair in merge(*(_pairs(a, b, replica, wanted) for replica in replicas), key=lambda one: one[:2]):
        if step and step[0].step != pair.step:
            _compare_step(step, found)
            step = []
        step.append(pair)
    _compare_step(step, found)
    return _result(a, b, replicas, found)


def place(one: DigestApart) -> str:
    """Where in a run a tensor is: `step 3, replica 0, section 2 FWD net__linear: value net__relu`."""
    when = f"before step {one.step + 1}" if one.begins else f"step {one.step}"
    micro_step = f", micro-step {one.micro_step + 1}" if one.micro_step else ""
    if one.section_title is not None:
        where = f", section {one.section_title}"
    else:
        where = "" if one.begins else ", the batch" if one.what == "input" else ", after the update"
    replicas = f"replica{'' if len(one.replicas) == 1 else 's'} {', '.join(map(str, one.replicas))}"
    return f"{when}, {replicas}{micro_step}{where}: {one.what} {one.name}"


def how_much(one: DigestApart) -> str:
    """By how much two tensors differ, as far as norms say."""
    if one.norms_apart is None:
        counts = (one.not_finite_a, one.not_finite_b)
        return "elements not finite: {} in A, {} in B".format(*(count or "none" for count in counts))
    if one.norms_apart < _SAME_NORM:
        return "same norm to 15 digits"
    norms = list(dict.fromkeys(f"{norm:.9g}" for norm in (one.norm_a, one.norm_b)))
    return f"norm{'s' if len(norms) > 1 else ''} {' and '.join(norms)}, {one.norms_apart:.1e} apart"


def _pairs(a: Recording, b: Recording, replica: int, wanted: Callable[[int], bool]) -> Iterator[_Pair]:
    ours, theirs = _lines(a, replica, wanted), _lines(b, replica, wanted)
    one, other = next(ours, None), next(theirs, None)
    while one is not None or other is not None:
        step = min(line.step for line in (one, other) if line is not None)
        left = one if one is not None and one.step == step else None
        right = other if other is not None and other.step == step else None
        yield _Pair(step, replica, left, right)
        one = next(ours, None) if left is not None else one
        other = next(theirs, None) if right is not None else other


def _lines(recording: Recording, replica: int, wanted: Callable[[int], bool]) -> Iterator[StepDigests]:
    for line in recording.steps(replica):
        if wanted(line.step) or (line.begins and wanted(line.step + 1)):
            yield line


def _compare_step(pairs: Sequence[_Pair], found: _Found) -> None:
    """All replicas of one step."""
    seen: list[tuple[int, int, ValueDigest, ValueDigest]] = []
    begins = False
    for pair in pairs:
        for side, line in enumerate((pair.a, pair.b)):
            if line is not None:
                found.ends[side] = max(found.ends[side], line.step)
                if found.starts[side] is None and not line.begins:
                    found.starts[side] = line.step
        if pair.a is None or pair.b is None:
            continue
        begins = pair.a.begins or pair.b.begins
        if not begins:
            found.steps.add(pair.step)
            found.losses.setdefault(pair.step, (pair.a.loss, pair.b.loss))
        ours, theirs = _by_name(pair.a), _by_name(pair.b)
        if pair.a.begins == pair.b.begins:  # else the one is a whole step, and the other the end of it
            found.only_in_a += len(ours.keys() - theirs.keys())
            found.only_in_b += len(theirs.keys() - ours.keys())
        seen += [(position, pair.replica, ours[key], theirs[key]) for position, key in enumerate(ours) if key in theirs]
    for _, replica, one, other in sorted(seen, key=lambda row: row[:2]):
        found.digests += 1
        if one.digest != other.digest:
            found.by_step[pairs[0].step] = found.by_step.get(pairs[0].step, 0) + 1
            _keep(found, pairs[0].step, replica, one, other, begins=begins)
        elif not found.apart:
            found.alike_before += 1
            found.last_alike = (pairs[0].step, replica, one, begins)


def _keep(found: _Found, step: int, replica: int, one: ValueDigest, other: ValueDigest, *, begins: bool) -> None:
    """One more tensor that differs; or one more replica in which the last one does."""
    last = found.apart[-1] if found.apart else None
    if last is not None and (last.step, last.what, last.name, last.micro_step) == (step, *one[:3]):
        found.apart[-1] = last.model_copy(update={"replicas": (*last.replicas, replica)})
    elif len(found.apart) < _MOST_SHOWN:
        found.apart.append(_apart(step, replica, one, other, found.titles, begins=begins))


def _by_name(line: StepDigests) -> dict[tuple[str, str, int | None], ValueDigest]:
    """In the order in which they were computed. Sections may be cut otherwise in another program."""
    return {(one.what, one.name, one.micro_step): one for one in line.values}


def _apart(
    step: int, replica: int, one: ValueDigest, other: ValueDigest, titles: dict[int, str], *, begins: bool
) -> DigestApart:
    return DigestApart(
        step=step,
        replicas=(replica,),
        micro_step=one.micro_step,
        section=one.section,
        section_title=None if one.section is None else titles.get(one.section, str(one.section)),
        what=one.what,
        name=one.name,
        norm_a=one.norm,
        norm_b=other.norm,
        norms_apart=relative_difference(one.norm, other.norm),
        not_finite_a=one.not_finite,
        not_finite_b=other.not_finite,
        begins=begins,
    )


def _result(a: Recording, b: Recording, replicas: tuple[int, ...], found: _Found) -> RunsCompared:
    right = not_comparable(a.run, b.run)
    notes = tuple(_notes(a, b, found))
    whole = a.replicas == b.replicas and found.ends[0] == found.ends[1] and not (found.only_in_a or found.only_in_b)
    first = found.apart[0] if found.apart else None
    return RunsCompared(
        a=str(a.folder),
        b=str(b.folder),
        alike=first is None and whole and found.digests > 0,
        verdict=_verdict(first, told(right), whole, len(replicas), found),
        not_comparable=right,
        asked_otherwise=asked_otherwise(a.run, b.run),
        steps=len(found.steps),
        replicas=replicas,
        digests=found.digests,
        first=first,
        alike_before=found.alike_before,
        last_alike=_last_alike(found),
        then=tuple(found.apart[1:]),
        differing_by_step=dict(list(found.by_step.items())[:_MOST_SHOWN]),
        losses=losses_apart([(step, *both) for step, both in found.losses.items()]),
        only_in_a=found.only_in_a,
        only_in_b=found.only_in_b,
        notes=notes,
    )


def _last_alike(found: _Found) -> str | None:
    if found.last_alike is None or not found.apart:
        return None
    step, replica, one, begins = found.last_alike
    return place(_apart(step, replica, one, one, found.titles, begins=begins))


def _verdict(first: DigestApart | None, right: str, whole: bool, replicas: int, found: _Found) -> str:
    if first is not None:
        before = f"not comparable bit by bit: {right}; " if right else ""
        return f"{before}they part {'' if first.begins else 'at '}{place(first)}; {how_much(first)}"
    if not found.digests:
        return "nothing to compare: they have no step of a replica in common"
    though = f", though {right}" if right else ""
    counts = f"{_count(len(found.steps), 'step')}, {_count(replicas, 'replica')}, {found.digests:,} digests"
    return f"alike: {counts}{though}" if whole else f"alike as far as both have recorded: {counts}{though}"


def _notes(a: Recording, b: Recording, found: _Found) -> Iterator[str]:
    for name, start in zip("AB", found.starts, strict=True):
        if start is not None and start > min(one for one in found.starts if one is not None):
            yield f"{name} begins at step {start}"
    for name, run, end in (("A", a.run, found.ends[0]), ("B", b.run, found.ends[1])):
        if found.ends[0] != found.ends[1] and end >= 0:
            yield f"{name} ends after step {end}{_of(run, end)}"
    for name, ours, theirs in (("A", a, b), ("B", b, a)):
        alone = [str(replica) for replica in ours.replicas if replica not in theirs.replicas]
        if alone:
            yield f"only {name} has {'replica' if len(alone) == 1 else 'replicas'} {', '.join(alone)}"
    for name, count in (("A", found.only_in_a), ("B", found.only_in_b)):
        if count:
            yield f"{_count(count, 'digest')} of common steps only in {name}, without a counterpart by name"
    if a.run.sees != b.run.sees:
        yield f"A has the {a.run.sees}, B the {b.run.sees}"
    if a.run.pef_digest != b.run.pef_digest:
        yield "the PEFs differ: sambasim compare A.pef B.pef says where"


def _of(run: RecordedRun, end: int) -> str:
    return f", and was to record up to step {run.last_step}" if end < run.last_step else ""


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
