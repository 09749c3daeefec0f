"""Pipeline schedules: which rank runs which stage of the model on which micro-batch, in what order.

A schedule has one row of actions for each rank of the axis pp. Stage s is on rank s % ranks; several stages of a rank
are its chunks. The compiler, the runtime, `inspect` and the tests read the same rows.

    action                                   needs, of the same micro-batch
    F   forward of a stage                   F of the stage before
    B   backward                             F, and B of the next stage
    I   gradients of the stage's inputs      F, and I of the next stage
    W   gradients of the stage's weights     I

With costs F = I = W = 1 and B = 2, P ranks, M micro-batches and v chunks; idle for M >= P, in flight for M >= 2 P:

    schedule            idle share (bubble)        in flight on rank r     source
    gpipe               (P - 1) / (M + P - 1)      M                       Huang et al., arXiv:1811.06965
    1f1b                (P - 1) / (M + P - 1)      P - r                   Narayanan et al., arXiv:2006.09503
    interleaved-1f1b    (P - 1) / (v M + P - 1)    (v + 1) P - 2 r - 1     Narayanan et al., arXiv:2104.04473
    zb-h1               (P - 1) / (3 M + P - 1)    P                       Qi et al., arXiv:2401.10241
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import accumulate, chain
from pathlib import Path

from sambasim.errors import OptionError, failing_with
from sambasim.files import read_text
from sambasim.ir.types import Count
from sambasim.units import MIB, counted


class ActionKind(StrEnum):
    FORWARD = "F"
    BACKWARD = "B"
    INPUT_GRADIENTS = "I"
    WEIGHT_GRADIENTS = "W"


_SPLIT = (ActionKind.INPUT_GRADIENTS, ActionKind.WEIGHT_GRADIENTS)


@dataclass(frozen=True, slots=True)
class Action:
    """One stage's work on one micro-batch. Its text is a cell of PyTorch's schedule CSV: `2F0`."""

    kind: ActionKind
    stage: Count
    micro_batch: Count

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro_batch}"


@dataclass(frozen=True, slots=True)
class Schedule:
    """The actions of each rank of the axis pp, in order."""

    name: str
    stages: Count
    micro_batches: Count
    rows: tuple[tuple[Action, ...], ...]

    @property
    def ranks(self) -> int:
        return len(self.rows)

    @property
    def splits_backward(self) -> bool:
        """Whether a backward is I and W, instead of B."""
        return any(action.kind in _SPLIT for row in self.rows for action in row)

    @property
    def backward_in_one_piece(self) -> bool:
        """Whether a rank runs the whole backward of a micro-batch by one action."""
        return self.stages == self.ranks and not self.splits_backward

    @property
    def keeps_order(self) -> bool:
        """Whether a rank runs the sections of each micro-batch in their order. Several stages of split backwards mix
        them: I of stage 2, I of stage 0, W of stage 2."""
        return self.stages == self.ranks or not self.splits_backward

    def rank_of(self, stage: int) -> int:
        return stage % self.ranks

    def stages_of(self, rank: int) -> range:
        return range(rank, self.stages, self.ranks)

    def needs(self, action: Action) -> Iterator[Action]:
        """The actions that must be done before `action`."""
        kind, stage, micro_batch = action.kind, action.stage, action.micro_batch
        if kind is ActionKind.WEIGHT_GRADIENTS:
            yield Action(ActionKind.INPUT_GRADIENTS, stage, micro_batch)
        elif kind is not ActionKind.FORWARD:
            yield Action(ActionKind.FORWARD, stage, micro_batch)
            if stage < self.stages - 1:
                yield Action(kind, stage + 1, micro_batch)
        elif stage > 0:
            yield Action(kind, stage - 1, micro_batch)


Rows = Sequence[Sequence[Action]]


def _schedule(name: str, rows: Rows) -> Schedule:
    stages = 1 + max(action.stage for row in rows for action in row)
    micro_batches = 1 + max(action.micro_batch for row in rows for action in row)
    return Schedule(name, stages, micro_batches, tuple(map(tuple, rows)))


def _rows(
    ranks: int, micro_batches: int, chunks: int, warm_up: Callable[[int], int], kind: ActionKind = ActionKind.BACKWARD
) -> list[list[Action]]:
    """Each rank runs `warm_up(rank)` forwards, then one forward and one backward in turn, then the other backwards.
    As many micro-batches as there are ranks go through all chunks, then the next ones."""
    rounds = [range(first, min(first + ranks, micro_batches)) for first in range(0, micro_batches, ranks)]
    rows = []
    for rank in range(ranks):
        stages = range(rank, ranks * chunks, ranks)
        forwards = [Action(ActionKind.FORWARD, stage, m) for part in rounds for stage in stages for m in part]
        backwards = [Action(kind, stage, m) for part in rounds for stage in reversed(stages) for m in part]
        first = min(warm_up(rank), len(forwards))
        in_turn = chain.from_iterable(zip(forwards[first:], backwards, strict=False))
        rows.append([*forwards[:first], *in_turn, *backwards[len(forwards) - first :]])
    return rows


def _interleaved(ranks: int, micro_batches: int) -> Rows:
    if micro_batches % ranks:
        what = f"interleaved-1f1b needs a multiple of {ranks} micro-batches on {ranks} ranks, got {micro_batches}"
        raise OptionError(what, remedy=f"--micro-batches {-(-micro_batches // ranks) * ranks}, or --schedule 1f1b")
    return _rows(ranks, micro_batches, 2, lambda rank: 2 * (ranks - 1 - rank) + ranks)


def _zb_h1(ranks: int, micro_batches: int) -> Rows:
    """1F1B with I for B. Rank r runs W r micro-batches late: I is early, and W fills what would be idle."""
    rows = []
    one_f_one_b = _rows(ranks, micro_batches, 1, lambda rank: ranks - 1 - rank, ActionKind.INPUT_GRADIENTS)
    for rank, row in enumerate(one_f_one_b):
        weights = (Action(ActionKind.WEIGHT_GRADIENTS, rank, m) for m in range(micro_batches))
        filled = []
        for action in row:
            filled.append(action)
            if action.kind is ActionKind.INPUT_GRADIENTS and action.micro_batch >= rank:
                filled.append(next(weights))
        rows.append([*filled, *weights])
    return rows


SCHEDULES: Mapping[str, Callable[[int, int], Rows]] = {
    "gpipe": lambda ranks, micro_batches: _rows(ranks, micro_batches, 1, lambda rank: micro_batches),
    "1f1b": lambda ranks, micro_batches: _rows(ranks, micro_batches, 1, lambda rank: ranks - 1 - rank),
    "interleaved-1f1b": _interleaved,
    "zb-h1": _zb_h1,
}
"""The rows of a schedule for a number of ranks and micro-batches. interleaved-1f1b has two chunks, the others one."""

_CHOICES = f"--schedule {' | '.join(SCHEDULES)} | FILE.csv"

_MOST_CELLS = 100_000
"""Ranks × micro-batches of a named schedule: two or three actions each, which take some 5 s to check."""


def make(name: str, ranks: int, micro_batches: int) -> Schedule:
    """The schedule `name`. Raises OptionError if there is none of that name, or none for these numbers."""
    if name not in SCHEDULES:
        raise OptionError(f"there is no schedule {name}", remedy=_CHOICES)
    if ranks * micro_batches > _MOST_CELLS:
        most = f"ranks × micro-batches may be {_MOST_CELLS:,}"
        what = f"a schedule of {ranks:,} ranks and {micro_batches:,} micro-batches is too long: {most}"
        raise OptionError(what, remedy="use fewer --pipeline-stages or --micro-batches")
    return _schedule(name, SCHEDULES[name](ranks, micro_batches))


_CELL = re.compile(rf"([0-9]{{1,9}})([{''.join(ActionKind)}])([0-9]{{1,9}})")

_MOST_BYTES = MIB  # of a CSV file: some 150,000 actions, which take 4 s to check


def read_csv(path: Path) -> Schedule:
    """The schedule in a CSV file as PyTorch writes it (`format="compute_only"`): a row for each rank, an action in each
    cell, or none. Raises OptionError if it cannot be read, a cell is no action, or the schedule cannot run."""
    with failing_with(OptionError, f"the schedule {path} cannot be read", _CHOICES):
        text = read_text(path, _MOST_BYTES).removeprefix("\ufeff")  # with which spreadsheets begin a file
    rows: list[list[Action]] = []
    for number, line in enumerate(text.rstrip().split("\n"), 1):
        rows.append([])
        for column, cell in enumerate(map(str.strip, line.split(",")), 1):
            if parts := _CELL.fullmatch(cell):
                rows[-1].append(Action(ActionKind(parts[2]), int(parts[1]), int(parts[3])))
            elif cell:
                where = f"{path}, row {number}, cell {column}"
                remedy = 'write stage, F, B, I or W, and micro-batch, as in 2F0: PyTorch\'s format "compute_only"'
                raise OptionError(f"{cell} is no action", where=where, remedy=remedy)
    if not any(rows):
        raise OptionError("the schedule has no actions", where=str(path), remedy="write a row of actions for each rank")
    schedule = _schedule(path.stem, rows)
    try:
        check(schedule)
    except OptionError as error:
        raise OptionError(error.what, where=f"{path}, {error.where}", remedy=error.remedy) from None
    return schedule


def check(schedule: Schedule) -> None:
    """Raises OptionError, with the row and a remedy, if the schedule cannot run: an action is missing, there twice, on
    the wrong rank or out of order, or ranks would wait for one another forever."""
    if min(schedule.stages, schedule.micro_batches, schedule.ranks) < 1:
        raise OptionError("the schedule has no stages, micro-batches or ranks", remedy=_CHOICES)
    _check_actions(schedule)
    _check_order(schedule)
    timeline(schedule, unit_cost)


def _wrong(rank: int, what: str, remedy: str) -> OptionError:
    return OptionError(what, where=f"row {rank + 1} (rank {rank})", remedy=remedy)


def _check_actions(schedule: Schedule) -> None:
    """Each action is there once, on its rank."""
    stages, micro_batches, ranks = schedule.stages, schedule.micro_batches, schedule.ranks
    seen = set[Action]()
    for rank, row in enumerate(schedule.rows):
        for action in row:
            if not (0 <= action.stage < stages and 0 <= action.micro_batch < micro_batches):
                what = f"{action} is none of {stages} stages and {micro_batches} micro-batches"
                raise _wrong(rank, what, "remove it")
            if (right := schedule.rank_of(action.stage)) != rank:
                what = f"{action} is on rank {rank}, but stage {action.stage} is on rank {right}"
                raise _wrong(rank, what, f"stage s is on rank s % {ranks}: move {action} to row {right + 1}")
            if action in seen:
                raise _wrong(rank, f"{action} is there twice", "remove one of the two")
            seen.add(action)
    if stages % ranks:
        what = f"the number of stages, {stages}, is no multiple of the number of ranks, {ranks}"
        raise _wrong(stages % ranks, what, "write a row for each rank, and the same number of stages in each")
    by_kind = {action.kind: action for row in schedule.rows for action in row}
    split = next((by_kind[kind] for kind in _SPLIT if kind in by_kind), None)
    if split and (whole := by_kind.get(ActionKind.BACKWARD)):
        what = f"some backwards are whole, such as {whole}, and others are split, such as {split}"
        raise _wrong(schedule.rank_of(split.stage), what, "write B for every backward, or I and W for every backward")
    kinds = (ActionKind.FORWARD, *(_SPLIT if split else (ActionKind.BACKWARD,)))
    # Made one by one: a stage 999999999 in a file stops at the first that is missing.
    expected = (Action(kind, stage, m) for stage in range(stages) for kind in kinds for m in range(micro_batches))
    if missing := next((action for action in expected if action not in seen), None):
        each = f"{', '.join(kinds)} of every micro-batch, 0 to {micro_batches - 1}"
        remedy = f"every stage, 0 to {stages - 1}, needs {each}"
        raise _wrong(schedule.rank_of(missing.stage), f"{missing} is missing", remedy)


def _check_order(schedule: Schedule) -> None:
    """In a row, micro-batches ascend, and what an action needs is before it."""
    for rank, row in enumerate(schedule.rows):
        done: set[Action] = set()
        for action in row:
            previous = Action(action.kind, action.stage, action.micro_batch - 1)
            if action.micro_batch and previous not in done:
                what = f"{action} is before {previous}, and micro-batches of a stage must ascend"
                raise _wrong(rank, what, f"move {previous} to before {action}")
            for need in schedule.needs(action):
                if schedule.rank_of(need.stage) == rank and need not in done:
                    raise _wrong(rank, f"{action} is before {need}, which it needs", f"move {need} to before {action}")
            done.add(action)


Span = tuple[Action, float, float]  # an action, its start and its stop


def unit_cost(action: Action) -> float:
    """F = I = W = 1 and B = 2."""
    return 2 if action.kind is ActionKind.BACKWARD else 1


def timeline(schedule: Schedule, seconds: Callable[[Action], float]) -> list[list[Span]]:
    """When the actions of each rank run, if each takes `seconds`. Messages take no time. Raises
    OptionError if the schedule, which must have each action exactly once, has a deadlock."""
    spans: list[list[Span]] = [[] for _ in schedule.rows]
    stops: dict[Action, float] = {}
    waiting: dict[Action, list[int]] = {}  # the ranks that wait for an action
    ready = list(range(schedule.ranks))
    while ready:
        rank = ready.pop()
        row, done = schedule.rows[rank], spans[rank]
        while len(done) < len(row):
            action = row[len(done)]
            needs = list(schedule.needs(action))
            if late := next((need for need in needs if need not in stops), None):
                waiting.setdefault(late, []).append(rank)
                break
            start = max([done[-1][2] if done else 0.0, *(stops[need] for need in needs)])
            stops[action] = start + seconds(action)
            done.append((action, start, stops[action]))
            ready += waiting.pop(action, ())
    if waiting:
        raise _deadlock(schedule, {rank: action for action, ranks in waiting.items() for rank in ranks}, spans)
    return spans


def _deadlock(schedule: Schedule, needed: Mapping[int, Action], spans: Sequence[Sequence[Span]]) -> OptionError:
    """The error that names ranks that wait for one another; `needed` is what each rank waits for."""
    at = {rank: schedule.rows[rank][len(spans[rank])] for rank in needed}
    rank = min(needed)
    path: list[int] = []
    while rank not in path:
        path.append(rank)
        rank = schedule.rank_of(needed[rank].stage)
    cycle = path[path.index(rank) :]
    waits = "; ".join(f"{at[rank]} on rank {rank} waits for {needed[rank]}" for rank in cycle)
    there = {rank: at[schedule.rank_of(needed[rank].stage)] for rank in cycle}
    moves = (f"{needed[rank]} to before {there[rank]}" for rank in cycle if needed[rank] != there[rank])
    where = f"rows {', '.join(str(rank + 1) for rank in sorted(cycle))}"
    return OptionError(f"the schedule has a deadlock: {waits}", where=where, remedy=f"move {' or '.join(moves)}")


def bubble(schedule: Schedule, seconds: Callable[[Action], float] = unit_cost) -> float:
    """The share of the ranks' time, from the first start to the last stop, in which they are idle."""
    spans = [span for row in timeline(schedule, seconds) for span in row]
    whole = schedule.ranks * (max(stop for _, _, stop in spans) - min(start for _, start, _ in spans))
    return 1 - sum(stop - start for _, start, stop in spans) / whole


