"""The rows as tables, between the marks that the page has for them."""

from collections.abc import Iterable, Mapping

from sambasim.samba.checks.findings import FINDINGS
from sambasim.samba.fidelity.api import API
from sambasim.samba.fidelity.behaviours import BEHAVIOURS
from sambasim.samba.fidelity.flags import FLAG_ROWS
from sambasim.samba.fidelity.row import Row, Status
from sambasim.samba.utils.flag import Flag
from sambasim.samba.utils.flags import FLAGS


def updated(page: str) -> str:
    """`page` with the tables of the rows between its marks. Raises ValueError if it lacks a mark."""
    for name, table in tables().items():
        begin, end = f"<!-- {name}: written by make golden -->\n", f"<!-- end of {name} -->\n"
        before, _, rest = page.partition(begin)
        _, found, after = rest.partition(end)
        if not found:
            raise ValueError(f"the page has no {begin.strip()} … {end.strip()}")
        page = f"{before}{begin}\n{table}\n{end}{after}"
    return page


def tables() -> Mapping[str, str]:
    """The tables in Markdown, by the names of their marks."""
    return {
        "api": _table(("name", "here", ""), (_of_name(row) for row in API)),
        "flags": _table(("flag", "here", ""), (_of_flag(row) for row in FLAG_ROWS)),
        "behaviours": _table(("what", "here", ""), ((row.name, row.status, row.note) for row in BEHAVIOURS)),
        "findings": _table(
            ("code", "finding", "what happens"), ((code, row.sentence, row.told) for code, row in FINDINGS.items())
        ),
    }


def flag_of(row: Row) -> Flag:
    """The flag that a row is about. Raises StopIteration if there is none."""
    return next(flag for flag in FLAGS if flag.names[0] == row.name)


def _of_name(row: Row) -> tuple[str, str, str]:
    return f"`{row.name}`", f"{row.status} †" if row.name_alone else row.status, row.note


def _of_flag(row: Row) -> tuple[str, Status, str]:
    flag = flag_of(row)
    return " ".join(f"`{name}`" for name in flag.names), row.status, flag.inert or row.note


def _table(heading: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [heading, ("---",) * len(heading), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
