"""Whether something can be written, asked without writing it."""

from pathlib import Path

import pytest

from sambasim.errors import OptionError
from sambasim.options.outputs import check_output_file, check_output_folder


@pytest.mark.parametrize("name", ["new.jsonl", "deep/er/new.jsonl", "old.jsonl", "linked/new.jsonl"])
def test_what_can_be_written_passes_and_nothing_is_left(name: str, tmp_path: Path) -> None:
    (tmp_path / "old.jsonl").write_text("kept")
    (tmp_path / "folder").mkdir()
    (tmp_path / "linked").symlink_to(tmp_path / "folder")
    before = sorted(tmp_path.rglob("*"))
    check_output_file(tmp_path / name, "the metrics file", "--metrics FILE")
    check_output_folder((tmp_path / name).parent / "logs", "the logs", "--log-dir FOLDER")
    assert sorted(tmp_path.rglob("*")) == before
    assert (tmp_path / "old.jsonl").read_text() == "kept"


def test_devices_and_pipes_are_files_too() -> None:
    check_output_file(Path("/dev/null"), "the metrics file", "--metrics FILE")


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("file/new.jsonl", "HERE/file is no folder"),
        ("file/deep/new.jsonl", "HERE/file is no folder"),
        ("folder", "HERE/folder is a folder"),
        ("away/new.jsonl", "HERE/away is no folder"),
    ],
)
def test_what_cannot_be_written_is_refused(name: str, why: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "folder").mkdir()
    (tmp_path / "away").symlink_to(tmp_path / "nowhere")
    with pytest.raises(OptionError) as caught:
        check_output_file(tmp_path / name, "the metrics file", "--metrics FILE")
    assert caught.value.what == f"the metrics file cannot be written to {tmp_path / name}"
    assert caught.value.where == why.replace("HERE", str(tmp_path))
    assert caught.value.remedy == "--metrics FILE"


def test_a_folder_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "logs").write_text("")
    with pytest.raises(OptionError, match="the logs cannot be written to"):
        check_output_folder(tmp_path / "logs", "the logs", "--log-dir FOLDER")
