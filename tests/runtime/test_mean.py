"""The mean over replicas has the bits of the tree, by torch and by the C kernel, which is built once per CPU model."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from sambasim.collectives import additions
from sambasim.errors import MachineError
from sambasim.runtime.machine.kernels import build, find_c_compiler
from sambasim.runtime.values.mean import (
    CHUNK_ELEMENTS,
    Finish,
    _mean_of,
    torch_tree_mean,
    tree_mean,
    tree_mean_build,
    tree_mean_kernel,
)
from tests.support.whole import whole_case


def _operands(count: int, numel: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(count * 1000 + numel)
    return [torch.randn(numel, generator=generator) * 10.0 ** (rank % 5) for rank in range(count)]


def _by_hand(operands: list[Tensor]) -> Tensor:
    """The tree written out for up to seven operands."""
    o = operands
    pair = [o[i] + o[i + 1] if i + 1 < len(o) else o[i] for i in range(0, len(o), 2)]
    quad = [pair[i] + pair[i + 1] if i + 1 < len(pair) else pair[i] for i in range(0, len(pair), 2)]
    total = quad[0] + quad[1] if len(quad) > 1 else quad[0]
    return total / len(o)


@pytest.mark.parametrize("numel", [0, 1, CHUNK_ELEMENTS + 64])
@pytest.mark.parametrize("count", range(1, 8))
def test_the_bits_are_those_of_the_tree(count: int, numel: int) -> None:
    operands = _operands(count, numel)
    out = torch.empty(numel)
    tree_mean(operands, out, len(operands))()
    assert torch.equal(out, _by_hand(operands))


def test_a_missing_leaf_is_skipped_so_that_a_negative_zero_stays_one() -> None:
    operands = [torch.tensor([-0.0])] * 3
    out = torch.empty(1)
    tree_mean(operands, out, len(operands))()
    assert str(out.item()) == "-0.0"


@pytest.mark.parametrize("count", [2, 4])
def test_a_power_of_two_divides_with_the_bits_of_a_division_down_to_the_smallest_numbers(count: int) -> None:
    bits = torch.randint(-(2**31), 2**31 - 1, (64 * 1024,), generator=torch.Generator().manual_seed(count))
    total = bits.to(torch.int32).view(torch.float32).nan_to_num(0.0)
    tiny = torch.arange(1, 65, dtype=torch.int32).view(torch.float32)  # the subnormal numbers next to zero
    for sums in (total, tiny):
        operands = [sums, *(torch.zeros_like(sums) for _ in range(count - 1))]
        out = torch.empty_like(sums)
        tree_mean(operands, out, count)()
        assert torch.equal(out.view(torch.int32), ((sums + 0.0) / count).view(torch.int32))


def _any_bits(count: int, numel: int, dtype: torch.dtype) -> list[Tensor]:
    """Numbers of every size, subnormal and infinite ones too, but none that is no number: its bits are not defined."""
    generator = torch.Generator().manual_seed(count * 1000 + numel)
    whole = torch.int32 if dtype is torch.float32 else torch.int64
    limits = torch.iinfo(whole)
    drawn = [torch.randint(limits.min, limits.max, (numel,), generator=generator, dtype=whole) for _ in range(count)]
    return [one.view(dtype).nan_to_num(-0.0, posinf=float("inf"), neginf=0.0) for one in drawn]


def _has_compiler() -> bool:
    try:
        return bool(find_c_compiler())
    except MachineError:
        return False


needs_compiler = pytest.mark.skipif(not _has_compiler(), reason="no C compiler")


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("finish", list(Finish))
@pytest.mark.parametrize("near", [False, True])
@pytest.mark.parametrize("count", [2, 3, 17])
def test_the_kernel_in_c_has_the_bits_of_torchs_operators(
    count: int, near: bool, finish: Finish, dtype: torch.dtype
) -> None:
    steps = additions(count)
    kernel = tree_mean_kernel(steps, dtype)
    assert kernel is not None, tree_mean_build(dtype).trouble
    for numel in (0, 1, 1023, 1024, 5000):
        operands = _any_bits(count, numel, dtype)
        expected, out = torch.empty(numel, dtype=dtype), torch.empty(numel, dtype=dtype)
        torch_tree_mean(steps, dtype)(operands, expected, finish, float(count), near)()
        kernel(operands, out, finish, float(count), near)()
        assert torch.equal(_bits(out), _bits(expected))
        for own in (0, count // 2, count - 1):
            again = [operand.clone() for operand in operands]
            kernel(again, again[own], finish, float(count), near)()
            assert torch.equal(_bits(again[own]), _bits(expected))


def _bits(numbers: Tensor) -> Tensor:
    return numbers.view(torch.int32 if numbers.dtype is torch.float32 else torch.int64)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache folder, and nothing remembered by this process."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    build.cache_clear()
    _mean_of.cache_clear()
    yield tmp_path
    build.cache_clear()
    _mean_of.cache_clear()


def _files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


@needs_compiler
def test_a_kernel_is_kept_and_needs_no_compiler_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert tree_mean_build(torch.float32).library is not None
    kept = _files(folder)
    assert len(kept) == 1
    build.cache_clear()
    _mean_of.cache_clear()
    monkeypatch.setenv("CC", "no-such-compiler")
    assert tree_mean_build(torch.float32).library is not None
    assert _files(folder) == kept


@needs_compiler
@pytest.mark.parametrize("part", [0.0, whole_case(0.3), 0.99])
def test_a_library_that_was_cut_off_is_built_again(folder: Path, part: float) -> None:
    assert tree_mean_build(torch.float32).library is not None
    (kept,) = _files(folder)
    whole = kept.read_bytes()
    kept.unlink()  # this process has mapped it
    kept.write_bytes(whole[: int(part * len(whole))])
    # In a process of its own, which loading what was cut off would end.
    script = (
        "import torch; from sambasim.runtime.values.mean import tree_mean_build; "
        "assert tree_mean_build(torch.float32).library is not None"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)
    assert kept.read_bytes() == whole


@needs_compiler
@pytest.mark.parametrize("place", ["file", "file/below"])
def test_without_a_folder_to_keep_it_in_a_kernel_is_built_for_this_process(
    folder: Path, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / place))
    assert tree_mean_build(torch.float32).library is not None
    assert _files(folder) == [folder / "file"]


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
    tree_mean(operands, with_kernel, len(operands))()
    build.cache_clear()
    _mean_of.cache_clear()
    monkeypatch.setenv("CC", compiler)
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "another"))
    expected = tree_mean_build(torch.float32)
    assert expected.library is None
    assert expected.trouble is not None
    assert expected.trouble.what == trouble
    tree_mean(operands, without, len(operands))()
    assert torch.equal(with_kernel, without)
