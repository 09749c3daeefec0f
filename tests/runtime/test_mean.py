"""The mean over replicas has the bits of the tree, by torch and by the C kernel, which is built once per CPU model."""

from collections.abc import Iterator
from ctypes import CDLL
from itertools import zip_longest
from pathlib import Path

import pytest
import torch
from torch import Tensor

from sambasim.collectives import additions
from sambasim.errors import MachineError
from sambasim.runtime.machine.kernels import build, find_c_compiler
from sambasim.runtime.values.mean import (
    CHUNK_ELEMENTS,
    _kernel_of,
    torch_tree_mean,
    tree_mean,
    tree_mean_build,
    tree_mean_kernel,
)

INTEGERS = {torch.float32: torch.int32, torch.float64: torch.int64}


def bits(numbers: Tensor) -> Tensor:
    return numbers.view(INTEGERS[numbers.dtype])


def mean(operands: list[Tensor]) -> Tensor:
    out = torch.empty_like(operands[0])
    tree_mean(operands, out, len(operands))()
    return out


@pytest.mark.parametrize("numel", [0, 1, CHUNK_ELEMENTS + 64])
@pytest.mark.parametrize("count", range(1, 8))
def test_the_bits_are_those_of_the_tree(count: int, numel: int) -> None:
    generator = torch.Generator().manual_seed(count * 1000 + numel)
    operands = [torch.randn(numel, generator=generator) * 10.0 ** (rank % 5) for rank in range(count)]
    level = operands
    while len(level) > 1:
        level = [left if right is None else left + right for left, right in zip_longest(level[::2], level[1::2])]
    assert torch.equal(mean(operands), level[0] / count)


def test_a_missing_leaf_is_skipped_so_that_a_negative_zero_stays_one() -> None:
    assert str(mean([torch.tensor([-0.0])] * 3).item()) == "-0.0"


@pytest.mark.parametrize("count", [2, 4])
def test_a_power_of_two_divides_with_the_bits_of_a_division_down_to_the_smallest_numbers(count: int) -> None:
    drawn = torch.randint(-(2**31), 2**31 - 1, (64 * 1024,), generator=torch.Generator().manual_seed(count))
    total = drawn.to(torch.int32).view(torch.float32).nan_to_num(0.0)
    tiny = torch.arange(1, 65, dtype=torch.int32).view(torch.float32)  # the subnormal numbers next to zero
    for sums in (total, tiny):
        operands = [sums, *[torch.zeros_like(sums)] * (count - 1)]
        assert torch.equal(bits(mean(operands)), bits((sums + 0.0) / count))


def has_compiler() -> bool:
    try:
        return bool(find_c_compiler())
    except MachineError:
        return False


needs_compiler = pytest.mark.skipif(
    not has_compiler(), reason="the kernel is compiled where there is a C compiler; without one torch does the same"
)


def rounded(numbers: Tensor) -> Tensor:
    """To bfloat16, to nearest even, by integers; NaN stays."""
    whole = numbers.view(torch.int32).to(torch.int64) & 0xFFFFFFFF
    down, rest = whole & 0xFFFF0000, whole & 0xFFFF
    up = (rest > 0x8000) | ((rest == 0x8000) & (down & 0x10000 != 0))
    near = (down + 0x10000 * up).to(torch.int32).view(torch.float32)
    return torch.where(numbers.isnan(), numbers, near)


def same(one: Tensor, other: Tensor) -> bool:
    """In all bits but those of NaN, which are not defined."""
    return torch.equal(*(bits(each.nan_to_num(0.5, torch.inf, -torch.inf)) for each in (one, other)))


@pytest.mark.parametrize("in_c", [pytest.param(True, marks=needs_compiler), False])
@pytest.mark.parametrize("count", range(2, 8))
def test_on_a_narrow_wire_every_operand_of_an_addition_is_rounded_and_the_mean_is_not(count: int, in_c: bool) -> None:
    """For numbers of every size, infinite ones and NaN; some may have come in bfloat16."""
    limits, steps = torch.iinfo(torch.int32), additions(count)
    generator = torch.Generator().manual_seed(count)
    drawn = torch.empty(count, 5000, dtype=torch.int32).random_(limits.min, limits.max, generator=generator)
    operands = [*drawn.view(torch.float32)]
    level = operands
    while len(level) > 1:
        pairs = zip_longest(level[::2], level[1::2])
        level = [left if right is None else rounded(left) + rounded(right) for left, right in pairs]
    expected = level[0] / count
    assert not same(expected, mean(operands))
    kernel = (tree_mean_kernel if in_c else torch_tree_mean)(steps, torch.float32, True)
    assert kernel is not None
    for given in (operands, [operands[0], *(operand.bfloat16() for operand in operands[1:])]):
        for near in (False, True):
            out = torch.empty(5000)
            kernel(given, out, True, float(count), near)()
            assert same(out, expected)


