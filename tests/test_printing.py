"""What commands print: names and texts from files and arguments cannot control the terminal."""

import json
import re
from pathlib import Path

import pytest

from sambasim.errors import say, say_json
from tests.cli.typed import invoked
from tests.pef import damage
from tests.pef.samples import write_sample
from tests.support.mpi import ROOT

HOSTILE = "x\x1b]0;y\x07\u202e\x9b2K\u2028\U000e0001"


def test_text_and_json_are_escaped_and_json_stays_what_it_was(capsys: pytest.CaptureFixture[str]) -> None:
    say(HOSTILE)
    assert capsys.readouterr().out == "x\\x1b]0;y\\x07\\u202e\\x9b2K\\u2028\\U000e0001\n"
    for ensure_ascii in (True, False):
        say_json(json.dumps([HOSTILE, "é"], ensure_ascii=ensure_ascii))
        line = capsys.readouterr().out.removesuffix("\n")
        assert line.isprintable()
        assert json.loads(line) == [HOSTILE, "é"]


def test_names_of_files_and_in_files_are_escaped(tmp_path: Path) -> None:
    pef = write_sample(tmp_path)
    damage.change_fields(pef, lambda fields: fields["graphs"]["logreg"]["metadata"].update(model=HOSTILE))
    renamed = pef.rename(tmp_path / f"{HOSTILE}.pef")
    for command in (["verify"], ["inspect", "--all"], ["inspect", "--json"], ["inspect", "--graph"]):
        result = invoked(*command, str(renamed))
        assert result.exit_code == 0
        assert result.output.replace("\n", "").isprintable(), command
    assert json.loads(invoked("inspect", "--json", str(renamed)).output)["pef"] == str(renamed)


MAY_PRINT = {
    "sambasim/errors.py": "say and say_json",
    "sambasim/terminal/output.py": "tables, whose cells are escaped before, and a warning of a stream",
    "sambasim/cli/apps.py": "lines that a shell evaluates",
    "sambasim/samba/ending.py": "the traceback of an app",
    "sambasim/samba/utils/measuring.py": "figures of an app",
}


def test_all_else_is_printed_by_say() -> None:
    files = [file for file in (ROOT / "sambasim").rglob("*.py") if re.search(r"(?<![\w.])print\(", file.read_text())]
    names = {str(file.relative_to(ROOT)) for file in files}
    assert names == MAY_PRINT.keys()
