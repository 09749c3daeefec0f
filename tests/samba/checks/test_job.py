"""How findings are reported, and what the ranks compare: files (DP08), and the number of steps (DP09)."""

import io
import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy
import pytest
import safetensors.torch
import torch
from safetensors.torch import save_file

from sambasim.errors import DataParallelError
from sambasim.samba import process
from sambasim.samba.checks.job import Files, Job, Point, different_steps
from sambasim.samba.process import Finding, Reporter
from sambasim.samba.profiler import Profiler


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[Files]:
    for module, name in ((torch.serialization, "_open_zipfile_writer"), (safetensors.torch, "serialize_file")):
        monkeypatch.setattr(module, name, getattr(module, name))  # put back after the test
    files = Files([0, 0, 1])
    files.start()
    yield files
    files.active = False


def test_written_files_are_noted_with_the_line_of_the_app(watched: Files, tmp_path: Path) -> None:
    tensors = {"x": torch.ones(2)}
    torch.save(tensors, tmp_path / "torch.pt")
    save_file(tensors, tmp_path / "x.safetensors")
    numpy.save(tmp_path / "x.npy", numpy.ones(2))
    (tmp_path / "text.txt").write_text("x")
    os.close(os.open(tmp_path / "raw", os.O_WRONLY | os.O_CREAT | os.O_TRUNC))
    with open(tmp_path / "x.pkl", "wb") as file:
        pickle.dump(1, file)
    seen = watched.take_new()
    assert [Path(path).name for path in seen] == ["torch.pt", "x.safetensors", "x.npy", "text.txt", "raw", "x.pkl"]
    assert all(where.startswith(f"{__file__}:") for where in seen.values()), seen
    assert seen[f"{tmp_path}/torch.pt"].endswith('torch.save(tensors, tmp_path / "torch.pt")')
    assert watched.take_new() == {}


def test_a_profile_of_the_app_is_noted(watched: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(process.current().parts, Job, SimpleNamespace(files=watched))
    profiler = Profiler()
    for _ in range(2):
        profiler.end_event(profiler.start_event("step"), tmp_path / "p.log")
    ((path, where),) = watched.take_new().items()
    assert (path, where.startswith(f"{__file__}:")) == (f"{tmp_path}/p.log", True)


def test_appended_temporary_and_tool_files_are_ignored(watched: Files, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / ".cache").mkdir()
    watched.take_new()
    for name in ("x.lock", ".cache/x"):
        (tmp_path / name).write_text("x")
    with open(tmp_path / "file", "a") as log, open(tmp_path / "file") as read, open(os.devnull, "w") as nothing:
        log.write(read.read())
        nothing.write("x")
    torch.save(1, io.BytesIO())
    assert watched.take_new() == {}
    watched.active = False
    (tmp_path / "file").write_text("x")
    assert watched.take_new() == {}


def test_a_file_of_several_ranks_is_found(watched: Files, reporter: Reporter) -> None:
    mine = {"/data/end.pt": "app.py:9: save()", "/data/rank_0.pt": "app.py:10: save()"}
    watched.compare([mine, {"/data/rank_1.pt": "app.py:10: save()"}, {}])
    assert not reporter.findings
    watched.compare([{}, {"/data/end.pt": "app.py:12: save()"}, {"/data/end.pt": "app.py:12: save()"}])
    assert [one.words for one in reporter.findings] == ["DP08: ranks 0, 1, 2 write the same file, /data/end.pt"]
    assert reporter.findings[0].where == "app.py:9: save()"


END = Point(4, ended=True)


@pytest.mark.parametrize(
    ("points", "words"),
    [
        ([Point(5), Point(5), END], "replica 0 takes step 5, and replica 2 came to its end after 4 steps"),
        ([Point(1, ended=True), Point(2)], "replica 0 came to its end after 1 step, and replica 1 takes step 2"),
        ([Point(8), Point(2)], "replica 0 takes step 8, and replica 1 takes step 2"),
    ],
)
def test_replicas_at_different_steps_are_found(points: list[Point], words: str) -> None:
    finding = different_steps(points, "app.py:1: run()")
    assert finding is not None
    assert (finding.words, finding.where) == (f"DP09: {words}", "app.py:1: run()")
    assert "drop_last=True" in finding.remedy


def test_a_notice_is_printed_once_and_dp09_ends_a_run_but_no_check(capsys: pytest.CaptureFixture[str]) -> None:
    reporter = Reporter()
    for _ in range(2):
        reporter.report(Finding("DP06", "as before", "app.py:3: for batch in loader:", "set_epoch"))
    reporter.report(Finding("DP06", "another", None, "set_epoch"))
    first = "notice: DP06: as before\n  where: app.py:3: for batch in loader:\n  try:   set_epoch\n"
    assert capsys.readouterr().err == f"{first}notice: DP06: another\n  try:   set_epoch\n"

    finding = Finding("DP09", "other steps", "app.py:3: run()", "drop_last=True")
    with pytest.raises(DataParallelError, match=r"DP09: other steps\n  where: app.py:3: run\(\)"):
        Reporter().report(finding)
    check = Reporter(on_demand=True)
    check.report(finding)
    check.report(None)
    assert (check.findings, check.has("DP09"), check.has("DP04")) == ((finding,), True, False)
    Reporter().report(finding, notice_only=True)
    assert capsys.readouterr().err.count("notice: DP09: other steps") == 1


def test_a_summary_lists_all_findings(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
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
