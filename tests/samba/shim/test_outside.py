"""The modules of `sambaflow` outside `sambaflow.samba`."""

import subprocess
import sys

import pytest

from sambasim import __version__
from sambasim.samba.shim import modules as root
from sambasim.samba.shim.modules.metadata import ConvTilingMetadata, TilingMetadata
from sambasim.samba.shim.modules.sambacollections import OrderedSet


def test_version() -> None:
    assert root.__version__ == f"1.19.0+sambasim.{__version__}"


def test_it_is_no_demonstration() -> None:
    assert not root.is_demo
    assert not root.is_demo()


def test_a_set_in_order() -> None:
    numbers = OrderedSet([3, 1, 3])
    numbers.add(2)
    numbers.add(3)
    numbers.update([5, 1], (4,))
    numbers.discard(1)
    numbers.discard(9)
    assert (list(numbers), list(reversed(numbers)), len(numbers)) == ([3, 2, 5, 4], [4, 5, 2, 3], 4)
    assert (2 in numbers, 1 in numbers, repr(numbers)) == (True, False, "OrderedSet([3, 2, 5, 4])")
    assert numbers == OrderedSet([2, 3, 4, 5])
    assert list(numbers | OrderedSet([7, 2])) == [3, 2, 5, 4, 7]
    assert list(numbers - {5}) == [3, 2, 4]


def test_metadata_is_kept() -> None:
    record = ConvTilingMetadata(original_size=(3, 512, 512))
    assert (record.key, repr(record)) == ("conv_tiling", "ConvTilingMetadata(original_size=(3, 512, 512))")
    tiling = TilingMetadata(original_size=(3, 512, 512), num_tiles=4)
    assert (TilingMetadata.key, tiling.num_tiles) == ("tiling", 4)


@pytest.mark.parametrize(("env", "rank"), [({}, ""), ({"PMI_SIZE": "4", "PMI_RANK": "3"}, " rank 3")])
def test_a_log_line_names_its_rank(env: dict[str, str], rank: str) -> None:
    body = (
        "import logging; logging.basicConfig()\n"
        "from sambasim.samba.shim.modules import samba_logger\n"
        "samba_logger.debug('too low'); samba_logger.samba_logger.warning('loss is %s', 3)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", body], env=env, capture_output=True, text=True, timeout=60, check=True
    )
    lines = result.stderr.splitlines()
    assert [line.partition(",")[2][3:] for line in lines] == [f"{rank} WARNING: loss is 3"]
