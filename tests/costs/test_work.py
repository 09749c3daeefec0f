"""The work of a graph, in figures counted by hand, and its boundary tensors in memory."""

from itertools import combinations, pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from sambasim.compiler.compile import Stopwatch, capture_model
from sambasim.costs.fit import reside
from sambasim.costs.price import load_of
from sambasim.costs.work import LANES, Work, work_of
from sambasim.ir.program import Program
from sambasim.options.compile import CompileOptions
from sambasim.options.training import OptimizerOptions
from tests.costs.graphs import ROWS, chain
from tests.costs.test_price import BUDGET

BATCH, FEATURES, CLASSES = 8, 64, 10


class Classifier(nn.Module):
    """A product, a view, and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(FEATURES, CLASSES, bias=False)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(self.linear(x.view(BATCH, FEATURES)), target)


@pytest.fixture(scope="module")
def program() -> Program:
    inputs = {"x": torch.zeros(BATCH, 8, 8), "target": torch.zeros(BATCH, dtype=torch.int64)}
    options = CompileOptions(optimizer=OptimizerOptions(name="sgd"))
    watch = Stopwatch(lambda phase: None)
    return capture_model(Classifier(), inputs, options, by_keyword=False, watch=watch).program


@pytest.fixture(scope="module")
def work(program: Program) -> Work:
    assert program.training is not None
    return work_of(program.training, program.symbols)


def _operators(program: Program, work: Work) -> list[str]:
    assert program.training is not None
    return [program.training.nodes[stage.node].operator.split(".")[1] for stage in work.stages]


def test_views_are_no_stages(program: Program, work: Work) -> None:
    assert _operators(program, work) == [
        *("mm", "_log_softmax", "nll_loss_forward"),
        *("nll_loss_backward", "_log_softmax_backward_data", "mm"),
    ]


def test_products_are_counted_with_the_blocks_of_what_is_laid_out(work: Work) -> None:
    forward, backward = (stage for stage in work.stages if stage.product_flops)
    assert forward.product_flops == backward.product_flops == 2 * BATCH * FEATURES * CLASSES
    assert forward.units == FEATURES // LANES
    assert all(stage.units == 0 for stage in work.stages if not stage.product_flops)


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


def test_a_chain_needs_two_neighbours_at_a_time() -> None:
    residency = reside(chain([32, 32, 32, 32, 32]), [(0, 1), (1, 2), (2, 3), (3, 4)])
    one = ROWS * 32 * 2
    assert [boundary.address for boundary in residency.boundaries] == [0, one, 0, one]
    assert residency.taken_bytes == (one, 2 * one, 2 * one, 2 * one)
    assert residency.size_bytes == 2 * one


def test_what_stays_in_one_section_is_not_beside_the_chip() -> None:
    residency = reside(chain([32, 32, 32]), [(0, 2)])
    assert [boundary.value for boundary in residency.boundaries] == ["y1"], "the graph's own result"


def test_what_has_a_home_elsewhere_is_not_here() -> None:
    assert reside(chain([32, 32, 32]), [(0, 2)], frozenset({"y1"})).boundaries == ()
