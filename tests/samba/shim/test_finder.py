"""What `sambaflow` is in a process with the import shim, and the errors for what it does not have."""

from collections.abc import Callable, Iterator
from importlib import import_module
from types import new_class
from typing import Any

import pytest

from sambasim.samba.notices import AbsentNameError
from sambasim.samba.shim import finder
from sambasim.samba.shim.finder import ABSENT, MODULES, ROOT, AbsentModuleError, what_there_is
from tests.support.door import open_door


@pytest.fixture(autouse=True)
def shim() -> Iterator[None]:
    """It is installed in each test."""
    with open_door():
        yield


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
        module = import_module(name)
        assert getattr(import_module(owner), name.rpartition(".")[2]) is module


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
        "sambaflow.mac.metadata.ConvTilingMetadata or sambaflow.mac.metadata.TilingMetadata",
    )
    assert not hasattr(metadata, "nothing")


@pytest.mark.parametrize(("module", "name"), [(module, name) for module, names in ABSENT.items() for name in names])
def test_a_name_that_is_known_and_absent_is_imported_and_refused_when_it_is_used(module: str, name: str) -> None:
    found: Any = getattr(import_module(module), name)
    uses: list[Callable[[], object]] = [
        lambda: found(1, key=2), lambda: found.attribute, lambda: new_class("Sub", (found,)), lambda: found[0],
        lambda: isinstance(1, found),
    ]  # fmt: skip
    for use in uses:
        with pytest.raises(AbsentNameError, match=rf"^sambasim has no {module}\.{name}: ") as caught:
            use()
        assert caught.value.remedy
        assert str(caught.value.where).startswith(f"{__file__}:")


def test_a_name_that_is_absent_stands_in_annotations() -> None:
    annotated = "from sambaflow.samba.graph import FwdGraph\ndef f(one: FwdGraph | None, two: None | FwdGraph): pass"
    exec(annotated)


def test_operators_are_near_too() -> None:
    with pytest.raises(AbsentNameError, match=r"sambaflow\.samba\.sigmoid"):
        _ = import_module("sambaflow.samba").sigmoyd


def test_where_nothing_is_near_what_there_is() -> None:
    with pytest.raises(
        AbsentModuleError, match="what sambaflow has: __version__, is_demo, logging, mac, samba, sambacoll"
    ):
        import_module("sambaflow.xyz")
    many = [f"name{index}" for index in range(14)]
    assert what_there_is("sambaflow.a", "xyz", many, many).endswith("name7, and 2 more")
    assert what_there_is("sambaflow.a", "xyz", [], []) == "the app without it: sambaflow.a is empty here"


def test_a_thing_and_its_module_of_the_same_name_are_called_alike() -> None:
    samba: Any = import_module("sambaflow.samba")
    module: Any = import_module("sambaflow.samba.materialize")
    assert samba.materialize is module, "Python put it there when it was imported"
    tensor = samba.randn(2)
    assert samba.materialize(tensor) is module.materialize(tensor) is tensor
    with pytest.raises(TypeError, match=r"sambaflow\.samba\.env is a module, and not callable"):
        samba.env()


def test_other_names_are_left_to_others() -> None:
    assert finder.SambaflowFinder().find_spec("sambaflows", None) is None
