"""What `sambaflow` is in a process with the door open, and the errors for what it is not."""

import sys
from collections.abc import Iterator
from importlib import import_module

import pytest

from sambasim.samba.door import finder
from sambasim.samba.door.absent import AbsentModuleError, AbsentNameError, what_there_is
from sambasim.samba.door.table import MODULES, ROOT


@pytest.fixture(autouse=True)
def door() -> Iterator[None]:
    """Open it in this process, and shut it again."""
    before = list(sys.meta_path)
    finder.install()
    yield
    sys.meta_path[:] = before
    for name in [name for name in sys.modules if name == ROOT or name.startswith(f"{ROOT}.")]:
        del sys.modules[name]


@pytest.mark.parametrize("name", MODULES)
def test_every_row_imports_and_has_what_our_module_has(name: str) -> None:
    facade, ours = import_module(name), import_module(MODULES[name])
    assert (facade.__name__, facade.__doc__) == (name, ours.__doc__)
    for exported in vars(ours).get("__all__", ()):
        mine = getattr(facade, exported)
        assert mine is getattr(ours, exported) or f"{name}.{exported}" in MODULES


@pytest.mark.parametrize("name", MODULES)
def test_every_row_has_its_package(name: str) -> None:
    owner = name.rpartition(".")[0]
    assert owner in MODULES or name == ROOT
    if owner:
        assert getattr(import_module(owner), name.rpartition(".")[2]) is import_module(name)


def test_our_modules_keep_their_names() -> None:
    import_module("sambaflow.samba.utils")
    assert all(import_module(ours).__name__ == ours for ours in MODULES.values())
    spec = import_module("sambasim.samba.utils").__spec__
    assert spec is not None
    assert spec.name == "sambasim.samba.utils"


def test_star() -> None:
    names: dict[str, object] = {}
    exec("from sambaflow.sambacollections import *", names)
    assert sorted(names) == ["OrderedSet", "__builtins__"]


def test_a_module_that_is_absent() -> None:
    with pytest.raises(ImportError) as caught:
        import_module("sambaflow.logging.samba_loger")
    assert isinstance(caught.value, AbsentModuleError)
    assert str(caught.value) == (
        "sambasim has no sambaflow.logging.samba_loger\n  try:   sambaflow.logging.samba_logger"
    )


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
        "sambaflow.mac.metadata.ConvTilingMetadata",
    )
    assert not hasattr(metadata, "nothing")


def test_operators_are_near_too() -> None:
    with pytest.raises(AbsentNameError, match=r"sambaflow\.samba\.sigmoid"):
        _ = import_module("sambaflow.samba").sigmoyd


def test_where_nothing_is_near_what_there_is() -> None:
    with pytest.raises(AbsentModuleError, match="what sambaflow has: __version__, logging, mac, samba, sambacoll"):
        import_module("sambaflow.xyz")
    many = [f"name{index}" for index in range(14)]
    assert what_there_is("sambaflow.a", "xyz", many, many).endswith("name7, and 2 more")
    assert what_there_is("sambaflow.a", "xyz", [], []) == "the app without it: sambaflow.a is empty here"


def test_other_names_are_left_to_others() -> None:
    assert finder.DoorFinder().find_spec("sambaflows", None) is None
