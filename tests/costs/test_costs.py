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
from torch import Tensor, nn
from torch.nn import functional as F

from sambasim.compiler.capture.step import Example
from sambasim.compiler.compile import Stopwatch, capture_model
from sambasim.costs.cut import Level, best_cut, cut, known_for
from sambasim.costs.fit import reside
from sambasim.costs.price import Bound, Load, Product, chip_bytes, load_of, price_of
from sambasim.costs.work import Work, work_of
from sambasim.hardware.budget import Budget
from sambasim.ir.graph import Graph, Node, Output, Ref, Section, SectionKind
from sambasim.ir.program import Program
from sambasim.ir.types import Symbol, SymbolKind, TensorType
from sambasim.options.compile import CompileOptions
from sambasim.options.training import OptimizerOptions

ROWS = 4096


def chain(widths: Sequence[int]) -> Work:
    """The work of a product for each two neighbours of `widths`: [ROWS, a] by a weight [a, b]."""
    return graph_and_work(widths)[1]


def graph_and_work(widths: Sequence[int]) -> tuple[Graph, Work]:
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


@given(loads, st.floats(1, 100))
def test_more_of_anything_is_never_slower(load: Load, factor: float) -> None:
    before = price_of(load, BUDGET).predicted_s
    for better in (
        replace(BUDGET, placeable_units=int(BUDGET.placeable_units * factor)),
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
        replace(load, least_streamed_bytes=load.least_streamed_bytes + more),
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


def test_copies_stop_where_memory_is_slower() -> None:
    load = replace(SMALL, read_bytes=10**10, products=(product_of(10**12, 100), product_of(10**11, 50)), other_units=60)
    price = price_of(load, BUDGET)
    assert price.compute_s == pytest.approx(price.memory_s)
    assert price.units == 210
    faster = price_of(load, replace(BUDGET, memory_bytes_per_s=1e12))
    assert faster.compute_s == pytest.approx(10 / 400)
    assert faster.units == 510, "for another copy 90 units are too few"


@given(loads)
def test_units_are_conserved(load: Load) -> None:
    for budget in (BUDGET, replace(BUDGET, by_hand=True)):
        price = price_of(load, budget)
        assert min(load.least_units, budget.placeable_units) <= price.units <= budget.placeable_units * (1 + 1e-9)
        one_by_one = sum(one.unit_s for one in load.products) / budget.placeable_units
        assert price.compute_s >= one_by_one * (1 - 1e-6), "not faster than all units that only compute products"


def test_weights_come_once_and_fill_no_pipeline() -> None:
    weights = replace(SMALL, read_bytes=10**9, once_bytes=10**9, stages=5)
    stream = replace(weights, once_bytes=0)
    assert price_of(weights, BUDGET).fill_s == pytest.approx(0.0)
    assert price_of(stream, BUDGET).fill_s == pytest.approx(10**9 / BUDGET.memory_bytes_per_s * 4 / 5)


TIGHT = replace(BUDGET, placeable_units=40, chip_bytes=200_000)


def _all_cuts(count: int, forced: int) -> Iterator[list[int]]:
    """Every way to end sections at numbers of stages, one of which is `forced`."""
    inner = range(1, count)
    for ends in joined.from_iterable(combinations(inner, size) for size in range(count)):
        if forced in (*ends, count):
            yield [*ends, count]


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
    seconds = [_seconds(work, each, budget) for each in _all_cuts(count, forced)]
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


BATCH, FEATURES, CLASSES = 8, 64, 10


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(FEATURES, CLASSES, bias=False)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(self.linear(x.view(BATCH, FEATURES)), target)


@pytest.fixture(scope="module")
def program() -> Program:
    inputs = {"x": torch.zeros(BATCH, 8, 8), "target": torch.zeros(BATCH, dtype=torch.int64)}
    options = CompileOptions(optimizer=OptimizerOptions(name="sgd"))
    return capture_model(Classifier(), Example(inputs), options, Stopwatch(print)).program


@pytest.fixture(scope="module")
def work(program: Program) -> Work:
    return work_of(program.leading, program.symbols)


def test_views_are_no_stages(program: Program, work: Work) -> None:
    names = [program.leading.nodes[stage.node].operator.split(".")[1] for stage in work.stages]
    assert names == [
        "mm", "_log_softmax", "nll_loss_forward", "nll_loss_backward", "_log_softmax_backward_data", "mm",
    ]  # fmt: skip


def test_products_are_counted_and_results_have_columns(work: Work) -> None:
    forward, backward = (stage for stage in work.stages if stage.product_flops)
    assert forward.product_flops == backward.product_flops == 2 * BATCH * FEATURES * CLASSES
    assert forward.blocks == inf, "no convolution"
    assert [stage.columns for stage in work.stages] == [CLASSES, CLASSES, 1, CLASSES, CLASSES, FEATURES]


def test_the_loss_is_float32_and_the_rest_bf16(program: Program, work: Work) -> None:
    (weight,) = (name for name, symbol in program.symbols.items() if symbol.torch_names)
    assert work.tensors[weight].size_bytes == 2 * FEATURES * CLASSES
    logits = work.stages[0].writes[0]
    assert work.tensors[logits].size_bytes == 4 * BATCH * CLASSES
    assert work.tensors["x"].size_bytes == 2 * BATCH * FEATURES


def test_weights_and_their_gradients_are_the_same_for_each_sample(work: Work) -> None:
    forward, *_, backward = work.stages
    assert [work.tensors[read.value].resident for read in forward.reads] == [False, True]
    assert work.tensors[backward.writes[0]].resident
    assert not work.tensors[forward.writes[0]].resident


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


_WIDTHS = st.lists(st.integers(1, 64), min_size=2, max_size=12)


@given(_WIDTHS, st.data())
def test_no_two_live_tensors_share_an_address(widths: list[int], data: st.DataObject) -> None:
    work = chain(widths)
    count = len(work.stages)
    cuts = sorted(data.draw(st.sets(st.integers(1, count - 1)))) if count > 1 else []
    residency = reside(work, list(pairwise([0, *cuts, count])))
    for one, other in combinations(residency.boundaries, 2):
        if one.first <= other.last and other.first <= one.last:
            assert one.address + one.size_bytes <= other.address or other.address + other.size_bytes <= one.address
    for number, taken in enumerate(residency.taken_bytes):
        assert taken == sum(one.size_bytes for one in residency.boundaries if one.first <= number <= one.last)
    assert residency.size_bytes >= max(residency.taken_bytes)


def test_what_lives_between_sections() -> None:
    """Of a chain, two neighbours at a time; of one section, only the graph's own result, unless it is kept."""
    residency = reside(chain([32, 32, 32, 32, 32]), [(0, 1), (1, 2), (2, 3), (3, 4)])
    one = ROWS * 32 * 2
    assert [boundary.address for boundary in residency.boundaries] == [0, one, 0, one]
    assert residency.taken_bytes == (one, 2 * one, 2 * one, 2 * one)
    assert residency.size_bytes == 2 * one
    assert residency.most_bytes([(0, 4)]) == 2 * one
    # Three passes have begun before the first one ends: each waits with what its second section has written.
    assert residency.most_bytes([(0, 2), (0, 2), (0, 2), (2, 4), (2, 4), (2, 4)]) == 4 * one
    assert [boundary.value for boundary in reside(chain([32, 32, 32]), [(0, 2)]).boundaries] == ["y1"]
    assert reside(chain([32, 32, 32]), [(0, 2)], frozenset({"y1"})).boundaries == ()