@pytest.mark.parametrize(
    ("operand", "sent"),
    [
        (1 + 2**-8, 1.0),  # a tie, to the even neighbour
        (1 + 3 * 2**-8, 1 + 2**-6),
        (1 + 2**-8 + 2**-20, 1 + 2**-7),
        (-1 - 3 * 2**-8, -1 - 2**-6),
        (2**-149, 0.0),
        (-(2**-133) * 1.75, -(2**-132)),  # below the smallest normal number
        (3.4e38, torch.inf),
        (-torch.inf, -torch.inf),
        (torch.nan, torch.nan),
    ],
)
def test_operands_are_rounded_to_nearest_even(operand: float, sent: float) -> None:
    out = torch.empty(100)
    tree_mean([torch.full((100,), operand), torch.zeros(100)], out, 1, wire="bf16")()
    assert same(out, torch.full((100,), sent))


def test_only_float32_is_rounded_and_only_where_something_is_added() -> None:
    for dtype, count in ((torch.float64, 2), (torch.float16, 2), (torch.float32, 1)):
        operands = [torch.full((100,), 1 + 2**-9, dtype=dtype)] * count
        out = torch.empty(100, dtype=dtype)
        tree_mean(operands, out, count, wire="bf16")()
        assert torch.equal(out, operands[0])


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("divides", "scales"), [(False, False), (False, True), (True, True)])
@pytest.mark.parametrize("near", [False, True])
@pytest.mark.parametrize("count", [2, 3, 17])
def test_the_kernel_in_c_has_the_bits_of_torchs_operators(
    count: int, near: bool, divides: bool, scales: bool, dtype: torch.dtype
) -> None:
    """For numbers of every size, subnormal and infinite ones too, but not for NaN, whose bits are not defined."""
    steps, limits = additions(count), torch.iinfo(INTEGERS[dtype])
    number = float(count) if scales else 1.0
    kernel = tree_mean_kernel(steps, dtype)
    assert kernel is not None, tree_mean_build(dtype)
    for numel in (0, 1, 1023, 1024, 5000):
        generator = torch.Generator().manual_seed(count * 1000 + numel)
        drawn = torch.empty(count, numel, dtype=INTEGERS[dtype])
        drawn.random_(limits.min, limits.max, generator=generator)
        operands = [*drawn.view(dtype).nan_to_num(-0.0, posinf=float("inf"), neginf=0.0)]
        expected, out = torch.empty(numel, dtype=dtype), torch.empty(numel, dtype=dtype)
        torch_tree_mean(steps, dtype)(operands, expected, divides, number, near)()
        kernel(operands, out, divides, number, near)()
        assert torch.equal(bits(out), bits(expected))
        for own in (0, count // 2, count - 1):
            again = [operand.clone() for operand in operands]
            kernel(again, again[own], divides, number, near)()
            assert torch.equal(bits(again[own]), bits(expected))


def forget() -> None:
    build.cache_clear()
    _kernel_of.cache_clear()


def built() -> CDLL | MachineError:
    """As by a new process."""
    forget()
    return tree_mean_build(torch.float32)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    forget()
    yield tmp_path
    forget()


def files_in(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


@needs_compiler
def test_a_kernel_is_kept_and_what_was_cut_off_is_built_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(built(), CDLL)
    (kept,) = files_in(folder)
    whole = kept.read_bytes()
    for part in (0.0, 0.99):
        kept.unlink()  # this process has mapped it
        kept.write_bytes(whole[: int(part * len(whole))])
        assert isinstance(built(), CDLL)
        assert kept.read_bytes() == whole
    monkeypatch.setenv("CC", "no-such-compiler")
    assert isinstance(built(), CDLL)
    assert files_in(folder) == [kept]


@needs_compiler
def test_without_a_folder_to_keep_it_in_a_kernel_is_built_for_this_process(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "file"))
    assert isinstance(built(), CDLL)
    assert files_in(folder) == [folder / "file"]


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
    by_kernel = mean(operands)
    monkeypatch.setenv("CC", compiler)
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "another"))
    result = built()
    assert isinstance(result, MachineError)
    assert result.what == trouble
    assert torch.equal(by_kernel, mean(operands))
