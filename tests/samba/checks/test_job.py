"""What the ranks compare: files (DP08), and the number of steps (DP09)."""

import io
import os
import pickle
from collections.abc import Iterator
from pathlib import Path

import numpy
import pytest
import safetensors.torch
import torch
from safetensors.torch import save_file

from sambasim.samba.checks.job import Files, Point, different_steps
from sambasim.samba.findings import Reporter


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
