"""Configs, devices and records that may be a stranger's are bounded before they are read."""

import os
from pathlib import Path

import pytest

from sambasim.bounded import LARGEST_TOML_BYTES
from sambasim.errors import OptionError
from sambasim.hardware.spec import load_device
from sambasim.options.load import read_toml


@pytest.mark.parametrize("text", ["a = " + "[" * 900 + "]" * 900, "[" + "a." * 300 + "b]", "a = " + "[" * 9000])
def test_nesting_is_bounded(text: str, tmp_path: Path) -> None:
    (tmp_path / "deep.toml").write_text(text)
    with pytest.raises(OptionError, match=r"is nested too deeply|is not valid TOML"):
        read_toml(tmp_path / "deep.toml")
    with pytest.raises(OptionError, match=r"is nested too deeply|is (no|not valid) TOML"):
        load_device(str(tmp_path / "deep.toml"))


def test_size_is_bounded(tmp_path: Path) -> None:
    with (tmp_path / "large.toml").open("wb") as file:
        file.truncate(1 << 40)  # takes no room on the disk, and would take all memory
    with pytest.raises(OptionError, match=r"cannot be read: it has more than 4\.0 MiB"):
        read_toml(tmp_path / "large.toml")
    assert LARGEST_TOML_BYTES == 4 << 20


def test_pipes_and_devices_are_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.toml")
    for path in (tmp_path / "pipe.toml", Path("/dev/zero")):
        with pytest.raises(OptionError, match="it is not a regular file"):
            read_toml(path)
