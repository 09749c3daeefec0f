"""`sambaflow` in a process with the import shim, its modules outside `samba`, and the errors for absent names."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from types import new_class
from typing import Any

import pytest

from sambasim import __version__
from sambasim.samba import shim
from sambasim.samba.notices import AbsentNameError
from sambasim.samba.shim import ABSENT, MODULES, ROOT, AbsentModuleError
from sambasim.samba.shim.modules import ConvTilingMetadata, OrderedSet, TilingMetadata
from tests.support.door import open_door
from tests.support.whole import whole_case


@pytest.fixture(autouse=True)
def installed() -> Iterator[None]:
    """It is installed in each test."""
    with open_door():
        yield


def test_every_row_imports_with_the_names_of_our_module() -> None:
    for name, source in MODULES.items():
        facade = import_module(name)
        ours = import_module(source if isinstance(source, str) else "sambasim.samba.shim.modules")
        assert facade.__name__ == name
        for exported in vars(ours).get("__all__", ()) if isinstance(source, str) else source:
            value = getattr(facade, exported)
            assert value is getattr(ours, exported) or f"{name}.{exported}" in MODULES
        owner, _, last = name.rpartition(".")
        assert name == ROOT or getattr(import_module(owner), last) is facade
        assert not isinstance(source, str) or ours.__name__ == source, "our module keeps its own name"


def test_star() -> None:
    names: dict[str, object] = {}
    exec("from sambaflow.sambacollections import *", names)
    assert sorted(names) == ["OrderedSet", "__builtins__"]


def test_a_module_that_is_absent() -> None:
    with pytest.raises(ImportError) as caught:
        import_module("sambaflow.logging.samba_loger")
    assert isinstance(caught.value, AbsentModuleError)
    text = "sambasim has no sambaflow.logging.samba_loger\n  try:   sambaflow.logging.samba_logger"
    assert str(caught.value) == text


def test_a_name_that_is_absent_by_from_import() -> None:
    with pytest.raises(AbsentModuleError, match=r"\.OrdredSet\n.*sambacollections\.OrderedSet"):
        exec("from sambaflow.sambacollections import OrdredSet")


def test_a_name_that_is_absent_by_attribute() -> None:
    metadata = import_module("sambaflow.mac.metadata")
    with pytest.raises(AttributeError) as caught:
        _ = metadata.convtilingmetadatum
    assert isinstance(caught.value, AbsentNameError)
    assert (caught.value.what, caught.value.remedy) == (
        "sambasim has no sambaflow.mac.metadata.convtilingmetadatum",
        "sambaflow.mac.metadata.ConvTilingMetadata or sambaflow.mac.metadata.TilingMetadata",
    )
    assert not hasattr(metadata, "nothing")


def test_an_absent_name_can_be_imported_and_raises_at_its_use() -> None:
    for module, name in [(module, name) for module, names in ABSENT.items() for name in names]:
        found: Any = getattr(import_module(module), name)
        uses: list[Callable[[], object]] = [
            partial(found, 1, key=2),
            partial(getattr, found, "attribute"),
            partial(new_class, "Sub", (found,)),
            partial(isinstance, 1, found),
        ]
        for use in uses:
            with pytest.raises(AbsentNameError, match=rf"^sambasim has no {module}\.{name}: ") as caught:
                use()
            assert caught.value.remedy
            assert str(caught.value.where).startswith(f"{__file__}:")


def test_an_absent_name_may_be_in_annotations() -> None:
    exec("from sambaflow.samba.graph import FwdGraph\ndef f(one: FwdGraph | None, two: None | FwdGraph): pass")


def test_the_nearest_name_may_be_an_operator() -> None:
    with pytest.raises(AbsentNameError, match=r"sambaflow\.samba\.sigmoid"):
        _ = import_module("sambaflow.samba").sigmoyd


def test_without_a_similar_name_the_error_lists_what_there_is() -> None:
    with pytest.raises(
        AbsentModuleError, match="what sambaflow has: __version__, is_demo, logging, mac, samba, sambacoll"
    ):
        import_module("sambaflow.xyz")
    with pytest.raises(AbsentModuleError, match=r"what sambaflow\.models has: nothing"):
        import_module("sambaflow.models.xyz")


def test_a_function_and_its_module_of_the_same_name_can_both_be_called() -> None:
    samba: Any = import_module("sambaflow.samba")
    module: Any = import_module("sambaflow.samba.materialize")
    assert samba.materialize is module, "Python put it there when it was imported"
    tensor = samba.randn(2)
    assert samba.materialize(tensor) is module.materialize(tensor) is tensor
    with pytest.raises(TypeError, match=r"sambaflow\.samba\.env is a module, and not callable"):
        samba.env()


def test_other_packages_are_not_affected() -> None:
    assert shim.SambaflowFinder().find_spec("sambaflows", None) is None


def test_version_and_demo() -> None:
    root: Any = import_module("sambaflow")
    assert root.__version__ == f"1.19.0+sambasim.{__version__}"
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
    assert (TilingMetadata.key, TilingMetadata(original_size=(3, 512, 512), num_tiles=4).num_tiles) == ("tiling", 4)


@pytest.mark.parametrize(("env", "rank"), [whole_case({}, ""), ({"PMI_SIZE": "4", "PMI_RANK": "3"}, " rank 3")])
def test_a_log_line_names_its_rank(env: dict[str, str], rank: str) -> None:
    body = (
        "import logging; logging.basicConfig()\n"
        "from sambasim.samba.shim import samba_logger\n"
        "samba_logger.debug('too low'); samba_logger.samba_logger.warning('loss is %s', 3)\n"
    )
    command = [sys.executable, "-c", body]
    result = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=True)
    lines = result.stderr.splitlines()
    assert [line.partition(",")[2][3:] for line in lines] == [f"{rank} WARNING: loss is 3"]


IMPORTS = [  # one of each form; test_fidelity and shim/test_finder check all modules and names
    "from sambaflow import samba; samba.session",
    "import sambaflow.samba as samba; samba.session",
    "import sambaflow; import sambaflow.samba as samba; sambaflow.samba.optim.SGD",
    "import sambaflow.samba.utils as sn_utils; sn_utils.assert_close",
    "from sambaflow import samba; samba.utils.trace_graph; samba.utils.assert_close",
    "import sambaflow.samba.nn as nn; nn.Module, nn.Sequential(nn.Conv2d(1, 1, 3), nn.ConvTranspose2d(1, 1, 2))",
    "import sambaflow.samba.nn as sn; sn.BatchNorm2d(1), sn.MaxPool2d(2), sn.ReLU(inplace=True)",
    "from sambaflow.samba import SambaTensor, to_torch",
    "from sambaflow.samba.utils import assert_close, set_seed, trace_graph, get_rank, get_world_size, is_main_process",
    "from sambaflow.samba.utils.argparser import parse_app_args, parse_yaml_to_args, SambaConfig",
    "import sambaflow.samba.utils.dataset.mnist as mnist; mnist.prepare_dataloader",
    "from sambaflow.samba.utils.dataset import mnist; mnist.prepare_dataloader",
    "from sambaflow.samba.utils.numeric import MAX_BF16_TRUNCATE_NORMAL_REL; assert MAX_BF16_TRUNCATE_NORMAL_REL > 0",
    "import sambaflow.samba.utils as utils; utils.checkpoint.save_tensors",
    "from sambaflow.samba.utils.trainer.samba import train as samba_train",
    "from sambaflow.samba.env import use_mock_samba_runtime; assert use_mock_samba_runtime() is False",
    "from sambaflow.samba.lazy_param import lazy_param, RNGProvider, RNGProviderFactory",
    "from sambaflow.samba.materialize import materialize",
    "from sambaflow.samba.graph import FwdGraph",
    "from sambaflow import __version__, is_demo; assert __version__[0].isdigit()",
    "from sambaflow.logging import samba_logger; samba_logger.info('ready')",
]


def test_an_import_is_executed_as_it_is_typed() -> None:
    for spelling in IMPORTS:
        exec(spelling, {})


def test_imports_in_try_except_pass() -> None:
    names: dict[str, object] = {}
    exec("try:\n    from sambaflow import samba\n    from sambaflow.samba.nothing import it\nexcept:\n    pass", names)
    assert "samba" in names
    assert "it" not in names
