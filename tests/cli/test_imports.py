"""What a command imports is kept from the garbage collector, and nothing of its user's is."""

import gc
import sys
import weakref
from pathlib import Path

import pytest

from sambasim.cli.shared import kept_imports
from sambasim.compiler.collector import rare_collections
from tests.support.mpi import run_job


class _Cycle:
    def __init__(self) -> None:
        self.itself = self


def test_what_is_made_meanwhile_is_passed_over_and_what_is_made_later_is_collected() -> None:
    with kept_imports():
        assert not gc.isenabled()
        early = weakref.ref(_Cycle())
    late = weakref.ref(_Cycle())
    gc.collect()
    assert gc.isenabled()
    assert early() is not None
    assert late() is None


def test_the_collector_is_left_as_it_was_by_an_import_that_fails() -> None:
    with pytest.raises(ImportError), kept_imports():
        raise ImportError("no such module")
    assert gc.isenabled()
    gc.disable()
    try:
        with kept_imports():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_a_capture_leaves_frozen_what_was() -> None:
    with kept_imports():
        pass
    frozen = gc.get_freeze_count()
    with rare_collections():
        assert gc.get_freeze_count() == frozen
    assert gc.get_freeze_count() == frozen
    gc.unfreeze()
    with rare_collections():
        assert gc.get_freeze_count() > 0
    assert gc.get_freeze_count() == 0


_OWN = """
import os

log = open("log.txt", "w")
log.write("the end")


class Own:
    def __init__(self):
        self.itself = self

    def __del__(self, write=os.write):
        write(1, b"finalized\\n")


own = Own()


def use():
    return log, own
"""
"""Its globals are in cycles with the dictionary that they lie in, as any script's are that has a function."""


@pytest.mark.parametrize(
    "start",
    [
        "from sambasim.cli.shared import kept_imports\nwith kept_imports(): import torch\nimport own",
        "import sys; sys.argv[1:] = ['app', 'app.py']; from sambasim.cli.main import main; main()",
    ],
    ids=["a module of a command's user", "an app"],
)
def test_what_a_user_leaves_open_is_written_as_python_ends(start: str, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(_OWN)
    (tmp_path / "app.py").write_text(f"from sambaflow import samba\n{_OWN}")
    ended = run_job([sys.executable, "-c", start], cwd=tmp_path).check()
    assert ended.stdout == "finalized\n"
    assert (tmp_path / "log.txt").read_text() == "the end"
