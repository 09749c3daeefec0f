"""A schedule as plain text that a person can read, for worlds that fit a terminal."""

from collections.abc import Sequence

from sambasim.collectives.schedule import Round, Schedule, Scope, sent_numel

_GAP = "  "
_IDLE = "."
_LEGEND = "+ is added to what the rank holds there, = replaces it; . receives nothing; a:b are elements a to b - 1"


def drawn(schedule: Schedule) -> str:
    """`schedule` with a row for each round and a column for each rank, in which stands what the rank receives."""
    ranks = range(schedule.world_size)
    heads = ["round", "", *(f"rank {rank}" for rank in ranks)]
    rows = [[heads]]
    if len(set(schedule.node_of)) > 1:
        rows[0].append(["", "", *(f"node {node}" for node in schedule.node_of)])
    for number, round_ in enumerate(schedule.rounds, start=1):
        rows.append(_lines_of(number, round_, schedule.world_size))
    rows.append([["sent", "", *(str(numel) for numel in sent_numel(schedule))]])
    title = f"{schedule.algorithm}: {schedule.world_size} ranks, {schedule.numel} elements"
    return "\n".join([title, *_aligned(rows), _LEGEND])


def _lines_of(number: int, round_: Round, world_size: int) -> list[list[str]]:
    """The lines of one round: as many as the rank has that receives most spans."""
    phase = str(round_.phase) if round_.scope is Scope.WORLD else f"{round_.phase} {round_.scope}"
    cells = [_received(round_, rank) for rank in range(world_size)]
    height = max(len(cell) for cell in cells)
    return [
        [str(number) if line == 0 else "", phase if line == 0 else "", *(_line(cell, line) for cell in cells)]
        for line in range(height)
    ]


def _line(cell: Sequence[str], line: int) -> str:
    if line < len(cell):
        return cell[line]
    return _IDLE if line == 0 else ""


def _received(round_: Round, rank: int) -> list[str]:
    """What `rank` receives, a line for each span: `+0:4 from 1 2 3`."""
    sources: dict[str, list[int]] = {}
    for transfer in round_.transfers:
        if transfer.target == rank:
            sign = "+" if transfer.accumulate else "="
            sources.setdefault(f"{sign}{transfer.start}:{transfer.stop}", []).append(transfer.source)
    return [f"{span} from {' '.join(map(str, ranks))}" for span, ranks in sources.items()]


def _aligned(rows: Sequence[Sequence[Sequence[str]]]) -> list[str]:
    """The lines of all rows with their columns under each other."""
    lines = [line for row in rows for line in row]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return [_GAP.join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
