"""How findings are reported."""

import pytest

from sambasim.errors import DataParallelError
from sambasim.samba.findings import Finding, Reporter


def test_a_notice_is_printed_once(capsys: pytest.CaptureFixture[str]) -> None:
    reporter = Reporter()
    for _ in range(2):
        reporter.report(Finding("DP06", "as before", "app.py:3: for batch in loader:", "set_epoch"))
    printed = capsys.readouterr().err
    assert printed == "notice: DP06: as before\n  where: app.py:3: for batch in loader:\n  try:   set_epoch\n"
    reporter.report(Finding("DP06", "another", None, "set_epoch"))
    assert capsys.readouterr().err == "notice: DP06: another\n  try:   set_epoch\n"


def test_dp09_ends_a_run_and_no_check(capsys: pytest.CaptureFixture[str]) -> None:
    finding = Finding("DP09", "other steps", "app.py:3: run()", "drop_last=True")
    with pytest.raises(DataParallelError, match=r"DP09: other steps\n  where: app.py:3: run\(\)"):
        Reporter().report(finding)
    check = Reporter(on_demand=True)
    check.report(finding)
    check.report(None)
    assert (check.findings, check.has("DP09"), check.has("DP04")) == ((finding,), True, False)
    Reporter().report(finding, notice_only=True)
    assert capsys.readouterr().err.count("notice: DP09: other steps") == 1


def test_a_summary_lists_all_findings_at_the_end(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    reporter = Reporter()
    reporter.summarize()
    assert capsys.readouterr().err == "", "no findings, no summary"
    reporter.report(Finding("DP03", "other weights", "app.py:3: run()", "set_seed"))
    capsys.readouterr()
    reporter.at_exit = True
    late = Finding("DP07", "weights differ", "app.py:4: to_cpu()", "to_device")
    reporter.report(late)
    reporter.report_from(1, [late, Finding("AP06", "saved", None, "to_cpu")])
    assert capsys.readouterr().err == "", "findings of the end are in the summary alone"
    reporter.summarize()
    assert capsys.readouterr().err == (
        "summary: 3 findings; sambasim app --check checks every step\n"
        "  DP03: other weights (app.py:3)\n"
        "  DP07: weights differ\n  where: app.py:4: to_cpu()\n  try:   to_device\n"
        "  AP06 (rank 1): saved\n  try:   to_cpu\n"
    ), "findings that were printed before are in short"
    monkeypatch.setenv("PMI_SIZE", "2")
    monkeypatch.setenv("PMI_RANK", "1")
    reporter.summarize()
    assert capsys.readouterr().err == "", "only rank 0 prints"
