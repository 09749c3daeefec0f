"""The table of findings, and what is told of one."""

import re
from pathlib import Path

import pytest

import sambasim
from sambasim.errors import DataParallelError
from sambasim.samba.checks.findings import FINDINGS, Finding, Reporter

SAMBA = Path(sambasim.__file__).parent / "samba"


def test_every_code_of_the_table_is_told_somewhere_and_no_other() -> None:
    sources = [file.read_text() for file in SAMBA.rglob("*.py") if file.name not in ("findings.py", "reporter.py")]
    # A Finding, or an error that has the code in its words: asking reporter.has("DP03") tells nothing.
    made = re.compile(r'(?:Finding|Error)\(\s*f?"((?:DP|AP)\d\d)\b')
    told = {code for source in sources for code in made.findall(source)}
    assert told == set(FINDINGS)


def test_a_notice_is_told_once(capsys: pytest.CaptureFixture[str]) -> None:
    reporter = Reporter()
    for _ in range(2):
        reporter.report(Finding("DP06", "as before", "app.py:3: for batch in loader:", "set_epoch"))
    told = capsys.readouterr().err
    assert told == "notice: DP06: as before\n  where: app.py:3: for batch in loader:\n  try:   set_epoch\n"
    reporter.report(Finding("DP06", "another", None, "set_epoch"))
    assert capsys.readouterr().err == "notice: DP06: another\n  try:   set_epoch\n"


def test_a_finding_that_is_refused_ends_a_run_and_no_check(capsys: pytest.CaptureFixture[str]) -> None:
    assert {code for code, row in FINDINGS.items() if row.ends_run} == {"DP09"}
    finding = Finding("DP09", "other steps", "app.py:3: run()", "drop_last=True")
    with pytest.raises(DataParallelError, match=r"DP09: other steps\n  where: app.py:3: run\(\)"):
        Reporter().report(finding)
    check = Reporter(on_demand=True)
    check.report(finding)
    check.report(None)
    assert (check.findings, check.has("DP09"), check.has("DP04")) == ((finding,), True, False)
    at_end = Reporter()
    at_end.report(finding, notice_only=True)
    assert capsys.readouterr().err.count("notice: DP09: other steps") == 1


def test_all_findings_are_told_together_at_the_end(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    reporter = Reporter()
    reporter.summarize()
    assert capsys.readouterr().err == "", "no findings, no summary"
    reporter.report(Finding("DP03", "other weights", "app.py:3: run()", "set_seed"))
    reporter.summarize()
    assert capsys.readouterr().err.splitlines()[3:] == [
        "summary: 1 finding; sambasim app --check looks at every step",
        "  DP03: other weights (app.py:3)",
    ]
    reporter.at_exit = True
    late = Finding("DP07", "weights differ", "app.py:4: to_cpu()", "to_device")
    reporter.report(late)
    reporter.report_from(1, [late, Finding("AP06", "saved", None, "to_cpu")])
    assert capsys.readouterr().err == "", "what the end finds is in the summary alone"
    reporter.summarize()
    assert capsys.readouterr().err == (
        "summary: 3 findings; sambasim app --check looks at every step\n"
        "  DP03: other weights (app.py:3)\n"
        "  DP07: weights differ\n  where: app.py:4: to_cpu()\n  try:   to_device\n"
        "  AP06 (rank 1): saved\n  try:   to_cpu\n"
    ), "what a notice has told is in short, and what none has, in full"
    reporter.on_demand = True
    reporter.summarize()
    reporter.on_demand = False
    monkeypatch.setenv("PMI_SIZE", "2")
    monkeypatch.setenv("PMI_RANK", "1")
    reporter.summarize()
    assert capsys.readouterr().err == "", "a check has a report, and rank 0 tells for all"