def in_flight(schedule: Schedule) -> list[int]:
    """For each rank, the most forwards that are done while their backwards (B, or W if split) are not."""
    changes = {ActionKind.FORWARD: 1, ActionKind.INPUT_GRADIENTS: 0}
    return [max(accumulate(changes.get(action.kind, -1) for action in row)) for row in schedule.rows]


def draw(schedule: Schedule) -> str:
    """A heading, then a line for each rank: its action in each step of unit cost, or `.` if it is idle."""
    with_stage = schedule.stages > schedule.ranks
    rows = timeline(schedule, unit_cost)
    end = max(row[-1][2] for row in rows)
    actions = [action for row in schedule.rows for action in row]
    labels = {action: str(action) if with_stage else f"{action.kind}{action.micro_batch}" for action in actions}
    width = 1 + max(map(len, labels.values()))
    idle = ".".ljust(width)
    counts = f"{schedule.stages} stages on {schedule.ranks} ranks, {schedule.micro_batches} micro-batches"
    lines = [f"{schedule.name}: {counts}, {100 * bubble(schedule):.1f} % idle if F, I and W take one step and B two"]
    for rank, (row, most) in enumerate(zip(rows, in_flight(schedule), strict=True)):
        cells, now = f"rank {rank:<{len(str(schedule.ranks - 1))}}  ", 0.0
        for action, start, stop in row:
            later_steps = "-" * (width * (round(stop - start) - 1))
            cells += idle * round(start - now) + labels[action].ljust(width - 1) + later_steps + " "
            now = stop
        lines.append(f"{cells}{idle * round(end - now)} {counted(most, 'forward')} in flight")
    return "\n".join(lines)
