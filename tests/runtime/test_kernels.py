"""Kernels in C: built once, found again, and done without where they cannot be built."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from sambasim.errors import MachineError
from sambasim.runtime.kernels.build import build, find_c_compiler
from sambasim.runtime.kernels.tree_mean import tree_mean_build
from sambasim.runtime.mean import tree_mean


def _has_compiler() -> bool:
    try:
        return bool(find_c_compiler())
    except MachineError:
        return False


needs_compiler = pytest.mark.skipif(not _has_compiler(), reason="no C compiler")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache folder, and nothing remembered by this process."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    build.cache_clear()
    yield tmp_path
    build.cache_clear()


def _files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


@needs_compiler
def test_a_kernel_is_kept_and_needs_no_compiler_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert tree_mean_build(torch.float32).library is not None
    kept = _files(folder)
    assert len(kept) == 1
    build.cache_clear()
    monkeypatch.setenv("CC", "no-such-compiler")
    assert tree_mean_build(torch.float32).library is not None
    assert _files(folder) == kept


@needs_compiler
def test_types_are_kept_apart(folder: Path) -> None:
    assert tree_mean_build(torch.float32).library is not None
    assert tree_mean_build(torch.float64).library is not None
    assert len(_files(folder)) == 2


@needs_compiler
@pytest.mark.parametrize("place", ["file", "file/below"])
def test_without_a_folder_to_keep_it_in_a_kernel_is_built_for_this_process(
    folder: Path, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / place))
    assert tree_mean_build(torch.float32).library is not None
    assert _files(folder) == [folder / "file"]


@needs_compiler
def test_a_user_without_a_home_has_kernels_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", no_home)
    assert tree_mean_build(torch.float32).library is not None


@pytest.mark.parametrize(
    ("compiler", "trouble"),
    [
        ("no-such-compiler", "CC names no-such-compiler, which does not exist"),
        ("false", "false cannot build tree_mean.c: exit code 1"),
    ],
)
def test_without_a_compiler_that_works_torch_does_the_same(
    folder: Path, compiler: str, trouble: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    operands = [torch.randn(3000) for _ in range(3)]
    with_kernel, without = torch.empty(3000), torch.empty(3000)
    tree_mean(operands, with_kernel, len(operands))
    build.cache_clear()
    monkeypatch.setenv("CC", compiler)
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "another"))
    told = tree_mean_build(torch.float32)
    assert told.library is None
    assert told.trouble is not None
    assert told.trouble.what == trouble
    tree_mean(operands, without, len(operands))
    assert torch.equal(with_kernel, without)


@needs_compiler
def test_cc_may_have_more_words_than_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", f"{find_c_compiler()[0]} -g")
    assert tree_mean_build(torch.float32).library is not None


@needs_compiler
@pytest.mark.parametrize("part", [0.0, 0.01, 0.3, 0.99])
def test_a_library_that_was_cut_off_is_built_anew(folder: Path, part: float) -> None:
    assert tree_mean_build(torch.float32).library is not None
    (kept,) = _files(folder)
    whole = kept.read_bytes()
    kept.unlink()  # this process has mapped it
    kept.write_bytes(whole[: int(part * len(whole))])
    # In a process of its own, which loading what was cut off would end.
    script = (
        "import torch; from sambasim.runtime.kernels.tree_mean import tree_mean_build as build; "
        "assert build(torch.float32).library is not None"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)
    assert kept.read_bytes() == whole
