"""`sambaflow` in a process with the import shim, its modules outside `samba`, and the errors for absent names."""

import sys
from collections.abc import Callable
from functools import partial
from importlib import import_module
from types import new_class
from typing import Any

import pytest

from sambasim import __version__
from sambasim.samba import shim
from sambasim.samba.notices import AbsentNameError
from sambasim.samba.shim import ABSENT, MODULES, ROOT, AbsentModuleError, ConvTilingMetadata, TilingMetadata
from tests.samba.harness import imported, refused
from tests.support.mpi import run_job
from tests.support.whole import whole_case

pytestmark = pytest.mark.usefixtures("app")


def test_every_row_imports_with_the_names_of_our_module() -> None:
    for name, source in MODULES.items():
        facade = import_module(name)
        ours = import_module(source if isinstance(source, str) else source[0] if source else "sambasim.samba.shim")
        assert facade.__name__ == name
        for exported in vars(ours).get("__all__", ()) if isinstance(source, str) else source[1:]:
            value = getattr(facade, exported)
            assert value is getattr(ours, exported) or f"{name}.{exported}" in MODULES
        owner, _, last = name.rpartition(".")
        assert name == ROOT or getattr(import_module(owner), last) is facade
        assert not isinstance(source, str) or ours.__name__ == source, "our module keeps its own name"


ABSENT_TEXTS = [
    ("import sambaflow.logging.samba_loger",
     "sambasim has no sambaflow.logging.samba_loger\n  try:   sambaflow.logging.samba_logger"),
    ("from sambaflow.sambacollections import OrdredSet",
     "sambasim has no sambaflow.sambacollections.OrdredSet\n  try:   sambaflow.sambacollections.OrderedSet"),
    ("import sambaflow.xyz", "what sambaflow has: __version__, is_demo, logging, mac, samba, sambacoll"),
    ("import sambaflow.models.xyz", "what sambaflow.models has: nothing"),
    ("import sambaflow.mac.metadata as m; m.convtilingmetadatum",
     "sambasim has no sambaflow.mac.metadata.convtilingmetadatum\n"
     "  try:   sambaflow.mac.metadata.ConvTilingMetadata or sambaflow.mac.metadata.TilingMetadata"),
    ("from sambaflow import samba; samba.sigmoyd", "sambaflow.samba.sigmoid"),  # the nearest may be an operator
    ("from sambaflow import samba; samba.randnt", "sambaflow.samba.randn"),
    ("from sambaflow.samba import functional as f; f.reluu", "\n  try:   sambaflow.samba.functional.relu or "),
    ("from sambaflow.samba import nn; nn.Linaer", "\n  try:   sambaflow.samba.nn.Linear or "),
    ("from sambaflow.samba import optim; optim.Adagrad", "\n  try:   what sambaflow.samba.optim has: Adam, AdamW, SGD"),
]  # fmt: skip


@pytest.mark.parametrize(("line", "text"), ABSENT_TEXTS)
def test_the_error_for_what_is_absent_names_the_nearest(line: str, text: str) -> None:
    names: dict[str, Any] = {}
    with pytest.raises((AbsentModuleError, AbsentNameError)) as caught:
        exec(line, names)
    assert isinstance(caught.value, AttributeError if ";" in line else ImportError)
    assert text in str(caught.value)
    assert "m" not in names or not hasattr(names["m"], "nothing")


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
            with refused(AbsentNameError, rf"^sambasim has no {module}\.{name}: "):
                use()


def test_a_function_and_its_module_of_the_same_name_can_both_be_called() -> None:
    samba: Any = import_module("sambaflow.samba")
    module: Any = import_module("sambaflow.samba.materialize")
    assert samba.materialize is module, "Python put it there when it was imported"
    tensor = samba.randn(2)
    assert samba.materialize(tensor) is module.materialize(tensor) is tensor
    module = imported("samba.tensor")
    assert module.SambaTensor is imported("samba.sambatensor").SambaTensor
    for one in (samba, import_module("sambasim.samba")):
        assert one.tensor([1, 2], name="x").tolist() == module([1, 2]).tolist() == [1, 2]
        assert one.trace(one.eye(3)) == 3
    with pytest.raises(TypeError, match=r"sambaflow\.samba\.env is a module, and not callable"):
        samba.env()


def test_version_demo_metadata_and_other_packages() -> None:
    root: Any = import_module("sambaflow")
    assert root.__version__ == f"1.19.0+sambasim.{__version__}"
    assert not root.is_demo
    assert not root.is_demo()
    assert shim.SambaflowFinder().find_spec("sambaflows", None) is None
    record = ConvTilingMetadata(original_size=(3, 512, 512))
    assert (record.key, repr(record)) == ("conv_tiling", "ConvTilingMetadata(original_size=(3, 512, 512))")
    assert (TilingMetadata.key, TilingMetadata(original_size=(3, 512, 512), num_tiles=4).num_tiles) == ("tiling", 4)
    assert [*import_module("sambaflow.sambacollections").OrderedSet([3, 1, 3]).union([2])] == [3, 1, 2]


@pytest.mark.parametrize(("env", "rank"), [whole_case({}, ""), ({"PMI_SIZE": "4", "PMI_RANK": "3"}, " rank 3")])
def test_a_log_line_names_its_rank(env: dict[str, str], rank: str) -> None:
    body = (
        "import logging; logging.basicConfig()\n"
        "import sambasim.samba.shim\n"
        "assert logging.getLogger('sambaflow').handlers == [], 'the handler is for those who import it'\n"
        "from sambasim.samba.shim import samba_logger\n"
        "samba_logger.debug('too low'); samba_logger.samba_logger.warning('loss is %s', 3)\n"
    )
    result = run_job([sys.executable, "-c", body], env=env).check()
    assert [line.partition(",")[2][3:] for line in result.stderr.splitlines()] == [f"{rank} WARNING: loss is 3"]


IMPORTS = [  # one of each form; test_fidelity and shim/test_finder check all modules and names
    "import sambaflow; import sambaflow.samba as samba; sambaflow.samba.optim.SGD",
    "import sambaflow.samba.utils as sn_utils; sn_utils.assert_close",
    "from sambaflow import samba; samba.utils.trace_graph; samba.utils.assert_close",
    "import sambaflow.samba.nn as nn; nn.Module, nn.Sequential(nn.Conv2d(1, 1, 3), nn.ConvTranspose2d(1, 1, 2))",
    "from sambaflow.samba.utils.dataset import mnist; mnist.prepare_dataloader",
    "from sambaflow.samba.utils.numeric import MAX_BF16_TRUNCATE_NORMAL_REL; assert MAX_BF16_TRUNCATE_NORMAL_REL > 0",
    "from sambaflow.samba.env import use_mock_samba_runtime; assert use_mock_samba_runtime() is False",
    "from sambaflow.samba.graph import FwdGraph\ndef f(a: FwdGraph | None, b: None | FwdGraph): pass",
    "from sambaflow import __version__, is_demo; assert __version__[0].isdigit()",
    "from sambaflow.logging import samba_logger; samba_logger.info('ready')",
]


def test_an_import_is_executed_as_it_is_typed() -> None:
    for spelling in IMPORTS:
        exec(spelling, {})
    names: dict[str, object] = {}
    exec("from sambaflow.sambacollections import *", names)
    assert sorted(names) == ["OrderedSet", "__builtins__"]
    exec("try:\n    from sambaflow import samba\n    from sambaflow.samba.nothing import it\nexcept:\n    pass", names)
    assert "samba" in names
    assert "it" not in names
