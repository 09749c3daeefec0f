"""The table of findings, and what is told of one."""

import re
from pathlib import Path

import pytest

import sambasim
from sambasim.errors import DataParallelError
from sambasim.samba.checks.findings import FINDINGS, Finding
from sambasim.samba.checks.telling import Telling

SAMBA = Path(sambasim.__file__).parent / "samba"


def test_every_code_of_the_table_is_told_somewhere_and_no_other() -> None:
    sources = [file.read_text() for file in SAMBA.rglob("*.py") if file.name not in ("findings.py", "telling.py")]
    # A Finding, or an error that has the code in its words: asking telling.has("DP03") tells nothing.
    made = re.compile(r'(?:Finding|Error)\(\s*f?"((?:DP|AP)\d\d)\b')
    told = {code for source in sources for code in made.findall(source)}
    assert told == set(FINDINGS)


def test_a_notice_is_told_once(capsys: pytest.CaptureFixture[str]) -> None:
    telling = Telling()
    for _ in range(2):
        telling.tell(Finding("DP06", "as before", "app.py:3: for batch in loader:", "set_epoch"))
    told = capsys.readouterr().err
    assert told == "notice: DP06: as before\n  where: app.py:3: for batch in loader:\n  try:   set_epoch\n"
    telling.tell(Finding("DP06", "another", None, "set_epoch"))
    assert capsys.readouterr().err == "notice: DP06: another\n  try:   set_epoch\n"


def test_a_finding_ends_a_run_and_no_check(capsys: pytest.CaptureFixture[str]) -> None:
    finding = Finding("DP03", "other weights", "app.py:3: run()", "set_seed")
    with pytest.raises(DataParallelError, match=r"DP03: other weights\n  where: app.py:3: run\(\)"):
        Telling().tell(finding)
    check = Telling(on_demand=True)
    check.tell(finding)
    check.tell(None)
    assert (check.findings, check.has("DP03"), check.has("DP04")) == ((finding,), True, False)
    at_end = Telling()
    at_end.tell(finding, only_noticed=True)
    assert capsys.readouterr().err.count("notice: DP03: other weights") == 1
