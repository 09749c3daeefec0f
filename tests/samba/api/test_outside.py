"""`sambaflow` outside `sambaflow.samba`."""

import logging

import pytest

from sambasim import __version__
from tests.samba.api.conftest import imported


def test_the_version_is_printed_and_compared() -> None:
    import importlib

    version = importlib.import_module("sambaflow").__version__
    assert tuple(int(part) for part in version.partition("+")[0].split(".")) >= (1, 9, 0)
    assert version.endswith(__version__)


def test_the_logger_is_used_as_a_module_and_as_a_logger(caplog: pytest.LogCaptureFixture) -> None:
    module = imported("logging").samba_logger
    logging.getLogger("sambaflow").addHandler(caplog.handler)
    with caplog.at_level(logging.INFO, "sambaflow"):
        module.info("epoch %d", 1)
        module.samba_logger.warning("slow")
    logging.getLogger("sambaflow").removeHandler(caplog.handler)
    assert caplog.messages == ["epoch 1", "slow"]


def test_an_ordered_set() -> None:
    names = imported("sambacollections").OrderedSet(["b", "a"])
    names.add("b")
    names.add("c")
    assert list(names) == ["b", "a", "c"]


def test_metadata_of_the_compiler_is_collected_by_its_key() -> None:
    record = imported("mac.metadata").ConvTilingMetadata(original_size=(3, 64, 64))
    assert {record.key: record}["conv_tiling"].original_size == (3, 64, 64)


def test_metadata_of_tiles_has_a_key_of_its_own() -> None:
    kind = imported("mac.metadata").TilingMetadata
    record = kind(original_size=(3, 64, 64), num_tiles=4)
    assert {kind.key: record}["tiling"].num_tiles == 4


def test_it_is_no_demonstration() -> None:
    import importlib

    is_demo = importlib.import_module("sambaflow").is_demo
    assert not is_demo
    assert not is_demo()
