"""The price of a section, and the best cut: laws that hold for all loads, and cuts compared with every other cut."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain as joined
from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sambasim.costs.cut import Level, best_cut, cut
from sambasim.costs.price import Bound, Load, Product, SectionPrice, chip_bytes, load_of, price_of, tile_rows
from sambasim.costs.work import Work
from sambasim.hardware.budget import Budget
from tests.costs.graphs import chain, graph_and_work

BUDGET = Budget(
    where="a device",
    units=640,
    stages=12,
    chip_bytes=10**8,
    unit_flops_per_s=1e11,
    memory="DDR",
    memory_bytes_per_s=1e11,
    capacity_bytes=10**12,
    behind=None,
    launch_s=1e-4,
    tile_rows=256,
    least_tiles=8,
)
counts = st.integers(0, 10**12)
products = st.builds(Product, st.integers(1, 10**15), st.integers(1, 10**4))
loads = st.builds(
    Load,
    *(counts, counts, st.just(0), counts, counts, st.integers(0, 10**7), st.integers(1, 10**8), st.integers(1, 24)),
    st.lists(products, max_size=4).map(tuple),
)


@given(loads, st.floats(1, 100))
def test_more_of_anything_is_never_slower(load: Load, factor: float) -> None:
    before = price_of(load, BUDGET).predicted_s
    more_units = replace(BUDGET, units=int(BUDGET.units * factor))
    for better in (
        more_units,
        replace(BUDGET, unit_flops_per_s=BUDGET.unit_flops_per_s * factor),
        replace(BUDGET, memory_bytes_per_s=BUDGET.memory_bytes_per_s * factor),
        replace(BUDGET, chip_bytes=int(BUDGET.chip_bytes * factor)),
        replace(BUDGET, launch_s=BUDGET.launch_s / factor),
    ):
        assert price_of(load, better).predicted_s <= before * (1 + 1e-12)


@given(loads, counts)
def test_more_bytes_and_more_work_are_never_quicker(load: Load, more: int) -> None:
    before = price_of(load, BUDGET).predicted_s
    for heavier in (
        replace(load, read_bytes=load.read_bytes + more),
        replace(load, written_bytes=load.written_bytes + more),
        replace(load, resident_bytes=load.resident_bytes + more),
        replace(load, streamed_bytes=load.streamed_bytes + more),
        replace(load, stages=load.stages + more % 100),
        replace(load, products=(*load.products, Product(more, 1))),
    ):
        assert price_of(heavier, BUDGET).predicted_s >= before * (1 - 1e-12)


@given(loads)
def test_the_parts_are_the_total(load: Load) -> None:
    price = price_of(load, BUDGET)
    longer = max(price.compute_s, price.memory_s)
    assert price.predicted_s == pytest.approx(longer + price.fill_s + price.launch_s)
    assert min(price.compute_s, price.memory_s, price.fill_s, price.launch_s) >= 0


SMALL = Load(0, 0, 0, 0, 0, 0, 256, 1, ())


@pytest.mark.parametrize(
    ("load", "bound"),
    [
        (replace(SMALL, products=(Product(10**15, 640),)), Bound.COMPUTE),
        (replace(SMALL, read_bytes=10**12), Bound.MEMORY),
        (replace(SMALL, read_bytes=10**8, resident_bytes=10**9, streamed_bytes=10**8), Bound.CAPACITY),
        (SMALL, Bound.LAUNCH),
    ],
)
def test_what_binds_a_section_is_told(load: Load, bound: Bound) -> None:
    assert price_of(load, BUDGET).bound is bound


def test_figures_by_hand() -> None:
    load = Load(6 * 10**9, 4 * 10**9, 0, 10**9, 10**8, 256_000, 2560, 3, (Product(32 * 10**13, 32),))
    price = price_of(load, BUDGET)
    assert price.memory_s == pytest.approx(0.1)
    assert price.compute_s == pytest.approx(100.0), "32 of 640 units can share it"
    assert price.fill_s == pytest.approx(100.0 * 2 / 10), "10 tiles through 3 stages"
    assert chip_bytes(load) == 10**8 + 2 * 256_000


def test_weights_that_do_not_fit_have_the_stream_read_again() -> None:
    load = replace(SMALL, read_bytes=10**9, resident_bytes=3 * 10**8, streamed_bytes=10**7)
    price = price_of(load, BUDGET)
    assert price.again_s == pytest.approx(2 * 10**7 / BUDGET.memory_bytes_per_s)
    assert price.memory_s == pytest.approx((10**9 + 2 * 10**7) / BUDGET.memory_bytes_per_s)
    assert price.bound is Bound.MEMORY, "reading again is the smaller part"


def test_weights_come_once_and_fill_no_pipeline() -> None:
    weights = replace(SMALL, read_bytes=10**9, once_bytes=10**9, stages=5)
    stream = replace(weights, once_bytes=0)
    assert price_of(weights, BUDGET).fill_s == pytest.approx(0.0)
    assert price_of(stream, BUDGET).fill_s == pytest.approx(10**9 / BUDGET.memory_bytes_per_s * 4 / BUDGET.least_tiles)


@given(st.integers(1, 10**7), st.integers(1, 10**7))
def test_a_tensor_of_more_rows_has_no_fewer_tiles(one: int, other: int) -> None:
    few, many = sorted((one, other))
    assert few / tile_rows(few, BUDGET) <= many / tile_rows(many, BUDGET) * (1 + 1 / BUDGET.least_tiles)
    assert 1 <= tile_rows(few, BUDGET) <= BUDGET.tile_rows


TIGHT = replace(BUDGET, stages=4, chip_bytes=200_000)


def _all_cuts(count: int, wall: int) -> Iterator[list[int]]:
    """Every way to end sections at numbers of stages, one of which is `wall`."""
    inner = range(1, count)
    for ends in joined.from_iterable(combinations(inner, size) for size in range(count)):
        if wall in (*ends, count):
            yield [*ends, count]


def _seconds(work: Work, ends: Sequence[int], budget: Budget) -> float | None:
    """What a cut is predicted to take; None for one that is not allowed."""
    total_s = 0.0
    for start, stop in pairwise((0, *ends)):
        load = load_of(work, start, stop, budget)
        fits = chip_bytes(load) <= budget.chip_bytes and stop - start <= budget.stages
        if stop - start > 1 and not fits:
            return None
        total_s += price_of(load, budget).predicted_s
    return total_s


@settings(max_examples=60)
@given(st.lists(st.sampled_from([32, 64, 256, 512]), min_size=2, max_size=8), st.integers(1, 7), st.booleans())
def test_no_cut_is_predicted_faster(widths: list[int], wall: int, tight: bool) -> None:
    work, budget = chain(widths), TIGHT if tight else BUDGET
    wall = min(wall, len(work.stages))
    count = len(work.stages)
    ends = best_cut(work, budget, [wall] * wall + [count] * (count - wall))
    assert wall in ends
    assert ends[-1] == len(work.stages)
    seconds = [_seconds(work, each, budget) for each in _all_cuts(len(work.stages), wall)]
    found = _seconds(work, ends, budget)
    assert found is not None
    assert found <= min(each for each in seconds if each is not None) * (1 + 1e-9)


@pytest.mark.parametrize("level", ["o1", "o3"])
def test_the_work_of_a_cut_grows_with_the_operators(level: Level, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many prices for each further operator, counted and not timed."""
    counted = Counter[str]()

    def counting(load: Load, budget: Budget) -> SectionPrice:
        counted["prices"] += 1
        return price_of(load, budget)

    monkeypatch.setattr("sambasim.costs.cut.price_of", counting)

    def prices(operators: int) -> int:
        counted.clear()
        graph, work = graph_and_work([64] * (operators + 1))
        cut(graph, work, BUDGET, level)
        return counted["prices"]

    few, more, most = prices(200), prices(400), prices(800)
    assert most - more == 2 * (more - few)
