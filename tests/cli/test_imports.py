"""What is imported is kept from the garbage collector, and nothing else is."""

import gc
import subprocess
import sys
import weakref
from collections.abc import Iterator

import pytest

from sambasim.cli.imports import kept_imports


class _Cycle:
    def __init__(self) -> None:
        self.itself = self


@pytest.fixture(autouse=True)
def thawed() -> Iterator[None]:
    """No test leaves pytest's own objects frozen."""
    yield
    gc.unfreeze()


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


def test_an_app_keeps_torch_and_its_own_cycles_are_collected_at_its_end() -> None:
    script = (
        "import gc, torch\n"
        "from sambasim.samba.door import finder\n"
        "finder.install()\n"
        "from sambaflow import samba\n"
        "class Own:\n"
        "    def __init__(self): self.itself = self\n"
        "    def __del__(self): print('finalized')\n"
        "print(gc.get_freeze_count() > 100_000)\n"
        "Own()\n"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert ended.stdout == "True\nfinalized\n"
