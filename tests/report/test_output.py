"""Tables on terminals of any width."""

import io

import pytest
from rich.console import Console

from sambasim.report.output import add_row, plain_table


def shown(width: int) -> list[str]:
    table = plain_table("steps", ["kind", "name"], ["predicted", "compute", "traffic"])
    add_row(table, "FWD", "a_section_with_a_long_name_of_its_own", "510.3 us", "48.8 us", "1,234,567.8 KiB")
    console = Console(file=io.StringIO(), width=width)
    console.print(table)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


@pytest.mark.parametrize(
    ("width", "left_out"),
    [(120, []), (100, []), (60, ["traffic"]), (42, ["compute", "traffic"])],
)
def test_a_table_leaves_out_its_last_numbers_rather_than_cut_them(width: int, left_out: list[str]) -> None:
    lines = shown(width)
    text = "".join(lines).replace(" ", "")
    assert all(len(line) <= width for line in lines)
    assert ("1,234,567.8KiB" in text, "48.8us" in text) == ("traffic" not in left_out, "compute" not in left_out)
    assert lines[-1].strip() == (f"for a wider terminal: {', '.join(left_out)}" if left_out else "")
    assert "510.3us" in text
