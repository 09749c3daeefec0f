"""The price of a section, by law: more never makes it slower, and its parts are its total."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sambasim.costs.price import Bound, Load, Product, chip_bytes, price_of, tile_rows
from sambasim.hardware.budget import Budget

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
