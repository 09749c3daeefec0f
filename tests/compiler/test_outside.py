"""What only seems to be an act of the user's code, and threads. tests/state/far.py has what is told, with its lines."""

import importlib
import os
import threading
from pathlib import Path

import pytest

from sambasim.compiler.capture.trial import Told, watched


def test_an_import_a_descriptor_and_what_is_done_afterwards_are_not_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "late_import.py").write_text("VALUE = 1")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("sys.dont_write_bytecode", False)
    number = os.open(tmp_path / "late_import.py", os.O_RDONLY)
    told: Told = {}
    with watched(told):
        importlib.import_module("late_import")
        with open(number, encoding="utf-8"):
            pass
    assert (tmp_path / "__pycache__").is_dir()  # which the import has made
    (tmp_path / "later").write_text("")
    assert told == {}


def test_what_a_thread_does_never_fails_by_being_watched(tmp_path: Path) -> None:
    failed: list[BaseException] = []
    ends = threading.Event()

    def work() -> None:
        while not ends.is_set():
            try:
                (tmp_path / "file").write_text("")
            except BaseException as error:
                failed.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    for _ in range(200):
        with watched({}):
            (tmp_path / "other").write_text("")
    ends.set()
    thread.join()
    assert failed == []
