"""The work of a graph, the price of a section, the best cut, and boundary tensors: figures by hand, and laws."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain as joined
from itertools import combinations, pairwise
from math import inf

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from sambasim.compiler.capture.step import Example
from sambasim.compiler.compile import capture_model
from sambasim.costs.cut import Level, best_cut, cut, known_for
from sambasim.costs.fit import reside
from sambasim.costs.price import Bound, Load, Product, chip_bytes, load_of, price_of
from sambasim.costs.work import Work, work_of
from sambasim.hardware.budget import Budget
from sambasim.ir.graph import Graph, Node, Output, Ref, Section, SectionKind
from sambasim.ir.types import Symbol, SymbolKind, TensorType
from sambasim.options.compile import CompileOptions
from sambasim.options.training import OptimizerOptions
from tests.support.compiled import Made

ROWS = 4096


def graph_and_work(widths: Sequence[int]) -> tuple[Graph, Work]:
    """A product for each two neighbours of `widths`: [ROWS, a] by a weight [a, b]."""
    symbols = {"x": Symbol("x", SymbolKind.INPUT, TensorType("float32", (ROWS, widths[0])))}
    nodes, values, before = [], {}, "x"
    for number, (rows, columns) in enumerate(pairwise(widths)):
        weight, result = f"w{number}", f"y{number}"
        symbols[weight] = Symbol(weight, SymbolKind.PARAMETER, TensorType("float32", (rows, columns)))
        nodes.append(Node(result, "aten.mm.default", (Ref(before), Ref(weight)), results=(result,)))
        values[result] = TensorType("float32", (ROWS, columns))
        before = result
    symbols["out"] = Symbol("out", SymbolKind.OUTPUT, values[before])
    sections = (Section(0, SectionKind.FWD, "forward", 0, len(nodes)),)
    graph = Graph("g", tuple(symbols), tuple(nodes), (Output(before, "out"),), values, sections)
    return graph, work_of(graph, symbols)


def chain(widths: Sequence[int]) -> Work:
    return graph_and_work(widths)[1]


BUDGET = Budget(
    where="a device", units=640, placeable_units=600, columns_per_unit=32, by_hand=False, chip_bytes=10**8,
    unit_flops_per_s=1e11, convolution_flops_per_s=1e10, memory="DDR", memory_bytes_per_s=1e11, capacity_bytes=10**12,
    behind=None, launch_s=1e-4, load_s=0.0, start_s=0.0, host_bytes_per_s=1e9, tile_rows=256, spread=0.0,
)  # fmt: skip


def product_of(flops: int, least: int) -> Product:
    return Product(flops, flops / BUDGET.unit_flops_per_s, least)


counts = st.integers(0, 10**12)
products = st.builds(
    lambda flops, least, more: product_of(flops, least)._replace(most=least * more),
    *(st.integers(1, 10**15), st.integers(1, 160), st.floats(1, 50) | st.just(inf)),
)
loads = st.builds(
    Load,
    *(counts, counts, st.just(0), counts, counts, st.integers(0, 10**7), st.integers(1, 10**8), st.integers(1, 24)),
    st.lists(products, max_size=4).map(tuple),
    st.integers(0, 700),
)


def more_of(budget: Budget, factor: float) -> Iterator[Budget]:
    yield replace(budget, placeable_units=int(budget.placeable_units * factor))
    yield replace(budget, chip_bytes=int(budget.chip_bytes * factor))
    yield replace(budget, memory_bytes_per_s=budget.memory_bytes_per_s * factor)
    yield replace(budget, launch_s=budget.launch_s / factor)


@given(loads, st.floats(1, 100), counts)
def test_more_of_anything_is_never_slower_and_more_work_never_quicker(load: Load, factor: float, more: int) -> None:
    before = price_of(load, BUDGET).predicted_s
    for better in more_of(BUDGET, factor):
        assert price_of(load, better).predicted_s <= before * (1 + 1e-12)
    sizes = ("read_bytes", "written_bytes", "resident_bytes", "least_streamed_bytes")
    for heavier in (
        *(replace(load, **{name: getattr(load, name) + more}) for name in sizes),
        replace(load, stages=load.stages + more % 100),
        replace(load, products=(*load.products, product_of(more + 1, 1))),
    ):
        assert price_of(heavier, BUDGET).predicted_s >= before * (1 - 1e-12)


SMALL = Load(0, 0, 0, 0, 0, 0, 256, 1, ())


@pytest.mark.parametrize(
    ("load", "bound"),
    [
        (replace(SMALL, products=(product_of(10**15, 20),)), Bound.COMPUTE),
        (replace(SMALL, read_bytes=10**12), Bound.MEMORY),
        (replace(SMALL, read_bytes=10**8, resident_bytes=10**9, least_streamed_bytes=10**8), Bound.CAPACITY),
        (SMALL, Bound.LAUNCH),
    ],
)
def test_what_limits_a_section(load: Load, bound: Bound) -> None:
    assert price_of(load, BUDGET).bound is bound


def test_figures_by_hand() -> None:
    load = Load(6 * 10**9, 4 * 10**9, 0, 10**9, 10**8, 256_000, 2560, 3, (product_of(32 * 10**13, 16),))
    price = price_of(load, BUDGET)
    assert price.memory_s == pytest.approx(0.1)
    assert price.compute_s == pytest.approx(3200 / 592)
    assert price.units == 592, "37 copies of 16 units"
    assert price.fill_s == pytest.approx(price.compute_s * 2 / 10), "10 tiles through 3 stages"
    by_hand = price_of(load, replace(BUDGET, by_hand=True))
    assert by_hand.compute_s == pytest.approx(3200 / 600)
    assert by_hand.units == pytest.approx(600)
    short = replace(load, resident_bytes=10**7)
    assert chip_bytes(short, BUDGET) == 10**7 + 2 * 256_000
    assert chip_bytes(load, BUDGET) == 10**8 + 2 * 256_000 / 8, "smaller tiles, because the chip is full"


def test_copies_stop_where_memory_is_slower_and_weights_come_once_and_fill_no_pipeline() -> None:
    load = replace(SMALL, read_bytes=10**10, products=(product_of(10**12, 100), product_of(10**11, 50)), other_units=60)
    price = price_of(load, BUDGET)
    assert price.compute_s == pytest.approx(price.memory_s)
    assert price.units == 210
    faster = price_of(load, replace(BUDGET, memory_bytes_per_s=1e12))
    assert faster.compute_s == pytest.approx(10 / 400)
    assert faster.units == 510, "for another copy 90 units are too few"
    weights = replace(SMALL, read_bytes=10**9, once_bytes=10**9, stages=5)
    assert price_of(weights, BUDGET).fill_s == pytest.approx(0.0)
    stream_s = 10**9 / BUDGET.memory_bytes_per_s
    assert price_of(replace(weights, once_bytes=0), BUDGET).fill_s == pytest.approx(stream_s * 4 / 5)


@given(loads)
def test_units_are_conserved(load: Load) -> None:
    for budget in (BUDGET, replace(BUDGET, by_hand=True)):
        price = price_of(load, budget)
        assert min(load.least_units, budget.placeable_units) <= price.units <= budget.placeable_units * (1 + 1e-9)
        one_by_one = sum(one.unit_s for one in load.products) / budget.placeable_units
        assert price.compute_s >= one_by_one * (1 - 1e-6), "not faster than all units that only compute products"


TIGHT = replace(BUDGET, placeable_units=40, chip_bytes=200_000)


def _seconds(work: Work, ends: Sequence[int], budget: Budget) -> float | None:
    """What a cut is predicted to take; None for one that is not allowed."""
    total_s = 0.0
    for start, stop in pairwise((0, *ends)):
        load = load_of(work, start, stop, budget)
        fits = chip_bytes(load, budget) <= budget.chip_bytes and load.least_units <= budget.placeable_units
        if stop - start > 1 and not fits:
            return None
        total_s += price_of(load, budget).predicted_s
    return total_s


@settings(max_examples=60)
@given(st.lists(st.sampled_from([32, 64, 256, 512]), min_size=2, max_size=8), st.integers(1, 7), st.booleans())
def test_no_cut_is_predicted_faster(widths: list[int], forced: int, tight: bool) -> None:
    work, budget = chain(widths), TIGHT if tight else BUDGET
    count = len(work.stages)
    forced = min(forced, count)
    ends = best_cut(work, budget, [forced] * forced + [count] * (count - forced))
    assert forced in ends
    assert ends[-1] == count
    inner = joined.from_iterable(combinations(range(1, count), size) for size in range(count))
    seconds = [_seconds(work, [*some, count], budget) for some in inner if forced in (*some, count)]
    found = _seconds(work, ends, budget)
    assert found is not None
    assert found <= min(each for each in seconds if each is not None) * (1 + 1e-9)


@pytest.mark.parametrize("level", ["o1", "o3"])
def test_the_work_of_a_cut_grows_with_the_operators(level: Level) -> None:
    """As many sections are priced for each further operator."""

    def priced(operators: int) -> int:
        known_for.cache_clear()
        graph, work = graph_and_work([1024] * (operators + 1))
        cut(graph, work, BUDGET, level)
        return known_for(BUDGET).count

    few, more, most = priced(200), priced(400), priced(800)
    assert few > 0
    assert most - more == pytest.approx(2 * (more - few), rel=0.01)


def test_the_work_of_a_classifier() -> None:
    batch, features, classes = 8, 64, 10
    inputs = {"x": torch.zeros(batch, 8, 8), "target": torch.zeros(batch, dtype=torch.int64)}
    model = Made(
        lambda net, x, target: F.cross_entropy(net.linear(x.view(batch, features)), target),
        linear=nn.Linear(features, classes, bias=False),
    )
    options = CompileOptions(optimizer=OptimizerOptions(name="sgd"))
    program = capture_model(model, Example(inputs), options).program
    work = work_of(program.leading, program.symbols)
    names = [program.leading.nodes[stage.node].operator.split(".")[1] for stage in work.stages]
    assert names == [
        "mm", "_log_softmax", "nll_loss_forward", "nll_loss_backward", "_log_softmax_backward_data", "mm",
    ], "views are no stages"  # fmt: skip
    forward, *_, backward = work.stages
    assert [stage for stage in work.stages if stage.product_flops] == [forward, backward]
    assert forward.product_flops == backward.product_flops == 2 * batch * features * classes
    assert forward.blocks == inf, "no convolution"
    assert [stage.columns for stage in work.stages] == [classes, classes, 1, classes, classes, features]
    (weight,) = (name for name, symbol in program.symbols.items() if symbol.torch_names)
    logits, gradient = work.tensors[forward.writes[0]], work.tensors[backward.writes[0]]
    assert logits.size_bytes == 4 * batch * classes, "the loss is float32, and the rest bf16"
    sizes_bytes = [work.tensors[name].size_bytes for name in (weight, "x")]
    assert sizes_bytes == [2 * features * classes, 2 * batch * features]
    assert [work.tensors[read.value].resident for read in forward.reads] == [False, True]
    assert (gradient.resident, logits.resident) == (True, False)


def test_what_stays_within_a_section_is_no_traffic() -> None:
    work = chain([32, 64, 32])
    apart = [load_of(work, 0, 1, BUDGET), load_of(work, 1, 2, BUDGET)]
    together = load_of(work, 0, 2, BUDGET)
    between = 2 * ROWS * 64
    assert sum(load.traffic_bytes for load in apart) - together.traffic_bytes == 2 * between
    assert together.traffic_bytes == 2 * (ROWS * 32 + 32 * 64 + 64 * 32 + ROWS * 32)
    assert together.resident_bytes == 2 * 2 * 32 * 64
    assert (together.buffered_bytes, apart[0].buffered_bytes) == (2 * 64 * BUDGET.tile_rows, 0)
    assert together.once_bytes == together.resident_bytes
    assert (together.rows, together.stages, together.product_flops) == (ROWS, 2, 4 * ROWS * 32 * 64)


@given(st.lists(st.integers(1, 64), min_size=2, max_size=12), st.data())
def test_no_two_live_tensors_share_an_address(widths: list[int], data: st.DataObject) -> None:
    work = chain(widths)
    count = len(work.stages)
    cuts = sorted(data.draw(st.sets(st.integers(1, count - 1)))) if count > 1 else []
    residency = reside(work, list(pairwise([0, *cuts, count])))
    for one, other in combinations(residency.boundaries, 2):
        if one.first <= other.last and other.first <= one.last:
            assert one.address + one.size_bytes <= other.address or other.address + other.size_bytes <= one.address
    for number, taken in enumerate(residency.taken_bytes()):
        assert taken == sum(one.size_bytes for one in residency.boundaries if one.first <= number <= one.last)
    assert residency.size_bytes >= max(residency.taken_bytes())


def test_what_lives_between_sections() -> None:
    """Of a chain, two neighbours at a time; of one section, only the graph's own result, unless it is kept."""
    residency = reside(chain([32, 32, 32, 32, 32]), [(0, 1), (1, 2), (2, 3), (3, 4)])
    one = ROWS * 32 * 2
    assert [boundary.address for boundary in residency.boundaries] == [0, one, 0, one]
    assert residency.taken_bytes() == [one, 2 * one, 2 * one, 2 * one]
    assert residency.size_bytes == 2 * one
    assert residency.taken_bytes([(0, 4)]) == residency.taken_bytes()
    # Three passes have begun before the first one ends: each waits with what its second section has written.
    assert max(residency.taken_bytes([(0, 2), (0, 2), (0, 2), (2, 4), (2, 4), (2, 4)])) == 4 * one
    assert [boundary.value for boundary in reside(chain([32, 32, 32]), [(0, 2)]).boundaries] == ["y1"]
    assert reside(chain([32, 32, 32]), [(0, 2)], frozenset({"y1"})).boundaries == ()
