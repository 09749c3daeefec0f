"""Kernels in C: built once, found again, and done without where they cannot be built."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from sambasim.runtime.kernels.build import find_c_compiler, library
from sambasim.runtime.sync.mean import tree_mean

REAL = "REAL=float"

needs_compiler = pytest.mark.skipif(find_c_compiler() is None, reason="no C compiler")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache folder, and nothing remembered by this process."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    library.cache_clear()
    yield tmp_path
    library.cache_clear()


@needs_compiler
def test_a_kernel_is_kept_and_needs_no_compiler_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert library("tree_mean", REAL) is not None
    (kept,) = folder.rglob("*.so")
    library.cache_clear()
    monkeypatch.setenv("CC", "no-such-compiler")
    assert library("tree_mean", REAL) is not None
    assert [path for path in folder.rglob("*") if path.is_file()] == [kept]


@needs_compiler
def test_types_are_kept_apart(folder: Path) -> None:
    assert library("tree_mean", REAL) is not None
    assert library("tree_mean", "REAL=double") is not None
    assert len(list(folder.rglob("*.so"))) == 2


@needs_compiler
def test_without_a_folder_to_keep_it_in_a_kernel_is_built_for_this_process(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "file"))
    assert library("tree_mean", REAL) is not None
    assert not list(folder.rglob("*.so"))


@pytest.mark.parametrize("compiler", ["no-such-compiler", "false"])
def test_without_a_compiler_that_works_torch_does_the_same(
    folder: Path, compiler: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    operands = [torch.randn(3000) for _ in range(3)]
    with_kernel, without = torch.empty(3000), torch.empty(3000)
    tree_mean(operands, with_kernel, len(operands))
    library.cache_clear()
    monkeypatch.setenv("CC", compiler)
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "another"))
    assert library("tree_mean", REAL) is None
    tree_mean(operands, without, len(operands))
    assert torch.equal(with_kernel, without)


@needs_compiler
def test_a_file_that_is_no_library_is_built_anew(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert library("tree_mean", REAL) is not None
    (whole,) = folder.rglob("*.so")
    another = folder / "another"
    cut_off = another / whole.relative_to(folder)
    cut_off.parent.mkdir(parents=True)
    cut_off.touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(another))
    library.cache_clear()
    assert library("tree_mean", REAL) is not None
    assert cut_off.stat().st_size > 0
